"""The tables, figures and claims of the paper as data (Wang et al., 2021, arXiv:2106.15357), and one figure of ours."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from moatlab.attacks.catalog import PAPER, WATCHED
from moatlab.runtime.errors import UserError, did_you_mean

COLUMNS = PAPER
OURS = ("nfgsm",)  # a later single-step baseline (de Jorge et al., 2022), below the paper's rows
Part = Literal["final", "last", "best"]
# The radius figure: accuracy against the radius trained for (figure 1 of Andriushchenko and Flammarion, 2020).
RADII = ("4/255", "8/255", "12/255", "16/255")
RADIUS_METHODS = ("fgsm", "fast", "nfgsm", "moat:2")
RADIUS_EPOCHS = 15


@dataclass(frozen=True)
class Row:
    """A row of a table, a curve or a bar of a figure, or with `eps` a point of the radius figure."""

    label: str
    method: str
    in_paper: bool = True
    eps: str | None = None
    cycled: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What its recipe has besides the options of the sweep."""
        return {"eps": self.eps, "cycle_momentum": self.cycled} if self.eps else {}

    @property
    def suffix(self) -> str:
        """Of the names of its runs: `_eps16-cycled`."""
        return f"_eps{self.eps.partition('/')[0]}{'-cycled' * self.cycled}" if self.eps else ""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure (the paper prints no numbers for figures). `parts` it needs of a run: `final`, the run's own
    test accuracies, or its `last` (and `best`) epoch under attack."""

    name: str
    title: str
    kind: Literal["table", "curves", "bars", "steps", "radius"]
    data: str
    schedule: str
    rows: list[Row]
    claims: list[dict[str, Any]]  # name, claim, section, quote and checks: see claims.py
    parts: tuple[Part, ...] = ("last",)
    columns: tuple[str, ...] = COLUMNS
    paper: dict[str, dict[str, float]] = field(default_factory=dict)  # row -> column -> fraction, and `minutes`
    collapsed: list[str] = field(default_factory=list)  # rows marked as catastrophically overfitted
    epochs: int | None = None  # None: the preset's

    @property
    def in_paper(self) -> bool:
        return self.kind != "radius"

    def rows_of(self, method: str) -> list[Row]:
        """The rows of a method or label; those to add if it is no row here."""
        if found := [row for row in self.rows if method in (row.method, row.label)]:
            return found
        return [Row(method, method, in_paper=False)] if self.in_paper else radius_rows(method)


@dataclass(frozen=True)
class Asked:
    """The parts of each run to measure, and the number of test images, for AutoAttack too (None: all)."""

    parts: tuple[Part, ...]
    images: int | None
    aa_images: int | None


def experiment(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS) + did_you_mean(name, EXPERIMENTS)
        raise UserError(f"there is no '{name}' in the paper; choose one of {known}")
    return EXPERIMENTS[name]


def radius_rows(method: str) -> list[Row]:
    """A method at each radius, and at the largest with cycled momentum too."""
    rows = [Row(f"{method} {eps}", method, in_paper=False, eps=eps) for eps in RADII]
    cycled = f"{method} {RADII[-1]}, cycled momentum"
    return [*rows, Row(cycled, method, in_paper=False, eps=RADII[-1], cycled=True)]


def _radius() -> Experiment:
    return Experiment(
        name="radius",
        title="Accuracy under PGD-7 by the radius trained for, CIFAR-10",
        kind="radius",
        data="cifar10",
        schedule="cyclic",
        rows=[row for method in RADIUS_METHODS for row in radius_rows(method)],
        claims=[],
        parts=("final",),
        columns=WATCHED,
        epochs=RADIUS_EPOCHS,
    )


def _experiments() -> Iterator[Experiment]:
    for name, one in PRINTED["experiments"].items():
        fields = {key: one[key] for key in ("title", "kind", "schedule", "claims")}
        if isinstance(one["claims"], str):  # those of the same table or figure for CIFAR-10
            fields["claims"] = PRINTED["experiments"][one["claims"]]["claims"]
        if one["kind"] == "table":
            paper = {method: dict(zip(PRINTED["columns"], row, strict=True)) for method, row in one["rows"].items()}
            for row in paper.values():
                row |= {column: row[column] / 100 for column in COLUMNS}
            rows = [Row(method, method, in_paper=method in paper) for method in (*paper, *OURS)]
            fields |= {"parts": ("last", "best"), "paper": paper, "collapsed": one["collapsed"]}
        else:
            rows = [Row(label, method) for label, method in one["rows"].items()]
        if one["kind"] == "curves":
            fields |= {"parts": ("final",), "columns": WATCHED}
        yield Experiment(name=name, data=one["dataset"], rows=rows, **fields)


PRINTED = json.loads((Path(__file__).parent / "paper.json").read_text(encoding="utf-8"))
EXPERIMENTS = {one.name: one for one in (*_experiments(), _radius())}
