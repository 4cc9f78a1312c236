"""Trackers get all numbers of a run, and never stop or change it."""

import random
import sys
import threading
import time

import numpy as np
import pytest
import torch

import moatlab
from moatlab.runtime.console import verbosity
from moatlab.runtime.errors import Interrupted, RunFailed, UserError
from moatlab.training import trackers as tracking
from moatlab.training.known_trackers import choose_trackers
from moatlab.training.run_folder import RunFolder
from moatlab.training.trackers import Tracker


class Diary(Tracker):
    """Writes down all calls."""

    def __init__(self):
        self.lines, self.images, self.events, self.starts, self.ends = [], [], [], [], []

    def start(self, folder, recipe, history):
        self.starts.append((folder, recipe, history))

    def epoch(self, line, images):
        self.lines.append(line)
        self.images.append(images)

    def event(self, line):
        self.events.append(line)

    def end(self, record):
        self.ends.append(record)


class Failing(Diary):
    """Raises an error, or hangs, in one of the calls."""

    def __init__(self, where, how):
        super().__init__()
        self.where, self.how, self.calls = where, how, []

    def __getattribute__(self, name):
        if name in ("start", "epoch", "event", "end"):
            self.calls.append(name)
            if name == self.where:
                return self.how
        return super().__getattribute__(name)


@pytest.fixture
def train(tiny, tmp_path):
    def run(name="run", method="moat:2", **options):
        fields = {"preset": "laptop", "width": 8, "batch_size": 16, "holdout": 16, "epochs": 3, "threads": 1, **options}
        return moatlab.train("preact_resnet18", str(tiny), method=method, out=tmp_path / name, **fields)

    return run


def metrics(run):
    """The lines of metrics.jsonl, without the schema number."""
    return [{k: v for k, v in line.items() if k != "schema"} for line in RunFolder(run.folder).read_metrics()]


def weights(run):
    return (run.folder / "model.safetensors").read_bytes()


def test_a_tracker_gets_every_line_of_the_metrics_some_images_and_the_record(train):
    diary = Diary()
    run = train(trackers=[diary])
    ((folder, recipe, history),) = diary.starts
    assert (folder, recipe.method, history) == (run.folder, "moat:2", [])
    assert diary.lines == metrics(run)
    assert all(images["plain"].shape == images["pgd7"].shape == (8, 3, 8, 8) for images in diary.images)
    assert diary.ends == [run.record]
    assert run.record.status == "finished"


def test_a_resumed_run_gives_its_tracker_the_epochs_before_and_sends_each_once(train):
    first, second = Diary(), Diary()
    train(trackers=[first], max_steps=7)
    run = train(trackers=[second], resume=True)
    assert [record.status for record in first.ends + second.ends] == ["stopped", "finished"]
    assert second.starts[0][2] == first.lines
    assert first.lines + second.lines == metrics(run)


def meddle(_, line, images):
    """Everything that a tracker might do to its surroundings."""
    line.clear()
    for batch in images.values():
        batch.zero_()
    torch.manual_seed(1)
    torch.rand(3)
    random.seed(1)
    np.random.seed(1)
    torch.set_grad_enabled(False)


def raise_error(*_):
    raise RuntimeError("the server is\non fire")


def end_the_process(*_):
    sys.exit(3)


def hang(*_):
    time.sleep(60)


@pytest.mark.parametrize(
    ("where", "how", "says"),
    [
        ("start", raise_error, "start failed (RuntimeError: the server is)"),
        ("epoch", raise_error, "epoch failed (RuntimeError: the server is)"),
        ("end", raise_error, "end failed (RuntimeError: the server is)"),
        ("epoch", end_the_process, "epoch failed (SystemExit: 3)"),
        ("start", hang, "start did not return within 1.5 s"),
        ("epoch", hang, "epoch did not return within 1.5 s"),
    ],
)
def test_a_tracker_that_fails_is_left_out_with_one_warning_and_the_run_has_the_same_bits(
    train, monkeypatch, capsys, where, how, says
):
    plain = train("plain", trackers=[])
    failing, diary = Failing(where, how), Diary()
    if how is hang:
        monkeypatch.setattr(tracking, "PATIENCE", 1.5)
        diary = Tracker()  # a busy machine may take longer than that to serve a tracker that works
    with verbosity(True):
        run = train(trackers=[failing, diary])
    assert run.record.status == "finished"
    assert weights(run) == weights(plain)
    assert [line["pgd7"] for line in metrics(run)] == [line["pgd7"] for line in metrics(plain)]
    warnings = [line for line in capsys.readouterr().err.splitlines() if "Failing" in line]
    assert warnings == [f"warning: the tracker Failing is left out from here on: {says}"]
    assert failing.calls.count(where) == 1
    events = [line for line in RunFolder(run.folder).read_events() if "Failing" in line["message"]]
    assert [line["event"] for line in events] == ["tracker left out"]
    if how is not hang:
        assert diary.lines == metrics(run)
        assert [line["event"] for line in diary.events] == ["tracker left out"]
        assert diary.ends == [run.record]


def test_a_tracker_can_not_change_a_run(train, monkeypatch):
    plain = train("plain", trackers=[])
    monkeypatch.setattr(Diary, "epoch", meddle)
    run = train(trackers=[Diary()])
    assert weights(run) == weights(plain)
    assert [line["loss"] for line in metrics(run)] == [line["loss"] for line in metrics(plain)]
    assert run.record.final == plain.record.final
    assert torch.is_grad_enabled()


def test_two_trackers_that_fail_at_the_same_time_are_both_left_out(train):
    first, second = Failing("epoch", raise_error), Failing("event", raise_error)
    run = train(trackers=[first, second])
    assert run.record.status == "finished"
    assert (first.calls, second.calls) == (["start", "epoch"], ["start", "event"])


@pytest.mark.parametrize(
    ("error", "status"), [(Interrupted("SIGTERM", 15), "interrupted"), (RunFailed("no"), "failed")]
)
def test_a_tracker_is_called_at_the_end_of_a_run_that_does_not_finish(train, monkeypatch, error, status):
    def check(_):
        raise error

    diary = Diary()
    monkeypatch.setattr("moatlab.training.trainer.Trainer.check", check)
    with pytest.raises(type(error)):
        train(method="fgsm", trackers=[diary], check_every=6, on_collapse="heal")
    assert [record.status for record in diary.ends] == [status]
    assert len(diary.lines) == 1


def test_a_run_leaves_no_thread_behind(train):
    before = set(threading.enumerate())
    train(trackers=[Diary(), Failing("epoch", raise_error)])
    assert set(threading.enumerate()) <= before


def test_what_is_no_tracker_is_refused_before_the_run(train, tmp_path):
    for given, says in (
        (["tensorbord"], "did you mean tensorboard"),
        ([Diary], "Diary is no tracker"),
        ([len], "len is no tracker"),
    ):
        with pytest.raises(UserError, match=says):
            train(trackers=given)
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_is_not_installed_is_refused_with_the_way_to_install_it(moat, tiny_options, monkeypatch):
    monkeypatch.setattr("moatlab.training.known_trackers.find_spec", lambda _: None)
    ending = moat("train", "fgsm", *tiny_options, "--track", "wandb", "--out", "run")
    assert ending.code == 2
    assert ending.err == 'moat: the tracker wandb is not installed: pip install "moatlab[wandb]"\n'
    assert choose_trackers(None) == []


def test_tensorboard_gets_the_epochs_that_were_trained_without_it(train):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(trackers=[], max_steps=7)
    run = train(trackers=["tensorboard"], resume=True)
    events = accumulator.EventAccumulator(str(run.folder)).Reload()
    for line in metrics(run):
        for name, value in tracking.numbers(line).items():
            (found,) = [one.value for one in events.Scalars(name) if one.step == line["epoch"]]
            assert found == pytest.approx(value)
