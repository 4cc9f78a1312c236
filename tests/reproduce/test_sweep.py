"""`moat reproduce` from end to end on the embedded data, at a size that takes seconds."""

import json
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from images_for_tests import cifar_folder
from moatlab.cli.publishing import split_methods
from moatlab.report.plots import plot_result
from moatlab.reproduce import sweep as sweeping
from moatlab.reproduce.outcomes import Outcome, pack, read_outcomes, steady_seconds, unpack
from moatlab.reproduce.paper import Asked, Row, experiment
from moatlab.reproduce.plan import plan_sweep
from moatlab.reproduce.results import make_result
from moatlab.reproduce.sweep import _kept, _others, run_sweep
from moatlab.reproduce.tables import as_text
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import read_json, write_json
from moatlab.training.making import make_recipe

KEPT = Path(__file__).parents[2] / "docs" / "results"
# One epoch of 4 steps of a narrow model; one image for AutoAttack, whose 5,000 queries would take the longest.
SMALL = ("--preset", "mini", "--epochs", 1, "--width", 8, "--batch-size", 1000, "--threads", 1, "--n", 6, "--n-aa", 1)
TIMES = {"train_seconds", "steady_seconds", "seconds", "seconds_to_fgsm", "date", "command", "folder", "numbers"}


def without_times(value):
    """A result without what the clock decides, and without its place."""
    if isinstance(value, dict):
        return {name: without_times(inner) for name, inner in value.items() if name not in TIMES}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


@pytest.fixture(scope="session")
def swept(tmp_path_factory):
    """Where the sweep that several tests look at is kept, once one of them has made it."""
    return tmp_path_factory.mktemp("sweep") / "whole"


@pytest.fixture
def whole(swept, moat):
    """A small table2a that ran to its end undisturbed."""
    if not swept.exists():
        ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", swept)
        assert ended.code == 0, ended.err
        (swept / "stdout.txt").write_text(ended.out)
    return swept


def test_a_table_has_the_paper_s_numbers_and_ours_side_by_side_and_all_its_files(whole):
    result = read_json(whole / "table2a.json")
    assert [row["row"] for row in result["rows"]] == ["fgsm", "fast"]
    for row in result["rows"]:
        for name, column in row["columns"].items():
            assert column["paper"] == experiment("table2a").paper[row["row"]][name]
            assert column["difference"] == pytest.approx(column["mean"] - column["paper"])
            assert column["interval"][0] <= column["mean"] <= column["interval"][1]
        assert row["cost"]["passes"] == 2
        assert row["cost"]["passes_to_fgsm"] == 1
        assert row["cost"]["paper_to_fgsm"] == pytest.approx(row["cost"]["paper_minutes"] / 120.86)
    assert result["images"] == {"aa": 1, "clean": 6, "fgsm": 6, "pgd50": 6, "cw50": 6, "mim50": 6}
    assert [row["row"] for row in result["best_rows"]] == ["fgsm", "fast"]
    verdicts = {claim["name"]: claim["verdict"] for claim in result["claims"]}
    assert verdicts["fgsm-collapses"] == "not decided"  # one seed
    assert verdicts["imoat-1-2-3-beats-moat-2"] == "not decided"
    for row in result["rows"]:
        assert row["outcomes"][0] in ("robust", "collapsed", "overfitted", "untrained", "undecided")
        assert row["cost"]["flops_to_fgsm"] == 1
        assert row["clean_of_aa"] in (0, 1)  # of AutoAttack's one image
    for suffix in ("md", "tex", "png", "pdf", "html"):
        assert (whole / f"table2a.{suffix}").stat().st_size > 500
    out = (whole / "stdout.txt").read_text()
    assert "93.2" in out  # clean accuracy of fgsm in the paper
    assert "not decided: fgsm collapses (section 4.3, caption of table 2)" in out
    assert max(map(len, out.splitlines()[:-1])) <= 80


def test_the_cards_agree_with_the_table(whole):
    row = read_json(whole / "table2a.json")["rows"][1]
    for name, file in (("pgd50", "eval.json"), ("clean", "eval.json"), ("aa", "eval_aa.json")):
        assert read_json(whole / "fast_s0" / file)["results"][name]["accuracy"] == row["columns"][name]["mean"]


def test_markdown_and_latex_hold_the_same_numbers(whole):
    row = read_json(whole / "table2a.json")["rows"][0]
    markdown, latex = (whole / "table2a.md").read_text(), (whole / "table2a.tex").read_text()
    line = next(line for line in markdown.splitlines() if line.startswith("| `fgsm`"))
    ours = [f"{100 * column['mean']:.1f}" for column in row["columns"].values()]
    assert [cell.strip() for cell in line.split("|")[2:8]] == ours
    assert r"\toprule" in latex
    assert latex.startswith(r"% needs \usepackage{booktabs,xcolor}")
    lines = 2 * (1 + 2 * 2), 1 + 2, 1 + 2 * 3  # last and best epoch; training time; the paper's accuracies
    assert latex.count(r"\\") == sum(lines)
    assert latex.count(r"95 \% interval") == markdown.count("| *95 % interval* |") == 2 * 2
    low, high = (100 * bound for bound in row["columns"]["clean"]["interval"])
    assert f"| *95 % interval* | {low:.1f}-{high:.1f} |" in markdown
    assert " & ".join(ours) in latex
    assert "| agrees |" in markdown  # the paper's own table
    assert "| Clean of AA's 1 |" in markdown
    assert "BatchNorm in attacks: train mode" in markdown


def test_a_second_time_nothing_is_trained_or_evaluated(whole, moat):
    before = {path: path.stat().st_mtime_ns for path in whole.glob("*/*.json")}
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", whole, "--json")
    assert ended.code == 0
    assert ended.err == ""  # nothing is announced, timed or asked
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert without_times(json.loads(ended.out)) == without_times(json.loads((whole / "table2a.json").read_text()))


def test_killed_again_and_again_it_ends_with_the_same_numbers(whole, moat_process, alone):
    """SIGKILL in the midst of the first evaluation, and of the second training."""
    command = ("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "killed")
    killed = alone / "killed"
    for sign in ("fgsm_s0/eval.json", "fast_s0/metrics.jsonl"):
        process = moat_process(*command)
        deadline = time.monotonic() + 120
        while not (killed / sign).exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (killed / "fast_s0" / "metrics.jsonl").exists()
    process = moat_process(*command)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert without_times(read_json(killed / "table2a.json")) == without_times(read_json(whole / "table2a.json"))


def test_one_failed_run_does_not_stop_the_others_and_is_reported_at_the_end(whole, moat, alone):
    """A model that was damaged after the run had finished can't be evaluated."""
    shutil.copytree(whole, alone / "sweep")
    (alone / "sweep" / "fgsm_s0" / "outcome.json").unlink()
    path = alone / "sweep" / "fgsm_s0" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"evil")
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "sweep")
    assert ended.code == 1
    assert re.search(r"moat: 1 of 2 runs failed, the first \(sweep/fgsm_s0\): .*damaged", ended.err)
    result = read_json(alone / "sweep" / "table2a.json")
    assert [row["row"] for row in result["rows"]] == ["fast"]
    assert result["failures"][0]["run"] == "sweep/fgsm_s0"
    assert (alone / "sweep" / "table2a.html").exists()
    assert "FAILED sweep/fgsm_s0" in ended.out  # below what the others gave
    assert "fast" in ended.out
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "sweep", "--json")
    assert ended.code == 1
    assert json.loads(ended.out)["failures"] == result["failures"]


def test_a_smaller_result_keeps_the_runs_of_the_one_that_it_replaces(whole, moat, alone):
    """Where a machine has nothing but that file, they would be lost."""
    (alone / "again").mkdir()
    path = shutil.copy(whole / "table2a.json", alone / "again" / "table2a.json")
    command = ("reproduce", "table2a", *SMALL, "--out", "again", "--known", path)
    for methods, rows in (("fast", ["fast"]), ("fast", ["fast"]), ("fgsm fast", ["fgsm", "fast"])):
        ended = moat(*command, "--methods", methods)
        assert ended.code == 0, ended.err
        assert [row["row"] for row in read_json(path)["rows"]] == rows
        assert sorted(one.method for one in read_outcomes(path)) == ["fast", "fgsm"]
    assert read_json(path)["kept_runs"] == []
    assert not (alone / "again" / "fgsm_s0").exists()
    path.write_text("{")
    ended = moat(
        "reproduce", "table2a", *SMALL, "--out", "again", "--known", whole / "table2a.json", "--methods", "fast"
    )
    assert ended.code == 0
    assert "replacing it" in ended.err


def test_a_run_with_another_number_of_threads_is_kept_beside_the_new_one():
    """Their recipes are the same, their last bits are not."""
    path = KEPT / "figure1a-mini.json"
    runs = read_outcomes(path)
    elsewhere = [run.model_copy(update={"environment": run.environment | {"threads": 1}}) for run in runs]
    assert _kept(path, runs) == []
    assert _kept(path, elsewhere) == runs


def test_other_images_than_those_of_known_runs_are_noticed_before_anything_is_trained(whole, moat, alone):
    result = read_json(whole / "table2a.json")
    result["runs"] = result["runs"][:1]
    result["runs"][0]["data"]["sha256"] = "0"
    write_json(alone / "known.json", result)
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "again", "--known", "known.json")
    assert ended.code == 2
    assert "fgsm_s0 was trained on another mini" in ended.err
    assert not (alone / "again").exists()


def test_a_run_is_not_evaluated_on_other_images_than_it_belongs_to(whole, moat, alone):
    shutil.copytree(whole, alone / "sweep")
    record = read_json(alone / "sweep" / "fgsm_s0" / "run.json")
    record["data"]["sha256"] = "0"
    write_json(alone / "sweep" / "fgsm_s0" / "run.json", record)
    (alone / "sweep" / "fgsm_s0" / "outcome.json").unlink()
    (alone / "sweep" / "fgsm_s0" / "eval.json").unlink()
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm", "--out", "sweep")
    assert ended.code == 1
    assert "sweep/fgsm_s0 was trained on another mini" in ended.err
    assert not (alone / "sweep" / "fgsm_s0" / "eval.json").exists()


def test_runs_known_from_an_earlier_result_are_not_repeated(whole, moat, alone):
    known = ("--known", whole / "table2a.json")
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "again", *known)
    assert ended.code == 0
    assert not (alone / "again" / "fgsm_s0").exists()
    assert read_json(alone / "again" / "table2a.json")["rows"] == read_json(whole / "table2a.json")["rows"]


def test_rows_show_all_seeds_that_are_known_unless_a_number_is_given(moat, alone):
    """Where time is short, some rows of a table have more seeds than others. Nothing is trained here."""
    kept = read_json(KEPT / "table2a-mini.json")
    kept["runs"] = [run for run in kept["runs"] if run["method"] != "kim" or run["seed"] == 0]
    write_json(alone / "kept.json", kept)
    command = ("reproduce", "table2a", "--preset", "mini", "--known", "kept.json", "--out", "again")
    ended = moat(*command, "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    seeds = {row["row"]: row["seeds"] for row in result["rows"]}
    assert seeds.pop("kim") == [0]
    assert set(map(tuple, seeds.values())) == {(0, 1, 2)}
    page = (alone / "again" / "table2a.md").read_text()
    assert "; 1 to 3 seeds; first 500 test images" in page
    assert "- One seed of kim: intervals cover the test images only, and no claim about them is decided." in page
    ended = moat(*command, "--seeds", 1, "--json")
    assert all(row["seeds"] == [0] for row in json.loads(ended.out)["rows"])
    assert "; 1 seed; first 500 test images" in (alone / "again" / "table2a.md").read_text()


def test_a_result_that_was_changed_by_hand_is_not_known(whole, moat, alone):
    fields = json.loads((whole / "table2a.json").read_text())
    fields["runs"][0]["last"]["accuracy"]["aa"] = 0.99
    (alone / "changed.json").write_text(json.dumps(fields))
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm", "--out", "again", "--known", "changed.json")
    assert ended.code == 2
    assert "changed after it was written" in ended.err


def test_a_table_shares_its_runs_with_a_figure(whole, moat):
    """fgsm is the first curve of figure 1."""
    ended = moat("reproduce", "figure1a", *SMALL, "--methods", "fgsm", "--out", whole)
    assert ended.code == 0
    assert "runs to do" not in ended.err
    assert (whole / "figure1a.pdf").exists()
    assert "| paper" not in (whole / "figure1a.md").read_text()  # figures come without numbers


def test_of_a_run_only_what_a_table_or_figure_shows_is_evaluated(moat, alone):
    """Figure 1 shows what runs measure by themselves, figure 3 the last epoch under attack, a table the best too."""
    command = (*SMALL, "--methods", "fgsm", "--out", "sweep", "--json")
    runs = {}
    both = ["eval.json", "eval_aa.json"]
    # fgsm of one epoch: the best one is the last one
    for name, cards in (("figure1a", []), ("figure3a", both), ("table2a", both)):
        ended = moat("reproduce", name, *command)
        assert ended.code == 0, ended.err
        assert sorted(path.name for path in (alone / "sweep" / "fgsm_s0").glob("eval*.json")) == sorted(cards)
        result = json.loads(ended.out)
        runs[name] = result["runs"][0]
        assert result["rows"][0]["seeds"] == [0]
        assert bool(result["best_rows"]) == (name == "table2a")
    figure = read_json(alone / "sweep" / "figure1a.json")
    final = read_json(alone / "sweep" / "fgsm_s0" / "run.json")["final"]
    assert {name: column["mean"] for name, column in figure["rows"][0]["columns"].items()} == {
        name: final[name] for name in ("clean", "fgsm", "pgd7")
    }
    assert figure["images"] == {"clean": 1000, "fgsm": 1000, "pgd7": 1000}
    assert {claim["name"]: claim["verdict"] for claim in figure["claims"]}["fgsm-collapses"] == "not decided"
    assert "PGD7" in (alone / "sweep" / "figure1a.md").read_text()
    assert (alone / "sweep" / "figure1a.html").read_text().count('<img class="figure"') == 1
    assert runs["figure3a"]["last"] == runs["table2a"]["last"] == runs["table2a"]["best"]


def test_claims_of_a_figure_look_at_the_runs_of_a_table_in_the_same_folder_or_in_a_known_result(tmp_path):
    """imoat:2,5,8 is no row of figure 3, and one of its claims is about it; but only at the same length."""
    options = {"width": 8, "batch_size": 1000, "images": 6, "aa_images": 1}
    sweep = plan_sweep(experiment("figure3a"), "mini", epochs=3, **options)
    recipe = sweep.recipe_of(Row("imoat:2,5,8", "imoat:2,5,8"), 0)
    kept = json.loads((KEPT / "table2a-mini.json").read_text())["runs"][0]
    outcome = Outcome(**kept | {"recipe_sha256": recipe.sha256, "images": 6, "aa_images": 1})
    assert _others(sweep, tmp_path, [outcome]) == {"imoat:2,5,8": [outcome]}
    (tmp_path / "imoat-2-5-8_s0").mkdir()
    write_json(tmp_path / "imoat-2-5-8_s0" / "outcome.json", outcome.as_dict())
    assert _others(sweep, tmp_path, []) == {"imoat:2,5,8": [outcome]}
    assert _others(plan_sweep(experiment("figure3a"), "mini", epochs=6, **options), tmp_path, [outcome]) == {}


def test_a_file_that_is_no_result_is_not_known(whole, moat):
    for name in ("fgsm_s0/outcome.json", "fgsm_s0/run.json"):
        ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm", "--out", "again", "--known", whole / name)
        assert ended.code == 2
        assert "is not a result of moat reproduce" in ended.err


def test_seconds_of_two_machines_are_not_compared_and_runs_on_other_images_are_refused(whole):
    runs = read_json(whole / "table2a.json")["runs"]
    sweep = plan_sweep(experiment("table2a"), "mini", methods=["fgsm", "fast"])

    def made(others=None):
        outcomes = dict(zip(sweep.jobs, (Outcome(**run) for run in runs), strict=True))
        return make_result(sweep, outcomes, whole, others={"kim": [Outcome(**others)]} if others else {})

    assert made()["rows"][1]["cost"]["seconds_to_fgsm"] > 0
    elsewhere = json.loads(json.dumps(runs[1]))
    elsewhere["environment"]["cpu"] = "another"
    assert made(elsewhere)["rows"] == made()["rows"]  # what is no row here does not count
    assert made(elsewhere)["machines"] == made()["machines"]
    elsewhere["data"]["sha256"] = "0"
    claims = {claim["name"]: claim["numbers"] for claim in made(elsewhere)["claims"]}
    assert "not measured" in claims["gradalign-beats-kim"]
    assert "kim" in claims["gradalign-beats-kim"]
    runs[0]["environment"]["cpu"] = "another"
    assert made()["rows"][1]["cost"]["seconds_to_fgsm"] is None
    assert len(made()["machines"]) == 2
    runs[0]["environment"]["precision"] = "bf16"
    assert any("bf16" in name for name in made()["machines"])
    runs[0]["data"]["sha256"] = "0"
    with pytest.raises(UserError, match="trained on different versions of mini"):
        made()


def test_pictures_are_drawn_of_any_rows_that_a_user_adds(whole, tmp_path):
    result = read_json(whole / "table2a.json")
    result["rows"] *= 7
    for kind in ("table", "curves", "bars", "steps"):
        plot_result(tmp_path / f"{kind}.png", result | {"kind": kind})
        assert (tmp_path / f"{kind}.png").stat().st_size > 1000


def test_a_cycle_in_a_table_does_not_break_it(whole):
    result = read_json(whole / "table2a.json")
    result["rows"][0]["row"] = "cutmix | fast | pgd:2"
    lines = [line for line in as_text(result, "md").splitlines() if line.startswith("| `cutmix")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in lines] == [11, 10, 8]
    assert r"cutmix \textbar{} fast" in as_text(result, "tex")
    result["rows"][0]["row"] = "my_stage"
    assert r"\texttt{my\_stage}" in as_text(result, "tex")


def test_a_sweep_folder_of_another_recipe_is_refused_before_anything_is_done(whole, moat):
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", whole, "--lr", 0.1)
    assert ended.code == 2
    assert "was started with lr = 0.2, not 0.1" in ended.err
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "kim", "--out", whole, "--lr", 0.1)  # no row of it
    assert ended.code == 2
    assert "was started with lr = 0.2, not 0.1" in ended.err


# --- from Python


@pytest.fixture
def no_training(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a run was trained")

    monkeypatch.setattr(sweeping, "train_recipe", refuse)


@pytest.mark.usefixtures("no_training")
@pytest.mark.parametrize("path", sorted(KEPT.glob("*a-mini*.json")), ids=lambda path: path.stem)
def test_every_run_of_a_kept_result_is_known_and_none_is_trained_again(path, tmp_path):
    """With the table beside it, whose fgsm costs are compared with, a kept result comes out as it is."""
    kept, runs = read_json(path), read_outcomes(path)
    first = runs[0]
    usual = make_recipe(first.method, preset=kept["preset"]).model_dump(mode="json")
    fixed = {"method", "data", "schedule", "seed", "on_collapse"}
    options = {name: value for name, value in first.recipe.items() if name not in fixed and value != usual[name]}
    sweep = plan_sweep(
        experiment(kept["experiment"]),
        kept["preset"],
        seeds=len(kept["seeds"]),
        methods=[row["row"] for row in kept["rows"]],
        images=first.images,
        aa_images=first.aa_images,
        **options,
    )
    assert len(sweep.jobs) == len(runs)
    assert all(any(run.answers(job.recipe, sweep.asked) for run in runs) for job in sweep.jobs)
    result = run_sweep(sweep, tmp_path / "out", known=[path, KEPT / "table2a-mini.json"])
    for name in ("rows", "best_rows", "setting", "images", "data", "machines", "failures", "runs"):
        assert result[name] == kept[name]
    for claim, before in zip(result["claims"], kept["claims"], strict=True):
        assert claim | {"name": ""} == before | {"name": ""}
    assert result["made"] == ["an earlier commit, date not recorded"]
    assert all(run["environment"]["threads"] in (1, 2) for run in result["runs"])
    assert not list((tmp_path / "out").glob("*/"))


@pytest.mark.usefixtures("no_training")
def test_from_python_no_command_line_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest", "--some", "option"])
    sweep = plan_sweep(experiment("figure1a"), "mini", methods=["fgsm"])
    result = run_sweep(sweep, tmp_path, known=[KEPT / "figure1a-mini.json"])
    assert result["command"] is None
    assert "`from Python`" in as_text(result, "md")
    result = run_sweep(sweep, tmp_path, known=[KEPT / "figure1a-mini.json"], command="moat reproduce figure1a")
    assert "`moat reproduce figure1a`" in as_text(result, "md")


@pytest.mark.usefixtures("aloud")
def test_runs_for_a_cluster_elsewhere_are_neither_timed_nor_refused_here(tmp_path, monkeypatch, capsys):
    """The head node may have no GPU; the cluster's machines may have some."""
    asked = []

    def each(_work, jobs, on, machine):
        asked.append((len(jobs), on, machine))
        return iter([(number, UserError("not here")) for number in range(len(jobs))])

    monkeypatch.setattr(sweeping, "each", each)
    monkeypatch.setattr(sweeping, "seconds_per_pass", None)  # whoever calls it fails
    sweep = plan_sweep(experiment("table2a"), "mini", methods=["fgsm"], epochs=10_000)
    result = run_sweep(sweep, tmp_path, on="ray:10.0.0.1:6379", machine=Machine(threads=3))
    assert asked == [(1, "ray:10.0.0.1:6379", Machine(threads=3))]
    assert [failure["message"] for failure in result["failures"]] == ["not here"]
    assert "the time on ray:10.0.0.1:6379 is not estimated" in capsys.readouterr().err
    monkeypatch.setattr(sweeping, "seconds_per_pass", lambda *_: (10.0, False))
    for here in (None, "ray"):  # a Ray cluster of this machine has no other GPUs
        with pytest.raises(UserError, match="without a GPU"):
            run_sweep(sweep, tmp_path / "here", on=here)


# --- plans


def test_the_plan_of_table1b_lists_the_ten_rows_of_the_paper_with_their_recipes_and_passes(moat, alone):
    ended = moat("reproduce", "table1b", "--preset", "paper", "--plan", "--json")
    assert ended.code == 0
    plan = json.loads(ended.out)
    passes = {row["row"]: row["passes"] for row in plan["rows"]}
    assert list(passes) == list(experiment("table1b").paper)
    assert list(passes.values()) == [400, 400, 700, 600, 600, 1600, 402, 403, 603, 606]
    for row in plan["rows"]:
        recipe = row["recipe"]
        assert (recipe["data"], recipe["schedule"], recipe["eps"]) == ("cifar100", "stepwise", "8/255")
        assert recipe["epochs"] == (201 if "moat" in row["row"] else 200)
        assert recipe["monitor"] == "test"
    assert [row["row"] for row in plan["additional_rows"]] == ["nfgsm"]
    assert list(alone.iterdir()) == []


def test_every_table_and_figure_has_a_plan_at_every_preset_that_holds_its_images(moat):
    for name in ("table1a", "table2a", "figure1a", "figure2a", "figure3a"):
        for preset in ("paper", "paper-fast", "laptop", "mini", "mini-long"):
            assert moat("reproduce", name, "--preset", preset, "--plan").code == 0
    for name in ("table1b", "table2b", "figure1b", "figure2b", "figure3b"):
        assert moat("reproduce", name, "--preset", "laptop", "--plan").code == 0
        ended = moat("reproduce", name, "--preset", "mini", "--plan")
        assert ended.code == 2
        assert "needs CIFAR-100" in ended.err


def test_seeds_and_methods_choose_the_runs():
    sweep = plan_sweep(experiment("table2a"), "mini", seeds=3, methods=["gradalign", "standard | fast | pgd:3"])
    assert [job.name for job in sweep.jobs[:2]] == ["gradalign-2.0_s0", "standard-fast-pgd-3_s0"]
    assert sweep.seeds == [0, 1, 2]
    assert [row.in_paper for row in sweep.rows] == [True, False]
    assert ", 21 epochs, " in sweep.setting
    assert ", 200 or 201 epochs, " in plan_sweep(experiment("table1a"), "paper").setting
    assert (sweep.asked.images, sweep.asked.aa_images) == (500, 200)
    assert plan_sweep(experiment("table2a"), "mini", images=50).asked.aa_images == 50


def test_tables_at_laptop_have_the_last_epoch_only_on_a_thousand_images_for_every_attack():
    asked = {preset: plan_sweep(experiment("table2a"), preset).asked for preset in ("laptop", "mini", "paper")}
    assert asked["laptop"] == Asked(("last",), 1000, 1000)
    assert asked["mini"] == Asked(("last", "best"), 500, 200)
    assert asked["paper"] == Asked(("last", "best"), None, None)
    assert plan_sweep(experiment("figure1a"), "laptop").asked.parts == ("final",)


def test_runs_of_another_length_have_a_folder_of_their_own():
    folders = [plan_sweep(experiment("figure1a"), "laptop", epochs=epochs).folder for epochs in (None, 15, 30)]
    assert [folder.name.removeprefix("reproduce_laptop_cifar10_") for folder in folders] == [
        "cyclic",
        "cyclic_15-epochs",
        "cyclic_30-epochs",
    ]


def test_methods_are_split_at_spaces_but_not_inside_a_cycle():
    assert split_methods(("fgsm  moat:2", "imoat:2,5,8")) == ["fgsm", "moat:2", "imoat:2,5,8"]
    assert split_methods(("cutmix | fast | pgd:2 fgsm",)) == ["cutmix | fast | pgd:2", "fgsm"]
    assert split_methods(()) is None


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("table9",), "there is no 'table9' in the paper"),
        (("figure1",), "did you mean figure1"),
        (("table2a", "--methods", "fgsmm", "--preset", "mini"), "did you mean fgsm?"),
        (("table2a", "--seeds", "0"), "--seeds"),
        (("table2a", "--preset", "huge"), "huge"),
        (("table2a", "--n", "0"), "--n"),
        (("table2a", "--data", "mini"), "--data"),
        (("table2a", "--preset", "mini", "--n", "1001"), "more than the 1,000 test images of mini"),
        (("table2a", "--preset", "mini", "--n-aa", "1001"), "--n-aa 1001"),
        (("table2a", "--preset", "mini", "--known", "nowhere.json"), "nowhere.json"),
        (("table2a", "--preset", "mini", "--epochs", "x"), "--epochs"),
        (("table2b",), "cifar100"),  # it is not here, and there is no way to get it
    ],
)
def test_what_can_not_be_reproduced_is_refused_in_one_sentence(moat, alone, arguments, says):
    ended = moat("reproduce", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert says in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    assert list(alone.iterdir()) == []


def test_data_that_is_absent_comes_with_the_way_to_get_it(moat):
    assert "moat data get" in moat("reproduce", "table2b").err or "cifar-100-binary" in moat("reproduce", "table2b").err


def test_data_that_is_not_whole_is_refused_at_the_paper_s_size(moat, alone):
    folder = cifar_folder(alone, "cifar10", count=200)
    ended = moat("reproduce", "table2a", "--preset", "paper", "--width", 8, "--data-dir", ".", "--yes")
    assert ended.code == 2
    assert "cifar10 is incomplete (200 instead of 50,000 training images" in ended.err
    assert [path.name for path in alone.iterdir()] == [folder.name]


def test_a_part_of_cifar100_is_enough_for_laptop_and_is_stated_with_the_result(moat, alone):
    cifar_folder(alone, "cifar100", count=200)
    small = ("--epochs", 1, "--width", 8, "--batch-size", 50, "--holdout", 50, "--threads", 1, "--n", 4, "--n-aa", 1)
    ended = moat("reproduce", "table2b", "--preset", "laptop", *small, "--methods", "fgsm", "--data-dir", ".")
    assert ended.code == 0, ended.err
    part = "NOT the whole data set: 200 instead of 50,000 training images"
    (folder,) = (alone / "runs").iterdir()
    assert folder.name == "reproduce_laptop_cifar100_cyclic_1-epochs"
    for text in (ended.out, (folder / "table2b.md").read_text(), (folder / "table2b.html").read_text()):
        assert part in " ".join(text.split())
    result = read_json(folder / "table2b.json")
    assert result["data"]["note"].startswith("200 instead of 50,000 training images")
    assert (result["data"]["trained_on"], result["data"]["held_out"]) == (150, 50)
    assert result["best_rows"] is None
    assert result["images"]["aa"] == 1
    assert "best" not in result["runs"][0]


@pytest.mark.usefixtures("no_training")
def test_a_note_on_the_conditions_is_shown_with_the_result(tmp_path):
    sweep, known = plan_sweep(experiment("figure1a"), "mini", methods=["fgsm"]), [KEPT / "figure1a-mini.json"]
    result = run_sweep(sweep, tmp_path, known=known, note="other jobs ran during training")
    assert result["note"] == "other jobs ran during training"
    for kind in ("md", "html", "tex"):
        assert "test images; other jobs ran during training." in (tmp_path / f"figure1a.{kind}").read_text()
    assert run_sweep(sweep, tmp_path, known=known)["note"] is None


def test_what_takes_days_without_a_gpu_is_not_started_unasked(moat, alone):
    ended = moat("reproduce", "table2a", "--preset", "mini", "--epochs", 100_000, "--threads", 1)
    assert ended.code == 2
    assert re.search(r"would take about [\d.]+ days on this machine.*without a GPU.*--yes", ended.err)
    assert list(alone.iterdir()) == []


# --- small things


def test_verdicts_come_back_from_their_digits():
    for flags in ([], [True], [False], [False, False, True], [True] * 9 + [False]):
        assert unpack(pack(flags)) == flags


def test_an_epoch_that_was_held_up_does_not_count_in_steady_seconds():
    stages = ["mixup", "fast", "pgd:2"] * 3
    seconds = [1.0, 2.0, 3.0, 1.0, 200.0, 3.0, 1.0, 2.0, 3.0]
    lines = [{"stage": stage, "train_seconds": one} for stage, one in zip(stages, seconds, strict=True)]
    assert steady_seconds(lines) == 18


def test_a_tampered_outcome_is_measured_again(whole, moat, alone):
    shutil.copytree(whole, alone / "sweep")
    path = alone / "sweep" / "fgsm_s0" / "outcome.json"
    truth = read_json(path)
    write_json(path, truth)
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    ended = moat("reproduce", "table2a", *SMALL, "--methods", "fgsm fast", "--out", "sweep")
    assert ended.code == 0
    assert read_json(path) == truth
