"""`moat reproduce radius`: robust accuracy by the radius trained for."""

import json
import re

import pytest

from moatlab.report.plots import plot_result
from moatlab.reproduce.paper import experiment
from moatlab.reproduce.plan import plan_sweep
from moatlab.runtime.files import read_json

# One epoch of 5 steps of a narrow model.
SMALL = ("--preset", "mini", "--epochs", 1, "--width", 8, "--batch-size", 1000, "--threads", 1)
RADII = ["4/255", "8/255", "12/255", "16/255", "16/255"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    return tmp_path_factory.mktemp("radius") / "figure"


@pytest.fixture
def drawn(figures, moat):
    """The folder of a small figure of fgsm, made once."""
    if not figures.exists():
        ended = moat("reproduce", "radius", *SMALL, "--methods", "fgsm", "--out", figures)
        assert ended.code == 0, ended.err
        (figures / "stdout.txt").write_text(ended.out)
    return figures


def test_the_plan_has_four_methods_at_four_radii_and_cycled_momentum_at_the_largest(moat, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = json.loads(moat("reproduce", "radius", "--plan", "--json").out)
    assert (plan["experiment"], plan["kind"], plan["preset"]) == ("radius", "radius", "laptop")
    assert plan["additional_rows"] == []
    assert len(plan["rows"]) == 4 * 5
    for number, method in enumerate(("fgsm", "fast", "nfgsm", "moat:2")):
        rows = plan["rows"][5 * number : 5 * number + 5]
        recipes = [row["recipe"] for row in rows]
        assert [(one["method"], one["eps"], one["epochs"]) for one in recipes] == [(method, eps, 15) for eps in RADII]
        assert [one.get("cycle_momentum", False) for one in recipes] == [False] * 4 + [True]
        assert {row["passes"] for row in rows} == {30}
        assert rows[-1]["row"] == f"{method} 16/255, cycled momentum"
    runs = [row["run"] for row in plan["rows"]]
    assert runs[:5] == ["fgsm_eps4_s0", "fgsm_eps8_s0", "fgsm_eps12_s0", "fgsm_eps16_s0", "fgsm_eps16-cycled_s0"]
    assert len(set(runs)) == 20
    assert plan["folder"] == "runs/reproduce_laptop_cifar10_cyclic_15-epochs"
    assert "eps 4/255, 8/255, 12/255, 16/255 (L-inf), 15 epochs" in plan["setting"]
    assert "cycled momentum" not in plan["setting"]


@pytest.mark.parametrize("preset", ["paper", "paper-fast", "laptop", "mini", "mini-long"])
def test_only_the_last_row_of_a_method_cycles_its_momentum_whatever_the_preset_does(preset):
    jobs = plan_sweep(experiment("radius"), preset, methods=["fgsm"]).jobs
    assert [job.recipe.cycle_momentum for job in jobs] == [False] * 4 + [True]
    assert [job.recipe.eps for job in jobs] == RADII


def test_another_method_is_trained_at_all_radii_with_the_weights_that_belong_to_them():
    sweep = plan_sweep(experiment("radius"), "laptop", methods=["gradalign"], seeds=2, epochs=3)
    assert [job.name for job in sweep.jobs[5:7]] == ["gradalign-0.0632_eps4_s1", "gradalign-0.2_eps8_s1"]
    assert [job.row.eps for job in sweep.jobs] == RADII * 2
    assert sweep.folder.name == "reproduce_laptop_cifar10_cyclic_3-epochs"


@pytest.mark.parametrize("option", [("--eps", "8/255"), ("--cycle-momentum",), ("--no-cycle-momentum",)])
def test_what_the_figure_decides_can_not_be_chosen(moat, option):
    ended = moat("reproduce", "radius", "--preset", "mini", *option, "--plan")
    assert ended.code == 2
    assert re.search(r"radius decides on --(eps|cycle-momentum) by itself", ended.err)


def test_each_run_is_trained_and_attacked_at_its_own_radius(drawn):
    result = read_json(drawn / "radius.json")
    assert [row["eps"] for row in result["rows"]] == RADII
    assert [row["cycle_momentum"] for row in result["rows"]] == [False] * 4 + [True]
    for row, run in zip(result["rows"], result["runs"], strict=True):
        name = "fgsm_eps" + row["eps"].partition("/")[0] + ("-cycled" if row["cycle_momentum"] else "") + "_s0"
        record = read_json(drawn / name / "run.json")
        assert row["columns"]["pgd7"]["mean"] == record["final"]["pgd7"] == run["final"]["pgd7"]
        assert row["outcomes"] == [record["outcome"]]
        assert f"eps {row['eps']}" in record["setting"]
        assert run["recipe"]["eps"] == row["eps"]
        assert row["cost"]["passes_to_fgsm"] == row["cost"]["flops_to_fgsm"] == row["cost"]["seconds_to_fgsm"] == 1
        assert "last" not in run
    assert result["images"] == {"clean": 1000, "fgsm": 1000, "pgd7": 1000}
    assert result["claims"] == []
    assert not list(drawn.glob("*/eval*.json"))


def test_its_pages_name_radii_outcomes_and_costs_and_have_no_claims(drawn):
    markdown, latex, page = ((drawn / f"radius.{kind}").read_text() for kind in ("md", "tex", "html"))
    outcome = read_json(drawn / "radius.json")["rows"][4]["outcomes"][0]
    line = next(line for line in markdown.splitlines() if line.startswith("| `fgsm 16/255, cycled momentum`"))
    assert f"| {outcome} | 2 |" in line
    assert "| method | passes | / fgsm | TFLOP | / fgsm | seconds | / fgsm |" in markdown
    assert r"\texttt{fgsm 4/255} & 2 & 1.00 &" in latex
    assert "Andriushchenko and Flammarion (2020)" in markdown
    assert "Andriushchenko and Flammarion (2020)" in page
    assert "fgsm_eps16-cycled_s0" in page  # its label there
    for text in (markdown, page, (drawn / "stdout.txt").read_text()):
        assert "The paper's claims" not in text
    assert max(map(len, (drawn / "stdout.txt").read_text().splitlines()[:-1])) <= 80
    for kind in ("png", "pdf"):
        assert (drawn / f"radius.{kind}").stat().st_size > 1000


def test_a_second_time_and_from_the_result_alone_nothing_is_trained(drawn, moat, alone, monkeypatch):
    monkeypatch.setattr("moatlab.reproduce.sweep.train_recipe", None)  # whoever calls it fails
    before = read_json(drawn / "radius.json")
    for options in (("--out", drawn), ("--out", "again", "--known", drawn / "radius.json")):
        ended = moat("reproduce", "radius", *SMALL, "--methods", "fgsm", *options, "--json")
        assert (ended.code, ended.err) == (0, "")
        assert json.loads(ended.out)["rows"] == before["rows"]
    assert not list((alone / "again").glob("*/"))


def test_runs_of_another_recipe_in_its_folder_are_refused(drawn, moat):
    for methods in ("fgsm", "moat:2"):  # the second has no run there
        ended = moat("reproduce", "radius", *SMALL, "--methods", methods, "--out", drawn, "--lr", 0.1)
        assert ended.code == 2
        assert "was started with lr = 0.2, not 0.1" in ended.err


def test_the_picture_shows_each_outcome(drawn, tmp_path):
    result = read_json(drawn / "radius.json")
    sizes = set()
    for outcomes in (["robust"] * 5, ["robust", "collapsed", "overfitted", "untrained", "undecided"]):
        rows = [row | {"outcomes": [one]} for row, one in zip(result["rows"], outcomes, strict=True)]
        for name, some in (("all", rows), ("plain", rows[:4])):
            plot_result(tmp_path / f"{name}.png", result | {"rows": some})
            sizes.add((tmp_path / f"{name}.png").stat().st_size)
    assert len(sizes) == 4
