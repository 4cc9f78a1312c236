"""The model, threat and random draws that a stage works with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks import Probe, pgd
from moatlab.attacks.norms import Threat
from moatlab.attacks.probe import evaluating
from moatlab.runtime import distributed


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

    @contextmanager
    def attacking(self, mode: str | None = None) -> Iterator[Probe]:
        """A probe with BatchNorm in `mode`, by default the recipe's; the model's own mode is restored afterwards."""
        with evaluating(self.model) if (mode or self.bn_in_attack) == "eval" else nullcontext():
            yield Probe(self.model)

    def climb(self, start: Tensor, x: Tensor, y: Tensor, *, steps: int, step_size: float) -> Tensor:
        """Projected gradient steps on the cross-entropy, from `start` (which is projected too)."""
        eps, norm = self.threat.eps, self.threat.norm
        with self.attacking() as probe:
            return pgd(probe, x, y, eps=eps, step_size=step_size, steps=steps, norm=norm, start=start)

    @property
    def eps(self) -> float:
        return self.threat.eps

    def noise(self, x: Tensor, radius: float | None = None) -> Tensor:
        """Uniform noise in the ball, or in one of another radius, for each image of x."""
        ball = Threat(self.threat.norm, radius or self.eps)
        whole, mine = x, slice(None)
        if self.shared and distributed.count() > 1:
            layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last
            shape = (len(x) * distributed.count(), *x.shape[1:])
            whole = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
            mine = distributed.share(len(whole))
        return ball.noise(whole, self.generator)[mine]

    def shuffled(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """lambda ~ U(0, 1), and the images and labels to mix with: a shuffle over the batch of all processes."""
        weight = torch.rand((), generator=self.generator, device=x.device)
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
