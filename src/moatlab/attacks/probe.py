"""The one place where an attack touches a model: only the input is differentiated, and the model is left as found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moatlab.attacks.losses import cross_entropy

STEEP = 1e12  # in place of an infinite entry; its square is still a number


class Probe:
    """Logits and input gradients of a model, in the mode the model is in.

    Parameters are frozen while the input is differentiated: backpropagation then skips every weight gradient,
    a third of the work that `loss.backward()` would do. With a batch size, images go through in batches of about
    equal size, none larger; `forwards` and `gradients` count images. `memory_format` is how the model gets its images.
    `inference_mode` is quicker than no gradients, but not every model can be differentiated after it. `tick` is called
    after each batch, and may raise.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_size: int | None = None,
        memory_format: torch.memory_format = torch.preserve_format,
        inference_mode: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.batch_size = batch_size
        self.memory_format = memory_format
        self.without_gradients = torch.inference_mode if inference_mode else torch.no_grad
        self.tick = tick
        self.forwards = self.gradients = 0

    def logits(self, x: Tensor) -> Tensor:
        """What the model answers; nothing can be differentiated through it."""
        with self.without_gradients():
            answers = [self._call(part) for (part,) in self._split(x)]
        torch.clear_autocast_cache()  # or earlier PyTorch would train on with casts that have no graph
        answer = joined(answers)
        return answer.clone() if answer.is_inference() else answer

    def gradient(
        self, x: Tensor, *labels: Tensor, loss: Callable[..., Tensor] = cross_entropy
    ) -> tuple[Tensor, Tensor]:
        """The gradient of each example's loss(logits, *labels) by its own input, and the logits met on the way."""
        gradients, answers = [], []
        with frozen(self.model), torch.inference_mode(False), torch.enable_grad():
            for part, *marks in self._split(x, *labels):
                part, *marks = (
                    tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in (part, *marks)
                )
                part.requires_grad_()
                logits = self._call(part)
                # The sum, not the mean: no example's gradient depends on how many others share its batch.
                total = loss(logits, *marks).sum()
                if total.requires_grad:
                    (gradient,) = torch.autograd.grad(total, part, materialize_grads=True)
                else:  # a model that nothing can be differentiated through has no slope to follow
                    gradient = torch.zeros_like(part)
                # Not a number: no direction to follow there. Beyond all numbers: a steep one.
                gradients.append(gradient.nan_to_num(0, STEEP, -STEEP))
                answers.append(logits.detach())
                self.gradients += len(part)
        return joined(gradients), joined(answers)

    def _split(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        count = len(tensors[0])
        batches = -(-count // self.batch_size) if self.batch_size else 1
        yield from zip(*(tensor.tensor_split(max(batches, 1)) for tensor in tensors), strict=True)

    def _call(self, x: Tensor) -> Tensor:
        """Never a batch of one in eval mode: its convolutions round differently, so it goes as two of the same."""
        count = len(x)
        if count == 1 and not self.model.training:
            x = x.expand(2, *x.shape[1:])
        if self.memory_format is not torch.preserve_format:
            x = x.contiguous(memory_format=self.memory_format)
        logits: Tensor = self.model(x)
        self.forwards += count
        self.tick()
        return logits[:count].to(x.dtype)  # losses and steps in the precision of the images


def joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        if modes[0][1]:
            model.train()  # some models do more than set a flag here
        for module, mode in modes:
            module.training = mode
