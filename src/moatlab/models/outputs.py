"""What a model returns: logits (images, classes), alone or as the `.logits` of an object, as in Hugging Face."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.runtime.errors import UserError


def unwrapped(_module: nn.Module, _inputs: Any, output: Any) -> Any:
    """A forward hook that replaces an object by its logits, and leaves a tensor as it is."""
    return getattr(output, "logits", None)


@contextmanager
def giving_logits(model: nn.Module, y: Tensor | None = None) -> Iterator[None]:
    """Inside, the model returns logits as a tensor. With labels `y`, its outputs are checked to fit them. A
    ScriptModule takes no hooks, and is left as it is."""
    if isinstance(model, torch.jit.ScriptModule):
        yield
        return
    handles = [model.register_forward_hook(unwrapped)]
    if y is not None:
        lowest, highest = int(y.min()), int(y.max())

        def check(_module: nn.Module, inputs: Any, output: Any) -> None:
            check_logits(output, len(inputs[0]), lowest, highest)

        handles.append(model.register_forward_hook(check))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_logits(logits: Any, images: int, lowest: int, highest: int) -> None:
    """Refuse outputs that are no logits of so many images, or have too few classes for the labels."""
    if not isinstance(logits, Tensor):
        raise UserError(f"the model returns a {type(logits).__name__}; it must return a tensor of logits")
    if logits.dim() != 2 or len(logits) != images:
        raise UserError(f"logits of {images} images have shape {tuple(logits.shape)}; it must be (images, classes)")
    if logits.shape[1] < 2:
        raise UserError("the model has one output only; attacks need logits of at least 2 classes")
    check_labels(lowest, highest, logits.shape[1])


def check_labels(lowest: int, highest: int, classes: int) -> None:
    if lowest < 0 or highest >= classes:
        raise UserError(f"labels range from {lowest} to {highest}, but the model has {classes} classes")
