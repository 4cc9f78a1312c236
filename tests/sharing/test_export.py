"""What goes out into the world answers as the model does."""

import io
import json
import logging
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from images_for_tests import tiny_images
from moatlab.data.images import as_floats
from moatlab.evaluation.target import load_target
from moatlab.models.registry import BUILT_IN, build_model, load
from moatlab.runtime.errors import RunFailed
from moatlab.sharing.claim import issue_text, what_is_missing
from moatlab.sharing.export import onnx_files
from moatlab.sharing.robustbench import robustbench_files, to_robustbench

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


@pytest.fixture
def run(moat, alone):
    data = tiny_images(alone / "data")
    ending = moat("train", "fast", "--data", data, "--width", 8, "--epochs", 1, "--batch-size", 16, "--out", "run")
    assert ending.code == 0, ending.err
    return alone / "run"


def metadata(readme):
    """The lines between the first two rules, as a model hub reads them."""
    yaml = pytest.importorskip("yaml")
    found = re.match(r"---\n(.*?)\n---\n", readme.read_text(), re.DOTALL)
    return yaml.safe_load(found[1])


def test_safetensors_are_those_of_the_run_with_a_model_card_that_shows_how_robust_it_is(run, moat):
    assert moat("eval", run, "--attacks", "pgd50", "--n", 16).code == 0
    ending = moat("export", run, "--format", "safetensors", "--json")
    assert [name.rpartition("/")[2] for name in json.loads(ending.out)["files"]] == ["model.safetensors", "README.md"]
    exported, own = load(run / "export-safetensors" / "model.safetensors"), load(run)
    images = torch.rand(3, 3, 8, 8)
    assert torch.equal(exported(images), own(images))
    card = metadata(run / "export-safetensors" / "README.md")
    assert (card["library_name"], card["pipeline_tag"]) == ("moatlab", "image-classification")
    (result,) = card["model-index"][0]["results"]
    accuracy = json.loads((run / "eval.json").read_text())["results"]["pgd50"]["accuracy"]
    title = "accuracy under pgd50 (L-inf, eps 8/255)"
    assert {"type": "accuracy", "name": title, "value": 100 * accuracy} in result["metrics"]


def test_a_model_that_was_not_evaluated_says_so_on_its_card(run, moat):
    assert moat("export", run, "--format", "safetensors", "--out", "elsewhere").code == 0
    assert "has not been evaluated" in (run.parent / "elsewhere" / "README.md").read_text()
    assert "model-index" not in metadata(run.parent / "elsewhere" / "README.md")


def test_an_evaluation_under_another_threat_is_not_the_models_robustness(run, moat):
    assert moat("eval", run, "--attacks", "pgd50", "--n", 16, "--eps", "1/255").code == 0
    ending = moat("export", run, "--format", "safetensors")
    assert "is left out" in ending.err
    assert "has not been evaluated" in (run / "export-safetensors" / "README.md").read_text()


def test_an_onnx_graph_answers_as_the_model_does_in_batches_of_any_size(run, moat):
    onnxruntime = pytest.importorskip("onnxruntime")
    ending = moat("export", run, "--format", "onnx")
    assert ending.code == 0, ending.err
    session = onnxruntime.InferenceSession(str(run / "export-onnx" / "model.onnx"))
    target = load_target(run)
    for count in (1, 5, 20):
        images = as_floats(target.images.test_x[:count]).contiguous()
        (logits,) = session.run(["logits"], {"images": images.numpy()})
        with torch.no_grad():
            assert np.abs(logits - target.model(images).numpy()).max() < 1e-4


class Transformer(nn.Module):
    """A vision transformer that takes the length of its batch with len(), which tracing makes a constant."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 5)

    def forward(self, x):
        tokens = self.layer(self.patches(x).flatten(2).transpose(1, 2))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        q, k, v = self.qkv(tokens).view(len(x), 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))


def test_a_transformer_is_exported_to_onnx_for_any_batch_size_and_no_global_changes():
    onnxruntime = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, fused = Transformer().eval(), torch.backends.mha.get_fastpath_enabled()
    session = onnxruntime.InferenceSession(onnx_files(model, [8, 8, 3])["model.onnx"])
    images = torch.rand(7, 3, 8, 8)
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    assert np.abs(logits - model(images).numpy()).max() < 1e-4
    assert torch.backends.mha.get_fastpath_enabled() == fused


class OfFour(nn.Module):
    def forward(self, x):
        return x.reshape(4, -1)[:, :2]


def test_a_model_that_can_not_be_exported_to_onnx_is_refused_in_one_line():
    pytest.importorskip("onnxruntime")
    with pytest.raises(RunFailed, match=r"can't be exported to ONNX \(.*\)") as caught:
        onnx_files(OfFour(), [8, 8, 3])
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_an_unfinished_run_says_so_on_its_model_card(moat, alone):
    data = tiny_images(alone / "data")
    options = ("--data", data, "--width", 8, "--batch-size", 16, "--holdout", 0, "--epochs", 1)
    assert moat("train", "fast", *options, "--out", "run", "--max-steps", 2).code == 0
    assert moat("eval", "run", "--attacks", "fgsm", "--n", 16).code == 0
    assert moat("export", "run", "--format", "safetensors").code == 0
    readme = (alone / "run" / "export-safetensors" / "README.md").read_text()
    assert "The training run was not finished: stopped after step 2 of 5." in readme


def test_an_export_to_onnx_leaves_the_log_level_of_pytorch_as_it_was():
    pytest.importorskip("onnxruntime")
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    try:
        logger.setLevel(logging.INFO)
        graph = onnx_files(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), [2, 2, 3])["model.onnx"]
        assert logger.level == logging.INFO
        with pytest.raises(RunFailed, match="can't be exported to ONNX"):
            onnx_files(nn.Linear(5, 2), [2, 2, 3])
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
    assert graph


class PreActBlock(nn.Module):
    """RobustBench's PreActBlock and PreActBlockV2, written independently."""

    activated = False

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x):
        activation = F.relu(self.bn1(x))
        if hasattr(self, "shortcut"):
            x = self.shortcut(activation if self.activated else x)
        return x + self.conv2(F.relu(self.bn2(self.conv1(activation))))


class PreActBlockV2(PreActBlock):
    activated = True


class PreActResNet(nn.Module):
    def __init__(self, block, num_blocks, num_classes=10, bn_before_fc=False):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        channels = 64
        for layer, (outputs, count) in enumerate(zip((64, 128, 256, 512), num_blocks, strict=True), start=1):
            blocks = [block(channels, outputs, 1 if layer == 1 else 2)]
            blocks += [block(outputs, outputs, 1) for _ in range(count - 1)]
            setattr(self, f"layer{layer}", nn.Sequential(*blocks))
            channels = outputs
        if bn_before_fc:
            self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x):
        x = self.conv1(x)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        if hasattr(self, "bn"):
            x = F.relu(self.bn(x))
        return self.linear(F.avg_pool2d(x, 4).flatten(1))


@pytest.mark.parametrize("shortcut", ["activated", "raw"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_the_zoo_entry_builds_robustbenchs_module_which_takes_the_weights_and_answers_alike(shortcut, final_norm):
    torch.manual_seed(0)
    arguments = {"width": 64, "shortcut": shortcut, "final_norm": final_norm, "mean": MEAN, "std": STD}
    model = build_model("preact_resnet18", classes=10, arguments=arguments)
    model(torch.rand(8, 3, 32, 32))  # running statistics that are not the first ones
    model.eval()
    files = robustbench_files(model, described(arguments=arguments), None)
    names = {"torch": torch, "PreActResNet": PreActResNet, "PreActBlock": PreActBlock, "PreActBlockV2": PreActBlockV2}
    exec(files["zoo_entry.py"].decode(), names)
    theirs = names["entry"][1]["model"]()
    theirs.load_state_dict(torch.load(io.BytesIO(files["model.pt"])), strict=True)
    block = {"activated": "PreActBlockV2", "raw": "PreActBlock"}[shortcut]
    architecture = f"PreActResNet({block}, [2, 2, 2, 2], bn_before_fc={final_norm})"
    assert json.loads(files["model_info.json"])["architecture"] == architecture
    assert f"- **Architecture**: {architecture}\n" in files["issue.md"].decode()
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(images), model(images), atol=1e-5)


def described(**changed):
    fields = {"model": "preact_resnet18", "classes": 10, "image_shape": [32, 32, 3], "data": "cifar10"}
    return {**fields, "norm": "linf", "eps": "8/255", "method": "moat:2", **changed}


def card(images=10_000, attacks=("clean", "aa"), unfinished=None, flags=(), note=None):
    """The parts of a card that a claim reads."""
    results = {name: SimpleNamespace(accuracy=share) for name, share in (("clean", 0.8123), ("aa", 0.4567))}
    return SimpleNamespace(
        data=SimpleNamespace(images=images, note=note),
        subject=SimpleNamespace(unfinished=unfinished),
        results={name: results[name] for name in attacks},
        flags=[SimpleNamespace(name=name, evidence="0.3", meaning="Why.") for name in flags],
    )


TO_FILL_IN = ["the name of the model, and title, address and authors of your paper", "the address of model.pt"]


def test_a_complete_claim_lacks_only_what_the_authors_know():
    assert what_is_missing(described(), card()) == TO_FILL_IN
    text = issue_text(described(), card(), "PreActResNet")
    assert text.startswith("Title: [New Model] NAME\n")
    for line in (
        "- **Dataset**: cifar10",
        "- **Threat Model**: Linf",
        "- **eps**: 8/255",
        "- **Clean accuracy**: 81.23 %",
        "- **Robust accuracy**: 45.67 %",
        "- **Additional data**: false",
        "- **Evaluation method**: AutoAttack, standard version, in moatlab, on 10,000 test images",
    ):
        assert f"{line}\n" in text


@pytest.mark.parametrize(
    ("changed", "measured", "says"),
    [
        ({}, None, "an evaluation: run `moat eval RUN --attacks aa` and export again"),
        ({}, card(attacks=["clean"]), "AutoAttack: run `moat eval RUN --attacks aa` and export again"),
        ({}, card(images=1000), "an evaluation on all 10,000 test images: 1,000 were used"),
        ({}, card(unfinished="stopped after step 2 of 5"), "the end of the training run: stopped after step 2 of 5"),
        ({}, card(note="a copy"), "an evaluation on the official images; these differ: a copy"),
        ({}, card(flags=["masking"]), "red flag masking (0.3): Why."),
        ({"eps": "4/255"}, card(), "RobustBench's leaderboard is at eps 8/255; this model is for eps 4/255"),
        ({"norm": "l2", "eps": "128/255"}, card(), "RobustBench's leaderboard is at eps 0.5; this model is for eps"),
        ({"data": "cifar100", "norm": "l2", "eps": "0.5"}, card(), "has no leaderboard for cifar100 in L2"),
        ({"init": "w.pt"}, card(), "whether the weights that training started from (w.pt) saw additional data"),
    ],
)
def test_a_claim_lists_what_is_missing(changed, measured, says):
    lacking = what_is_missing(described(**changed), measured)
    assert lacking[:2] == TO_FILL_IN
    (found,) = lacking[2:]
    assert says in found
    text = issue_text(described(**changed), measured, "PreActResNet")
    assert f"- {found}\n" in text
    if measured is None or "aa" not in measured.results:
        assert "- **Robust accuracy**: (missing)\n" in text


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "resnet18"}, "this model is resnet18"),
        ({"image_shape": [16, 16, 3]}, "takes 16x16"),
        ({"arguments": {"width": 16, "shortcut": "raw", "final_norm": True}}, "this one has width 16"),
        ({"arguments": {"width": 64, "shortcut": "raw", "final_norm": True, "stem": "4x4s2"}}, "the stem 4x4s2"),
        ({"arguments": {"width": 64, "shortcut": "raw", "final_norm": True, "activation": "silu"}}, "one has silu"),
    ],
)
def test_robustbench_has_one_preact_resnet_and_others_are_refused_in_a_sentence(changed, says):
    arguments = {"width": 64, "shortcut": "raw", "final_norm": True}
    described = {"model": "preact_resnet18", "image_shape": [32, 32, 3], "data": "cifar100", "arguments": arguments}
    model = BUILT_IN["preact_resnet18"](classes=10, width=8)
    with pytest.raises(Exception, match=says):
        to_robustbench(model, described | changed)


def test_what_cannot_be_exported_is_refused_in_a_sentence(run, moat, monkeypatch):
    ending = moat("export", run, "--format", "robustbench")
    assert ending.code == 2
    assert ending.err == "moat: RobustBench has CIFAR-10 and CIFAR-100 only; this model was trained on data\n"
    assert not (run / "export-robustbench").exists()
    (run.parent / "README.md").write_text("mine")
    assert "did not write" in moat("export", run, "--format", "safetensors", "--out", ".").err
    assert moat("export", "nowhere", "--format", "onnx").code == 2
    monkeypatch.setattr("moatlab.sharing.export.find_spec", lambda _: None)
    ending = moat("export", run, "--format", "onnx")
    assert ending.code == 2
    assert 'pip install "moatlab[onnx]"' in ending.err
