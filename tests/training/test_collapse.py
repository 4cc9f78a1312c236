"""What a run does when robustness collapses: real runs on `tiny`, with accuracies told to the monitor by the test."""

import json

import pytest
import torch

import moatlab
from moatlab.methods.language import parse_method
from moatlab.runtime.errors import NotWritten, RunFailed
from moatlab.runtime.files import read_json
from moatlab.training import trainer
from moatlab.training.api import train_recipe as train
from moatlab.training.making import make_recipe
from moatlab.training.run_folder import RunFolder

GOOD, LOST = {"fgsm": 0.30, "pgd7": 0.28, "alignment": 0.9}, {"fgsm": 0.60, "pgd7": 0.01, "alignment": 0.05}


@pytest.fixture
def told(monkeypatch):
    """`told(GOOD, LOST, ...)`: what the monitor measures after the first epoch, the second, ...; then the truth."""

    def tell(*course):
        real, watched = trainer.measure, []

        def measure(model, x, y, **more):
            found = real(model, x, y, **more)
            if len(y) == 16:  # the held-out images; the test images are measured as they are
                found |= dict(watched.pop(0)) if watched else {}
            return found

        watched += course
        monkeypatch.setattr(trainer, "measure", measure)

    return tell


@pytest.fixture
def small(tiny):
    def recipe(method="fgsm", **options):
        fields = {
            "precision": "fp32",
            "data": str(tiny),
            "width": 8,
            "epochs": 6,
            "batch_size": 32,
            "holdout": 16,
            "lr": 0.05,
        }
        return make_recipe(method, preset="laptop", **(fields | options))

    return recipe


def bits(folder, name="model.safetensors"):
    return (folder / name).read_bytes()


def events(folder):
    return [(event["event"], event.get("epoch")) for event in RunFolder(folder).read_events()]


def stages(folder):
    return [line["stage"] for line in RunFolder(folder).read_metrics()]


@pytest.mark.usefixtures("aloud")
def test_warn_tells_of_it_once_and_changes_no_bit(small, told, tmp_path, capsys):
    train(small(), tmp_path / "plain")
    told(GOOD, GOOD, LOST, LOST, LOST, LOST)
    record = train(small(), tmp_path / "run")
    assert events(tmp_path / "run") == [("collapse", 3)]
    assert record.alarms == [3]
    assert record.collapsed_at == 3
    assert bits(tmp_path / "run") == bits(tmp_path / "plain")
    err = capsys.readouterr().err
    assert err.count("robustness collapsed") == 1
    assert "collapsed at epoch 3: pgd7 1.0 % (best 28.0 %), fgsm 60.0 %, alignment 0.05" in err


def test_robustness_that_comes_back_is_told_too_and_may_be_lost_again(small, told, tmp_path):
    told(GOOD, LOST, GOOD, GOOD, LOST, LOST)
    record = train(small(), tmp_path / "run")
    assert events(tmp_path / "run") == [("collapse", 2), ("recovered", 3), ("collapse", 5)]
    assert record.alarms == [2, 5]


def test_stop_ends_the_run_with_the_last_good_epoch(small, told, tmp_path):
    told(GOOD, GOOD)
    train(small(), tmp_path / "until", max_steps=4)
    told(GOOD, GOOD, LOST)
    record = train(small(on_collapse="stop"), tmp_path / "run")
    assert (record.status, record.kept_epoch, record.steps_done) == ("finished", 2, 6)
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 3
    until, kept = moatlab.load(tmp_path / "until"), moatlab.load(tmp_path / "run")
    assert all(torch.equal(a, b) for a, b in zip(until.parameters(), kept.parameters(), strict=True))
    images = moatlab.load_images(record.setting.split(",")[0])
    measured = moatlab.measure(kept, images.test_x, images.test_y, eps=8 / 255, seed=0)
    assert record.final["pgd7"] == pytest.approx(measured["pgd7"], abs=0.051)
    assert train(small(on_collapse="stop"), tmp_path / "run", resume=True).status == "finished"


def test_rollback_goes_on_from_the_last_good_epoch_by_another_method(small, told, tmp_path):
    told(GOOD, GOOD, LOST, GOOD, GOOD, GOOD)
    record = train(small(on_collapse="rollback", then="pgd:3"), tmp_path / "run")
    assert stages(tmp_path / "run") == ["fgsm"] * 3 + ["pgd:3"] * 3
    assert events(tmp_path / "run") == [("collapse", 3)]
    assert record.steps_done == 12
    assert record.kept_epoch is None
    # The rate runs on; the weights of the third epoch are gone: one epoch of pgd:3 from those of the second.
    rates = [line["lr"] for line in RunFolder(tmp_path / "run").read_metrics()]
    told(*[GOOD] * 6)
    train(small(), tmp_path / "plain")
    assert rates == [line["lr"] for line in RunFolder(tmp_path / "plain").read_metrics()]


def test_after_a_rollback_the_weights_are_those_of_the_good_epoch_and_the_momentum_rests(small, told, tmp_path):
    told(GOOD, GOOD, LOST)
    train(small(on_collapse="rollback"), tmp_path / "run", max_steps=6)
    content = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    told(GOOD, GOOD)
    train(small(), tmp_path / "until", max_steps=4)
    good = moatlab.load(tmp_path / "until").state_dict()
    assert all(torch.equal(tensor, good[name]) for name, tensor in content["model"].items())
    assert all(not buffer.any() for tensors in content["optimizer"] for buffer in tensors)


def test_heal_trains_multi_step_until_it_is_back_and_counts_that_apart(small, told, tmp_path):
    told(GOOD, LOST, LOST, GOOD, GOOD, GOOD)
    record = train(small(on_collapse="heal", then="pgd:4"), tmp_path / "run")
    assert stages(tmp_path / "run") == ["fgsm", "fgsm", "pgd:4", "pgd:4", "fgsm", "fgsm"]
    assert events(tmp_path / "run") == [("collapse", 2), ("recovered", 4)]
    for kind, planned in record.planned.items():
        assert record.counted[kind] == planned + record.healing[kind]
    assert record.healing["passes"] == 2 * (5 - 2)
    assert record.planned == json.loads((tmp_path / "run" / "run.json").read_text())["planned"]


def test_a_second_collapse_is_healed_to_the_end(small, told, tmp_path):
    told(GOOD, LOST, GOOD, LOST, GOOD, GOOD)
    train(small(on_collapse="heal"), tmp_path / "run")
    assert stages(tmp_path / "run") == ["fgsm", "fgsm", "pgd:2", "fgsm", "pgd:2", "pgd:2"]


@pytest.mark.parametrize("policy", ["stop", "rollback", "heal"])
def test_a_collapse_in_the_last_epoch_leaves_the_last_good_one(small, told, tmp_path, policy):
    told(GOOD, GOOD, GOOD, GOOD, GOOD, LOST)
    record = train(small(on_collapse=policy), tmp_path / "run")
    assert (record.status, record.kept_epoch) == ("finished", 5)
    told(*[GOOD] * 5)
    train(small(), tmp_path / "until", max_steps=10)
    kept, good = (moatlab.load(tmp_path / name).state_dict() for name in ("run", "until"))
    assert all(torch.equal(tensor, good[name]) for name, tensor in kept.items())


def test_healing_that_has_not_succeeded_by_the_end_leaves_the_last_good_epoch(small, told, tmp_path):
    told(GOOD, GOOD, GOOD, GOOD, LOST, LOST)
    record = train(small(on_collapse="heal"), tmp_path / "run")
    assert (record.alarms, record.kept_epoch) == ([5], 4)
    assert [event["action"] for event in RunFolder(tmp_path / "run").read_events()] == ["heal", "heal"]


def test_without_momentum_there_is_none_to_rest(small, told, tmp_path):
    told(GOOD, LOST, GOOD)
    assert train(small(momentum=0, on_collapse="rollback", epochs=3), tmp_path / "run").status == "finished"


def test_a_checkpoint_that_could_not_be_written_does_not_change_what_a_rollback_goes_back_to(
    small, told, tmp_path, monkeypatch
):
    course = (GOOD, GOOD, LOST, GOOD, GOOD, GOOD)
    told(*course)
    train(small(on_collapse="rollback"), tmp_path / "whole")
    told(*course)
    train(small(on_collapse="rollback"), tmp_path / "run", max_steps=4)
    with monkeypatch.context() as full:

        def keep(*_arguments):
            raise NotWritten("the disk at / is full")

        full.setattr("moatlab.training.saving.save_checkpoint", keep)
        told(*course[2:])
        with pytest.raises(RunFailed):
            train(small(on_collapse="rollback"), tmp_path / "run", resume=True)
    told(*course[2:])
    train(small(on_collapse="rollback"), tmp_path / "run", resume=True)
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")


def test_the_dips_within_a_cycle_are_no_collapse(small, told, tmp_path):
    told(LOST, LOST, GOOD, LOST, LOST, GOOD)
    record = train(small("moat:2", on_collapse="stop"), tmp_path / "run")
    assert events(tmp_path / "run") == []
    assert record.collapsed_at is None


def test_healing_epochs_within_a_cycle_are_comparable(small, told, tmp_path):
    told(LOST, LOST, GOOD, LOST, LOST, LOST, LOST, GOOD, GOOD)
    record = train(small("moat:2", epochs=9, on_collapse="heal"), tmp_path / "run")
    assert stages(tmp_path / "run") == ["mixup", "fast", "pgd:2", "mixup", "fast", "pgd:2", "pgd:2", "pgd:2", "pgd:2"]
    assert events(tmp_path / "run") == [("collapse", 6), ("recovered", 8)]
    assert record.counted["passes"] == record.planned["passes"] + record.healing["passes"]
    assert parse_method("moat:2").cost(9).passes == record.planned["passes"]


@pytest.mark.parametrize("policy", ["warn", "stop", "rollback", "heal"])
@pytest.mark.parametrize("stops", [[2, 3, 4, 5, 6, 7, 9]])
def test_a_run_that_is_stopped_around_a_collapse_and_resumed_ends_with_the_same_bits(
    small, told, tmp_path, policy, stops
):
    course = (GOOD, LOST, GOOD, LOST, GOOD, GOOD)
    told(*course)
    whole = train(small(on_collapse=policy), tmp_path / "whole")
    for stop in (*stops, None):
        done = len(RunFolder(tmp_path / "run").read_metrics()) if (tmp_path / "run").exists() else 0
        told(*course[done:])
        record = train(small(on_collapse=policy), tmp_path / "run", resume=True, max_steps=stop)
    assert record.status == "finished"
    assert bits(tmp_path / "run") == bits(tmp_path / "whole")
    assert (tmp_path / "run" / "events.jsonl").read_text() == (tmp_path / "whole" / "events.jsonl").read_text()
    kept = ("alarms", "kept_epoch", "healing", "counted", "final", "best", "collapsed_at")
    records = [read_json(tmp_path / name / "run.json") for name in ("run", "whole")]
    resumed, undisturbed = ({name: record[name] for name in kept} for record in records)
    assert resumed == undisturbed
    assert whole.alarms == record.alarms
