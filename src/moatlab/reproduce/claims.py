"""The paper's claims as checks: each sentence that a table or a figure is there to support, over measured numbers.

A claim is made of parts; it holds if all of them hold, does not hold if one of them does not, and is not decided
otherwise. A part that compares accuracies is decided where the 95 % interval of the difference (over images and seeds,
paired) lies on one side, and by two seeds at least: one says nothing about how much seeds differ. The paper's own
numbers come without intervals and are taken as they are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moatlab.evaluation.intervals import paired_difference
from moatlab.methods.language import parse_method
from moatlab.reproduce.paper import COLUMNS, STAGE_ONE, Experiment, collapsed_in_paper

Verdict = Literal["holds", "does not hold", "not decided"]
STRONG = ("pgd50", "aa")  # what "robust accuracy" is judged by
SAME_COST = 0.05  # of the other's cost
COMPARABLE_COST = 0.10
SIMILAR = 0.02  # of accuracy
SHORT = {method: label for label, method in STAGE_ONE.items() if label != "mixup"}  # of long names


@dataclass(frozen=True)
class Runs:
    """The runs of one row, by seed: `cost` in passes, `time` in seconds (of the paper both in minutes), and
    `standing[column][seed][image]`, which the paper does not tell."""

    accuracy: dict[str, dict[int, float]]
    cost: dict[int, float]
    time: dict[int, float]
    collapsed: dict[int, bool]
    standing: dict[str, dict[int, list[bool]]] = field(default_factory=dict)
    slowly: dict[int, bool] = field(default_factory=dict)  # collapsed, and FGSM accuracy fell as PGD-7 accuracy did


@dataclass(frozen=True)
class Part:
    verdict: Verdict
    numbers: str


@dataclass(frozen=True)
class Claim:
    name: str
    sentence: str
    verdict: Verdict
    numbers: str


Rows = dict[str, Runs]
Check = Callable[[Rows], list[Part]]


def check_claims(experiment: Experiment, rows: Rows) -> list[Claim]:
    """Every claim that the table or figure is there for. `rows` by the label or the method of a row."""
    claims = []
    for name, sentence, needed, check in CLAIMS[experiment.kind](experiment):
        missing = [label for label in needed if label not in rows]
        if missing:
            claims.append(Claim(name, sentence, "not decided", f"not measured: {', '.join(missing)}"))
            continue
        parts = check(rows)
        verdicts = {part.verdict for part in parts}
        verdict: Verdict = "holds" if verdicts == {"holds"} else "not decided"
        if "does not hold" in verdicts:
            verdict = "does not hold"
        claims.append(Claim(name, sentence, verdict, "; ".join(part.numbers for part in parts)))
    return claims


# --- parts


def collapses(label: str) -> Check:
    """In every seed: one that does not is enough to fail."""

    def check(rows: Rows) -> list[Part]:
        fates = list(rows[label].collapsed.values())
        told = f"{label}: {sum(fates)} of {_seeds(len(fates))} collapsed{_slowly(rows[label])}"
        return [Part("holds" if all(fates) else "does not hold", told)]

    return check


def never_collapses(labels: Sequence[str]) -> Check:
    """One collapse is enough to fail, though others are not measured."""

    def check(rows: Rows) -> list[Part]:
        fates = {label: list(rows[label].collapsed.values()) for label in labels if label in rows}
        fallen = [
            f"{label} ({sum(fate)} of {len(fate)}{_slowly(rows[label])})" for label, fate in fates.items() if any(fate)
        ]
        if fallen:
            return [Part("does not hold", f"collapsed: {', '.join(fallen)}")]
        missing = [label for label in labels if label not in rows]
        parts = [Part("not decided", f"not measured: {', '.join(missing)}")] if missing else []
        if fates:
            count = sum(map(len, fates.values()))
            what = f"none of {count} runs of {', '.join(fates)} collapsed"
            parts.append(Part("holds", what))
        return parts

    return check


def at_least(ours: str, theirs: str, columns: Sequence[str] = STRONG, *, short_of: float = 0.0) -> Check:
    """Our accuracy is not below theirs, or short of it by so much at most."""
    least = -short_of - 1e-12  # 0.4368 - 0.4168 is a little less than 0.02
    return lambda rows: [_compare(rows, ours, theirs, column, lambda gap: gap >= least) for column in columns]


def more_than(ours: str, theirs: str, columns: Sequence[str] = STRONG) -> Check:
    return lambda rows: [_compare(rows, ours, theirs, column, lambda gap: gap > 1e-12) for column in columns]


def cheaper(ours: str, theirs: str, share: float, *, in_time: bool = False) -> Check:
    """Our cost is below such a share of theirs, in every seed."""
    return _ratio(ours, theirs, lambda ratio: ratio < share, in_time=in_time)


def as_cheap(ours: str, theirs: str, tolerance: float) -> Check:
    return _ratio(ours, theirs, lambda ratio: abs(ratio - 1) <= tolerance, in_time=False)


def _all(*checks: Check) -> Check:
    return lambda rows: [part for check in checks for part in check(rows)]


def _compare(rows: Rows, ours_: str, theirs_: str, column: str, fits: Callable[[float], bool]) -> Part:
    ours, theirs = rows[ours_], rows[theirs_]
    seeds = sorted(ours.accuracy[column].keys() & theirs.accuracy[column].keys())
    if not seeds:
        return Part("not decided", f"{column}: no seed in common")
    if column in ours.standing and column in theirs.standing:
        difference, half = paired_difference(
            [ours.standing[column][seed] for seed in seeds], [theirs.standing[column][seed] for seed in seeds]
        )
        spread = f" ± {100 * half:.1f} ({_seeds(len(seeds))})"
        if len(seeds) == 1:
            half = math.inf
    else:
        difference = statistics.fmean(ours.accuracy[column][seed] - theirs.accuracy[column][seed] for seed in seeds)
        half, spread = 0.0, ""
    verdict: Verdict = "not decided"
    if fits(difference - half):
        verdict = "holds"
    elif not fits(difference + half):
        verdict = "does not hold"
    names = " - ".join(SHORT.get(label, label) for label in (ours_, theirs_))
    return Part(verdict, f"{column}: {names} = {100 * difference:+.1f}{spread} points")


def _ratio(ours: str, theirs: str, fits: Callable[[float], bool], *, in_time: bool) -> Check:
    def check(rows: Rows) -> list[Part]:
        a, b = (rows[label].time if in_time else rows[label].cost for label in (ours, theirs))
        ratios = [a[seed] / b[seed] for seed in sorted(a.keys() & b.keys()) if b[seed]]
        verdict: Verdict = "not decided"
        if ratios and len({fits(ratio) for ratio in ratios}) == 1:
            verdict = "holds" if fits(ratios[0]) else "does not hold"
        shown = ", ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in ratios))
        return [Part(verdict, f"{'time' if in_time else 'cost'} of {ours} / {theirs} = {shown or 'unknown'}")]

    return check


def _slowly(runs: Runs) -> str:
    count = sum(runs.slowly.values())
    return f", {count} of them slowly: fgsm fell with pgd7" if count else ""


def _seeds(count: int) -> str:
    return f"{count} seed" + ("s" if count != 1 else "")


# --- the claims

Entry = tuple[str, str, tuple[str, ...], Check]  # name, sentence, the rows it needs, check


def _of_tables(experiment: Experiment) -> list[Entry]:
    fallen = collapsed_in_paper(experiment.name)
    multi = [row.label for row in experiment.rows if parse_method(row.method).stages[-1].name == "pgd"]
    entries: list[Entry] = [
        (f"{label}-collapses", f"{label} overfits catastrophically", (label,), collapses(label))
        for label in ("fgsm", "fast", "kim")
        if label in fallen
    ]
    if "kim" not in fallen:
        entries.append(("kim-holds", "kim does not collapse here", ("kim",), never_collapses(["kim"])))
    return [
        *entries,
        (
            "multi-step-never-collapses", "no pgd:K, moat or imoat run collapses", (),
            never_collapses(multi),
        ),
        (
            "moat-2-costs-what-fgsm-costs", "moat:2 costs what fgsm costs", ("moat:2", "fgsm"),
            as_cheap("moat:2", "fgsm", SAME_COST),
        ),
        (
            "moat-2-like-gradalign", "moat:2 is at least as robust as gradalign at under half its time",
            ("moat:2", "gradalign"),
            _all(at_least("moat:2", "gradalign"), cheaper("moat:2", "gradalign", 0.5, in_time=True)),
        ),
        (
            "imoat-1-2-3-improves-moat-2", "imoat:1,2,3 is at least as robust as moat:2 at the same cost",
            ("imoat:1,2,3", "moat:2"),
            _all(at_least("imoat:1,2,3", "moat:2"), as_cheap("imoat:1,2,3", "moat:2", SAME_COST)),
        ),
        (
            "moat-5-beats-pgd-2", "moat:5 has higher clean and robust accuracy than pgd:2 at comparable cost",
            ("moat:5", "pgd:2"),
            _all(more_than("moat:5", "pgd:2", ("clean", *STRONG)), as_cheap("moat:5", "pgd:2", COMPARABLE_COST)),
        ),
        (
            "imoat-2-5-8-near-pgd-7", "imoat:2,5,8 is within two points of pgd:7 at under half its cost",
            ("imoat:2,5,8", "pgd:7"),
            _all(at_least("imoat:2,5,8", "pgd:7", short_of=SIMILAR), cheaper("imoat:2,5,8", "pgd:7", 0.5)),
        ),
    ]  # fmt: skip


def _of_curves(experiment: Experiment) -> list[Entry]:
    multi = [row.label for row in experiment.rows if row.label.startswith("pgd")]
    return [
        ("fgsm-collapses", "fgsm overfits catastrophically", ("fgsm",), collapses("fgsm")),
        ("multi-step-never-collapses", "no pgd:K run collapses, pgd:2 included", tuple(multi), never_collapses(multi)),
    ]


def _of_stage_one(_: Experiment) -> list[Entry]:
    original = STAGE_ONE["original"]
    return [
        (
            f"{label}-beats-original", f"{label} at stage I gives more robustness than original images",
            (STAGE_ONE[label], original), more_than(STAGE_ONE[label], original, COLUMNS[1:]),
        )
        for label in ("cutmix", "mixup")
    ]  # fmt: skip


def _of_steps(experiment: Experiment) -> list[Entry]:
    few, many = experiment.rows[0].label, experiment.rows[-1].label
    return [
        (
            "robustness-grows-with-k", "robustness grows with K", (few, many),
            more_than(many, few),
        ),
        (
            "clean-falls-with-k", "clean accuracy falls with K", (few, many),
            more_than(few, many, ("clean",)),
        ),
        (
            "imoat-2-5-8-beats-moat-8", "imoat:2,5,8 is more robust than moat:8 at lower cost",
            ("imoat:2,5,8", "moat:8"),
            _all(more_than("imoat:2,5,8", "moat:8"), cheaper("imoat:2,5,8", "moat:8", 1.0)),
        ),
    ]  # fmt: skip


CLAIMS: dict[str, Callable[[Experiment], list[Entry]]] = {
    "table": _of_tables, "curves": _of_curves, "bars": _of_stage_one, "steps": _of_steps,
}  # fmt: skip


def paper_rows(experiment: Experiment) -> Rows:
    """The paper's own numbers, one seed of each, its minutes as cost and time; none where it is a figure."""
    fallen = collapsed_in_paper(experiment.name) if experiment.paper else set()
    return {
        label: Runs(
            accuracy={column: {0: values[column]} for column in COLUMNS},
            cost={0: values["minutes"]},
            time={0: values["minutes"]},
            collapsed={0: label in fallen},
        )
        for label, values in experiment.paper.items()
    }
