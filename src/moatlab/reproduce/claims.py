"""Check the paper's claims, each a sentence that a table or figure supports, on measured numbers.

A claim (see paper.json) consists of checks, a check of parts. It holds if all parts hold, does not hold if one does
not, and is not decided otherwise. A part that compares accuracies is decided if the 95 % interval of the paired
difference (over images and seeds) lies on one side. That takes two seeds: one shows no spread. The paper prints no
intervals; its numbers are compared as they are.
"""

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, PRINTED, Experiment
from moatlab.runtime.intervals import paired_difference

STRONG = ("pgd50", "aa")  # the columns meant by "robust accuracy"
TINY = 1e-12  # rounding: 0.4368 - 0.4168 is slightly less than 0.02
SHORT = {row.method: row.label for row in EXPERIMENTS["figure2a"].rows if "|" in row.method}  # for long names


@dataclass(frozen=True)
class Run:
    """What claims compare: `cost` in passes, `time` in seconds (the paper's: both in minutes), and the images that are
    robust in each column, which the paper does not print."""

    accuracy: dict[str, float]
    cost: float
    time: float | None  # None if other runs were timed on another machine
    collapsed: bool
    robust: dict[str, list[bool]] = field(default_factory=dict)
    slowly: bool = False  # collapsed, with FGSM accuracy falling like PGD-7 accuracy


@dataclass(frozen=True)
class Claim:
    name: str
    sentence: str
    verdict: str
    numbers: str


Runs = dict[int, Run]  # seed -> run, for one row
Rows = dict[str, Runs]
Part = tuple[bool | None, str]  # whether it holds (None: not decided), and the numbers


def check_claims(experiment: Experiment, rows: Rows) -> list[Claim]:
    """Check each claim of the table or figure. `rows`: label or method -> runs."""
    claims = []
    for name in experiment.claims:
        sentence, *checks = PRINTED["claims"][name]
        needed = dict.fromkeys(label for kind, *labels in checks if kind != NEVER for label in labels)
        parts = not_measured(rows, needed) or [part for kind, *labels in checks for part in CHECKS[kind](rows, *labels)]
        held = {holds for holds, _ in parts}
        verdict = "does not hold" if False in held else "not decided" if None in held else "holds"
        claims.append(Claim(name, sentence, verdict, "; ".join(numbers for _, numbers in parts)))
    return claims


def not_measured(rows: Rows, labels: Iterable[str]) -> list[Part]:
    missing = ", ".join(label for label in labels if label not in rows)
    return [(None, f"not measured: {missing}")] if missing else []


def paper_rows(experiment: Experiment) -> Rows:
    """The paper's own numbers as one seed per row, with minutes as cost and time; none for a figure."""
    return {
        label: {0: Run(values, values["minutes"], values["minutes"], label in experiment.collapsed)}
        for label, values in experiment.paper.items()
    }


def collapses(rows: Rows, label: str) -> list[Part]:
    """Every seed collapses."""
    count, slowly = collapsed(rows[label])
    seeds = "seeds" if len(rows[label]) != 1 else "seed"
    return [(count == len(rows[label]), f"{label}: {count} of {len(rows[label])} {seeds} collapsed{slowly}")]


def never_collapses(rows: Rows, *labels: str) -> list[Part]:
    """No run collapses. One collapse decides, even if other rows are not measured."""
    found = {label: collapsed(rows[label]) for label in labels if label in rows}
    shown = [f"{label} ({count} of {len(rows[label])}{slowly})" for label, (count, slowly) in found.items() if count]
    if shown:
        return [(False, f"collapsed: {', '.join(shown)}")]
    none = f"none of {sum(len(rows[label]) for label in found)} runs of {', '.join(found)} collapsed"
    return not_measured(rows, labels) + ([(True, none)] if found else [])


def collapsed(runs: Runs) -> tuple[int, str]:
    """How many runs collapsed, and a remark if some of them did so slowly."""
    count, slow = sum(run.collapsed for run in runs.values()), sum(run.slowly for run in runs.values())
    return count, f", {slow} of them slowly: fgsm fell with pgd7" if slow else ""


def paired(rows: Rows, ours: str, theirs: str) -> list[tuple[Run, Run]]:
    return [(rows[ours][seed], rows[theirs][seed]) for seed in sorted(rows[ours].keys() & rows[theirs].keys())]


def accuracy(columns: Iterable[str], above: float) -> Callable[..., list[Part]]:
    """Ours exceeds theirs by more than `above` in each column."""

    def check(rows: Rows, ours: str, theirs: str) -> list[Part]:
        names = " - ".join(SHORT.get(label, label) for label in (ours, theirs))
        return [part(column, paired(rows, ours, theirs), names) for column in columns]

    def part(column: str, pairs: list[tuple[Run, Run]], names: str) -> Part:
        if not pairs:
            return None, f"{column}: no seed in common"
        half, spread = 0.0, ""
        difference = statistics.fmean(ours.accuracy[column] - theirs.accuracy[column] for ours, theirs in pairs)
        if all(column in run.robust for pair in pairs for run in pair):
            sides = ([run.robust[column] for run in side] for side in zip(*pairs, strict=True))
            difference, half = paired_difference(*sides)
            spread = f" ± {100 * half:.1f} ({len(pairs)} seed{'s' if len(pairs) != 1 else ''})"
            half = half if len(pairs) > 1 else math.inf
        holds = True if difference - half > above else None if difference + half > above else False
        return holds, f"{column}: {names} = {100 * difference:+.1f}{spread} points"

    return check


def ratio(kind: str, fits: Callable[[float], bool]) -> Callable[..., list[Part]]:
    """Our cost or time divided by theirs fits, in every seed."""

    def check(rows: Rows, ours: str, theirs: str) -> list[Part]:
        pairs = [[getattr(run, kind) for run in pair] for pair in paired(rows, ours, theirs)]
        ratios = [a / b for a, b in pairs if a is not None and b]
        answers = {fits(one) for one in ratios}
        shown = ", ".join(dict.fromkeys(f"{one:.2f}" for one in ratios)) or "unknown"
        return [(answers.pop() if len(answers) == 1 else None, f"{kind} of {ours} / {theirs} = {shown}")]

    return check


NEVER = "never collapses"
CHECKS: dict[str, Callable[..., list[Part]]] = {
    "collapses": collapses,
    NEVER: never_collapses,
    "at least as robust": accuracy(STRONG, -TINY),
    "within two points": accuracy(STRONG, -0.02 - TINY),
    "more robust": accuracy(STRONG, TINY),
    "higher clean": accuracy(("clean",), TINY),
    "better under attack": accuracy(COLUMNS[1:], TINY),
    "same cost": ratio("cost", lambda one: abs(one - 1) <= 0.05),
    "comparable cost": ratio("cost", lambda one: abs(one - 1) <= 0.10),
    "lower cost": ratio("cost", lambda one: one < 1),
    "half the cost": ratio("cost", lambda one: one < 0.5),
    "half the time": ratio("time", lambda one: one < 0.5),
}
