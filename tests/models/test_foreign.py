"""Models from elsewhere. timm and torchvision can't be imported where these tests run: stand-ins take their place."""

import json
import shutil
import sys
from contextlib import suppress
from enum import Enum
from types import ModuleType, SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import moatlab
from moatlab.evaluation.red_flags import WithoutGradients
from moatlab.runtime.errors import UserError
from models_for_tests import FIXTURES, as_onnx, images, network

CONFIG = {
    "architecture": "small",
    "num_classes": 5,
    "pretrained_cfg": {
        "input_size": [3, 8, 8],
        "crop_pct": 0.8,
        "interpolation": "bicubic",
        "mean": [0.5, 0.4, 0.3],
        "std": [0.5, 0.6, 0.7],
    },
}


@pytest.fixture
def timm(monkeypatch):
    """A stand-in for timm with one model."""

    def create_model(name, pretrained, num_classes=5, **arguments):
        if name != "small" or arguments:
            raise RuntimeError(f"Unknown model ({name})")
        model = network(num_classes, seed=3 if pretrained else 9)
        model.pretrained_cfg = CONFIG["pretrained_cfg"]
        return model

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))


@pytest.fixture
def torchvision(monkeypatch):
    """A stand-in for torchvision with one model."""
    mode = Enum("InterpolationMode", {"BILINEAR": "bilinear"}).BILINEAR
    transform = SimpleNamespace(crop_size=[8], resize_size=[10], mean=[0.5] * 3, std=[0.2] * 3, interpolation=mode)
    weights = SimpleNamespace(transforms=lambda: transform, meta={"categories": list("abcde")})
    package, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.get_model_weights = {"small": SimpleNamespace(DEFAULT=weights)}.__getitem__
    models.get_model = lambda name, weights: network(5)  # noqa: ARG005
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def write_timm_folder(folder, config=CONFIG):
    folder.mkdir()
    save_file(network(5).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def vit(tmp_path_factory):
    """A folder as transformers writes it: a small ViT for 5 classes of 16x16 images."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5)
    folder = tmp_path_factory.mktemp("vit")
    ViTForImageClassification(config).save_pretrained(folder)
    write_processor(folder)
    return folder


def write_processor(folder):
    steps = {"do_resize": True, "size": {"height": 16, "width": 16}, "resample": 3, "do_rescale": True}
    steps |= {"rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "ViTImageProcessor", **steps}))


@pytest.fixture
def a_vit(vit, tmp_path):
    return shutil.copytree(vit, tmp_path / "copy of vit")


def test_a_folder_of_transformers_is_loaded_with_its_image_processor_as_the_first_layer(vit):
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    ours = moatlab.load(vit)
    theirs, processor = (kind.from_pretrained(vit) for kind in (AutoModelForImageClassification, AutoImageProcessor))
    y, x, c = np.mgrid[0:1:20j, 0:1:24j, 0:3]
    image = (128 + 60 * np.sin(4 * x + 3 * y + c)).astype(np.uint8)
    with torch.no_grad():
        expected = theirs(**processor(Image.fromarray(image), return_tensors="pt")).logits
        assert torch.allclose(ours(torch.from_numpy(image).permute(2, 0, 1)[None] / 255), expected, atol=5e-3)
        assert expected.abs().max() > 0.05
        square = torch.rand(2, 3, 16, 16)  # taken as it is, without rounding
        normal = (square - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / 0.5
        assert torch.allclose(ours(square), theirs(normal).logits, atol=1e-5)


def test_three_lines_evaluate_a_hub_folder(vit):
    x, y = torch.rand(12, 3, 8, 8), torch.arange(12) % 5
    model = moatlab.load(vit)
    result = moatlab.evaluate(model, x, y, attacks="pgd7")
    assert set(result.accuracy) == {"clean", "pgd7"}


def test_loading_prints_nothing_and_leaves_the_settings_of_transformers(vit, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    moatlab.load(vit)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("timm")
def test_a_folder_of_timm_is_loaded_with_a_stand_in_for_timm(tmp_path):
    model, x = moatlab.load(write_timm_folder(tmp_path / "hub")), torch.rand(3, 3, 8, 8)
    cfg = CONFIG["pretrained_cfg"]
    mean, std = (torch.tensor(cfg[name]).view(3, 1, 1) for name in ("mean", "std"))
    assert torch.allclose(model(x), network(5)((x - mean) / std), atol=1e-5)
    assert model.steps.resize == 10
    old = {"architecture": "small", **cfg, "num_classes": 5}  # an older layout, without pretrained_cfg
    assert torch.equal(moatlab.load(write_timm_folder(tmp_path / "old", old))(x), model(x))


@pytest.mark.usefixtures("timm", "torchvision")
def test_models_of_timm_and_torchvision_are_loaded_by_name_with_stand_ins():
    x = torch.rand(3, 3, 8, 8)
    assert torch.allclose(moatlab.load("torchvision:small")(x), network(5)((x - 0.5) / 0.2), atol=1e-5)
    assert moatlab.load("timm:small").steps.crop == (8, 8)
    for source in ("timm:other", "torchvision:other"):
        with pytest.raises(UserError, match=f"{source} can't be loaded"):
            moatlab.load(source)
    with pytest.raises(UserError, match="no name of a model"):
        moatlab.load("timm:hf-hub:user/name")


@pytest.mark.parametrize("package", ["timm", "torchvision.models", "huggingface_hub"])
def test_a_missing_package_is_named_in_one_sentence(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    source = {"timm": "timm:a", "torchvision.models": "torchvision:a", "huggingface_hub": "hf_hub:user/a"}[package]
    with pytest.raises(UserError, match=f"{source} needs the package {package}, which can't be imported .*pip install"):
        moatlab.load(source)


def test_a_model_of_the_hub_is_downloaded_and_loaded_as_a_folder(vit, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(repository, revision, allow_patterns):
        asked.append((repository, revision))
        assert "*.json" in allow_patterns
        return str(vit)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    x = torch.rand(2, 3, 16, 16)
    assert torch.equal(moatlab.load("hf_hub:user/vit")(x), moatlab.load(vit)(x))
    moatlab.load("hf_hub:user/vit@v2")
    assert asked == [("user/vit", None), ("user/vit", "v2")]


def test_without_a_network_the_hub_is_refused_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"hf_hub:user/name: the hub can't be reached .*; a local folder"):
        moatlab.load("hf_hub:user/name")
    with pytest.raises(UserError, match="write hf_hub:USER/NAME"):
        moatlab.load("hf_hub:not a//name")


def test_an_export_of_moatlab_in_a_hubs_layout_is_ours(tmp_path):
    shutil.copy(FIXTURES / "mini_moat2.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"library_name": "moatlab"}')
    x = torch.rand(2, 3, 16, 16)
    assert torch.equal(moatlab.load(tmp_path)(x), moatlab.load(FIXTURES / "mini_moat2.safetensors")(x))


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))


def without_head(folder):
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "classifier" not in name}, folder / "model.safetensors"
    )


def with_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"w": print}, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "preprocessor_config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is missing or not readable"),
        (lambda folder: (folder / "config.json").write_text("{}"), "names neither an architecture of timm"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not a configuration"),
        (lambda folder: change_config(folder, model_type="unheard-of"), "can't load the 'unheard-of' image classifier"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"), "can't load the 'vit'"),
        (lambda folder: (folder / "model.safetensors").unlink(), "can't load the 'vit'"),
        (without_head, "classifier.bias is missing or differs"),
        (with_code, "pytorch_model.bin is damaged, or holds more than tensors"),
    ],
)
def test_a_bad_folder_is_refused_in_one_sentence(a_vit, change, says):
    change(a_vit)
    with pytest.raises(UserError, match=says) as error:
        moatlab.load(a_vit)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["vit", "unheard-of"])
def test_code_in_a_folder_is_never_run(a_vit, kind):
    (a_vit / "own.py").write_text(f"open({str(a_vit / 'was run')!r}, 'w').close()\nclass Own: ...\n")
    places = dict.fromkeys(("AutoConfig", "AutoModelForImageClassification", "AutoImageProcessor"), "own.Own")
    change_config(a_vit, model_type=kind, auto_map=places)
    with suppress(UserError):
        moatlab.load(a_vit)
    assert not (a_vit / "was run").exists()


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"architecture": "unheard-of"}, "timm can't build 'unheard-of'"),
        ({"architecture": "hf-hub:user/name"}, "is no name of a model"),
        ({"num_classes": 7}, "don't fit the model"),
        ({"pretrained_cfg": {"mean": 0.5}}, "unreadable pretrained_cfg"),
    ],
)
def test_a_bad_folder_of_timm_is_refused_with_a_stand_in_for_timm(tmp_path, fields, says):
    with pytest.raises(UserError, match=says):
        moatlab.load(write_timm_folder(tmp_path / "hub", CONFIG | fields))


def script_files(folder, model, x):
    scripted, traced = torch.jit.script(model), torch.jit.trace(model, x[:2])
    for name, one in (("scripted.ts", scripted), ("traced.pt", traced), ("frozen.pt", torch.jit.freeze(traced))):
        torch.jit.save(one, folder / name)
        yield name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_has_the_verdicts_of_the_module_it_came_from(tmp_path):
    model = network().double()
    x, y = images(12, model)
    options = {"attacks": ["pgd7", "apgd-ce"], "eps": 12 / 255}
    expected = moatlab.evaluate(model, x.double(), y, **options)
    assert 0 < expected.accuracy["apgd-ce"] < expected.accuracy["clean"]
    for name in script_files(tmp_path, model, x.double()):
        loaded = moatlab.load(tmp_path / name, trust_model_code=True)
        assert moatlab.evaluate(loaded, x.double(), y, **options).broken_by == expected.broken_by
        raw = torch.jit.load(tmp_path / name)  # as a user may pass it
        assert moatlab.evaluate(raw, x.double(), y, **options).broken_by == expected.broken_by


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_attacked_in_a_faster_copy_and_left_unchanged(tmp_path, capsys):
    model = network()
    x, y = images(10, model)
    for name in script_files(tmp_path, model, x):
        loaded = moatlab.load(tmp_path / name, trust_model_code=True)
        before = [(parameter.requires_grad, parameter.clone()) for parameter in loaded.parameters()]
        moatlab.evaluate(loaded, x, y, attacks="fgsm", verbose=True)
        assert "instead of a faster copy" not in capsys.readouterr().err
        after = loaded.parameters()
        for (flag, value), parameter in zip(before, after, strict=True):
            assert flag == parameter.requires_grad
            assert torch.equal(value, parameter)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_a_program_and_needs_trust(tmp_path):
    (name,) = {*script_files(tmp_path, network(), torch.rand(2, 3, 8, 8))} & {"traced.pt"}
    with pytest.raises(UserError, match="running the program in it; if you trust it, add trust_model_code=True"):
        moatlab.load(tmp_path / name)
    content = bytearray((tmp_path / name).read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="can't be read as TorchScript"):
        moatlab.load(tmp_path / name, trust_model_code=True)
    (tmp_path / "text.ts").write_text("no archive")
    with pytest.raises(UserError, match="can't be read as TorchScript"):
        moatlab.load(tmp_path / "text.ts", trust_model_code=True)


def linear_images(path, count=10):
    weights = torch.from_numpy(numpy_helper.to_array(onnx.load(path).graph.initializer[0]).copy())
    x = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, (x.flatten(1) @ weights).argmax(1), weights


@pytest.mark.parametrize("batch", ["n", 1, 7])
def test_an_onnx_file_has_the_verdicts_of_the_same_module_under_square(tmp_path, batch):
    path = as_onnx(tmp_path, batch=batch)
    x, y, weights = linear_images(path)
    y[0] = (y[0] + 1) % 4
    module = nn.Sequential(nn.Flatten(), nn.Linear(48, 4, bias=False))
    module[1].weight.data = weights.T.contiguous()
    options = {"attacks": ["square"], "eps": "16/255"}
    if batch != "n":  # several calls for each query
        options = {"attacks": ["clean"]}
    model = moatlab.load(path)
    assert torch.allclose(model(x), module(x), atol=1e-5)
    found, expected = (moatlab.evaluate(one, x, y, **options) for one in (model, module))
    assert found.broken_by == expected.broken_by
    assert found.accuracy["clean"] == 1 - 1 / len(y)


def test_an_onnx_result_does_not_claim_flags_that_need_gradients(tmp_path):
    path = as_onnx(tmp_path)
    x, y, _ = linear_images(path)
    result = moatlab.evaluate(moatlab.load(path), x, y)  # Square by default
    assert result.attacks == ("clean", "square")
    assert isinstance(result.measured, WithoutGradients)
    assert "no red flags" not in str(result)
    assert "flags that need gradients were not measured" in str(result)
    assert result.cost["square"].gradients == 0
    half = 0.5 * torch.ones(60, 3, 4, 4)
    wrong = moatlab.evaluate(moatlab.load(path), half, torch.arange(60) % 4, attacks="clean")
    assert [flag.name for flag in wrong.flags] == ["no-better-than-guessing"]
    with pytest.raises(UserError, match='leave out precision="bf16"'):
        moatlab.evaluate(moatlab.load(path), x, y, precision="bf16")
    for options, trouble in (({"attacks": ["aa"]}, "aa"), ({"attacks": "clean", "audit": True}, "audit=True")):
        with pytest.raises(UserError, match=f"{trouble} needs gradients, which an ONNX model does not have; clean"):
            moatlab.evaluate(moatlab.load(path), x, y, **options)


def test_an_onnx_file_that_reads_other_files_or_is_damaged_is_refused(tmp_path, monkeypatch):
    elsewhere = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[48, 4], data_location=TensorProto.EXTERNAL)
    elsewhere.external_data.add(key="location", value="weights")
    (tmp_path / "weights").write_bytes(bytes(4 * 48 * 4))
    monkeypatch.chdir(tmp_path)
    path = as_onnx(tmp_path, weights=elsewhere)
    with pytest.raises(UserError, match="can't be read as an ONNX graph"):
        moatlab.load(path)
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match="can't be read as an ONNX graph"):
        moatlab.load(path)
    with pytest.raises(UserError, match=r"missing.onnx can't be read"):
        moatlab.load(tmp_path / "missing.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match="needs the package onnxruntime"):
        moatlab.load(path)


def test_an_unknown_prefix_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"'hf_hug:' \(did you mean hf_hub\?\) is not one of hf_hub:NAME, timm:NAME"):
        moatlab.load("hf_hug:user/name")
