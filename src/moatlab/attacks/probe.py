"""The one place where an attack touches a model: only the input is differentiated, and the model is left as found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Probe:
    """Logits and input gradients of a model, in the mode the model is in.

    Parameters are frozen while the input is differentiated: backpropagation then skips every weight gradient,
    a third of the work that `loss.backward()` would do.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        return self._call(x)

    def gradient(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of each example's cross-entropy by its own input, and the logits met on the way."""
        x = x.detach().requires_grad_()
        with frozen(self.model), torch.enable_grad():
            logits = self._call(x)
            # The sum, not the mean: no example's gradient depends on how many others share its batch.
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), x)
        return gradient, logits.detach()

    def _call(self, x: Tensor) -> Tensor:
        """Never a batch of one in eval mode: its convolutions round differently, so it goes as two of the same."""
        if len(x) == 1 and not self.model.training:
            return self.model(x.expand(2, *x.shape[1:]))[:1]  # type: ignore[no-any-return]
        return self.model(x)  # type: ignore[no-any-return]


def as_probe(model: Probe | nn.Module) -> Probe:
    return model if isinstance(model, Probe) else Probe(model)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Parameters take no gradients inside; afterwards exactly those that did before do again."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards every module is in the mode it was in, layers frozen by the user among them."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def full_precision() -> Iterator[None]:
    """Plain float32 inside: no autocast, and none of the shortened multiplications (TF32) that GPUs offer."""
    flags: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    for flag in flags:
        flag.allow_tf32 = False
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value
