import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import moatlab
from moatlab.attacks import fgsm
from moatlab.attacks.probe import Probe
from moatlab.models.preact_resnet import PreActResNet18
from moatlab.runtime.device import Autocast, choose_precision, has_fast_bf16
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.training import nan_guard
from moatlab.training.api import train_recipe as train
from moatlab.training.making import make_recipe
from moatlab.training.setup import Session


@pytest.mark.parametrize(
    ("capabilities", "precision"),
    [
        ({}, "fp32"),  # as on Macs
        ({"avx512": True, "avx512_bf16": False, "amx_bf16": False}, "fp32"),
        ({"avx512": True, "avx512_bf16": True}, "bf16"),
        ({"avx512": True, "avx512_bf16": False, "amx_bf16": True}, "bf16"),
    ],
)
def test_auto_is_bf16_on_a_cpu_with_instructions_for_it(monkeypatch, capabilities, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    cpu = torch.device("cpu")
    assert has_fast_bf16(cpu) == (precision == "bf16")
    assert choose_precision("auto", cpu) == precision
    assert [choose_precision(name, cpu) for name in ("fp32", "bf16")] == ["fp32", "bf16"]
    assert choose_precision("auto", torch.device("mps")) == "fp32"


def test_fp16_is_refused_where_its_gradients_cannot_be_scaled():
    with pytest.raises(UserError, match="use bf16 or fp32"):
        choose_precision("fp16", torch.device("mps"))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_in_fewer_bits_answers_and_steps_nearly_as_it_does_in_full(precision):
    torch.manual_seed(0)
    model = PreActResNet18(classes=10, width=8)
    x, y = torch.rand(16, 3, 16, 16), torch.randint(10, (16,))
    model(x)
    model.eval()
    short = Autocast(model, precision)
    seen = []
    model.conv1.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    answer = short(x)
    assert seen == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]]
    assert answer.dtype == torch.float32
    torch.testing.assert_close(answer, model(x), atol=0.05, rtol=0.05)
    whole, gradient = (Probe(which).gradient(x, y)[0] for which in (model, short))
    assert gradient.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(gradient.flatten(1), whole.flatten(1)).median() > 0.99
    same = (fgsm(short, x, y, eps=0.03) == fgsm(model, x, y, eps=0.03)).float().mean()
    assert same > {"bf16": 0.9, "fp16": 0.97}[precision]


def test_gradients_too_small_for_fp16_keep_their_sign():
    class Faint(torch.nn.Module):
        """Logits that hardly depend on the image: gradients below 6e-8, the smallest number of float16, inside."""

        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(12, 2)

        def forward(self, x):
            return self.linear(x.flatten(1)).float() / 2e7

    torch.manual_seed(0)
    model, x, y = Faint(), torch.rand(64, 3, 2, 2), torch.zeros(64, dtype=torch.int64)
    expected, _ = Probe(model).gradient(x, y)
    kept, _ = Probe(Autocast(model, "fp16")).gradient(x, y)
    assert torch.equal(kept.sign(), expected.sign())
    torch.testing.assert_close(kept, expected, rtol=0.05, atol=1e-11)
    plain = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        answer = model(plain)
    torch.nn.functional.cross_entropy(answer, y, reduction="sum").backward()
    assert not plain.grad.any()  # without the scale nothing is left


def test_where_weights_are_differentiated_too_their_gradients_are_not_scaled():
    """As in GradAlign, whose second derivatives reach the weights through the gradient at the input."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x, y = torch.rand(16, 3, 2, 2, requires_grad=True), torch.zeros(16, dtype=torch.int64)

    def second_derivatives(network):
        loss = torch.nn.functional.cross_entropy(network(x), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [*model.parameters()], allow_unused=True)

    for short, whole in zip(second_derivatives(Autocast(model, "fp16")), second_derivatives(model), strict=True):
        torch.testing.assert_close(short, whole, rtol=0.05, atol=0.02 * float(whole.abs().max()))


def test_a_first_step_that_overflows_in_fp16_leaves_weights_and_momentum_as_they_were(short):
    session = Session(recipe := short("fp16"), torch.device("cpu"), moatlab.load_images(recipe.data))
    before = [parameter.detach().clone() for parameter in session.model.parameters()]
    for parameter in session.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    session.scaler.scale(torch.zeros(()))  # as the loss of a step would be
    session.scaler.step(session.optimizer)
    session.scaler.update()
    for parameter, old in zip(session.model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert not session.optimizer.state[parameter][0].any()


def test_gradients_that_never_fit_into_fp16_end_the_run(tmp_path, short, monkeypatch):
    monkeypatch.setattr(nan_guard, "SMALLEST_SCALE", 2**20)
    with pytest.raises(RunFailed, match="bf16 or fp32"):
        train(short("fp16"), tmp_path / "run")


def test_a_model_that_cannot_run_in_fewer_bits_is_refused_before_anything_is_written(moat, alone, tiny):
    (alone / "own.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.linear = torch.nn.Linear(192, classes)\n"
        "    def forward(self, x):\n"
        "        z = self.linear(x.flatten(1))\n"
        "        return z if z.dtype == torch.float32 else 1 / 0\n"
    )
    ended = moat("train", "fgsm", "--data", tiny, "--model", "own:Net", "--batch-size", 8, "--precision", "bf16")
    assert ended.code == 2, ended.err
    assert "own:Net" in ended.err
    assert not (alone / "runs").exists()


@pytest.fixture
def short(tiny):
    """A recipe of 8 steps an epoch on images of 8x8."""

    def recipe(precision):
        fields = {"data": str(tiny), "width": 8, "epochs": 3, "batch_size": 8, "holdout": 16, "lr": 0.05}
        return make_recipe("mixup | fast | pgd:2", preset="laptop", stem="3x3", precision=precision, **fields)

    return recipe


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_fewer_bits_counts_what_it_planned_keeps_float32_weights_and_resumes_to_the_same_bytes(
    tmp_path, short, precision
):
    whole = train(short(precision), tmp_path / "whole")
    assert whole.counted == whole.planned
    assert whole.environment["precision"] == precision
    for steps in (3, 17, None):
        train(short(precision), tmp_path / "parts", resume=True, max_steps=steps)
    bytes_of = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert bytes_of[0] == bytes_of[1]
    weights = load_file(tmp_path / "whole" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}
    train(short("fp32"), tmp_path / "full")
    losses = [
        [json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "full")
    ]
    assert losses[0] != losses[1]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.03)  # later epochs go ways of their own, as seeds do


class CastsItself(nn.Module):
    """What is common in users' code: an autocast inside the model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(192, 2)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.linear(x.flatten(1)).float()


def test_a_model_with_an_autocast_of_its_own_trains_with_its_present_weights(tmp_path, tiny):
    """PyTorch keeps cast weights until the outermost autocast is left, and ours, which turns it off, is one."""
    options = {"eps": "8/255", "epochs": 6, "batch_size": 16, "augment": False, "lr": 0.05}
    run = moatlab.train(CastsItself(), str(tiny), method="fgsm", out=tmp_path / "run", **options)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] / 2
    assert run.record.final["clean"] == 1


def test_the_scale_of_fp16_gradients_is_part_of_a_checkpoint(tmp_path, short):
    train(short("fp16"), tmp_path / "run")
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    skipped = math.log2(65536 / content["scaler"]["scale"])  # each overflow halves the scale
    assert 0 <= skipped < 6
    assert 24 - 6 <= content["scaler"]["_growth_tracker"] <= 24 - skipped  # steps since the last one
