"""`moat tune`: real searches over tiny images, killed, resumed and shared by two processes."""

import json
import signal
import time

import pytest
import torch

from moatlab.attacks import strong_pgd
from moatlab.attacks.norms import Threat
from moatlab.report.fronts import front_of, last_runs
from moatlab.reproduce.held_out import right_under_both
from moatlab.reproduce.space import read_space
from moatlab.reproduce.trials import Measured, Trials, Unit
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import read_json

SPACE = """
method = ["{single}", "pgd:{K}", "mixup | {single} | pgd:{K}", "{single} > pgd:{K}"]
single = ["fgsm", "fast", "nfgsm"]
K = [1, 2]
lr = { low = 0.01, high = 0.4, log = true }
eps_warmup = [0.0, 0.5]
average = ["none", "ema"]
"""
FEW = ("--budget", "6passes", "--trials", 12, "--holdout", 20, "--width", 8, "--batch-size", 20, "--threads", 1)


@pytest.fixture
def search(tiny, alone):
    """The options of a search of seconds."""
    (alone / "space.toml").write_text(SPACE)
    return ("tune", "--data", tiny, "--space", "space.toml", *FEW)


def found(out):
    """What a search found, without the time that it took."""
    result = read_json(out / "tune.json")
    for trial in result["trials"]:
        for run in trial["runs"]:
            del run["seconds"]
    return result


@pytest.fixture(scope="session")
def searched(tmp_path_factory):
    """Where the search that several tests look at is kept, once one of them has made it."""
    return tmp_path_factory.mktemp("search") / "whole"


@pytest.fixture
def undisturbed(searched, search, moat):
    if not searched.exists():
        ended = moat(*search, "--out", searched)
        assert ended.code == 0, ended.err
    return searched


def test_a_search_killed_twice_and_resumed_makes_the_same_trials_and_names_the_same_winner(
    search, undisturbed, moat_process, alone
):
    out = alone / "killed"
    for number in (2, 7):
        process = moat_process(*search, "--out", out)
        deadline = time.monotonic() + 120
        while not (out / "trials" / f"{number:03}" / "trial.json").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (out / "tune.json").exists()
    process = moat_process(*search, "--out", out)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert found(out) == found(undisturbed)
    assert (out / "recipe.toml").read_text() == (undisturbed / "recipe.toml").read_text()


def test_a_finished_search_has_all_its_files_and_halves_its_trials(search, undisturbed, moat):
    result = read_json(undisturbed / "tune.json")
    assert len(result["trials"]) == 12
    rungs = [[run for trial in result["trials"] for run in trial["runs"] if run["rung"] == rung] for rung in range(3)]
    assert [len(runs) for runs in rungs] == [12, 5, 2 * 2]  # two seeds at the last
    assert all(run["passes"] <= 6 for run in rungs[2])
    first = sorted((trial["runs"][0]["value"] for trial in result["trials"]), reverse=True)
    kept = [trial["runs"][0]["value"] for trial in result["trials"] if len(trial["runs"]) > 1]
    assert sorted(kept, reverse=True) == first[:5]  # the better ones are kept
    best = max(result["ranking"], key=lambda one: one["value"])
    assert best["trial"] == result["winner"]
    assert result["winner"] in {trial["trial"] for trial in result["trials"] if trial["runs"][-1]["rung"] == 2}
    page = (undisturbed / "tune.html").read_text()
    assert "Importance of each choice" in page
    assert page.count("data:image/png;base64") >= 1
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("result.json")}
    ended = moat(*search, "--out", undisturbed)
    assert ended.code == 0
    assert "trials at the last rung" in ended.out
    assert {path: path.stat().st_mtime_ns for path in before} == before  # nothing is trained again
    ended = moat("train", "--recipe", undisturbed / "recipe.toml", "--max-steps", 1, "--out", "winner")
    assert ended.code == 0, ended.err


def test_two_processes_at_once_lose_no_trial(search, moat):
    ended = moat(*search, "--out", "shared", "--on", 2, "--trials", 6, "--rungs", 2, "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert [trial["trial"] for trial in result["trials"]] == list(range(6))
    assert all(trial["runs"][0]["value"] is not None for trial in result["trials"])
    assert sum(run["rung"] == 1 for trial in result["trials"] for run in trial["runs"]) == 3 * 2


def test_a_failing_trial_is_recorded_and_does_not_end_the_search(moat, alone, tiny):
    (alone / "space.toml").write_text('method = ["pgd:7", "fgsm"]\n')
    arguments = ("--data", tiny, "--space", "space.toml", *FEW, "--trials", 5, "--out", "out", "--json")
    ended = moat("tune", *arguments)
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    failures = [run["failure"] for trial in result["trials"] for run in trial["runs"] if run["failure"]]
    assert failures
    assert all("one epoch of pgd:7 needs 8passes" in failure for failure in failures)
    assert result["trials"][result["winner"]]["fields"]["method"] == "fgsm"
    ended = moat("tune", *arguments, "--seed", 1)
    assert ended.code == 2
    assert "out has a search with another seed" in ended.err


def test_a_mistake_that_would_fail_every_trial_is_found_before_the_first(moat, search, alone):
    for options, sentence in (
        (("--device", "cuda:7"), "this machine or build of PyTorch has no such device"),
        (("--batch-size", 500), "--batch-size 500 is larger than the 60 images to train on"),
        (("--holdout", 0), "moat tune compares trials on held-out images"),
        (("--eps-warmup", 3), "give it as a share of the run"),
        (("--budget", "soon"), "--budget soon: must be a time"),
        (("--on", 0), "--on 0: must be from 1 to 1024"),
    ):
        ended = moat(*search, *options, "--out", "out")
        assert ended.code == 2, ended.err
        assert sentence in ended.err
        assert not (alone / "out" / "trials" / "000").exists()


def test_a_recipe_file_is_where_a_search_starts_from_and_never_watches_test_images(moat, alone, tiny):
    short = ("--data", tiny, "--width", 8, "--batch-size", 20, "--holdout", 0, "--monitor", "test", "--threads", 1)
    assert moat("train", "fgsm", *short, "--epochs", 1, "--momentum", 0.5, "--out", "run").code == 0
    (alone / "one.toml").write_text('method = ["fgsm"]\n')
    options = (
        "--recipe",
        "run/recipe.toml",
        "--holdout",
        20,
        "--trials",
        1,
        "--rungs",
        1,
        "--seeds",
        1,
        "--threads",
        1,
    )
    ended = moat("tune", "--space", "one.toml", "--budget", "2passes", *options, "--out", "out")
    assert ended.code == 0, ended.err
    winner = (alone / "out" / "recipe.toml").read_text()
    assert "momentum = 0.5" in winner
    assert 'monitor = "holdout"' in winner


def test_whole_numbers_are_drawn_between_whole_bounds(tmp_path):
    (tmp_path / "space.toml").write_text('method = ["pgd:{K}"]\nK = { low = 2, high = 4 }\n')
    trials = Trials(tmp_path / "out", read_space(tmp_path / "space.toml"), 4, 1, 1, 0)
    (tmp_path / "out" / "trials").mkdir(parents=True)
    for number in range(4):
        (tmp_path / "out" / "trials" / f"{number:03}").mkdir()
    methods = {trials.read_fields(number)["method"] for number in range(4)}
    assert methods <= {"pgd:2", "pgd:3", "pgd:4"}


def test_if_every_trial_fails_the_first_reason_is_named(moat, alone, tiny):
    (alone / "space.toml").write_text('method = ["pgd:7"]\n')
    ended = moat("tune", "--data", tiny, "--space", "space.toml", *FEW, "--trials", 2, "--out", "out")
    assert ended.code == 1
    assert "no trial succeeded" in ended.err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr = [0.1]", "needs a line method = [...]"),
        ('method = ["fgsm"]\nlearning = [1]', "'learning' is no field of a recipe, and no method has {learning}"),
        ('method = ["pgd:{K}"]', "a method has {K}, and there is no line 'K = ...'"),
        ('method = ["fgsm"]\nlr = 0.1', "lr must be a list or { low = ..., high = ... }"),
        ('method = ["fgsm"]\nlr = []', "lr must be a list or"),
        ('method = ["fgsm"]\nlr = {low = 2, high = 1}', "lr needs low <= high"),
        ('method = ["fgsm"]\nlr = {low = 0, high = 1, log = true}', "low > 0 with log"),
        ('method = ["fgsm"]\nlr = {low = 0, hihg = 1}', "lr must be a list or"),
        ('method = ["fgms"]', "there is no method or stage 'fgms' (did you mean fgsm?)"),
        ('method = ["fgsm"]\nepochs = [3]', "'epochs' can't be searched"),
        ("method = [1]", "method must be a list of methods"),
        ("method = [", "is not valid TOML"),
    ],
)
def test_a_bad_space_is_one_sentence(tmp_path, text, sentence):
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(UserError) as error:
        read_space(tmp_path / "space.toml")
    assert sentence in str(error.value)


def test_the_default_space_is_thirty_readable_lines_and_printed_on_request(moat):
    ended = moat("tune", "--show-space")
    assert ended.code == 0
    lines = [line for line in ended.out.splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 30
    assert set(read_space().choices) >= {"method", "lr", "average", "activation"}


def test_what_is_given_as_an_option_is_not_searched(search, moat, alone):
    ended = moat(*search, "--out", "out", "--trials", 1, "--rungs", 1, "--seeds", 1, "--lr", 0.05, "--json")
    assert ended.code == 0, ended.err
    assert "lr" not in json.loads(ended.out)["trials"][0]["fields"]
    assert "lr = 0.05" in (alone / "out" / "recipe.toml").read_text()


def test_without_optuna_it_is_named(moat, search, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    ended = moat(*search, "--out", "out")
    assert ended.code == 2
    assert 'pip install "moatlab[tune]"' in ended.err


def test_robust_images_are_those_right_under_both_attacks():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3)).eval()
    x, y = torch.rand(600, 3, 4, 4), torch.randint(3, (600,))
    y[:400] = model(x[:400]).argmax(1)
    threat = Threat.of("8/255")
    clean, robust = right_under_both(model, x, y, threat)
    right = model(x).argmax(1) == y
    assert clean == right.double().mean().item()
    # Of a linear model the worst case of class j against y is known exactly.
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    margins = []
    for image, label in zip(x, y, strict=True):
        differences = weight - weight[label]
        low, high = (image - threat.eps).clamp(0, 1).flatten(), (image + threat.eps).clamp(0, 1).flatten()
        worst = torch.where(differences > 0, differences * high, differences * low).sum(1) + bias - bias[label]
        worst[label] = -torch.inf
        margins.append(worst.max())
    certain = (torch.stack(margins) < 0).double().mean().item()
    assert certain <= robust <= certain + 0.01
    alone = strong_pgd(model, x, y, eps=threat.eps, step_size=threat.eps / 4, steps=10)
    assert robust <= (model(alone).argmax(1) == y).float().mean().item() + 0.01


def test_trials_below_the_floor_of_clean_accuracy_lose(tmp_path):
    """Ranked by value: the search gives such trials their clean accuracy minus one."""
    trials = Trials(tmp_path, read_space(), 3, 1, 1, 0)
    for trial, value in enumerate((0.2, -0.6, None)):
        trials.write(Unit(trial, 0, 0), Measured(value=value, failure=None if value else "no"))
    assert [trial for _, trial in trials.ranking(0)] == [0, 1, 2]


def test_the_front_is_what_no_other_trial_beats():
    def trial(number, robust, clean, passes, rung=0):
        run = {"robust": robust, "clean": clean, "passes": passes, "value": robust, "flops": 1, "seconds": 1}
        return {"trial": number, "runs": [run | {"rung": rung, "seed": 0, "epochs": 1}]}

    trials = [trial(0, 0.3, 0.6, 10), trial(1, 0.2, 0.7, 10), trial(2, 0.2, 0.6, 10), trial(3, 0.2, 0.6, 5)]
    assert front_of(trials) == [0, 1, 3]
    failed = {"trial": 4, "runs": [{"value": None, "rung": 0}]}
    assert front_of([*trials, failed]) == [0, 1, 3]
    assert last_runs([failed]) == {}
