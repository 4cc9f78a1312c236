"""The paper's tables and figures, their numbers and claims, as data (arXiv:2106.15357)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moatlab.attacks.catalog import PAPER, WATCHED
from moatlab.runtime.errors import UserError, did_you_mean

COLUMNS = PAPER
OURS = ("nfgsm",)  # a later single-step baseline (de Jorge et al., 2022), below the paper's rows
Part = Literal["final", "last", "best"]


@dataclass(frozen=True)
class Row:
    """A row of a table, a curve or a bar of a figure."""

    label: str
    method: str
    in_paper: bool = True


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper; its figures come without numbers.

    `parts` are what it needs of a run: `final`, what the run measured by itself at its end, or its `last` epoch (and
    its `best` one) under the attacks.
    """

    name: str
    title: str
    kind: Literal["table", "curves", "bars", "steps"]
    data: str
    schedule: str
    rows: list[Row]
    claims: list[str]
    parts: tuple[Part, ...] = ("last",)
    columns: tuple[str, ...] = COLUMNS
    paper: dict[str, dict[str, float]] = field(default_factory=dict)  # fractions by row and column, with `minutes`
    collapsed: list[str] = field(default_factory=list)  # rows that the paper marks as catastrophically overfitted


@dataclass(frozen=True)
class Asked:
    """What is measured of each run, on how many test images (None: all), and on how many by AutoAttack."""

    parts: tuple[Part, ...]
    images: int | None
    aa_images: int | None


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS) + did_you_mean(name, EXPERIMENTS)
        raise UserError(f"there is no '{name}' in the paper; known are {known}")
    return EXPERIMENTS[name]


def _experiments() -> Iterator[Experiment]:
    for name, one in PRINTED["experiments"].items():
        fields = {"name": name, "data": one["dataset"]} | {
            key: one[key] for key in ("title", "kind", "schedule", "claims")
        }
        if one["kind"] == "table":
            paper = {method: dict(zip(PRINTED["columns"], row, strict=True)) for method, row in one["rows"].items()}
            for row in paper.values():
                row |= {column: row[column] / 100 for column in COLUMNS}
            rows = [
                *(Row(method, method) for method in paper),
                *(Row(method, method, in_paper=False) for method in OURS),
            ]
            fields |= {"parts": ("last", "best"), "paper": paper, "collapsed": one["collapsed"]}
        else:
            rows = [Row(label, method) for label, method in one["rows"].items()]
        if one["kind"] == "curves":
            fields |= {"parts": ("final",), "columns": WATCHED}
        yield Experiment(rows=rows, **fields)


PRINTED = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))
EXPERIMENTS = {one.name: one for one in _experiments()}
