"""The result of an evaluation: a verdict for each image and attack, and accuracies and red flags from these."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, Protocol, TypeAlias

import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from moatlab.attacks.catalog import AUDIT, CATALOG
from moatlab.attacks.norms import Norm, Threat
from moatlab.evaluation.red_flags import Flag, Measured, Verdicts, WithoutGradients, judge
from moatlab.runtime.console import counted
from moatlab.runtime.intervals import wilson
from moatlab.runtime.sheet import Line, Sheet, percent, percent_range

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


class Result(Cost, Share):
    note: str = ""  # in the file only if there is one


class Audit(BaseModel, extra="forbid", strict=True):
    attacked: int
    broken: int
    forwards: int
    gradients: int
    seconds: float


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Verdicts on all images, in the order given. Accuracies are fractions. `print` shows the table of `moat eval`."""

    broken_by: Verdicts  # None: robust; "clean": misclassified without an attack
    cost: dict[str, Cost]
    measured: Measured | WithoutGradients
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
        return judge(self.measured, self.broken_by, self.settings.norm)

    @property
    def results(self) -> dict[str, Result]:
        """For each attack: accuracy, interval, cost."""
        return {
            name: Result(**dict(shares(self.broken_by[name])), **dict(self.cost[name]), note=CATALOG[name].note)
            for name in self.attacks
        }

    @property
    def all_attacks(self) -> Share:
        return shares(first_broken_by(self.broken_by))

    @property
    def audit(self) -> Audit | None:
        if AUDIT not in self.broken_by:
            return None
        broken = sum(verdict not in NOT_FOUND for verdict in self.broken_by[AUDIT])
        attacked = broken + self.broken_by[AUDIT].count(None)
        return Audit(attacked=attacked, broken=broken, **dict(self.cost[AUDIT]))

    def __repr__(self) -> str:
        accuracy = {name: round(share, 4) for name, share in self.accuracy.items()}
        return f"Evaluation(accuracy={accuracy}, flags={[flag.name for flag in self.flags]})"

    def __str__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Sheet:
        return summarise(self, counted(self.settings.images, "image"))


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


class Summarised(Protocol):
    """What an `Evaluation` and a card have in common."""

    @property
    def settings(self) -> Settings: ...
    @property
    def results(self) -> dict[str, Result]: ...
    @property
    def all_attacks(self) -> Share: ...
    @property
    def flags(self) -> list[Flag]: ...
    @property
    def measured(self) -> Measured | WithoutGradients: ...
    @property
    def audit(self) -> Audit | None: ...


def summarise(one: Summarised, title: str) -> Sheet:
    """Accuracies with their intervals and costs, red flags, and the accuracy under all attacks."""
    settings, whole, results = one.settings, one.all_attacks, one.results
    precision = f", in {settings.precision}" if settings.precision != "fp32" else ""
    rows: list[tuple[str, ...]] = [
        (
            f"{name} *" if result.note else name,
            *(percent(result.accuracy), percent_range(result.interval)),
            *(f"{result.forwards:,}", f"{result.gradients:,}", f"{result.seconds:.1f}"),
        )
        for name, result in results.items()
    ]
    if len(results) > 2:
        rows.append(("strongest", percent(whole.accuracy), percent_range(whole.interval), "", "", ""))
    lines = [Line(f"* {name} is {result.note}") for name, result in results.items() if result.note]
    if one.audit:
        lines.append(Line(f"audit: {one.audit.broken} of {one.audit.attacked} robust images were broken"))
    lines += [Line(f"RED FLAG {flag.name} ({flag.evidence}): {flag.meaning}", alert=True) for flag in one.flags]
    if isinstance(one.measured, WithoutGradients):
        lines.append(Line(one.measured.not_measured, alert=True))
    elif not one.flags:
        lines.append(Line("no red flags"))
    if any(name in CATALOG and CATALOG[name].thorough for name in results):
        share = f"{percent(whole.accuracy)} % ({percent_range(whole.interval)})"
        lines.append(Line(f"robust accuracy: {share} of {counted(settings.images, 'image')}, under all attacks"))
    columns = ("attack", "accuracy %", "95 %", "forwards", "gradients", "seconds")
    return Sheet(f"{title}, {settings.threat}{precision}", columns, rows, lines)
