"""Adversarial weight perturbation (Wu, Xia and Wang, 2020): the loss is trained at weights that raise it."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moatlab.runtime import distributed

TINY = 1e-20


def perturb(model: nn.Module, loss: Callable[[], Tensor], gamma: float) -> list[tuple[Tensor, Tensor]]:
    """Add v = gamma |w| g/|g| to each weight tensor w of two or more dimensions, where g is the gradient of the loss.
    Returns the pairs (w, v), to be subtracted after the optimizer's step. Buffers are as before."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = [buffer.clone() for buffer in model.buffers()]
    gradients = torch.autograd.grad(loss(), weights, allow_unused=True)
    moved: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        for weight, gradient in zip(weights, gradients, strict=True):
            if gradient is not None and weight.dim() > 1:
                gradient = distributed.mean(gradient)
                step = gamma * weight.norm() / (gradient.norm() + TINY) * gradient
                weight.add_(step)
                moved.append((weight, step))
    return moved


@torch.no_grad()
def restore(moved: list[tuple[Tensor, Tensor]]) -> None:
    for weight, step in moved:
        weight.sub_(step)
