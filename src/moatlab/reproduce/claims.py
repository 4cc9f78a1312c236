"""Check the paper's claims, each a sentence of a section (paper.json), on measured numbers.

A claim consists of checks, a check of parts. It holds if all parts hold, does not hold if one does not, and is not
decided otherwise. Robust accuracy means AutoAttack and PGD-50, both. Three seeds decide about accuracies, with the 95 %
interval of a paired difference over images and seeds, after Holm's correction for the number of comparisons in a table:

    higher, better             above 0
    significantly, much        above 3 % of the reference's accuracy
    slightly                   estimate above 0, interval above -2 % of the reference's
    on par, similar            above -5 % of the reference's, and only where pgd:7 > pgd:2 is shown by the same runs

A claim about catastrophic overfitting counts collapsed runs, at two seeds or more. Runs that did not train decide
nothing; neither do accuracies of overfitted ones. Costs follow from the plan and are stated beside a claim. The paper
prints no intervals: on its own rows the estimates alone agree or disagree.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, Experiment
from moatlab.runtime.intervals import LEVEL, Estimate, exact_rate, holm, paired, unpaired

STRONG = ("aa", "pgd50")
SEEDS, SEEDS_FOR_RATES = 3, 2
SHORT = {row.method: row.label for row in EXPERIMENTS["figure2a"].rows if "|" in row.method}  # for long names


@dataclass(frozen=True)
class Run:
    """What claims compare: costs, and the images that are robust in each column (the paper does not print them)."""

    accuracy: dict[str, float]
    outcome: str
    passes: float = 0.0
    flops: float | None = None
    time: float | None = None  # seconds, or the paper's minutes; None if the runs are from different machines
    images: dict[str, int] = field(default_factory=dict)
    robust: dict[str, list[bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """`holds` is decided here, or by two p values after they were corrected."""

    numbers: str
    holds: bool | None = None
    p_holds: float | None = None
    p_fails: float = 1.0
    condition: bool = False  # needed for a claim to hold, but can't refute it


@dataclass(frozen=True)
class Claim:
    name: str
    claim: str
    section: str
    quote: str  # of the paper's sentence
    verdict: str
    numbers: str
    costs: str


Runs = dict[int, Run]  # seed -> run, for one row
Rows = dict[str, Runs]  # label or method -> runs


def check_claims(experiment: Experiment, rows: Rows) -> list[Claim]:
    """On measured runs: holds, does not hold or not decided."""
    found = [[part for check in claim["checks"] for part in _parts(rows, check)] for claim in experiment.claims]
    tests = {part.numbers: part for parts in found for part in parts if part.p_holds is not None}  # each counted once
    adjusted = holm([min(part.p_holds or 0.0, part.p_fails) for part in tests.values()])
    holds = {
        numbers: (part.p_holds or 0.0) < part.p_fails if p <= LEVEL else None
        for (numbers, part), p in zip(tests.items(), adjusted, strict=True)
    }
    claims = []
    for claim, parts in zip(experiment.claims, found, strict=True):
        parts = [replace(part, holds=holds.get(part.numbers, part.holds)) for part in parts]
        held = {part.holds for part in parts if not part.condition}
        ready = all(part.holds for part in parts if part.condition)
        verdict = "does not hold" if False in held else "holds" if held == {True} and ready else "not decided"
        claims.append(_claim(claim, verdict, parts, rows))
    return claims


def check_paper(experiment: Experiment) -> list[Claim]:
    """On the paper's own rows: agrees or disagrees; nothing for a figure, which has no numbers."""
    rows = {
        label: {0: Run(values, "collapsed" if label in experiment.collapsed else "robust", time=values["minutes"])}
        for label, values in experiment.paper.items()
    }
    claims = []
    for claim in experiment.claims if rows else []:
        parts = [part for check in claim["checks"] for part in _parts(rows, check, printed=True)]
        verdict = "agrees" if all(part.holds for part in parts) else "disagrees"
        claims.append(_claim(claim, verdict, parts, rows))
    return claims


def _claim(claim: dict[str, object], verdict: str, parts: list[Part], rows: Rows) -> Claim:
    costs = [text for check in claim["checks"] if (text := _costs(rows, check))]  # type: ignore[attr-defined]
    name, text, section, quote = (str(claim[key]) for key in ("name", "claim", "section", "quote"))
    numbers = "; ".join(part.numbers for part in parts)
    return Claim(name, text, section, quote, verdict, numbers, "; ".join(dict.fromkeys(costs)))


def _parts(rows: Rows, check: Sequence[str | float], printed: bool = False) -> list[Part]:
    kind, *arguments = check
    return CHECKS[str(kind)](rows, printed, *arguments)


def _costs(rows: Rows, check: Sequence[str | float]) -> str:
    """The costs of a compared pair as ratios, the paper's in minutes."""
    ours, theirs = (rows.get(str(label)) for label in (*check[1:3], "", "")[:2])
    if not ours or not theirs or "collapse" in str(check[0]) or "with K" in str(check[0]):
        return ""
    ratios = {}
    for name in ("passes", "flops", "time"):
        means = [[getattr(run, name) for run in runs.values()] for runs in (ours, theirs)]
        if all(value for values in means for value in values):
            ratios[name] = statistics.fmean(means[0]) / statistics.fmean(means[1])
    shown = ", ".join(f"{name.replace('flops', 'FLOPs')} {ratio:.2f}" for name, ratio in ratios.items())
    return f"{_short(check[1])} / {_short(check[2])}: {shown}" if shown else ""


def _short(label: str | float) -> str:
    return SHORT.get(str(label), str(label))


def _missing(rows: Rows, labels: Iterable[str]) -> list[Part]:
    missing = ", ".join(_short(label) for label in labels if not rows.get(label))
    return [Part(f"not measured: {missing}")] if missing else []


# --- catastrophic overfitting


def collapses(rows: Rows, printed: bool, label: str) -> list[Part]:
    if missing := _missing(rows, [label]):
        return missing
    count, seeds, numbers = _rate(rows, [label])
    if printed:
        return [Part(f"{label} is {'' if count else 'not '}marked as catastrophically overfitted", count > 0)]
    enough = seeds >= SEEDS_FOR_RATES
    return [Part(numbers, True if enough and count == seeds else False if enough and count == 0 else None)]


def does_not_collapse(rows: Rows, printed: bool, *labels: str) -> list[Part]:
    """One collapse refutes it, even if other rows are not measured."""
    there = [label for label in labels if rows.get(label)]
    if not there:
        return _missing(rows, labels)
    count, seeds, numbers = _rate(rows, there)
    if printed:
        return [Part(f"{count} of {', '.join(there)} are marked as catastrophically overfitted", count == 0)]
    enough = min(_rate(rows, [label])[1] for label in there) >= SEEDS_FOR_RATES
    enough = enough or (count > 0 and seeds >= SEEDS_FOR_RATES)
    return [*_missing(rows, labels), Part(numbers, count == 0 if enough else None)]


def _rate(rows: Rows, labels: Sequence[str]) -> tuple[int, int, str]:
    """Collapsed runs, runs that decide, and a text with one-sided bounds of the rate and the other outcomes."""
    outcomes = [run.outcome for label in labels for run in rows[label].values()]
    other = {name: outcomes.count(name) for name in ("overfitted", "untrained", "undecided")}
    count, seeds = outcomes.count("collapsed"), len(outcomes) - other["untrained"] - other["undecided"]
    text = f"{', '.join(map(_short, labels))}: {count} of {seeds} collapsed"
    if seeds >= SEEDS_FOR_RATES:
        low, high = (f"{100 * bound:.0f} %" for bound in exact_rate(count, seeds))
        text += f", at most {high}" if count == 0 else f", at least {low}" if count == seeds else f", {low} to {high}"
    elif seeds == 1:
        text += " (one seed decides nothing)"
    return count, seeds, text + "".join(f", {number} {name}" for name, number in other.items() if number)


# --- accuracies


@dataclass(frozen=True)
class Rule:
    """Ours must exceed theirs by more than `share` of their accuracy; `positive`: and the estimate must exceed 0."""

    columns: tuple[str, ...] = STRONG
    share: float = 0.0
    positive: bool = False
    calibrated: bool = False  # only where pgd:7 > pgd:2 is shown

    def __call__(self, rows: Rows, printed: bool, ours: str, theirs: str) -> list[Part]:
        if missing := _missing(rows, (ours, theirs)):
            return missing
        parts = [self.part(rows, printed, column, ours, theirs) for column in self.columns]
        if self.calibrated:
            needed = _missing(rows, ("pgd:7", "pgd:2")) or HIGHER(rows, printed, "pgd:7", "pgd:2")
            parts += [replace(part, condition=True) for part in needed]
        return parts

    def part(self, rows: Rows, printed: bool, column: str, ours: str, theirs: str) -> Part:
        names = f"{column}: {_short(ours)} - {_short(theirs)}"
        found = _estimate(rows, column, [ours, theirs], [1.0, -1.0])
        if isinstance(found, str):
            return Part(f"{names}: {found}")
        reference = statistics.fmean(run.accuracy[column] for run in rows[theirs].values())
        bound = self.share * reference
        needed = f" (needs more than {100 * bound:+.1f})" if bound else ""
        needed += " and an estimate above 0" if self.positive else ""
        if printed:
            holds = found.value > bound + 1e-12 and (found.value > 0 or not self.positive)
            return Part(f"{names} = {100 * found.value:+.2f} points{needed}", holds)
        lowest = 0.0 if self.positive else bound
        return _tested(f"{names} = {_shown(found)}{needed}", found, bound, lowest, self.positive)


def trend(sign: float) -> Callable[..., list[Part]]:
    """Whether accuracy increases (1) or decreases (-1) with K: the change from the smallest to the largest K on the
    line fitted to the rows that were measured, three at least."""

    def check(rows: Rows, _printed: bool, column: str, *labels: str) -> list[Part]:
        there = [label for label in labels if rows.get(label)]
        if len(there) < 3:
            return [Part(f"not measured: {', '.join(label for label in labels if label not in there)}")]
        steps = [float(re.split(":", label)[1]) for label in there]
        centred = [step - statistics.fmean(steps) for step in steps]
        scale = (max(steps) - min(steps)) / sum(step * step for step in centred)
        found = _estimate(rows, column, there, [sign * scale * step for step in centred])
        names = f"{column}: {'increase' if sign > 0 else 'decrease'} from {there[0]} to {there[-1]} (fitted line)"
        if isinstance(found, str):
            return [Part(f"{names}: {found}")]
        return [_tested(f"{names} = {_shown(found)}", found, 0.0, 0.0)]

    return check


def _tested(numbers: str, found: Estimate, bound: float, lowest: float, positive: bool = False) -> Part:
    """Not decided below three seeds; else by the distance of the estimate from `bound`, or below `lowest`."""
    if len(found.by_seed) < SEEDS:
        return Part(numbers)
    above = found.value > bound and (found.value > 0 or not positive)
    p_fails = found.p_value(lowest) if found.value < lowest else 1.0
    return Part(numbers, p_holds=found.p_value(bound) if above else 1.0, p_fails=p_fails)


def _estimate(rows: Rows, column: str, labels: Sequence[str], weights: Sequence[float]) -> Estimate | str:
    """The weighted sum of the rows' accuracies over their common seeds, or why it decides nothing."""
    seeds = sorted(set.intersection(*({*rows[label]} for label in labels)))
    if not seeds:
        return "no seed in common"
    runs = [[rows[label][seed] for seed in seeds] for label in labels]
    for label, some in zip(labels, runs, strict=True):
        for outcome in ("untrained", "undecided", "overfitted"):
            if count := sum(run.outcome == outcome for run in some):
                return f"{_short(label)} is {outcome} at {count} of {len(some)} seeds and decides nothing"
    if all(column in run.robust for some in runs for run in some):
        return paired([[run.robust[column] for run in some] for some in runs], weights)
    accuracies = [[run.accuracy[column] for run in some] for some in runs]
    return unpaired(accuracies, runs[0][0].images.get(column, 1), weights)


def _shown(found: Estimate) -> str:
    seeds = len(found.by_seed)
    count = f"{seeds} seed{'s' if seeds != 1 else ''}" + (": too few to decide" if seeds < SEEDS else "")
    return f"{100 * found.value:+.1f} ± {100 * found.half():.1f} points ({count})"


# --- time


def time_at_most(rows: Rows, _printed: bool, ours: str, theirs: str, most: float) -> list[Part]:
    """Measured time, in every seed, on one machine."""
    if missing := _missing(rows, (ours, theirs)):
        return missing
    seeds = sorted(rows[ours].keys() & rows[theirs].keys())
    times = [(rows[ours][seed].time, rows[theirs][seed].time) for seed in seeds]
    ratios = [a / b for a, b in times if a is not None and b]
    answers = {ratio <= most for ratio in ratios}
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios) or "not comparable"
    return [Part(f"time of {ours} / {theirs} = {shown}", answers.pop() if len(answers) == 1 else None)]


HIGHER = Rule()
CHECKS: dict[str, Callable[..., list[Part]]] = {
    "collapses": collapses,
    "does not collapse": does_not_collapse,
    "higher": HIGHER,
    "higher clean": Rule(("clean",)),
    "higher under every attack": Rule(COLUMNS[1:]),
    "significantly higher": Rule(share=0.03),
    "slightly higher": Rule(share=-0.02, positive=True),
    "on par": Rule(share=-0.05, calibrated=True),
    "increases with K": trend(1.0),
    "decreases with K": trend(-1.0),
    "time at most": time_at_most,
}
