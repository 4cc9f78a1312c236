"""The outcome of a run and the online alarm, on constructed histories, recorded ones, and a naive re-statement."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moatlab.methods.language import parse_method
from moatlab.training.outcome import is_bent, judge, outcome_of

KEPT = Path(__file__).parents[2] / "docs" / "results"
ONE_STAGE, CYCLE = parse_method("fgsm"), parse_method("moat:2")


def history(*rows, method=ONE_STAGE):
    """Rows of clean, fgsm, pgd7 and alignment in percent and hundredths; the alignment may be missing."""
    lines = []
    for epoch, (clean, fgsm, pgd7, *alignment) in enumerate(rows):
        line = {"epoch": epoch + 1, "clean": clean / 100, "fgsm": fgsm / 100, "pgd7": pgd7 / 100}
        line |= {"alignment": alignment[0] / 100} if alignment else {}
        lines.append(line | {"comparable": method.ends_cycle(epoch)})
    return lines


GOOD, LOST, SLOW = (40, 22, 20, 90), (45, 60, 1, 5), (45, 5, 3, 90)


def outcome(*rows, method=ONE_STAGE, classes=10):
    found = outcome_of(history(*rows, method=method), classes)
    return found.outcome, found.since


def test_a_fall_to_nothing_with_a_bent_loss_is_a_collapse_at_the_first_low_epoch():
    assert outcome(GOOD, GOOD, LOST, LOST) == ("collapsed", 3)
    assert outcome(GOOD, SLOW, SLOW, LOST) == ("collapsed", 2)  # bent at some check of the fall


def test_the_same_fall_without_a_bent_loss_is_overfitting_and_never_a_collapse():
    assert outcome(GOOD, GOOD, SLOW, SLOW) == ("overfitted", 3)
    assert outcome(GOOD, GOOD, SLOW[:3], SLOW[:3]) == ("overfitted", 3)  # no alignment was kept


def test_a_run_that_lost_its_robustness_before_the_first_check_has_collapsed():
    assert outcome(LOST, LOST, LOST) == ("collapsed", 1)


def test_a_run_that_never_learned_is_untrained():
    assert outcome((12, 12, 11, 90), (18, 14, 13, 90)) == ("untrained", None)  # 19 % is chance + a tenth of the rest
    assert outcome((12, 12, 11, 90), (20, 14, 13, 90)) == ("robust", None)
    assert outcome((8, 7, 6, 90), (10, 7, 6, 90), classes=100) == ("untrained", None)
    assert outcome((12, 12, 11, 90), (12, 9, 1, 10)) == ("untrained", None)


def test_a_run_that_was_never_robust_and_never_bent_is_untrained():
    assert outcome(*[(30, 2, 1, 90)] * 5) == ("untrained", None)  # was: collapsed at epoch 2


def test_a_run_that_ends_at_chance_is_not_robust():
    assert outcome(GOOD, GOOD, (10, 10, 10, 90)) == ("untrained", None)


def test_a_gap_alone_is_no_sign():
    """The paper's healthy moat:2 of table 1a: FGSM 50.25 %, PGD-50 34.35 %."""
    assert not is_bent(history((87.61, 50.25, 34.35))[0])
    assert is_bent(history((87, 50, 24))[0])
    assert not is_bent(history((40, 8, 3.5))[0])  # less than half, but within five points
    assert is_bent(history((40, 22, 20, 39))[0])


def test_a_third_of_the_best_is_the_floor_and_five_percent_its_minimum():
    assert outcome(GOOD, (45, 60, 7, 5)) == ("robust", None)
    assert outcome((60, 48, 45, 90), (60, 60, 14, 5), (60, 60, 10, 5)) == ("collapsed", 2)
    assert outcome((30, 10, 9, 90), (45, 60, 4.9, 5)) == ("collapsed", 2)


def test_spells_that_ended_are_listed_and_a_first_check_is_none():
    assert outcome_of(history(GOOD, LOST, LOST, GOOD, GOOD), 10).recovered == [[2, 3]]
    assert outcome_of(history(GOOD, LOST, GOOD, LOST), 10).recovered == [[2, 2]]
    assert outcome_of(history(LOST, GOOD, GOOD), 10).recovered == []
    assert outcome_of(history(GOOD, SLOW, GOOD), 10).recovered == []


def test_dips_within_a_cycle_are_not_looked_at():
    assert outcome(LOST, LOST, GOOD, LOST, LOST, GOOD, method=CYCLE) == ("robust", None)
    assert outcome(LOST, LOST, GOOD, GOOD, GOOD, LOST, method=CYCLE) == ("collapsed", 6)


def test_a_run_that_ends_within_a_cycle_is_undecided():
    found = outcome_of(history(LOST, LOST, GOOD, LOST, method=CYCLE), 10)
    assert found.outcome == "undecided"
    assert "not the end of a cycle" in found.reason


def test_without_gradients_nothing_is_decided():
    lines = history(GOOD, GOOD)
    lines[-1]["zero_gradients"] = 0.06
    found = outcome_of(lines, 10)
    assert found.outcome == "undecided"
    assert "6 % of the images have no gradient" in found.reason
    lines[-1]["zero_gradients"] = 0.05
    assert outcome_of(lines, 10).outcome == "robust"


percents = st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(-100, 100))


@given(st.lists(percents, min_size=1, max_size=9), st.sampled_from([10, 100]))
def test_the_outcome_is_what_its_definition_says(rows, classes):
    """Written out from the definition, with loops over epochs instead of spells."""
    clean, fgsm, pgd7, aligned = ([row[k] / 100 for row in rows] for k in range(4))
    bent = [(f - p > 0.05 and p < f / 2) or a < 0.4 for f, p, a in zip(fgsm, pgd7, aligned, strict=True)]
    floor, chance = max(0.05, max(pgd7) / 3), 1 / classes
    since = next((e for e in range(len(rows)) if all(p < floor for p in pgd7[e:])), None)
    if max(clean) <= chance + 0.1 * (1 - chance) or (max(pgd7) < 0.05 and not any(bent)):
        expected = "untrained"
    elif since is not None:
        expected = "collapsed" if any(bent[since:]) else "overfitted"
    else:
        expected = "robust" if clean[-1] > chance + 0.1 * (1 - chance) else "untrained"
    found = outcome_of(history(*rows), classes)
    assert found.outcome == expected
    assert found.since == (since + 1 if expected in ("collapsed", "overfitted") else None)


# --- the alarm


def verdict(*rows, alarmed=False):
    return judge(history(*rows), 10, alarmed=alarmed)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ((40, 24, 18, 70), "good"),
        ((40, 15, 11, 70), "good"),  # above half of the best: a bad epoch
        ((40, 13, 7, 70), "low"),  # fallen, but neither a gap nor a bent loss
        ((40, 40, 7, 70), "collapsed"),  # the gap alone
        ((40, 12, 7, 20), "collapsed"),  # the alignment alone: fast collapses so
        ((40, 45, 0, 5), "collapsed"),
    ],
)
def test_an_alarm_needs_a_fall_and_a_loss_that_is_bent(last, expected):
    assert verdict(GOOD, GOOD, last) == expected


def test_robustness_that_is_lost_before_it_was_reached_raises_an_alarm_at_the_second_check():
    never = (45, 60, 2, 10)
    assert verdict(never) == "low"  # and its weights are not taken for good ones
    assert verdict(never, never) == "collapsed"


def test_a_large_fall_that_stays_above_half_raises_an_alarm_if_both_signs_agree():
    before = (60, 45, 40, 90)
    assert verdict(before, (60, 95, 21, 10)) == "collapsed"
    assert verdict(before, (60, 45, 21, 90)) == "good"  # a bad epoch: the gap alone
    assert verdict(before, (60, 35, 31, 10)) == "good"


def test_gradients_that_are_all_zero_raise_an_alarm():
    lines = history(GOOD, (40, 40, 40, 0))
    lines[-1]["zero_gradients"] = 1.0
    assert judge(lines, 10) == "collapsed"
    lines[-1] |= {"zero_gradients": 0.1, "alignment": 0.9}
    assert judge(lines, 10) == "low"  # not an epoch to go back to


def test_robustness_is_not_back_while_the_model_guesses_or_its_loss_is_bent():
    """nfgsm on CIFAR-10 at 16/255 was reported as recovered at pgd7 7.3 %, clean accuracy 7.9 % and alignment 0.28."""
    before, lost = (25, 14, 10, 60), (30, 50, 0.1, 20)
    assert verdict(before, lost, (7.9, 8, 7.3, 28), alarmed=True) == "low"
    assert verdict(before, lost, (7.9, 8, 7.3, 80), alarmed=True) == "low"
    assert verdict(before, lost, (40, 20, 12, 28), alarmed=True) == "low"
    assert verdict(before, lost, (40, 20, 12, 80), alarmed=True) == "good"


def test_one_late_epoch_that_recovers_and_falls_again_is_two_alarms_and_one_recovered_spell():
    rows = [GOOD, GOOD, LOST, LOST, LOST, GOOD, LOST]
    assert alarms_in(history(*rows)) == [3, 7]
    assert outcome_of(history(*rows), 10).recovered == [[3, 5]]
    assert outcome_of(history(*rows[:-1]), 10).recovered == [[3, 5]]


def test_the_first_check_is_no_alarm():
    assert verdict((40, 30, 2, 30)) == "low"
    assert verdict((40, 30, 16, 30)) == "good"


@given(st.lists(st.tuples(*[st.integers(20, 100)] * 3, st.integers(-100, 100)), min_size=1, max_size=9))
def test_a_best_check_above_chance_is_never_an_alarm(rows):
    best = max(row[2] for row in rows)
    assert verdict(*rows, (50, 100, best, -100)) == "good"


def alarmed_at_the_end(lines):
    return replay(lines)[1]


def alarms_in(lines):
    return replay(lines)[0]


def replay(lines, classes=10):
    """The monitor's alarms over the comparable checks of a run, and whether one is still on."""
    checks, alarms, alarmed = [line for line in lines if line["comparable"]], [], False
    for number, check in enumerate(checks):
        found = judge(checks[: number + 1], classes, alarmed=alarmed)
        if found == "collapsed" and not alarmed:
            alarms.append(check["epoch"])
        alarmed = found == "collapsed" or (alarmed and found == "low")
    return alarms, alarmed


def kept_histories():
    seen = {}
    for path in sorted(KEPT.glob("*.json")):
        content = json.loads(path.read_text())
        for run in [*content.get("runs", []), *content.get("kept_runs", [])]:
            if "history" in run:
                name = f"{path.stem} {run['method']} {run['seed']}"
                seen.setdefault(json.dumps(run["history"]), (name, run))
    return list(seen.values())


def test_every_kept_collapse_was_alarmed_in_time_and_no_run_whose_loss_never_bent():
    found = kept_histories()
    assert len(found) >= 60
    for name, run in found:
        lines = [{"comparable": True} | line for line in run["history"]]
        checks, alarms = [line for line in lines if line["comparable"]], alarms_in(lines)
        verdict = outcome_of(lines, 10)
        assert verdict.outcome == run["outcome"], name
        if verdict.collapsed_at:
            bent = next(c["epoch"] for c in checks if c["epoch"] >= verdict.collapsed_at and is_bent(c))
            until = [line for line in lines if line["epoch"] <= bent]
            assert alarmed_at_the_end(until), name
        if not any(map(is_bent, checks)):
            assert alarms == [], name
