"""The paper's claims: on its own tables, and on made-up numbers where the answer is known."""

import re
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from render_results import page_of

from moatlab.data.sizes import find_sizes
from moatlab.reproduce.claims import Run, check_claims, check_paper
from moatlab.reproduce.outcomes import read_outcomes, unpack
from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, experiment
from moatlab.runtime.errors import UserError
from moatlab.runtime.intervals import (
    Estimate,
    exact_rate,
    holm,
    interval,
    over_seeds,
    paired,
    student_quantile,
    unpaired,
    wilson,
)
from moatlab.training.outcome import outcome_of
from moatlab.training.recipe import Recipe

KEPT = Path(__file__).parents[2] / "docs" / "results"
TABLES = ["table1a", "table1b", "table2a", "table2b"]
TABLE = ("fgsm", "fast", "gradalign", "kim", "pgd:2", "pgd:7", "moat:2", "imoat:1,2,3", "moat:5", "imoat:2,5,8")


def verdicts(name, rows):
    return {claim.name: claim.verdict for claim in check_claims(experiment(name), rows)}


def numbers(name, rows, claim):
    return next(found.numbers for found in check_claims(experiment(name), rows) if found.name == claim)


# --- the paper's own tables


def test_the_paper_disagrees_with_itself_on_table_1b_only():
    found = {(name, claim.name): claim for name in TABLES for claim in check_paper(experiment(name))}
    assert {claim.verdict for claim in found.values()} == {"agrees", "disagrees"}
    disagreeing = {key for key, claim in found.items() if claim.verdict == "disagrees"}
    assert disagreeing == {("table1b", "imoat-1-2-3-improves-moat-2"), ("table1b", "imoat-2-5-8-like-pgd-7")}
    assert "aa: imoat:1,2,3 - moat:2 = -0.38 points" in found["table1b", "imoat-1-2-3-improves-moat-2"].numbers
    assert (
        "aa: imoat:2,5,8 - pgd:7 = -1.32 points (needs more than -0.9)"
        in found["table1b", "imoat-2-5-8-like-pgd-7"].numbers
    )


@pytest.mark.parametrize(
    ("table", "claim", "margin"),
    [
        ("table1a", "moat-2-beats-single-step", "aa: moat:2 - gradalign = +0.94"),
        ("table1a", "gradalign-lowers-clean", "clean: kim - gradalign = +4.59"),
        ("table1a", "moat-2-in-half-the-time", "= 0.42"),
        ("table1a", "pgd-7-beats-pgd-2", "aa: pgd:7 - pgd:2 = +4.28"),
        ("table1a", "moat-5-beats-pgd-2", "clean: moat:5 - pgd:2 = +0.85"),
        ("table1a", "imoat-2-5-8-improves-moat-5", "aa: imoat:2,5,8 - moat:5 = +0.66"),
        ("table1a", "imoat-2-5-8-beats-gradalign", "aa: imoat:2,5,8 - gradalign = +4.56 points (needs more than +0.9)"),
        ("table2a", "gradalign-beats-kim", "aa: gradalign - kim = +5.30"),
        ("table2a", "imoat-1-2-3-beats-moat-2", "aa: imoat:1,2,3 - moat:2 = +1.01"),
        (
            "table2a",
            "imoat-1-2-3-like-gradalign",
            "pgd50: imoat:1,2,3 - gradalign = -0.26 points (needs more than -2.2)",
        ),
        ("table2a", "imoat-2-5-8-like-pgd-7", "aa: imoat:2,5,8 - pgd:7 = -1.20 points (needs more than -2.3)"),
        ("table2b", "imoat-2-5-8-like-pgd-7", "aa: imoat:2,5,8 - pgd:7 = -0.12 points (needs more than -1.2)"),
        ("table2b", "kim-collapses", "kim is marked"),
    ],
)
def test_the_margins_on_the_paper_s_tables_are_those_that_a_reader_computes(table, claim, margin):
    found = {one.name: one for one in check_paper(experiment(table))}[claim]
    assert margin in found.numbers
    assert found.verdict == "agrees"


def test_a_sentence_of_the_step_wise_section_is_not_applied_to_the_cyclic_tables():
    cyclic = {claim["name"] for name in ("table2a", "table2b") for claim in experiment(name).claims}
    assert not cyclic & {"moat-5-beats-pgd-2", "moat-2-beats-single-step", "imoat-1-2-3-improves-moat-2"}


def test_every_claim_names_its_section_and_quotes_its_sentence():
    for one in EXPERIMENTS.values():
        for claim in one.claims:
            assert re.match(r"(3\.1|4\.[234]), ", claim["section"])
            assert len(claim["quote"]) > 20
            assert claim["checks"]
        assert len({claim["name"] for claim in one.claims}) == len(one.claims)


def test_the_figures_of_the_paper_have_no_numbers_to_check():
    assert all(check_paper(experiment(name)) == [] for name in EXPERIMENTS.keys() - set(TABLES))


# --- made-up runs whose answer is known


def made_up(accuracy, *, seeds=3, images=2000, outcome="robust", seconds=100.0, spread=0.002, draw=0):
    """Runs whose images are robust at random with a given chance, the same images for every method."""
    difficulty = np.random.default_rng(0).random(images)
    shifts = np.random.default_rng(draw).normal(0, spread, seeds)
    runs = {}
    for seed in range(seeds):
        robust = (difficulty < accuracy + shifts[seed]).tolist()
        columns = dict.fromkeys(COLUMNS, statistics.fmean(robust))
        counts = dict.fromkeys(COLUMNS, images)
        runs[seed] = Run(columns, outcome, 42.0, 1e12, seconds, counts, dict.fromkeys(COLUMNS, robust))
    return runs


BETTER = "imoat-1-2-3-beats-moat-2"


def test_a_difference_beyond_its_interval_decides_and_one_within_does_not():
    moat = made_up(0.40)
    assert verdicts("table2a", {"imoat:1,2,3": made_up(0.50), "moat:2": moat})[BETTER] == "holds"
    assert verdicts("table2a", {"imoat:1,2,3": made_up(0.401, draw=1), "moat:2": moat})[BETTER] == "not decided"
    assert verdicts("table2a", {"imoat:1,2,3": made_up(0.30), "moat:2": moat})[BETTER] == "does not hold"


def test_two_seeds_decide_nothing_about_accuracies_however_large_the_difference():
    for seeds in (1, 2):
        rows = {"imoat:1,2,3": made_up(0.8, seeds=seeds), "moat:2": made_up(0.2, seeds=seeds)}
        assert verdicts("table2a", rows)[BETTER] == "not decided"
        assert "too few to decide" in numbers("table2a", rows, BETTER)


@pytest.mark.parametrize("outcome", ["untrained", "undecided", "overfitted"])
def test_a_row_that_did_not_train_or_overfitted_decides_nothing_about_accuracies(outcome):
    other = made_up(0.2)
    other[1] = replace(other[1], outcome=outcome)
    rows = {"imoat:1,2,3": made_up(0.5), "moat:2": other}
    assert verdicts("table2a", rows)[BETTER] == "not decided"
    assert f"moat:2 is {outcome} at 1 of 3 seeds" in numbers("table2a", rows, BETTER)


def test_significantly_means_more_than_three_percent_of_the_reference():
    def verdict(ours):
        return verdicts("table2a", {"imoat:2,5,8": made_up(ours), "pgd:2": made_up(0.40)})["imoat-2-5-8-beats-pgd-2"]

    assert verdict(0.46) == "holds"
    assert verdict(0.412) == "not decided"
    assert verdict(0.40) == "does not hold"


def test_slightly_means_an_estimate_above_zero_and_an_interval_above_minus_two_percent():
    def verdict(ours):
        rows = {"imoat:1,2,3": made_up(ours), "moat:2": made_up(0.40)}
        return verdicts("table1a", rows)["imoat-1-2-3-improves-moat-2"]

    assert verdict(0.404) == "holds"
    assert verdict(0.398) == "not decided"  # below zero, and not below it for certain
    assert verdict(0.35) == "does not hold"


def test_on_par_needs_an_interval_above_minus_five_percent_and_runs_that_can_tell_pgd_7_from_pgd_2():
    rows = {"imoat:2,5,8": made_up(0.40), "pgd:7": made_up(0.40)}
    name = "imoat-2-5-8-like-pgd-7"
    assert verdicts("table2a", rows | {"pgd:2": made_up(0.30)})[name] == "holds"
    assert verdicts("table2a", rows | {"pgd:2": made_up(0.399, draw=1)})[name] == "not decided"
    assert verdicts("table2a", rows)[name] == "not decided"
    worse = rows | {"imoat:2,5,8": made_up(0.30), "pgd:2": made_up(0.30)}
    assert verdicts("table2a", worse)[name] == "does not hold"


def test_comparisons_are_corrected_for_their_number():
    """One difference whose interval just excludes zero decides alone, and not among many that show nothing."""
    ours, theirs = made_up(0.4165, spread=0.0013, draw=3), made_up(0.40, spread=0.0013, draw=4)
    estimate = paired([[run.robust["aa"] for run in side.values()] for side in (ours, theirs)], [1.0, -1.0])
    assert 0.005 < estimate.p_value(0.0) < 0.025  # two columns, so half of 5 %
    alone = {"imoat:1,2,3": ours, "moat:2": theirs}
    assert verdicts("table2a", alone)[BETTER] == "holds"
    others = {
        name: made_up(0.4001, spread=0.004, draw=k) for k, name in enumerate(("gradalign", "kim", "pgd:2", "pgd:7"))
    }
    others["imoat:2,5,8"] = made_up(0.4, spread=0.004, draw=9)
    assert verdicts("table2a", alone | others)[BETTER] == "not decided"


def test_holm_s_correction_is_the_textbook_s():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def collapsing(*outcomes):
    runs = made_up(0.1, seeds=len(outcomes))
    return {seed: replace(run, outcome=outcome) for (seed, run), outcome in zip(runs.items(), outcomes, strict=True)}


@pytest.mark.parametrize(
    ("outcomes", "verdict", "text"),
    [
        (["collapsed"] * 3, "holds", "3 of 3 collapsed, at least 37 %"),
        (["collapsed", "robust", "robust"], "not decided", "1 of 3 collapsed, 2 % to 86 %"),
        (["robust"] * 3, "does not hold", "0 of 3 collapsed, at most 63 %"),
        (["collapsed"], "not decided", "1 of 1 collapsed (one seed decides nothing)"),
        (["collapsed", "untrained"], "not decided", "1 of 1 collapsed (one seed decides nothing), 1 untrained"),
        (["collapsed", "overfitted", "overfitted"], "not decided", "1 of 3 collapsed, 2 % to 86 %, 2 overfitted"),
        (["overfitted"] * 3, "does not hold", "0 of 3 collapsed, at most 63 %, 3 overfitted"),
    ],
)
def test_collapses_are_counted_with_exact_bounds_and_slow_overfitting_is_none(outcomes, verdict, text):
    rows = {"fast": collapsing(*outcomes)}
    assert verdicts("table2a", rows)["fast-collapses"] == verdict
    assert numbers("table2a", rows, "fast-collapses") == f"fast: {text}"


def test_no_collapse_is_a_bound_of_the_rate_and_one_collapse_refutes_it():
    name, methods = "moat-does-not-collapse", ("moat:2", "imoat:1,2,3", "moat:5", "imoat:2,5,8")
    rows = {method: collapsing("robust", "robust", "overfitted") for method in methods}
    assert verdicts("table2b", rows)[name] == "holds"
    assert "0 of 12 collapsed, at most 22 %, 4 overfitted" in numbers("table2b", rows, name)
    assert verdicts("table2b", rows | {"moat:5": collapsing("collapsed", "robust")})[name] == "does not hold"
    assert verdicts("table2b", rows | {"moat:5": collapsing("robust")})[name] == "not decided"
    del rows["moat:5"]
    assert verdicts("table2b", rows)[name] == "not decided"
    assert verdicts("table2b", {})[name] == "not decided"


def test_exact_bounds_are_clopper_and_pearson_s():
    assert exact_rate(0, 3) == pytest.approx((0.0, 1 - 0.05 ** (1 / 3)))
    assert exact_rate(3, 3) == pytest.approx((0.05 ** (1 / 3), 1.0))
    assert exact_rate(1, 3) == pytest.approx((0.01695, 0.86465), abs=1e-5)


def test_a_trend_over_k_uses_all_rows_that_were_measured():
    rows = {f"moat:{k}": made_up(0.3 + 0.01 * k) for k in range(2, 9)}
    assert verdicts("figure3a", rows)["robustness-grows-with-k"] == "holds"
    assert verdicts("figure3a", rows)["clean-falls-with-k"] == "does not hold"
    some = {f"moat:{k}": rows[f"moat:{k}"] for k in (2, 4, 6, 8)}
    assert verdicts("figure3a", some)["robustness-grows-with-k"] == "holds"
    means = [statistics.fmean(run.accuracy["aa"] for run in some[f"moat:{k}"].values()) for k in (2, 4, 6, 8)]
    fitted = 6 * np.polyfit((2, 4, 6, 8), means, 1)[0]
    shown = numbers("figure3a", some, "robustness-grows-with-k")
    assert f"increase from moat:2 to moat:8 (fitted line) = {100 * fitted:+.1f}" in shown
    two = {f"moat:{k}": rows[f"moat:{k}"] for k in (2, 8)}
    assert numbers("figure3a", two, "clean-falls-with-k").startswith("not measured: moat:3")
    flat = {f"moat:{k}": made_up(0.3, draw=k) for k in range(2, 9)}
    assert verdicts("figure3a", flat)["robustness-grows-with-k"] == "not decided"


def test_figure_1_compares_final_accuracies_without_the_verdicts_of_images():
    def final(pgd7):
        return {seed: Run({"pgd7": pgd7}, "robust", images={"pgd7": 10_000}) for seed in range(3)}

    rows = {"pgd:2": final(0.30), "pgd:4": final(0.34), "pgd:8": final(0.40)}
    assert verdicts("figure1a", rows)["robustness-grows-with-k"] == "holds"


def test_every_attack_must_agree_that_original_images_are_lowest():
    rows = {row.method: made_up(0.5) for row in experiment("figure2a").rows}
    rows["standard | fast | pgd:2"] = made_up(0.4)
    assert verdicts("figure2a", rows)["original-is-lowest"] == "holds"
    lucky = rows["standard | fast | pgd:2"]
    for seed, run in lucky.items():
        lucky[seed] = replace(run, robust=run.robust | {"mim50": made_up(0.6)[seed].robust["mim50"]})
    assert verdicts("figure2a", rows)["original-is-lowest"] == "does not hold"


def test_time_decides_where_all_seeds_agree_on_one_machine():
    def verdict(seconds):
        rows = {"moat:2": made_up(0.4, seconds=seconds), "gradalign": made_up(0.4, seconds=100.0)}
        return verdicts("table1a", rows)["moat-2-in-half-the-time"]

    assert (verdict(40.0), verdict(60.0), verdict(None)) == ("holds", "does not hold", "not decided")


def test_costs_are_stated_beside_a_claim_and_do_not_decide_it():
    rows = {"imoat:1,2,3": made_up(0.5), "moat:2": made_up(0.4)}
    rows["imoat:1,2,3"] = {seed: replace(run, passes=84.0) for seed, run in rows["imoat:1,2,3"].items()}
    found = {claim.name: claim for claim in check_claims(experiment("table2a"), rows)}[BETTER]
    assert found.costs == "imoat:1,2,3 / moat:2: passes 2.00, FLOPs 1.00, time 1.00"
    assert found.verdict == "holds"


def test_rows_that_were_not_measured_are_named():
    assert numbers("figure3a", {"moat:8": made_up(0.35)}, "imoat-2-5-8-beats-moat-8") == "not measured: imoat:2,5,8"


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
    assert over_seeds([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5)
    assert over_seeds([5.0]) == 0.0


def test_student_s_quantiles_are_those_of_tables():
    for degrees, expected in ((1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (29, 2.04523)):
        assert student_quantile(0.05, degrees) == pytest.approx(expected, abs=1e-4)
    assert student_quantile(0.01, 4) == pytest.approx(4.60409, abs=1e-4)


def difference(ours, theirs):
    return paired([ours, theirs], [1.0, -1.0])


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_paired_difference_is_that_of_the_means_and_turns_its_sign_with_the_sides(seed, seeds):
    draws = np.random.default_rng(seed)
    ours, theirs = ((draws.random((seeds, 30)) < share).tolist() for share in draws.random(2))
    found, turned = difference(ours, theirs), difference(theirs, ours)
    assert found.value == pytest.approx(np.mean(ours) - np.mean(theirs))
    assert (turned.value, turned.half()) == pytest.approx((-found.value, found.half()))


def test_the_interval_of_a_difference_covers_the_truth_in_about_95_of_100_draws():
    draws = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        difficulty = draws.random(300)
        ours, theirs = [(difficulty < 0.4).tolist()], [(difficulty + 0.2 * draws.random(300) < 0.4).tolist()]
        found = difference(ours, theirs)
        covered += abs(found.value - 0.1) <= found.half()
    assert 0.92 <= covered / 400 <= 0.98


@given(st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=5), st.floats(1e-3, 0.1), st.floats(-0.3, 0.3))
def test_a_p_value_is_the_level_at_which_the_interval_touches_the_bound(by_seed, error, bound):
    found = Estimate(by_seed, error)
    level = found.p_value(bound)
    assert 0 < level <= 1
    if 1e-6 < level < 0.999:
        assert found.half(level) == pytest.approx(abs(found.value - bound), rel=1e-3, abs=1e-6)


def test_without_the_verdicts_of_images_an_interval_is_wider():
    draws = np.random.default_rng(1)
    difficulty = draws.random(500)
    rows = [[(difficulty < share).tolist()] for share in (0.4, 0.35)]
    apart = unpaired([[np.mean(row[0])] for row in rows], 500, [1.0, -1.0])
    assert apart.value == pytest.approx(difference(*rows).value)
    assert apart.half() > 1.5 * difference(*rows).half()


@pytest.mark.parametrize("path", sorted(KEPT.glob("*a-mini*.json")), ids=lambda path: path.stem)
def test_a_kept_result_is_as_it_was_written_and_follows_from_its_own_verdicts(path):
    for run in read_outcomes(path):
        verdict = outcome_of(run.history, run.data.get("classes", 10))
        assert (run.outcome, run.collapsed_at, run.recovered) == (
            verdict.outcome, verdict.collapsed_at, verdict.recovered,
        )  # fmt: skip
        assert run.flops == pytest.approx(Recipe(**run.recipe).planned_flops(find_sizes(run.recipe["data"])), rel=1e-12)
        for part in filter(None, (run.last, run.best)):
            for name, accuracy in part.accuracy.items():
                robust = unpack(part.standing[name])
                assert len(robust) == part.images[name]
                assert sum(robust) / len(robust) == accuracy
    assert path.with_suffix(".md").read_text() == page_of(path)  # scripts/render_results.py writes it
    assert f"({path.stem}.png)" in page_of(path)
