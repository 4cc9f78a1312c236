"""The outcome of a run, and the online alarm: one rule for monitor, tables, pages and claims.

Both look at comparable checks only: every epoch of a one-stage method, the ends of cycles otherwise. Within a cycle
pgd7 drops at stages of benign examples and recovers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

Check = Mapping[str, Any]  # a line of metrics.jsonl; alignment and zero_gradients may be missing

LOW = 0.05  # pgd7 accuracy that counts as none
GAP = 0.05  # fgsm minus pgd7 accuracy
ALIGNED = 0.4  # on mini, robust runs stay above 0.8 after their first epoch, and collapsed ones below 0.3
LARGE_FALL = 0.75  # of the best pgd7 accuracy
MANY, MOST = 0.05, 0.5  # shares of images whose gradient is zero


@dataclass(frozen=True)
class Verdict:
    """`outcome`: robust, collapsed, overfitted, untrained or undecided (for a `reason`). `since`: the epoch from which
    robustness is lost. `recovered`: first and last epoch of each collapse that ended."""

    outcome: str
    since: int | None = None
    recovered: list[list[int]] = field(default_factory=list)
    reason: str = ""

    @property
    def collapsed_at(self) -> int | None:
        return self.since if self.outcome == "collapsed" else None


def is_bent(check: Check) -> bool:
    """Whether the loss is far from linear inside the ball, so that a single step fails: fgsm accuracy is more than 5
    points above pgd7 and more than twice as high, or gradients at x and at a random start are poorly aligned."""
    return _has_gap(check) or _misaligned(check)


def _has_gap(check: Check) -> bool:
    return bool(check["fgsm"] - check["pgd7"] > GAP and check["pgd7"] < check["fgsm"] / 2)


def _misaligned(check: Check) -> bool:
    alignment = check.get("alignment")
    return alignment is not None and alignment < ALIGNED


def is_trained(clean: float, classes: int) -> bool:
    """Whether clean accuracy is above chance + 0.1 (1 - chance)."""
    return clean > 1 / classes + 0.1 * (1 - 1 / classes)


def outcome_of(history: Sequence[Check], classes: int) -> Verdict:
    """The outcome of a whole run.

    untrained    clean accuracy never passed chance + 0.1 (1 - chance), or pgd7 never reached 5 % and no loss was bent;
                 also if the run ends at chance without having collapsed
    collapsed    pgd7 is below max(5 %, a third of its best) from some epoch to the end, and the loss bent since then
    overfitted   pgd7 is as low, and the loss was never bent: robust overfitting (Rice et al., 2020)
    robust       otherwise

    Catastrophic overfitting is `collapsed` and nothing else. `undecided`: the last epoch is not comparable, or over 5 %
    of the images have no gradient there, so that no gradient attack can measure their robustness.
    """
    checks = [line for line in history if line["comparable"]]
    if not history or not history[-1]["comparable"]:
        return Verdict("undecided", reason="the last epoch is not the end of a cycle")
    last, best = checks[-1], max(check["pgd7"] for check in checks)
    floor = max(LOW, best / 3)
    spells = [[*found] for low, found in groupby(checks, lambda check: check["pgd7"] < floor) if low]
    ended = spells[:-1] if last["pgd7"] < floor else spells
    later = [spell for spell in ended if spell[-1] is not checks[0]]  # a first check alone is of a model just begun
    recovered = [[spell[0]["epoch"], spell[-1]["epoch"]] for spell in later if any(map(is_bent, spell))]
    if (last.get("zero_gradients") or 0) > MANY:
        share = f"{100 * last['zero_gradients']:.0f} % of the images have no gradient"
        return Verdict("undecided", recovered=recovered, reason=f"{share}; evaluate the run with Square")
    if not any(is_trained(check["clean"], classes) for check in checks):
        return Verdict("untrained")
    if best < LOW and not any(map(is_bent, checks)):
        return Verdict("untrained")
    if last["pgd7"] < floor:
        name = "collapsed" if any(map(is_bent, spells[-1])) else "overfitted"
        return Verdict(name, spells[-1][0]["epoch"], recovered)
    if not is_trained(last["clean"], classes):
        return Verdict("untrained", recovered=recovered)
    return Verdict("robust", recovered=recovered)


def judge(checks: Sequence[Check], classes: int, *, alarmed: bool = False) -> Literal["good", "low", "collapsed"]:
    """The state at the last of the comparable checks so far; the end of the run is unknown.

    Collapsed: the loss is bent, and pgd7 is below 5 % or half of its best so far, or below three quarters of it with
    both signs of a bent loss; or most gradients are zero. The first check alone is never an alarm. Good: none of that,
    at least half of the best pgd7 and 5 %, clean accuracy above chance; after an alarm, also a loss that is not bent.
    """
    now, best = checks[-1], max(check["pgd7"] for check in checks)
    low = now["pgd7"] < max(LOW, best / 2)
    both = _has_gap(now) and (_misaligned(now) or now.get("alignment") is None)
    fell = low or (now["pgd7"] < LARGE_FALL * best and both)
    vanished = now.get("zero_gradients") or 0
    if vanished > MOST or (len(checks) > 1 and fell and is_bent(now)):
        return "collapsed"
    unsure = alarmed and is_bent(now)
    return "low" if low or unsure or vanished > MANY or not is_trained(now["clean"], classes) else "good"
