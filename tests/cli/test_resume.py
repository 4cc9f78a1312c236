"""Options beside --resume: repeated, changed, or more epochs."""

import pytest
import torch

import moatlab
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import atomic, read_json
from moatlab.training import checkpoint
from moatlab.training.recipe import load_recipe
from moatlab.training.run_folder import RunFolder


@pytest.fixture
def started(moat, alone, tiny_options):
    """`started("fgsm", "--epochs", 3)`: a run that has taken three steps of its first epoch."""

    def start(*arguments, steps=3):
        assert moat("train", *arguments, *tiny_options, "--max-steps", steps, "--out", "run").code == 0
        return alone / "run"

    return start


def test_options_that_were_not_typed_are_taken_from_the_run(moat, started):
    run = started("moat:2", "--epochs", 3, "--seed", 5, "--lr", 0.05)
    ended = moat("train", "moat:2", "--resume", "--out", "run", "--max-steps", 4)  # as if the rest were forgotten
    assert ended.code == 0, ended.err
    ended = moat("train", "--resume", "--out", "run", "--seed", 5, "--lr", 0.05, "--max-steps", 5)
    assert ended.code == 0, ended.err
    assert read_json(run / "run.json")["steps_done"] == 5


def test_every_typed_option_that_differs_is_named_and_no_other(refuses, started):
    started("fgsm", "--epochs", 3, "--seed", 5)
    err = refuses(
        "train", "pgd:2", "--resume", "--out", "run", "--lr", 0.3, "--seed", 5, "--no-augment",
        says="was started with method = fgsm, not pgd:2, lr = 0.2, not 0.3, augment = True, not False; leave these out",
    )  # fmt: skip
    assert "seed" not in err
    assert "epochs" not in err


def test_a_preset_beside_resume_means_its_settings(moat, refuses, started):
    started("fgsm", "--preset", "laptop", "--epochs", 3, "--holdout", 0)
    arguments = ("train", "--resume", "--out", "run", "--max-steps", 4, "--preset", "laptop")
    refuses(*arguments, "--epochs", 3, says="holdout = 0, not 1000")
    same = ("--epochs", 3, "--holdout", 0, "--width", 8, "--batch-size", 16)
    refuses(*arguments, *same, says="data = ")
    assert moat(*arguments, *same, "--data", load_recipe(RunFolder("run").recipe).data).code == 0


def test_a_run_gets_more_epochs_while_the_rates_of_its_steps_stay_as_they_were(moat, alone, started, tiny_options):
    started("fgsm", "--epochs", 10, "--schedule", "stepwise", steps=12)  # in the third epoch; rates drop at the fourth
    ended = moat("train", "--resume", "--out", "run", "--epochs", 12, "--max-steps", 14)
    assert ended.code == 0, ended.err
    assert "12 epochs now, not 10" in ended.err
    assert load_recipe(alone / "run" / "recipe.toml").epochs == 12
    assert moat("train", "--resume", "--out", "run").code == 0
    command = ("train", "fgsm", *tiny_options, "--schedule", "stepwise", "--epochs", 12, "--out", "whole")
    assert moat(*command).code == 0
    run, whole = (moatlab.load(alone / name) for name in ("run", "whole"))
    assert all(torch.equal(a, b) for a, b in zip(run.parameters(), whole.parameters(), strict=True))
    assert read_json(alone / "run" / "run.json")["recipe"] == read_json(alone / "whole" / "run.json")["recipe"]


def test_a_finished_run_gets_more_epochs_too(moat, alone, started):
    started("fgsm", "--epochs", 1, "--schedule", "stepwise", steps=5)
    assert read_json(alone / "run" / "run.json")["status"] == "finished"
    ended = moat("train", "--resume", "--out", "run", "--epochs", 2)
    assert ended.code == 0, ended.err
    record = read_json(alone / "run" / "run.json")
    assert (record["status"], record["steps_done"], record["epochs"]) == ("finished", 10, 2)
    assert [line["epoch"] for line in RunFolder(alone / "run").read_metrics()] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (("fgsm", "--schedule", "cyclic", "--epochs", 2), 3),
        (("fgsm", "--schedule", "stepwise", "--epochs", 2), 10),
        (("pgd:1>2", "--schedule", "stepwise", "--epochs", 2), 6),
    ],
)
def test_more_epochs_are_refused_where_they_would_have_changed_a_step(moat, alone, started, arguments, steps):
    started(*arguments, steps=steps)
    before = {path: path.read_bytes() for path in (alone / "run").iterdir() if path.name != "events.out"}
    ended = moat("train", "--resume", "--out", "run", "--epochs", 20)
    assert ended.code == 2
    assert "can't have 20 epochs" in ended.err
    assert "--init run" in ended.err
    assert {path: path.read_bytes() for path in before} == before


def test_a_process_that_ends_between_checkpoint_and_recipe_loses_nothing(moat, alone, started):
    started("fgsm", "--epochs", 10, "--schedule", "stepwise")
    more = ("train", "--resume", "--out", "run", "--epochs", 12, "--max-steps", 4)

    def unless_recipe(path, **options):
        if path.name == "recipe.toml":
            raise RunFailed("killed")
        return atomic(path, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "atomic", unless_recipe)
        assert moat(*more).code == 1
    assert load_recipe(alone / "run" / "recipe.toml").epochs == 10
    ended = moat(*more)
    assert ended.code == 0, ended.err
    assert "resuming run at step 3 of 60" in ended.err


def test_a_comparison_that_is_resumed_keeps_its_settings_for_runs_that_are_not_begun(moat, alone, tiny_options):
    assert moat("train", "fgsm", *tiny_options, "--seed", 3, "--epochs", 1, "--out", "both/fgsm").code == 0
    ended = moat("compare", "fgsm", "standard", "--resume", "--out", "both", "--threads", 1)
    assert ended.code == 0, ended.err
    recipes = [load_recipe(alone / "both" / name / "recipe.toml") for name in ("fgsm", "standard")]
    assert recipes[1].model_copy(update={"method": "fgsm"}) == recipes[0]


def test_python_resumes_with_the_settings_of_the_run(tiny, tmp_path):
    options = {"method": "fgsm", "width": 8, "batch_size": 16, "threads": 1, "out": tmp_path / "run"}
    moatlab.train("preact_resnet18", str(tiny), epochs=2, seed=4, max_steps=1, **options)
    run = moatlab.train("preact_resnet18", str(tiny), resume=True, max_steps=2, out=tmp_path / "run")
    assert run.record.steps_done == 2
    with pytest.raises(UserError, match="batch-size = 16, not 8, seed = 4, not 5"):
        moatlab.train("preact_resnet18", str(tiny), resume=True, seed=5, **options | {"batch_size": 8})
