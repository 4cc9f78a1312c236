"""Whether a model and its images can be evaluated at all. What can't be is refused before anything runs."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moatlab.attacks.catalog import check_classes
from moatlab.attacks.probe import Probe
from moatlab.runtime.console import note
from moatlab.runtime.errors import UserError, users_code

BATCH, BATCH_PIXELS = 256, 3 * 32 * 32  # images of that size; fewer of larger ones


def check_input(x: Tensor, y: Tensor, examples: Tensor | None) -> None:
    if x.dim() != 4 or not (x.is_floating_point() or x.dtype == torch.uint8):
        raise UserError(
            f"x has shape {tuple(x.shape)} and type {x.dtype}; it must be (N, C, H, W) floats or (N, H, W, C) bytes"
        )
    if x.dtype in (torch.float16, torch.bfloat16):
        raise UserError(
            f"x is {x.dtype}, in which small steps vanish and the ball is left by rounding; give x.float(), and let a "
            'model of short numbers convert it, or evaluate it with precision="bf16" or "fp16"'
        )
    channels, others = (1, 3) if x.is_floating_point() else (3, 1)
    if x.shape[channels] > 4 >= x.shape[others]:
        order = "(0, 3, 1, 2)" if x.is_floating_point() else "(0, 2, 3, 1)"
        raise UserError(
            f"x has shape {tuple(x.shape)}, with channels in the wrong place; floats are (N, C, H, W) and bytes "
            f"(N, H, W, C): x.permute{order}"
        )
    if len(x) != len(y) or not len(y):
        raise UserError(f"there are {len(x)} images and {len(y)} labels; there must be as many, and at least one")
    if y.dim() != 1 or y.is_floating_point():
        raise UserError(f"y must hold one whole number for each image, not {y.dtype} of shape {tuple(y.shape)}")
    if x.is_floating_point() and not (x.amin() >= 0 and x.amax() <= 1):
        raise UserError(
            f"images must lie in [0, 1], and these reach from {x.amin():.3g} to {x.amax():.3g}; "
            "normalisation belongs inside the model"
        )
    if examples is not None and examples.shape != y.shape:
        raise UserError("examples must give one number for each image")


class Outputs(NamedTuple):
    """What a model's outputs show. `answers`, for a few images, tell it from another model with the same weights."""

    classes: int
    answers: Tensor
    randomised: bool
    probabilities: bool


def check_model(model: nn.Module, x: Tensor, y: Tensor, names: Sequence[str]) -> Outputs:
    """What the outputs for a few images show. A model that can't be attacked is refused."""

    def ask(images: Tensor) -> Tensor:
        shown = images.clone()
        with users_code("the model can't be run on these images"), torch.no_grad():
            logits: Tensor = model(shown)
        if not torch.equal(shown, images):
            raise UserError("the model changes its input images in place; let it work on a copy of them")
        if not isinstance(logits, Tensor):
            raise UserError(f"the model returns a {type(logits).__name__}; it must return a tensor of logits")
        return logits.clone()

    x = x if len(x) > 1 else x.repeat(2, 1, 1, 1)
    logits = ask(x)
    if logits.dim() != 2 or len(logits) != len(x):
        raise UserError(
            f"the model's output for {len(x)} images has shape {tuple(logits.shape)}; "
            "it must be (images, classes), the logits"
        )
    if logits.isnan().any():
        raise UserError("the model's output is not a number; it can't be evaluated")
    classes = logits.shape[1]
    if classes < 2:
        raise UserError("the model has one output only; attacks need a logit for each of at least 2 classes")
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise UserError(f"labels reach from {int(y.min())} to {int(y.max())}, but the model has {classes} classes")
    for name in names:
        check_classes(name, classes)
    scale = float(logits.abs().max().clamp(min=1e-6))
    randomised = float((ask(x) - logits).abs().max()) > 1e-4 * scale
    if not randomised:
        mates = torch.cat([x[:1], 1 - x[1:]])  # the first image among others
        if float((ask(mates)[0] - logits[0]).abs().max()) > 1e-3 * scale:
            raise UserError(
                "the model's output for an image changes with the other images of its batch (BatchNorm without running "
                "statistics?); its accuracy under attack is not defined"
            )
    probabilities = bool((logits >= 0).all() and ((logits.sum(1) - 1).abs() < 1e-3).all())
    between = 0.97 * x + 0.0123  # values that no byte has: a model may round its images
    answers = torch.cat([logits, ask(between)]).float().nan_to_num().cpu()
    return Outputs(classes, answers, randomised, probabilities)


def images_at_once(pixels: int) -> int:
    """How many images of so many values a model is given. Measured: gradients of CIFAR-sized images gain little beyond
    256 at once, and memory is bounded by it."""
    return max(min(BATCH, BATCH * BATCH_PIXELS // pixels), 32)


def channels_last_copy(model: nn.Module, x: Tensor) -> nn.Module | None:
    """A copy to attack, laid out for speed; None where it can't be made or does not answer as the model does.

    BatchNorm in eval mode is a product and a sum, and is made so: its gradient is cheaper. The copy must answer and be
    differentiable after a call in inference mode, and for other images than the model has seen last: it may still be
    tied to the model that it was made from, by a hook for one.
    """
    y = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    try:
        with users_code("it can't be copied"):
            twin: nn.Module = copy.deepcopy(model)
        replace_batchnorm(twin)
        with users_code("its copy can't be run channels last and in inference mode"):
            twin.to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
            probe = Probe(twin, memory_format=torch.channels_last, inference_mode=True)
            with torch.no_grad():
                model(1 - x)
            answers = [(probe.logits(part), part) for part in (x, x[:3])]
            probe.gradient(x[:3], y[:3])
            with torch.no_grad():
                pairs = [(answer, model(part)) for answer, part in answers]
        if not all((answer - own).abs().max() <= 1e-3 * own.abs().max().clamp(min=1e-6) for answer, own in pairs):
            raise UserError("its copy gives other answers")
    except UserError as error:
        note(f"the model itself is attacked, not a faster copy of it: {error}")
        return None
    return twin


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


def device_of(model: nn.Module, otherwise: Tensor) -> torch.device:
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), otherwise.device)
