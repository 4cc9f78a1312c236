"""How attacks call a model: only the input is differentiated, and the model is left unchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from moatlab.attacks.losses import cross_entropy

STEEP = 1e12  # replaces an infinite entry; its square is still finite


@dataclass(eq=False, repr=False)
class Probe:
    """Logits and input gradients of a model, in its current mode.

    Parameters are frozen while the input is differentiated, which skips all weight gradients: a third of the work of
    `loss.backward()`. `inference_mode` is faster than no_grad, but some models cannot be differentiated after it.
    """

    model: nn.Module
    _: KW_ONLY
    batch_size: int | None = None  # the largest; images are split evenly
    memory_format: torch.memory_format = torch.preserve_format  # of the model's input
    inference_mode: bool = False
    twice: bool = True  # pass a single image twice: convolutions round differently for a batch of one
    tick: Callable[[], None] = lambda: None  # called after each batch; may raise
    forwards: int = field(default=0, init=False)  # images
    gradients: int = field(default=0, init=False)

    def logits(self, x: Tensor) -> Tensor:
        """The model's logits, without a graph."""
        with torch.inference_mode() if self.inference_mode else torch.no_grad():
            logits = joined([self._call(part) for (part,) in self._split(x)])
        torch.clear_autocast_cache()  # earlier PyTorch would keep casts without a graph and train with them
        return logits.clone() if logits.is_inference() else logits

    def gradient(
        self, x: Tensor, *y: Tensor, loss: Callable[..., Tensor] = cross_entropy, average: int = 1
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each image's loss(logits, *y) with respect to the image, and the logits. `average`: for a
        randomised model, the mean over that many calls, and the logits of the last."""
        total, logits = self._gradient(x, *y, loss=loss)
        for _ in range(average - 1):
            gradient, logits = self._gradient(x, *y, loss=loss)
            total = total + gradient
        return total / average if average > 1 else total, logits

    def _gradient(self, x: Tensor, *y: Tensor, loss: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        gradients, answers = [], []
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad():
            for tensors in self._split(x, *y):
                part, *labels = (one.clone() if one.is_inference() else one.detach() for one in tensors)
                part.requires_grad_()
                logits = self._call(part)
                total = loss(logits, *labels).sum()  # not the mean, so that gradients do not depend on the batch size
                gradient = torch.zeros_like(part)  # of a model that is not differentiable
                if total.requires_grad:
                    (gradient,) = torch.autograd.grad(total, part, materialize_grads=True)
                gradients.append(gradient.nan_to_num(0, STEEP, -STEEP))  # NaN has no direction
                answers.append(logits.detach())
                self.gradients += len(part)
        return joined(gradients), joined(answers)

    def _split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        count = len(tensors[0])
        batches = -(-count // self.batch_size) if self.batch_size else 1
        yield from zip(*(tensor.tensor_split(max(batches, 1)) for tensor in tensors), strict=True)

    def _call(self, x: Tensor) -> Tensor:
        count = len(x)
        if count == 1 and self.twice and not self.model.training:
            x = x.expand(2, *x.shape[1:])
        if self.memory_format is not torch.preserve_format:
            x = x.contiguous(memory_format=self.memory_format)
        logits: Tensor = self.model(x)
        self.forwards += count
        self.tick()
        return logits[:count].to(x.dtype)  # losses and steps in the precision of the images


Model: TypeAlias = Probe | nn.Module


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def as_probe(model: Model) -> Probe:
    return model if isinstance(model, Probe) else Probe(model)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Parameters require no gradient inside; afterwards exactly those that did before do again."""
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
    """Eval mode inside; afterwards each module has its own earlier mode, such as layers that the user froze."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        if modes[0][1]:
            model.train()  # some models do more than set a flag here
        for module, mode in modes:
            module.training = mode
