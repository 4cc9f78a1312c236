"""Budgets, the epochs within them, and `moat train best`."""

import json
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from make_front import FRONT, as_text, make_front

import moatlab
from moatlab.data.sizes import find_sizes
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.training.best import recipe_within
from moatlab.training.budget import Budget, price, within
from moatlab.training.estimate import measured_seconds
from moatlab.training.front import Point, best_point, load_fronts
from moatlab.training.making import draft_recipe, make_recipe

MINI = find_sizes("mini")


def test_budgets_are_times_passes_or_flops():
    assert Budget.parse("30min") == Budget("seconds", 1800)
    assert Budget.parse("1.5h") == Budget("seconds", 5400)
    assert Budget.parse(" 90 s ") == Budget("seconds", 90)
    assert Budget.parse("1pass") == Budget("passes", 1)
    assert Budget.parse("60passes") == Budget("passes", 60)
    assert Budget.parse("2PFLOP") == Budget("flops", 2e15)


@pytest.mark.parametrize("text", ["", "30", "min", "0min", "-5min", "2days", "1e3passes", "٣min", "5 min 3 s", "nanh"])
def test_what_is_no_budget_is_refused_with_examples(text):
    with pytest.raises(UserError, match="such as 30min, 2h, 60passes or 2PFLOP"):
        Budget.parse(text)


@given(
    method=st.sampled_from(["fgsm", "moat:2", "imoat:2,5,8", "liet", "free:4", "fgsm > fgsm > pgd:2"]),
    amount=st.floats(12, 500),
)
def test_a_recipe_within_a_budget_is_the_longest_one_of_whole_cycles(method, amount):
    def passes(recipe):
        return price(recipe, MINI, "passes")

    recipe = within(Budget("passes", amount), draft_recipe(method), passes)
    cycle = max(len(recipe.parsed_method.slots), recipe.parsed_method.replays)
    assert recipe.epochs % cycle == 0
    assert passes(recipe) <= amount
    assert passes(recipe.model_copy(update={"epochs": recipe.epochs + cycle})) > amount


def test_the_price_in_passes_and_flops_is_the_planned_cost():
    recipe = make_recipe("moat:2")
    assert price(recipe, MINI, "passes") == 42
    assert price(recipe, MINI, "flops") == recipe.planned_flops(MINI)
    # 39 steps of 128 images: per image 3, 5 and 7 forwards' time, seven times; then 19 for each measured image
    trained = 39 * 128 * 7 * (3 + 5 + 7)
    assert price(recipe, MINI, "seconds", 1e-3) == pytest.approx(1e-3 * (trained + 19 * (21 * 500 + 1000)))


def test_the_price_of_an_own_model_is_not_known_in_flops():
    recipe = make_recipe("fgsm", model="mine:build")
    with pytest.raises(UserError, match="built-in model"):
        price(recipe, MINI, "flops")


def point(method, passes, clean, robust):
    numbers = {"passes": passes, "clean": clean, "robust": robust, "interval": (0.0, 1.0)}
    return Point(method=method, options={}, epochs=3, flops=1, images=10, seeds=1, source="here", **numbers)


def test_the_best_point_is_the_most_robust_affordable_one():
    points = [point("a", 10, 0.6, 0.2), point("b", 20, 0.5, 0.3), point("c", 20, 0.55, 0.25), point("d", 90, 0.5, 0.4)]
    costs = [one.passes for one in points]
    assert best_point(points, costs, 50).method == "b"
    assert best_point(points, costs, 19.7).method == "b"  # two percent are allowed: epochs follow from the budget
    assert best_point(points, costs, 50, "clean").method == "c"  # at least 80 % as robust as b
    assert best_point(points, costs, 15).method == "a"
    assert best_point(points, costs, 1000).method == "d"
    assert best_point(points, costs, 1).method == "a"  # the cheapest; its epochs will be fewer


def test_the_front_in_the_package_is_that_of_the_kept_results():
    assert FRONT.read_text() == as_text(make_front())
    for front in load_fronts().values():
        assert front.points
        for one in front.points:
            assert moatlab.parse_method(one.method)
            assert one.interval.low <= one.robust <= one.interval.high


def test_best_within_passes_names_what_was_measured_and_where(moat, alone):
    ended = moat("train", "best", "--budget", "50passes", "--max-steps", 0, "--threads", 1)
    assert ended.code == 0, ended.err
    assert "within 50 passes: nfgsm, 25 epochs, 50 passes" in ended.err
    assert "measured with 21 epochs (42 passes, 3 seeds): clean 39.5 %, AutoAttack 17.5 %" in ended.err
    assert "not measured" not in ended.err
    recipe = tomllib.loads((alone / "runs" / "best_mini_s0" / "recipe.toml").read_text())
    assert (recipe["method"], recipe["epochs"]) == ("nfgsm", 25)


def test_best_for_other_images_says_that_they_were_not_measured_and_resumes(moat, tiny):
    options = ("--data", tiny, "--width", 8, "--batch-size", 16, "--threads", 1, "--out", "run")
    ended = moat("train", "best", "--budget", "8passes", *options, "--prefer", "clean", "--max-steps", 3)
    assert ended.code == 0, ended.err
    assert "not measured for your data, width; moat tune searches for a recipe of your own" in ended.err
    ended = moat("train", "best", "--budget", "999passes", *options, "--resume", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["counted"]["passes"] <= 8


def test_a_budget_run_is_resumed_with_its_own_epochs_whatever_the_preset_says(moat, alone):
    options = ("--preset", "mini", "--width", 8, "--batch-size", 500, "--threads", 1, "--out", "run", "--budget")
    assert moat("train", "fgsm", *options, "4passes", "--max-steps", 3).code == 0
    ended = moat("train", "fgsm", *options, "4passes", "--resume", "--max-steps", 4)
    assert ended.code == 0, ended.err
    assert "epochs = 2" in (alone / "run" / "recipe.toml").read_text()


def test_a_model_in_memory_is_timed_as_it_is_and_left_unchanged(tiny):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    before = [parameter.clone() for parameter in model.parameters()]
    images = find_sizes(str(tiny))
    recipe = draft_recipe("fgsm", data=str(tiny), model="torch.nn:Sequential", batch_size=16)
    assert measured_seconds(recipe, Machine(threads=1), images, model) > 0
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))


def test_what_excludes_a_measured_method_does_not_stop_best():
    """Checks within an epoch are for methods of one stage; moat:2 is a cycle."""
    recipe = recipe_within("60passes", "best", prefer="clean", check_every=50)
    assert len(recipe.parsed_method.slots) == 1


def test_python_needs_a_budget_for_best_too(tiny, tmp_path):
    for options in ({"method": "best"}, {"prefer": "clean"}):
        with pytest.raises(UserError, match='method="best" needs a budget'):
            moatlab.train("preact_resnet18", tiny, out=tmp_path, **options)


def test_a_time_is_measured_and_kept(tiny, tmp_path):
    """How long runs take on a busy machine is not tested; only that measured steps become epochs."""
    run = moatlab.train("preact_resnet18", tiny, method="fgsm", budget="3s", out=tmp_path, width=8, threads=1)
    assert run.record.status == "finished"
    assert run.record.counted["passes"] >= 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["best"], "moat train best needs a budget"),
        (["moat:2", "--prefer", "clean"], "moat train best needs a budget"),
        (["moat:2", "--prefer", "clean", "--budget", "60passes"], "--prefer clean is for moat train best"),
        (["best", "--budget", "60passes", "--epochs", "3"], "--budget decides on the number of epochs"),
        (["moat:2", "--budget", "2passes"], "one cycle of moat:2 (3 epochs) needs 6passes, and 2 passes were given"),
        (["fgsm", "--budget", "1passes"], "one epoch of fgsm needs 2passes"),
        (["fgsm", "--budget", "soon"], "--budget soon: must be a time, passes or FLOPs"),
    ],
)
def test_bad_budgets_are_one_sentence_and_nothing_is_begun(moat, alone, arguments, sentence):
    ended = moat("train", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert sentence in ended.err.splitlines()[-1]
    assert not (alone / "runs").exists()
