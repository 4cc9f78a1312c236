import json

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

import moatlab
from moatlab.data.images import Images
from moatlab.data.known import SPECS
from moatlab.models.flops import STEMS, stem_for
from moatlab.models.preact_resnet import PreActResNet18
from moatlab.models.registry import build_model
from moatlab.models.weights import write_weights
from moatlab.runtime.errors import UserError
from moatlab.training.making import make_recipe
from moatlab.training.setup import model_arguments
from models_for_tests import Linear


def plain_preact(model, x, *, shortcut, final_norm, keep=None):
    """He et al.'s network written out with functions, on the weights of `model`; for eval mode."""

    def norm(bn, x):
        return F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)

    x = F.conv2d(x, model.conv1.weight, padding=1)
    for number, block in enumerate(model.blocks):
        stride = 2 if number in (2, 4, 6) else 1
        activated = F.relu(norm(block.bn1, x))
        branch = F.conv2d(activated, block.conv1.weight, stride=stride, padding=1)
        branch = F.conv2d(F.relu(norm(block.bn2, branch)), block.conv2.weight, padding=1)
        if stride == 2:
            x = F.conv2d(activated if shortcut == "activated" else x, block.shortcut.weight, stride=2)
        x = x + branch
        if keep is not None:
            keep.append(x)
    x = F.relu(norm(model.bn, x)) if final_norm else x
    return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), model.linear.weight, model.linear.bias)


@pytest.mark.parametrize("shortcut", ["activated", "raw"])
@pytest.mark.parametrize("final_norm", [True, False])
@pytest.mark.parametrize("side", [16, 32, 9])
def test_each_variant_of_preact_resnet_18_equals_it_written_out(shortcut, final_norm, side):
    torch.manual_seed(0)
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    model = PreActResNet18(classes=7, width=8, shortcut=shortcut, final_norm=final_norm, mean=mean, std=std)
    model.train()
    model(torch.rand(16, 3, side, side))  # so that running statistics are not those of a new layer
    model.eval()
    x = torch.rand(4, 3, side, side)
    normalised = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    expected = plain_preact(model, normalised, shortcut=shortcut, final_norm=final_norm)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


# Shortcut convolution sees relu(bn1(x)), last BatchNorm, divisors of CIFAR-10's channels, mode of attacks.
CITED = {
    "paper": ("activated", False, (0.2023, 0.1994, 0.2010), "eval"),  # Kim et al.
    "paper-fast": ("raw", True, (0.2470, 0.2435, 0.2616), "train"),  # fast_adversarial
}


@pytest.mark.parametrize("preset", CITED)
def test_the_network_of_a_preset_is_that_of_the_cited_code_layer_by_layer(preset):
    shortcut, final_norm, std, mode = CITED[preset]
    recipe = make_recipe("moat:2", preset=preset)
    assert recipe.bn_in_attack == mode
    x = torch.zeros(2, 32, 32, 3, dtype=torch.uint8)
    spec = SPECS["cifar10"]
    data = Images("cifar10", x, torch.arange(2), x, torch.arange(2), spec.classes, spec.mean, spec.std, "", None, "")
    torch.manual_seed(0)
    model = build_model(recipe.model, classes=10, arguments=model_arguments(recipe, data))
    layers = [(name, tuple(layer.weight.shape)) for name, layer in model.named_modules() if hasattr(layer, "weight")]
    expected, width = [("conv1", (64, 3, 3, 3))], 64
    for number in range(8):
        out = 64 * 2 ** (number // 2)
        block = f"blocks.{number}"
        expected += [(f"{block}.bn1", (width,)), (f"{block}.conv1", (out, width, 3, 3))]
        expected += [(f"{block}.bn2", (out,)), (f"{block}.conv2", (out, out, 3, 3))]
        expected += [(f"{block}.shortcut", (out, width, 1, 1))] if out != width else []
        width = out
    expected += [("bn", (512,))] if final_norm else []
    assert layers == [*expected, ("linear", (10, 512))]
    seen, theirs = [], []
    for block in model.blocks:
        block.register_forward_hook(lambda _block, _x, output: seen.append(output))
    model.eval()
    images = torch.rand(2, 3, 32, 32)
    normalised = (images - torch.tensor(spec.mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        answer = model(images)
        plain = plain_preact(model, normalised, shortcut=shortcut, final_norm=final_norm, keep=theirs)
    for mine, other in zip(seen, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(answer, plain, rtol=1e-4, atol=1e-4)


def test_preact_resnet_18_has_the_size_that_its_name_promises():
    weights = sum(parameter.numel() for parameter in PreActResNet18(classes=10).parameters())
    convolutions = (
        3 * 64 * 9 + 4 * 64 * 64 * 9 + sum(w * 2 * w * 9 + 3 * (2 * w) ** 2 * 9 + w * 2 * w for w in (64, 128, 256))
    )
    norms = 2 * (4 * 64 + sum(w + 3 * 2 * w for w in (64, 128, 256)) + 512)
    assert weights == convolutions + norms + 512 * 10 + 10


def test_a_file_that_names_a_part_of_python_as_its_model_runs_nothing(tmp_path):
    for name, classes in (("os:system", "touch harm"), ("os:abort", 1), ("subprocess:getoutput", "touch harm")):
        description = {"model": name, "classes": classes, "arguments": {}}
        write_weights(tmp_path / "m.safetensors", Linear(torch.zeros(1, 1)), description)
        with pytest.raises(UserError):
            moatlab.load(tmp_path / "m.safetensors")


def test_a_file_of_a_newer_schema_is_refused(tmp_path):
    text = json.dumps({"schema": 2, "model": "preact_resnet18", "classes": 2})
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors", metadata={"moatlab": text})
    with pytest.raises(UserError, match="schema 2"):
        moatlab.load(tmp_path / "m.safetensors")


def test_a_file_of_somebody_elses_says_that_its_model_is_unknown(tmp_path):
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(UserError, match="does not name its model"):
        moatlab.load(tmp_path / "m.safetensors")


def test_a_model_file_holds_one_metadata_key_and_is_the_same_each_time(tmp_path):
    model = build_model("preact_resnet18", classes=3, arguments={"width": 8}).to(memory_format=torch.channels_last)
    for name in ("a", "b"):
        write_weights(tmp_path / name, model, {"model": "preact_resnet18", "classes": 3, "arguments": {"width": 8}})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (tmp_path / "a").rename(tmp_path / "a.safetensors")
    loaded = moatlab.load(tmp_path / "a.safetensors")
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(loaded(x), model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("side", "stem", "positions"),
    [(32, "3x3", 32), (48, "3x3", 48), (64, "4x4s2", 32), (96, "4x4s2", 48), (128, "7x7s4", 32), (224, "7x7s4", 56)],
)
@pytest.mark.parametrize("name", ["preact_resnet18", "resnet18", "wide_resnet28_10"])
def test_the_stem_goes_by_the_size_of_the_images(name, side, stem, positions):
    assert stem_for(side) == stem
    model = build_model(name, classes=2, arguments={"width": 8, "stem": stem})
    assert model.conv1(torch.zeros(1, 3, side, side)).shape[2:] == (positions, positions)


def test_a_model_with_another_stem_is_loaded_again_and_an_unknown_stem_is_refused(tmp_path):
    model = build_model("preact_resnet18", classes=2, arguments={"width": 8, "stem": "7x7s4"}).eval()
    described = {"model": "preact_resnet18", "classes": 2, "arguments": {"width": 8, "stem": "7x7s4"}}
    write_weights(tmp_path / "model.safetensors", model, described)
    x = torch.rand(2, 3, 96, 96)
    assert torch.equal(moatlab.load(tmp_path / "model.safetensors")(x), model(x))
    with pytest.raises(UserError, match=f"one of {', '.join(STEMS)}"):
        build_model("preact_resnet18", classes=2, arguments={"stem": "9x9"})
