"""What goes out into the world answers as the model does."""

import json
import logging
import re

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
from moatlab.sharing.export import onnx_files
from moatlab.sharing.robustbench import to_robustbench

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


class Block(nn.Module):
    """RobustBench's PreActBlock (`raw`) and PreActBlockV2, written independently."""

    def __init__(self, inputs, outputs, stride, activated):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.activated = activated
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False))

    def forward(self, x):
        activation = F.relu(self.bn1(x))
        if hasattr(self, "shortcut"):
            x = self.shortcut(activation if self.activated else x)
        return x + self.conv2(F.relu(self.bn2(self.conv1(activation))))


class TheirPreActResNet(nn.Module):
    def __init__(self, activated, bn_before_fc):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        channels = 64
        for layer, outputs in enumerate((64, 128, 256, 512), start=1):
            first = Block(channels, outputs, 1 if layer == 1 else 2, activated)
            setattr(self, f"layer{layer}", nn.Sequential(first, Block(outputs, outputs, 1, activated)))
            channels = outputs
        if bn_before_fc:
            self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, 10)
        self.register_buffer("mu", torch.zeros(1, 3, 1, 1))
        self.register_buffer("sigma", torch.ones(1, 3, 1, 1))

    def forward(self, x):
        x = self.conv1((x - self.mu) / self.sigma)
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        if hasattr(self, "bn"):
            x = F.relu(self.bn(x))
        return self.linear(F.avg_pool2d(x, 4).flatten(1))


@pytest.mark.parametrize("shortcut", ["activated", "raw"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_robustbenchs_module_takes_the_exported_weights_and_answers_alike(shortcut, final_norm):
    torch.manual_seed(0)
    arguments = {"width": 64, "shortcut": shortcut, "final_norm": final_norm, "mean": MEAN, "std": STD}
    model = build_model("preact_resnet18", classes=10, arguments=arguments)
    model(torch.rand(8, 3, 32, 32))  # running statistics that are not the first ones
    model.eval()
    described = {"model": "preact_resnet18", "arguments": arguments, "image_shape": [32, 32, 3], "data": "cifar10"}
    tensors, block = to_robustbench(model, described)
    assert block == {"activated": "PreActBlockV2", "raw": "PreActBlock"}[shortcut]
    theirs = TheirPreActResNet(shortcut == "activated", final_norm)
    theirs.load_state_dict(tensors, strict=True)
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(images), model(images), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model": "resnet18"}, "this model is resnet18"),
        ({"image_shape": [16, 16, 3]}, "takes 16x16"),
        ({"arguments": {"width": 16, "shortcut": "raw", "final_norm": True}}, "this one has width 16"),
        ({"arguments": {"width": 64, "shortcut": "raw", "final_norm": True, "stem": "4x4s2"}}, "the stem 4x4s2"),
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
