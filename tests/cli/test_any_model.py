"""`moat eval` of models from elsewhere: the same weights have the same verdicts whichever way they come in."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import moatlab
from moatlab.models.weights import read_weights
from models_for_tests import FIXTURES, as_onnx

ROBUST = FIXTURES / "mini_moat2.safetensors"
ATTACKS = ("--attacks", "pgd7,apgd-ce", "--n", 16, "--data", "mini", "--eps", "16/255", "--save-adversarial")


def robustbench_names(tensors, counts=(2, 2, 2, 2)):
    """Names of RobustBench, with the normalisation of mini beside them."""
    places = [f"layer{stage + 1}.{number}" for stage, count in enumerate(counts) for number in range(count)]
    found = {}
    for name, tensor in tensors.items():
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            name = f"{places[int(number)]}.{rest.replace('shortcut.', 'shortcut.0.')}"
        found[f"module.{name}"] = tensor
    images = moatlab.load_images("mini")
    return found | {
        name: torch.tensor(of).view(1, 3, 1, 1) for name, of in (("mu", images.mean), ("sigma", images.std))
    }


@pytest.fixture(scope="session")
def ways(tmp_path_factory):
    """One model as a run's file, a hub folder, a state dict, TorchScript and (in module `mine`) a factory."""
    folder = tmp_path_factory.mktemp("ways")
    shutil.copy(ROBUST, folder / "ours.safetensors")
    (folder / "hub").mkdir()
    shutil.copy(ROBUST, folder / "hub" / "model.safetensors")
    (folder / "hub" / "config.json").write_text('{"library_name": "moatlab"}')
    torch.save(robustbench_names(read_weights(ROBUST)[0]), folder / "robustbench.pt")
    model = moatlab.load(ROBUST).requires_grad_(False)  # else the weight gradient of wide convolutions is traced too
    torch.jit.save(torch.jit.trace(model, torch.rand(2, 3, 16, 16)), folder / "script.pt")
    (folder / "mine.py").write_text("import moatlab\n\n\ndef trained():\n    return moatlab.load('ours.safetensors')\n")
    timm = folder / "timm_hub"
    timm.mkdir()
    save_file(model.state_dict(), timm / "model.safetensors")
    cfg = {"input_size": [3, 16, 16], "crop_pct": 1, "mean": [0, 0, 0], "std": [1, 1, 1], "interpolation": "bicubic"}
    (timm / "config.json").write_text(json.dumps({"architecture": "ours", "num_classes": 10, "pretrained_cfg": cfg}))
    return folder


@pytest.fixture
def here(ways, alone, monkeypatch):
    shutil.copytree(ways, alone, dirs_exist_ok=True)
    timm = SimpleNamespace(create_model=lambda *_, **__: moatlab.load(ROBUST))
    monkeypatch.setitem(sys.modules, "timm", timm)
    return alone


@pytest.fixture(scope="session")
def expected():
    images = moatlab.load_images("mini")
    x, y = images.test_x[:16], images.test_y[:16]
    result = moatlab.evaluate(moatlab.load(ROBUST), x, y, attacks=["pgd7", "apgd-ce"], eps="16/255")
    assert 0 < result.accuracy["apgd-ce"] < result.accuracy["clean"]
    return result.broken_by


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("command", "card", "model", "assumed"),
    [
        (["ours.safetensors"], "ours.safetensors.eval.json", "preact_resnet18", None),
        (["hub"], "hub/eval.json", "preact_resnet18", None),
        (
            ["robustbench.pt", "--model", "preact_resnet18"],
            "robustbench.pt.eval.json",
            "preact_resnet18",
            "mu and sigma",
        ),
        (["script.pt", "--trust-model-code"], "script.pt.eval.json", "torchscript", "not changed"),
        (["--model", "mine:trained"], "mine-trained.eval.json", "mine:trained", None),
        (["timm_hub"], "timm_hub/eval.json", "hub-folder", "resized (shorter side to 16, bicubic)"),
    ],
    ids=["our file", "our hub folder", "RobustBench", "TorchScript", "module", "timm folder, stand-in for timm"],
)
def test_the_same_weights_have_the_same_verdicts_and_can_be_verified(
    moat, here, expected, command, card, model, assumed
):
    code, out, err = moat("eval", *command, *ATTACKS)
    assert code == 0, err
    assert f"card: {card}" in out
    written = json.loads((here / card).read_text())
    assert written["broken_by"] == expected
    assert written["subject"]["model"] == model
    assert ("preprocessing" in written["subject"]) == (assumed is not None)
    assert assumed is None or (assumed in written["subject"]["preprocessing"] and assumed in out and assumed in err)
    trust = ["--trust-model-code"] if "script.pt" in command else []
    code, out, err = moat("verify", card, *trust)
    assert code == 0, err
    assert "verified" in out


@pytest.mark.usefixtures("aloud")
def test_the_shortcut_that_classifies_more_images_correctly_is_assumed(moat, here):
    from moatlab.models.preact_resnet import PreActResNet18

    images = moatlab.load_images("mini")
    arguments = {"classes": 10, "width": 8, "mean": images.mean, "std": images.std}
    raw = PreActResNet18(**arguments, shortcut="raw").eval()
    save_file(raw.state_dict(), "raw.safetensors")
    labels = raw(images.test_x.permute(0, 3, 1, 2) / 255).argmax(1)
    import numpy as np

    arrays = {"x_train": images.train_x[:20], "y_train": torch.arange(20) % 10}
    arrays |= {"x_test": images.test_x[:100], "y_test": labels[:100]}
    np.savez("known.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    options = ("--model", "preact_resnet18", "--data", "known.npz", "--attacks", "clean")
    code, _, err = moat("eval", "raw.safetensors", *options)
    assert code == 0, err
    assert "raw shortcuts (" in err
    assert "of 100 images are classified correctly, with activated ones" in err
    assert "shortcuts" in json.loads((here / "raw.safetensors.eval.json").read_text())["subject"]["preprocessing"]


def test_an_onnx_file_is_measured_with_square_only_and_its_card_states_it(moat, here, refuses):
    as_onnx(here, side=16, classes=10)
    refuses("eval", "model.onnx", "--data", "mini", "--attacks", "pgd7", says="--attacks square work")
    code, out, err = moat("eval", "model.onnx", "--data", "mini", "--n", 12, "--eps", "16/255", "--save-adversarial")
    assert code == 0, err
    assert "flags that need gradients were not measured" in out
    assert "no red flags" not in out
    card = json.loads((here / "model.onnx.eval.json").read_text())
    assert list(card["results"]) == ["clean", "square"]
    assert "not_measured" in card["measured"]
    assert card["subject"]["model"] == "onnx"
    assert moat("verify", "model.onnx.eval.json").code == 0
    as_onnx(here, side=16, classes=10, seed=1)
    code, out, _ = moat("verify", "model.onnx.eval.json")
    assert code == 1
    assert "it is of another model" in out


def test_bad_input_is_refused_in_one_sentence(refuses, here, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "none"))
    mini = ("--data", "mini")
    refuses("eval", "hf_hub:user/name", *mini, says="the hub can't be reached")
    refuses(
        "eval",
        "hub:user/name",
        *mini,
        says="'hub:' (did you mean hf_hub?) is not one of hf_hub:NAME, timm:NAME, torchvision:NAME",
    )
    refuses("eval", "script.pt", *mini, says="add --trust-model-code")
    refuses("eval", "script.pt", "--trust-model-code", says="name them with --data")
    monkeypatch.setitem(sys.modules, "timm", None)
    refuses("eval", "timm:resnet18", *mini, says="needs the package timm")
    refuses("eval", "timm_hub", *mini, says="needs the package timm")
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    refuses("eval", "torchvision:resnet18", *mini, says="needs the package torchvision")
    (here / "timm_hub" / "config.json").unlink()
    refuses("eval", "timm_hub", *mini, says="does not name its model")
    (here / "script.pt").write_bytes((here / "script.pt").read_bytes()[:-100])
    refuses("eval", "script.pt", *mini, "--model", "preact_resnet18", says="can't be read")


def test_classes_of_other_names_or_in_another_order_are_pointed_out(moat, here):
    config = json.loads((here / "timm_hub" / "config.json").read_text())
    names = list(reversed(moatlab.load_images("mini").classes))
    (here / "timm_hub" / "config.json").write_text(json.dumps(config | {"label_names": names}))
    code, _, err = moat("eval", "timm_hub", "--data", "mini", "--n", 4, "--attacks", "clean")
    assert code == 0
    assert "warning: the classes of timm_hub (truck, ship, horse, ...) are not those of mini (airplane, " in err
