"""What a stage works with: the model, the threat, random draws, and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks import Probe, pgd
from moatlab.attacks.norms import Threat
from moatlab.attacks.probe import evaluating
from moatlab.runtime import distributed


@dataclass(frozen=True)
class When:
    """The step of a run, counted from 0: within its epoch, and the epoch of how many."""

    position: int = 0
    epoch: int = 0
    epochs: int = 1


@dataclass(frozen=True)
class Context:
    """The first argument of every stage.

    Where several processes train together (`shared`), x and y are this process's part of the batch. Draws are made for
    the whole batch and sliced, so that they do not depend on the number of processes.
    """

    model: nn.Module  # the plain model, for attacks
    forward: Callable[[Tensor], Tensor]  # the model or its distributed wrapper, for the trained loss
    threat: Threat
    generator: torch.Generator  # this step's draws
    classes: int
    bn_in_attack: str = "train"
    shared: bool = False
    when: When = When()
    memory: dict[str, Tensor] = field(default_factory=dict)  # kept from step to step, and in checkpoints
    numbers: Tensor | None = None  # of the batch's images in the training set
    images: int = 0  # in the training set
    label_smoothing: float = 0.0
    watched: list[tuple[Tensor, Callable[[Tensor], None]]] = field(default_factory=list)

    @contextmanager
    def attacking(self, mode: str | None = None) -> Iterator[Probe]:
        """A probe with BatchNorm in `mode`, by default the recipe's; the model's own mode is restored afterwards."""
        with evaluating(self.model) if (mode or self.bn_in_attack) == "eval" else nullcontext():
            yield Probe(self.model, twice=False)

    def climb(self, start: Tensor, x: Tensor, y: Tensor, *, steps: int, step_size: float) -> Tensor:
        """Projected gradient steps on the cross-entropy, from `start` (which is projected too)."""
        eps, norm = self.threat.eps, self.threat.norm
        with self.attacking() as probe:
            return pgd(probe, x, y, eps=eps, step_size=step_size, steps=steps, norm=norm, start=start)

    def step(self, start: Tensor, gradient: Tensor, x: Tensor, size: float) -> Tensor:
        """One projected step of this size along the gradient."""
        return self.threat.project(start + size * self.threat.steepest(gradient), x)

    @property
    def eps(self) -> float:
        return self.threat.eps

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Of the trained pass, with the recipe's label smoothing."""
        return F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)

    def after_backward(self, leaf: Tensor, action: Callable[[Tensor], None]) -> None:
        """Let the trained backward pass also give the gradient of `leaf`, and call `action` with it."""
        self.watched.append((leaf, action))

    def draws(self, x: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        """`draw(empty)` for a whole batch of the shape and layout of x, and of that this process's part."""
        if not (self.shared and distributed.count() > 1):
            return draw(torch.empty_like(x))
        layout = torch.channels_last if x.dim() == 4 and not x.is_contiguous() else torch.contiguous_format
        shape = (len(x) * distributed.count(), *x.shape[1:])
        whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
        return draw(whole)[distributed.share(len(whole))]

    def noise(self, x: Tensor, radius: float | None = None) -> Tensor:
        """Uniform noise in the ball, or in one of another radius, for each image of x."""
        ball = Threat(self.threat.norm, radius or self.eps)
        return self.draws(x, lambda empty: ball.noise(empty, self.generator))

    def uniform(self, x: Tensor) -> Tensor:
        """U(0, 1) in the shape of x."""
        return self.draws(x, lambda empty: empty.uniform_(generator=self.generator))

    def normal(self, x: Tensor) -> Tensor:
        """N(0, 1) in the shape of x."""
        return self.draws(x, lambda empty: empty.normal_(generator=self.generator))

    def number(self) -> Tensor:
        """U(0, 1), one for the batch."""
        return torch.rand((), generator=self.generator, device=self.generator.device)

    def shuffled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """lambda ~ U(0, 1), and the images and labels to mix with: a shuffle over the batch of all processes."""
        weight = self.number()
        whole_x, whole_y = (distributed.gathered(x), distributed.gathered(y)) if self.shared else (x, y)
        order = torch.randperm(len(whole_y), generator=self.generator, device=x.device)
        if self.shared:
            order = order[distributed.share(len(order))]
        return weight, whole_x[order], whole_y[order]

    def soft_labels(self, y: Tensor, other_y: Tensor, weight: Tensor) -> Tensor:
        labels, others = (F.one_hot(numbers, self.classes).float() for numbers in (y, other_y))
        return torch.lerp(others, labels, weight)

    def mean_count(self, count: Tensor) -> Tensor:
        """The mean of a count over the processes that share the batch."""
        return distributed.mean(count) if self.shared else count
