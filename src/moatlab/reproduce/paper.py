"""The paper's tables as data, and what each of its tables and figures is made of (arXiv:2106.15357)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from moatlab.runtime.errors import UserError, did_you_mean

COLUMNS = ("clean", "fgsm", "pgd50", "cw50", "mim50", "aa")
WATCHED = ("clean", "fgsm", "pgd7")  # what a run measures by itself
DATA = {"a": "cifar10", "b": "cifar100"}

TABLE = ("fgsm", "fast", "gradalign", "kim", "pgd:2", "pgd:7", "moat:2", "imoat:1,2,3", "moat:5", "imoat:2,5,8")
OURS = ("nfgsm",)  # a later single-step baseline (de Jorge et al., 2022), below the paper's rows
STAGE_ONE = {"original": "standard | fast | pgd:2", "cutmix": "cutmix | fast | pgd:2", "mixup": "moat:2"}
Part = Literal["final", "last", "best"]


@dataclass(frozen=True)
class Row:
    """A row of a table, a curve or a bar of a figure."""

    label: str
    method: str
    in_paper: bool = True


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper."""

    name: str
    kind: Literal["table", "curves", "bars", "steps"]
    data: str
    schedule: str
    rows: tuple[Row, ...]
    title: str

    @property
    def paper(self) -> dict[str, dict[str, float]]:
        """The paper's numbers, as fractions, by row and column, with `minutes`; its figures come without numbers."""
        return paper_table(self.name) if self.kind == "table" else {}

    @property
    def columns(self) -> tuple[str, ...]:
        return WATCHED if self.kind == "curves" else COLUMNS

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it needs of a run: what the run measured by itself at its end, or its last epoch (and its best one)
        under the attacks."""
        if self.kind == "curves":
            return ("final",)
        return ("last", "best") if self.kind == "table" else ("last",)


def experiment(name: str) -> Experiment:
    known = EXPERIMENTS.get(name)
    if known is None:
        raise UserError(
            f"there is no '{name}' in the paper; known are {', '.join(EXPERIMENTS)}{did_you_mean(name, EXPERIMENTS)}"
        )
    return known


@cache
def _tables() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "paper_tables.json").read_text(encoding="utf-8")))


def paper_table(name: str) -> dict[str, dict[str, float]]:
    names = _tables()["columns"]
    return {
        label: {
            column: value if column == "minutes" else value / 100 for column, value in zip(names, values, strict=True)
        }
        for label, values in _tables()["tables"][name]["rows"].items()
    }


def collapsed_in_paper(name: str) -> set[str]:
    """The rows that the paper marks as catastrophically overfitted."""
    return set(_tables()["tables"][name]["collapsed"])


def _experiments() -> dict[str, Experiment]:
    table = (*(Row(method, method) for method in TABLE), *(Row(method, method, in_paper=False) for method in OURS))
    curves = tuple(Row(method, method) for method in ("fgsm", "pgd:2", "pgd:4", "pgd:8"))
    bars = tuple(Row(label, method) for label, method in STAGE_ONE.items())
    steps = tuple(Row(f"moat:{k}", f"moat:{k}") for k in range(2, 9))
    found = {}
    for letter, data in DATA.items():
        on = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}[data]
        for one in (
            Experiment(f"table1{letter}", "table", data, "stepwise", table, f"Step-wise learning rate, {on}"),
            Experiment(f"table2{letter}", "table", data, "cyclic", table, f"Cyclic learning rate, {on}"),
            Experiment(
                f"figure1{letter}", "curves", data, "cyclic", curves, f"Accuracy under PGD-7 over the epochs, {on}"
            ),
            Experiment(f"figure2{letter}", "bars", data, "cyclic", bars, f"What stage I of MOAT trains on, {on}"),
            Experiment(f"figure3{letter}", "steps", data, "cyclic", steps, f"MOAT by the number of steps K, {on}"),
        ):
            found[one.name] = one
    return dict(sorted(found.items(), key=lambda item: item[0].replace("figure", "z")))


EXPERIMENTS = _experiments()
