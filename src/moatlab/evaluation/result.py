"""What an evaluation found: a verdict for each image and attack, and what follows from the verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from moatlab.attacks.catalog import AUDIT
from moatlab.attacks.norms import Norm, Threat
from moatlab.evaluation.intervals import wilson
from moatlab.evaluation.red_flags import Flag, Measured, Verdicts, judge

NOT_FOUND = (None, "clean", "before")  # verdicts without an adversarial example: robust, or wrong before the attack


class Settings(BaseModel, extra="forbid", strict=True):
    """What was asked for, and what it was worked on with. `eps` is text, such as 8/255."""

    attacks: list[str]
    eps: str
    norm: Norm
    seed: int
    images: PositiveInt
    audit: bool
    chunk_size: PositiveInt
    batch_size: PositiveInt
    classes: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # in files only where it is another

    @property
    def threat(self) -> Threat:
        return Threat.of(self.eps, self.norm)


class Cost(BaseModel, extra="forbid", strict=True):
    """What an attack took: model calls, in images, and time."""

    forwards: int
    gradients: int
    seconds: float


class Share(BaseModel, extra="forbid", strict=True):
    """How many images are robust: as a fraction with its 95 % interval, and as a number."""

    accuracy: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    standing: int


@dataclass(frozen=True, repr=False)
class Evaluation:
    """The verdicts on all images, in the order given, and what follows from them. Accuracies are fractions."""

    broken_by: Verdicts  # "clean" where the image itself is misclassified; None: robust
    cost: dict[str, Cost]
    measured: Measured
    settings: Settings
    # what was found, where it was asked for and not left in `state`: (numbers of images, points), piece by piece
    adversarial: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @cached_property
    def robust(self) -> dict[str, Tensor]:
        """For each attack a bool for each image."""
        return {
            name: torch.tensor([verdict is None for verdict in verdicts])
            for name, verdicts in self.broken_by.items()
            if name != AUDIT
        }

    @property
    def attacks(self) -> tuple[str, ...]:
        return tuple(self.robust)

    @property
    def accuracy(self) -> dict[str, float]:
        """For each attack the share of all images that are robust to it."""
        return {name: int(robust.sum()) / len(robust) for name, robust in self.robust.items()}

    @cached_property
    def flags(self) -> list[Flag]:
        """Signs that the accuracies may be too high."""
        return judge(self.measured, self.broken_by)

    def __repr__(self) -> str:
        return f"Evaluation(accuracy={self.accuracy}, flags={[flag.name for flag in self.flags]})"


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of a data set, from those of its parts in their order, whose examples are in their states. What
    the red flags use besides verdicts and labels was measured on the first images, which are in the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    costs = {name: [part.cost[name] for part in parts] for name in first.cost}
    labels = [sum(counts) for counts in zip(*(part.measured.labels for part in parts), strict=True)]
    return Evaluation(
        broken_by={name: [verdict for part in parts for verdict in part.broken_by[name]] for name in first.broken_by},
        cost={
            name: Cost(
                forwards=sum(cost.forwards for cost in each),
                gradients=sum(cost.gradients for cost in each),
                seconds=max(cost.seconds for cost in each),
            )
            for name, each in costs.items()
        },
        measured=first.measured.model_copy(update={"labels": labels}),
        settings=first.settings.model_copy(update={"images": sum(part.settings.images for part in parts)}),
    )


def shares(verdicts: list[str | None]) -> Share:
    robust, count = verdicts.count(None), len(verdicts)
    return Share(accuracy=robust / count, interval=wilson(robust, count), standing=robust)


def first_broken_by(broken_by: Verdicts) -> list[str | None]:
    """For each image the first attack, in the order they ran, that broke it."""
    each = (zip(broken_by, verdicts, strict=True) for verdicts in zip(*broken_by.values(), strict=True))
    return [next((name for name, verdict in pairs if verdict is not None), None) for pairs in each]
