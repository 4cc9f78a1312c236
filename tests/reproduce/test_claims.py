"""The paper's claims: on its own tables, and on made-up numbers where the answer is known."""

import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_results import page_of

from moatlab.reproduce.claims import Run, check_claims, paper_rows
from moatlab.reproduce.outcomes import Evaluated, Outcome, as_runs, read_outcomes, unpack
from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, experiment
from moatlab.runtime.errors import UserError
from moatlab.runtime.intervals import interval, over_seeds, paired_difference, wilson
from moatlab.training.collapse import collapsed_at

KEPT = Path(__file__).parents[2] / "docs" / "results"
TABLES = ["table1a", "table1b", "table2a", "table2b"]
TABLE = ("fgsm", "fast", "gradalign", "kim", "pgd:2", "pgd:7", "moat:2", "imoat:1,2,3", "moat:5", "imoat:2,5,8")


def verdicts(name, rows=None):
    one = experiment(name)
    return {claim.name: claim.verdict for claim in check_claims(one, paper_rows(one) if rows is None else rows)}


def numbers(name, claim):
    one = experiment(name)
    return next(found.numbers for found in check_claims(one, paper_rows(one)) if found.name == claim)


def test_the_paper_s_own_tables_fail_just_the_claims_that_a_reader_finds_wrong_there():
    failed = {
        (name, claim) for name in TABLES for claim, verdict in verdicts(name).items() if verdict == "does not hold"
    }
    assert failed == {
        ("table1b", "imoat-1-2-3-improves-moat-2"),  # AA 14.06 < 14.44
        ("table2a", "moat-2-like-gradalign"),  # AA 41.36 < 42.25
        ("table2a", "moat-5-beats-pgd-2"),  # clean 86.23 < 87.72
        ("table2b", "moat-2-like-gradalign"),  # AA 20.34 < 20.74
    }
    assert "aa: imoat:1,2,3 - moat:2 = -0.4 points" in numbers("table1b", "imoat-1-2-3-improves-moat-2")
    assert "aa: moat:2 - gradalign = -0.9 points" in numbers("table2a", "moat-2-like-gradalign")


@pytest.mark.parametrize("name", TABLES)
def test_no_claim_is_left_undecided_on_a_table_of_the_paper(name):
    assert "not decided" not in verdicts(name).values()


def test_kim_collapses_in_the_one_table_where_the_paper_says_so():
    assert [name for name in TABLES if "kim-collapses" in verdicts(name)] == ["table2b"]
    assert [name for name in TABLES if "kim-holds" in verdicts(name)] == ["table1a", "table1b", "table2a"]


def test_the_figures_of_the_paper_come_without_numbers_so_nothing_is_decided_there():
    for name in EXPERIMENTS.keys() - set(TABLES):
        assert set(verdicts(name).values()) == {"not decided"}


def made_up(accuracy, *, seeds=3, images=400, passes=42.0, seconds=100.0, collapsed=False, draw=0):
    """Runs whose images are robust at random with a given chance, the same images for every method."""
    difficulty = np.random.default_rng(0).random(images)
    shifts = np.random.default_rng(draw).normal(0, 0.01, seeds)
    runs = {}
    for seed in range(seeds):
        robust = (difficulty < accuracy + shifts[seed]).tolist()
        columns = dict.fromkeys(COLUMNS, statistics.fmean(robust))
        runs[seed] = Run(columns, passes, seconds, collapsed, dict.fromkeys(COLUMNS, robust))
    return runs


def test_a_difference_beyond_its_interval_decides_and_one_within_does_not():
    gradalign = made_up(0.40, seconds=300.0)
    assert verdicts("table2a", {"moat:2": made_up(0.50), "gradalign": gradalign})["moat-2-like-gradalign"] == "holds"
    close = {"moat:2": made_up(0.398, draw=1), "gradalign": gradalign}
    assert verdicts("table2a", close)["moat-2-like-gradalign"] == "not decided"
    worse = {"moat:2": made_up(0.30), "gradalign": gradalign}
    assert verdicts("table2a", worse)["moat-2-like-gradalign"] == "does not hold"


def test_robustness_alone_is_not_enough_where_the_claim_is_about_time_too():
    slow = {"moat:2": made_up(0.5, seconds=200.0), "gradalign": made_up(0.4, seconds=300.0)}
    assert verdicts("table2a", slow)["moat-2-like-gradalign"] == "does not hold"


def test_one_seed_that_does_not_collapse_is_enough_to_fail_and_so_is_one_multi_step_collapse():
    fgsm = made_up(0.1)
    some = {seed: replace(run, collapsed=seed != 1) for seed, run in fgsm.items()}
    assert verdicts("table2a", {"fgsm": some})["fgsm-collapses"] == "does not hold"
    assert verdicts("table2a", {"fgsm": fgsm})["fgsm-collapses"] == "does not hold"
    assert verdicts("table2a", {"fgsm": made_up(0.0, collapsed=True)})["fgsm-collapses"] == "holds"
    assert verdicts("table2a", {"pgd:2": some, "moat:2": fgsm})["multi-step-never-collapses"] == "does not hold"
    assert verdicts("table2a", {"fgsm": some})["multi-step-never-collapses"] == "not decided"


def test_a_collapse_without_a_gap_between_fgsm_and_pgd7_is_reported_as_slow():
    def outcome(seed, collapsed_at, fgsm):
        checks = [(1, 0.5, 0.3, True), (2, 0.9, 0.0, False), (3, fgsm, 0.02, True)]
        names = ("epoch", "fgsm", "pgd7", "comparable")
        last = Evaluated(epoch=3, images={"aa": 0}, accuracy={"aa": 0.0}, standing={"aa": "1"}, flags=[])
        history = [dict(zip(names, check, strict=True)) for check in checks]
        facts = {"seed": seed, "collapsed_at": collapsed_at, "history": history, "last": last}
        return Outcome.model_construct(passes=1.0, steady_seconds=1.0, **facts)

    runs = as_runs([outcome(0, 3, 0.4), outcome(1, 3, 0.1), outcome(2, None, 0.1)])
    assert {seed: run.slowly for seed, run in runs.items()} == {0: False, 1: True, 2: False}
    rows = {"fast": runs, "moat:2": runs}
    found = {claim.name: claim.numbers for claim in check_claims(experiment("table2a"), rows)}
    assert found["fast-collapses"] == "fast: 2 of 3 seeds collapsed, 1 of them slowly: fgsm fell with pgd7"
    assert found["multi-step-never-collapses"] == "collapsed: moat:2 (2 of 3, 1 of them slowly: fgsm fell with pgd7)"


def test_one_seed_decides_nothing_about_accuracy_and_says_that_it_is_one():
    rows = {"moat:8": made_up(0.5, seeds=1), "moat:2": made_up(0.2, seeds=1)}
    claim = check_claims(experiment("figure3a"), rows)[0]
    assert claim.verdict == "not decided"
    assert "+" in claim.numbers
    assert "(1 seed)" in claim.numbers


def test_models_that_no_image_tells_apart_do_not_beat_each_other():
    nothing = {f"moat:{k}": made_up(-1.0) for k in (2, 8)} | {"imoat:2,5,8": made_up(-1.0, passes=30.0)}
    assert set(verdicts("figure3a", nothing).values()) == {"not decided"}


def test_no_collapse_so_far_decides_nothing_while_rows_are_missing():
    rows = {"pgd:2": made_up(0.3)}
    assert verdicts("table2a", rows)["multi-step-never-collapses"] == "not decided"
    every = {method: made_up(0.3) for method in TABLE}
    assert verdicts("table2a", every)["multi-step-never-collapses"] == "holds"


def test_rows_that_were_not_measured_are_named():
    claims = check_claims(experiment("figure3a"), {"moat:8": made_up(0.35), "moat:2": made_up(0.2)})
    found = {claim.name: claim for claim in claims}
    assert found["robustness-grows-with-k"].verdict == "holds"
    assert found["imoat-2-5-8-beats-moat-8"].numbers == "not measured: imoat:2,5,8"


def test_every_table_has_the_ten_rows_of_the_paper_and_one_of_ours():
    for name in TABLES:
        one = experiment(name)
        assert tuple(row.label for row in one.rows if row.in_paper) == TABLE
        assert set(one.paper) == set(TABLE)
        assert [row.label for row in one.rows if not row.in_paper] == ["nfgsm"]
        assert all(0 <= one.paper[row][column] <= 1 for row in TABLE for column in COLUMNS)


def test_an_unknown_table_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"no 'tabel2a'.*did you mean table2a\?"):
        experiment("tabel2a")


# --- intervals


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(2, 2000))
def test_an_interval_holds_its_mean_and_stays_within_0_and_1(accuracies, images):
    low, high = interval(accuracies, images)
    assert 0 <= low <= statistics.fmean(accuracies) + 1e-12
    assert statistics.fmean(accuracies) - 1e-12 <= high <= 1


def test_one_seed_has_wilson_s_interval_and_seeds_that_differ_widen_it():
    assert interval([0.3], 200) == pytest.approx(wilson(60, 200))
    same, apart = interval([0.3, 0.3, 0.3], 200), interval([0.25, 0.3, 0.35], 200)
    assert same == pytest.approx(wilson(60, 200))
    assert apart[1] - apart[0] > same[1] - same[0]


def test_student_s_interval_of_three_seeds_is_the_textbook_s():
    assert over_seeds([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert over_seeds([5.0]) == 0.0


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_paired_difference_is_that_of_the_means_and_turns_its_sign_with_the_sides(seed, seeds):
    draws = np.random.default_rng(seed)
    ours, theirs = ((draws.random((seeds, 30)) < share).tolist() for share in draws.random(2))
    difference, half = paired_difference(ours, theirs)
    assert difference == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert paired_difference(theirs, ours) == pytest.approx((-difference, half))


def test_the_interval_of_a_difference_covers_the_truth_in_about_95_of_100_draws():
    draws = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        difficulty = draws.random(300)
        ours, theirs = [(difficulty < 0.4).tolist()], [(difficulty + 0.2 * draws.random(300) < 0.4).tolist()]
        difference, half = paired_difference(ours, theirs)
        covered += abs(difference - 0.1) <= half
    assert 0.92 <= covered / 400 <= 0.98


@pytest.mark.parametrize("path", sorted(KEPT.glob("*a-mini*.json")), ids=lambda path: path.stem)
def test_a_kept_result_is_as_it_was_written_and_follows_from_its_own_verdicts(path):
    for run in read_outcomes(path):
        checks = [(line["epoch"], line["pgd7"]) for line in run.history if line["comparable"]]
        assert run.collapsed_at == collapsed_at(checks)
        for part in filter(None, (run.last, run.best)):
            for name, accuracy in part.accuracy.items():
                robust = unpack(part.standing[name])
                assert len(robust) == part.images[name]
                assert sum(robust) / len(robust) == accuracy
    assert path.with_suffix(".md").read_text() == page_of(path)  # scripts/render_results.py writes it
    assert f"({path.stem}.png)" in page_of(path)
