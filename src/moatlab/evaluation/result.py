"""The result of an evaluation: a verdict for each image and attack, and accuracies and red flags from these."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, TypeAlias

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from moatlab.attacks.catalog import AUDIT
from moatlab.attacks.norms import Norm, Threat
from moatlab.evaluation.intervals import wilson
from moatlab.evaluation.red_flags import Flag, Measured, Verdicts, judge

Precision: TypeAlias = Literal["fp32", "bf16", "fp16"]
NOT_FOUND = (None, "clean", "before")  # verdicts without an adversarial example: robust, or wrong before the attack


class Settings(BaseModel, extra="forbid", strict=True):
    """The options of an evaluation. `eps` is text, such as 8/255."""

    attacks: list[str]
    eps: str
    norm: Norm
    seed: int
    images: PositiveInt
    audit: bool
    chunk_size: PositiveInt
    batch_size: PositiveInt
    classes: PositiveInt
    precision: Precision = "fp32"  # written to files only if it differs

    @property
    def threat(self) -> Threat:
        return Threat.of(self.eps, self.norm)


class Cost(BaseModel, extra="forbid", strict=True):
    """The cost of an attack: forward passes and gradients, in images, and time."""

    forwards: int
    gradients: int
    seconds: float


class Share(BaseModel, extra="forbid", strict=True):
    """Robust images: fraction, its 95 % interval, and number."""

    accuracy: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]
    standing: int


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Verdicts on all images, in the order given. Accuracies are fractions."""

    broken_by: Verdicts  # None: robust; "clean": misclassified without an attack
    cost: dict[str, Cost]
    measured: Measured
    settings: Settings
    # (numbers of images, points) for each attack, with `keep_adversarial` and without `state`
    adversarial: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict)

    @cached_property
    def robust(self) -> dict[str, Tensor]:
        """For each attack, a bool for each image."""
        attacks = {name: verdicts for name, verdicts in self.broken_by.items() if name != AUDIT}
        return {name: torch.tensor([one is None for one in verdicts]) for name, verdicts in attacks.items()}

    @property
    def attacks(self) -> tuple[str, ...]:
        return tuple(self.robust)

    @property
    def accuracy(self) -> dict[str, float]:
        """For each attack, the fraction of all images that are robust to it."""
        return {name: int(robust.sum()) / len(robust) for name, robust in self.robust.items()}

    @cached_property
    def flags(self) -> list[Flag]:
        """Signs that the accuracies may overestimate robustness."""
        return judge(self.measured, self.broken_by)

    def __repr__(self) -> str:
        return f"Evaluation(accuracy={self.accuracy}, flags={[flag.name for flag in self.flags]})"


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """Join the evaluations of a data set's parts, in order. The red flags' sample is in the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    labels = [sum(counts) for counts in zip(*(part.measured.labels for part in parts), strict=True)]
    return Evaluation(
        broken_by={name: [verdict for part in parts for verdict in part.broken_by[name]] for name in first.broken_by},
        cost={
            name: Cost(
                forwards=sum(part.cost[name].forwards for part in parts),
                gradients=sum(part.cost[name].gradients for part in parts),
                seconds=max(part.cost[name].seconds for part in parts),
            )
            for name in first.cost
        },
        measured=first.measured.model_copy(update={"labels": labels}),
        settings=first.settings.model_copy(update={"images": sum(part.settings.images for part in parts)}),
    )


def shares(verdicts: list[str | None]) -> Share:
    robust, count = verdicts.count(None), len(verdicts)
    return Share(accuracy=robust / count, interval=wilson(robust, count), standing=robust)


def first_broken_by(broken_by: Verdicts) -> list[str | None]:
    """For each image, the first attack that broke it, in the order they ran."""
    each = (zip(broken_by, verdicts, strict=True) for verdicts in zip(*broken_by.values(), strict=True))
    return [next((name for name, verdict in pairs if verdict is not None), None) for pairs in each]
