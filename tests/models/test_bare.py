"""State dicts under RobustBench's names, against a second statement of its networks."""

import importlib.util
from pathlib import Path

import pyautoattack
import pytest
import torch
import torch.nn.functional as F

import moatlab
from moatlab.models.bare import read_bare
from moatlab.models.registry import BUILT_IN, build_bare
from moatlab.runtime.errors import UserError
from moatlab.sharing.robustbench import to_robustbench

EXAMPLES = Path(pyautoattack.__file__).parent / "examples"


def filled(model):
    """Random BatchNorm statistics too, so that no two layers can be exchanged unnoticed."""
    torch.manual_seed(3)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
        elif tensor.is_floating_point():
            tensor.normal_(0, 0.2)
    return model.eval()


def norm(t, name, x):
    return F.batch_norm(x, t[f"{name}.running_mean"], t[f"{name}.running_var"], t[f"{name}.weight"], t[f"{name}.bias"])


def pooled(t, head, x):
    return F.linear(F.avg_pool2d(x, x.shape[-1]).flatten(1), t[f"{head}.weight"], t.get(f"{head}.bias"))


def preact(t, x, counts, *, raw, bottleneck):
    x = F.conv2d((x - t["mu"]) / t["sigma"], t["conv1.weight"], padding=1)
    for layer, count in enumerate(counts, 1):
        for number in range(count):
            name, stride = f"layer{layer}.{number}", 2 if layer > 1 and number == 0 else 1
            out = F.relu(norm(t, f"{name}.bn1", x))
            side = t.get(f"{name}.shortcut.0.weight")
            kept = x if side is None else F.conv2d(x if raw else out, side, stride=stride)
            if bottleneck:
                out = F.conv2d(out, t[f"{name}.conv1.weight"])
                out = F.conv2d(F.relu(norm(t, f"{name}.bn2", out)), t[f"{name}.conv2.weight"], padding=1, stride=stride)
                out = F.conv2d(F.relu(norm(t, f"{name}.bn3", out)), t[f"{name}.conv3.weight"])
            else:
                out = F.conv2d(out, t[f"{name}.conv1.weight"], padding=1, stride=stride)
                out = F.conv2d(F.relu(norm(t, f"{name}.bn2", out)), t[f"{name}.conv2.weight"], padding=1)
            x = out + kept
    return pooled(t, "linear", F.relu(norm(t, "bn", x)) if "bn.weight" in t else x)


def wide(t, x, count):
    x = F.conv2d(x, t["conv1.weight"], padding=1)
    for stage in (1, 2, 3):
        for number in range(count):
            name, stride = f"block{stage}.layer.{number}", 2 if stage > 1 and number == 0 else 1
            out = F.relu(norm(t, f"{name}.bn1", x))
            side = t.get(f"{name}.convShortcut.weight")
            kept = x if side is None else F.conv2d(out, side, stride=stride)
            out = F.relu(norm(t, f"{name}.bn2", F.conv2d(out, t[f"{name}.conv1.weight"], padding=1, stride=stride)))
            x = F.conv2d(out, t[f"{name}.conv2.weight"], padding=1) + kept
    return pooled(t, "fc", F.relu(norm(t, "bn1", x)))


@pytest.mark.parametrize(
    ("name", "shortcut", "final_norm", "prefix"),
    [
        ("preact_resnet18", "activated", True, ""),
        ("preact_resnet18", "raw", True, "module."),
        ("preact_resnet18", "raw", False, "model."),
        ("preact_resnet34", "activated", False, "module.model."),
        ("preact_resnet50", "activated", True, ""),
    ],
)
def test_a_preact_resnet_of_robustbench_is_ours_and_the_inverse_of_our_export(name, shortcut, final_norm, prefix):
    arguments = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4], "shortcut": shortcut, "final_norm": final_norm}
    ours = filled(BUILT_IN[name](classes=10, width=8, **arguments))
    about = {"model": name, "data": "cifar10", "image_shape": (32, 32, 3), "arguments": {"width": 64, **arguments}}
    theirs, _ = to_robustbench(ours, about)  # which only looks at the description for the width
    again = build_bare(name, {prefix + key: value for key, value in theirs.items()}, "x", shortcut=shortcut).eval()
    x, counts = torch.rand(3, 3, 32, 32), (2, 2, 2, 2) if name.endswith("18") else (3, 4, 6, 3)
    expected = preact(theirs, x, counts, raw=shortcut == "raw", bottleneck=name.endswith("50"))
    assert torch.equal(again(x), ours(x))
    assert torch.allclose(again(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(("name", "count"), [("wide_resnet28_10", 4), ("wide_resnet34_10", 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_resnet_of_robustbench_is_ours(name, count, bias):
    ours = filled(BUILT_IN[name](classes=10, width=16))
    theirs = {}
    for key, tensor in ours.state_dict().items():
        if key.startswith("blocks."):
            _, number, rest = key.split(".", 2)
            stage, number = divmod(int(number), count)
            key = f"block{stage + 1}.layer.{number}.{rest.replace('shortcut', 'convShortcut')}"
        theirs[key.replace("linear.", "fc.") if not key.startswith("bn.") else f"bn1.{key[3:]}"] = tensor
    if not bias:
        del theirs["fc.bias"]
    unused = {f"sub_block1.{key[7:]}": torch.rand(2) for key in theirs if key.startswith("block1.")}
    again = build_bare(name, theirs | unused, "x").eval()
    x = torch.rand(3, 3, 32, 32)
    expected = wide(theirs, x, count)
    assert torch.allclose(again(x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_published_robust_resnet18_gives_the_logits_of_its_own_code():
    spec = importlib.util.spec_from_file_location("their_resnet", EXAMPLES / "resnet.py")
    their_code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(their_code)
    theirs = their_code.ResNet18().eval()
    theirs.load_state_dict(torch.load(EXAMPLES / "model_test.pt", weights_only=True, map_location="cpu"))
    ours = moatlab.load(EXAMPLES / "model_test.pt", model="resnet18")
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(ours(x), theirs(x), atol=1e-5)
        assert theirs(x).abs().max() > 1


def test_without_mu_and_sigma_nothing_is_normalised_and_arguments_override():
    tensors = {"layer1.0.conv1.weight": torch.ones(8, 8, 3, 3), "conv1.weight": torch.ones(8, 3, 3, 3)}
    assert read_bare("preact_resnet18", tensors)[1]["mean"] == [0, 0, 0]
    assert read_bare("preact_resnet18", tensors)[1]["std"] == [1, 1, 1]
    moved = {"mu": torch.full((1, 3, 1, 1), 0.5), "sigma": torch.full((1, 3, 1, 1), 0.25), **tensors}
    assert read_bare("preact_resnet18", moved)[1]["mean"] == [0.5] * 3
    assert read_bare("preact_resnet18", {"conv1.weight": torch.ones(8, 3, 3, 3)})[1].get("mean") is None


@pytest.mark.parametrize(
    ("file", "model", "says"),
    [
        ("model_test.pt", "preact_resnet18", "don't fit the model: 'blocks.2.bn1.weight' is"),
        ("model_test.pt", "wide_resnet28_10", "don't fit the model"),
        ("model_test.pt", "resnet19", r"no built-in model 'resnet19' \(did you mean resnet18\?\)"),
        ("model_test.pt", None, "does not name its model"),
    ],
)
def test_weights_of_another_network_are_refused(file, model, says):
    with pytest.raises(UserError, match=says):
        moatlab.load(EXAMPLES / file, model=model)
