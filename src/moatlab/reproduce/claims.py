"""The paper's claims as checks: each sentence that a table or a figure supports, over measured numbers.

A claim (see paper.json) is made of checks, a check of parts; it holds if all parts hold, does not hold if one of them
does not, and is not decided otherwise. A part that compares accuracies is decided where the 95 % interval of the
difference (over images and seeds, paired) lies on one side, and with two seeds at least: one does not show how much
seeds differ. The paper's own numbers come without intervals and are taken as they are.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moatlab.evaluation.intervals import paired_difference
from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, PRINTED, Experiment

STRONG = ("pgd50", "aa")  # what "robust accuracy" is judged by
TINY = 1e-12  # of accuracy: 0.4368 - 0.4168 is a little less than 0.02
SHORT = {row.method: row.label for row in EXPERIMENTS["figure2a"].rows if "|" in row.method}  # of long names


@dataclass(frozen=True)
class Run:
    """A run as claims see it: `cost` in passes, `time` in seconds (of the paper both in minutes), and which images are
    robust in each column, which the paper does not print."""

    accuracy: dict[str, float]
    cost: float
    time: float | None  # None where other runs are of another machine
    collapsed: bool
    robust: dict[str, list[bool]] = field(default_factory=dict)
    slowly: bool = False  # collapsed, and FGSM accuracy fell as PGD-7 accuracy did


@dataclass(frozen=True)
class Claim:
    name: str
    sentence: str
    verdict: str
    numbers: str


Runs = dict[int, Run]  # of a row, by seed
Rows = dict[str, Runs]
Part = tuple[bool | None, str]  # whether it holds (None: not decided), and the numbers


def check_claims(experiment: Experiment, rows: Rows) -> list[Claim]:
    """Every claim that the table or figure supports. `rows` by the label or the method of a row."""
    claims = []
    for name in experiment.claims:
        sentence, *checks = PRINTED["claims"][name]
        needed = dict.fromkeys(label for kind, *labels in checks if kind != NEVER for label in labels)
        parts = not_measured([label for label in needed if label not in rows])
        parts = parts or [part for kind, *labels in checks for part in CHECKS[kind](rows, *labels)]
        held = {holds for holds, _ in parts}
        verdict = "does not hold" if False in held else "not decided" if None in held else "holds"
        claims.append(Claim(name, sentence, verdict, "; ".join(numbers for _, numbers in parts)))
    return claims


def not_measured(labels: Sequence[str]) -> list[Part]:
    return [(None, f"not measured: {', '.join(labels)}")] if labels else []


def paper_rows(experiment: Experiment) -> Rows:
    """The paper's own numbers, one seed of each, its minutes as cost and time; none where it is a figure."""
    return {
        label: {0: Run(values, values["minutes"], values["minutes"], label in experiment.collapsed)}
        for label, values in experiment.paper.items()
    }


# --- checks


def collapses(rows: Rows, label: str) -> list[Part]:
    """In every seed: one that does not is enough to fail."""
    count, seeds = collapsed(rows[label]), "seeds" if len(rows[label]) != 1 else "seed"
    numbers = f"{label}: {count} of {len(rows[label])} {seeds} collapsed{slowly(rows[label])}"
    return [(count == len(rows[label]), numbers)]


def never_collapses(rows: Rows, *labels: str) -> list[Part]:
    """One collapse is enough to fail, even where other rows are not measured."""
    found = {label: rows[label] for label in labels if label in rows}
    counts = {label: count for label, runs in found.items() if (count := collapsed(runs))}
    if counts:
        shown = [f"{label} ({count} of {len(rows[label])}{slowly(rows[label])})" for label, count in counts.items()]
        return [(False, f"collapsed: {', '.join(shown)}")]
    none = f"none of {sum(map(len, found.values()))} runs of {', '.join(found)} collapsed"
    return not_measured([label for label in labels if label not in rows]) + ([(True, none)] if found else [])


def collapsed(runs: Runs) -> int:
    return sum(run.collapsed for run in runs.values())


def slowly(runs: Runs) -> str:
    count = sum(run.slowly for run in runs.values())
    return f", {count} of them slowly: fgsm fell with pgd7" if count else ""


def accuracy(columns: Sequence[str], above: float) -> Callable[..., list[Part]]:
    """Ours exceeds theirs by more than so much, in each column."""

    def check(rows: Rows, ours: str, theirs: str) -> list[Part]:
        seeds = sorted(rows[ours].keys() & rows[theirs].keys())
        pairs = [(rows[ours][seed], rows[theirs][seed]) for seed in seeds]
        return [
            part(column, pairs, " - ".join(SHORT.get(label, label) for label in (ours, theirs))) for column in columns
        ]

    def part(column: str, pairs: list[tuple[Run, Run]], names: str) -> Part:
        if not pairs:
            return None, f"{column}: no seed in common"
        half, spread = 0.0, ""
        difference = statistics.fmean(ours.accuracy[column] - theirs.accuracy[column] for ours, theirs in pairs)
        if all(column in run.robust for pair in pairs for run in pair):
            difference, half = paired_difference(
                *([run.robust[column] for run in side] for side in zip(*pairs, strict=True))
            )
            spread = f" ± {100 * half:.1f} ({len(pairs)} seed{'s' if len(pairs) != 1 else ''})"
            half = half if len(pairs) > 1 else math.inf
        holds = True if difference - half > above else None if difference + half > above else False
        return holds, f"{column}: {names} = {100 * difference:+.1f}{spread} points"

    return check


def ratio(kind: str, fits: Callable[[float], bool]) -> Callable[..., list[Part]]:
    """Our cost or time as a share of theirs, in every seed."""

    def check(rows: Rows, ours: str, theirs: str) -> list[Part]:
        seeds = sorted(rows[ours].keys() & rows[theirs].keys())
        pairs = [[getattr(rows[label][seed], kind) for label in (ours, theirs)] for seed in seeds]
        ratios = [a / b for a, b in pairs if a is not None and b]
        fates = {fits(one) for one in ratios}
        shown = ", ".join(dict.fromkeys(f"{one:.2f}" for one in ratios)) or "unknown"
        return [(fates.pop() if len(fates) == 1 else None, f"{kind} of {ours} / {theirs} = {shown}")]

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
