"""Checks of a model and its images before an evaluation, and the faster copy of the model that is attacked."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moatlab.attacks.catalog import check_names
from moatlab.attacks.norms import distance
from moatlab.attacks.probe import Probe, frozen
from moatlab.models.graphs import has_gradients
from moatlab.models.outputs import check_logits
from moatlab.runtime.console import note
from moatlab.runtime.errors import UserError, users_code

BATCH, BATCH_PIXELS = 256, 3 * 32 * 32  # images of this size; fewer of larger ones
FEWEST = 16  # which, at 224x224, take about the memory of a training step
DEFAULT, WITHOUT_GRADIENTS = ("aa",), ("square",)  # attacks


class Outputs(NamedTuple):
    """Properties of a model's outputs. `answers` to a few images identify a model beyond its weights."""

    classes: int
    answers: Tensor
    randomised: bool
    probabilities: bool


def check_attacks(model: nn.Module, attacks: Sequence[str] | str | None, *, audit: bool) -> list[str]:
    """The names of the attacks; an error if they or the audit need gradients that this kind of model does not have."""
    gradients = has_gradients(model)
    names = check_names((DEFAULT if gradients else WITHOUT_GRADIENTS) if attacks is None else attacks)
    unfit = [] if gradients else [*(name for name in names if name not in WITHOUT_GRADIENTS), *["--audit"] * audit]
    if unfit:
        works = "clean accuracy and --attacks square work; convert it to PyTorch or TorchScript for the others"
        raise UserError(f"{unfit[0]} needs gradients, which an ONNX model does not have; {works}")
    return names


def check_model(model: nn.Module, x: Tensor, y: Tensor) -> Outputs:
    """Properties of the outputs for a few images; an error for a model that can't be attacked."""

    def ask(images: Tensor) -> Tensor:
        shown = images.clone()
        with users_code("the model can't be run on these images"), torch.no_grad():
            logits: Tensor = model(shown)
        if not torch.equal(shown, images):
            raise UserError("the model changes its input in place; let it work on a copy")
        check_logits(logits, len(images), int(y.min()), int(y.max()))
        return logits.clone()

    x = x if len(x) > 1 else x.repeat(2, 1, 1, 1)
    logits = ask(x)
    if logits.isnan().any():
        raise UserError("the model's output is NaN")
    classes = logits.shape[1]
    scale = float(logits.abs().max().clamp(min=1e-6))
    randomised = float((ask(x) - logits).abs().max()) > 1e-4 * scale
    if not randomised:
        mates = torch.cat([x[:1], 1 - x[1:]])  # the first image among others
        if float((ask(mates)[0] - logits[0]).abs().max()) > 1e-3 * scale:
            raise UserError("an image's logits depend on other images of its batch (BatchNorm without statistics?)")
    probabilities = bool((logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-3).all())
    between = 0.97 * x + 0.0123  # not multiples of 1/255: shows whether a model rounds its input
    answers = torch.cat([logits, ask(between)]).float().nan_to_num().cpu()
    return Outputs(classes, answers, randomised, probabilities)


def images_at_once(pixels: int) -> int:
    """Default batch size. Measured: gradients of CIFAR-sized images get little faster beyond 256."""
    return max(min(BATCH, BATCH * BATCH_PIXELS // pixels), FEWEST)


def channels_last_copy(model: nn.Module, x: Tensor) -> nn.Module | None:
    """A faster copy to attack; None if there can be none, or if its outputs or input gradients differ from the model's.

    BatchNorm in eval mode is replaced by a product and a sum, whose gradient is cheaper; its hooks are lost. The copy
    is tested after the model ran on other images, since a hook may still tie it to the model, and differentiated after
    inference mode.
    """
    if not has_gradients(model):
        return None
    try:
        # A ScriptModule copies trained parameters as computed tensors.
        scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
        still = frozen(model) if scripted else nullcontext()
        with users_code("it can't be copied"), still:
            twin: nn.Module = copy.deepcopy(model)
        replace_batchnorm(twin)
        with users_code("its copy can't run in channels last and inference mode"):
            twin.to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
            probe = Probe(twin, memory_format=torch.channels_last, inference_mode=True)
            with torch.no_grad():
                model(1 - x)
            answers = [(probe.logits(part), part) for part in (x, x[:3])]
            least_likely = answers[1][0].argmin(1)  # for this class, cross-entropy does not saturate
            gradient, _ = probe.gradient(x[:3], least_likely)
            with torch.no_grad():
                pairs = [(answer, model(part)) for answer, part in answers]
        if not all((answer - own).abs().max() <= 1e-3 * own.abs().max().clamp(min=1e-6) for answer, own in pairs):
            raise UserError("the outputs of its copy differ")
        if any(one.is_inference() for one in (*model.parameters(), *model.buffers())):
            return twin  # only the copy can be differentiated
        with users_code("its gradients can't be compared with those of its copy"):
            own_gradient, _ = Probe(model, memory_format=torch.contiguous_format).gradient(x[:3], least_likely)
        if far_apart(gradient, own_gradient):
            raise UserError("the gradients of its copy differ")
    except UserError as error:
        note(f"attacking the model itself instead of a faster copy: {error}")
        return None
    return twin


def far_apart(gradient: Tensor, own: Tensor) -> bool:
    """Whether an image's gradients differ by over a tenth of their length. Rounding, which may move the kink of a ReLU
    or the maximum of a pool, changes far less."""
    return bool((distance(gradient - own, "l2") > 0.1 * distance(own, "l2")).any())


class ScaleAndShift(nn.Module):
    """BatchNorm in eval mode: scale = weight / sqrt(var + eps), shift = bias - mean scale."""

    scale: Tensor
    shift: Tensor

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = (norm.running_var + norm.eps).rsqrt()
        scale = scale if norm.weight is None else norm.weight * scale
        shift = -norm.running_mean * scale
        shift = shift if norm.bias is None else norm.bias + shift
        for name, values in (("scale", scale), ("shift", shift)):
            self.register_buffer(name, values.detach().view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


def replace_batchnorm(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if type(child) is nn.BatchNorm2d and child.running_mean is not None:
            setattr(module, name, ScaleAndShift(child))
        else:
            replace_batchnorm(child)
