"""What an evaluation found: every verdict, and what follows from the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moatlab.evaluation import red_flags
from moatlab.evaluation.intervals import wilson
from moatlab.evaluation.red_flags import Flag

AUDIT = "audit"
NOT_FOUND = (None, "clean", "before")  # verdicts without an adversarial example: standing, or wrong before the attack


@dataclass(frozen=True)
class Evaluation:
    """What came out. Accuracies are fractions of all images; `robust` and `broken_by` are in the order given."""

    attacks: tuple[str, ...]
    accuracy: dict[str, float]
    robust: dict[str, Tensor]  # a bool for each example
    broken_by: dict[str, list[str | None]]  # "clean" where the image itself is misclassified; None: still standing
    cost: dict[str, dict[str, float]]  # forwards and gradients (in images), seconds
    flags: list[Flag]
    measured: dict[str, Any]  # what the flags were judged by
    settings: dict[str, Any]
    # what was found, where it was asked for and not left in `state`: (numbers of images, points), piece by piece
    adversarial: dict[str, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False)


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """One evaluation of a data set, from those of its parts in their order. What the red flags go by besides verdicts
    and labels was measured on the first images, which are in the first part."""
    first = parts[0]
    if len(parts) == 1:
        return first
    robust = {name: torch.cat([part.robust[name] for part in parts]) for name in first.robust}
    broken_by = {name: [verdict for part in parts for verdict in part.broken_by[name]] for name in first.broken_by}
    accuracy = {name: int(flags.sum()) / len(flags) for name, flags in robust.items()}
    cost = {
        name: {kind: sum(part.cost[name][kind] for part in parts) for kind in ("forwards", "gradients")}
        | {"seconds": max(part.cost[name]["seconds"] for part in parts)}
        for name in first.cost
    }
    labels = [sum(counts) for counts in zip(*(part.measured["labels"] for part in parts), strict=True)]
    measured = first.measured | {"labels": labels}
    starts = [sum(part.settings["images"] for part in parts[:number]) for number in range(len(parts))]
    adversarial = {
        name: [(rows + start, points) for part, start in zip(parts, starts, strict=True)
               for rows, points in part.adversarial[name]]
        for name in first.adversarial
    }  # fmt: skip
    return Evaluation(
        attacks=first.attacks,
        accuracy=accuracy,
        robust=robust,
        broken_by=broken_by,
        cost=cost,
        flags=red_flags.judge(measured, accuracy, broken_by, audited(broken_by)),
        measured=measured,
        settings=first.settings | {"images": len(robust["clean"])},
        adversarial=adversarial,
    )


def audited(broken_by: dict[str, list[str | None]]) -> tuple[int, int] | None:
    """How many images the audit broke, of how many; None where there was none."""
    if AUDIT not in broken_by:
        return None
    verdicts = [verdict for verdict in broken_by[AUDIT] if verdict != "before"]
    return len(verdicts) - verdicts.count(None), len(verdicts)


def shares(verdicts: list[str | None]) -> dict[str, Any]:
    """How many images stand, as a number and as a fraction with its interval."""
    standing, count = verdicts.count(None), len(verdicts)
    return {"accuracy": standing / count, "interval": list(wilson(standing, count)), "standing": standing}


def first_broken_by(broken_by: dict[str, list[str | None]]) -> list[str | None]:
    """For each example the first attack, in the order they ran, that broke it."""
    firsts: list[str | None] = []
    for verdicts in zip(*broken_by.values(), strict=True):
        broken = (name for name, verdict in zip(broken_by, verdicts, strict=True) if verdict is not None)
        firsts.append(next(broken, None))
    return firsts
