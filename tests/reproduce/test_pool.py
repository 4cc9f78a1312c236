"""Runs given to Ray."""

import json
import logging
import os
import signal
import sys
import time

import pytest

from images_for_tests import tiny_images
from moatlab.reproduce.pool import each, machine_for
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import read_json

OPTIONS = ("--width", 8, "--epochs", 3, "--batch-size", 16, "--threads", 1)


def state():
    return dict(os.environ), list(sys.path), logging.getLogger("ray").level, signal.getsignal(signal.SIGTERM)


def compared(moat, data, *options):
    """The rows of a comparison, without times and places."""
    ended = moat("compare", "fgsm", "moat:2", "imoat:1,2,3", "--data", data, *OPTIONS, "--json", *options)
    assert ended.code == 0, ended.err
    return [{**row, "train_seconds": 0, "run": ""} for row in json.loads(ended.out)["rows"]]


def test_a_comparison_on_ray_gives_the_same_numbers_as_without_and_leaves_the_process_as_it_was(moat, alone):
    ray = pytest.importorskip("ray")
    data = tiny_images(alone / "data")
    here, before = compared(moat, data, "--out", "here"), state()
    assert compared(moat, data, "--out", "there", "--on", "ray") == here
    assert state() == before
    assert not ray.is_initialized()


def test_runs_two_at_a_time_give_the_same_numbers_as_one_after_another(moat, alone):
    data = tiny_images(alone / "data")
    assert compared(moat, data, "--out", "there", "--on", 2) == compared(moat, data, "--out", "here")


def test_processes_stop_and_save_their_runs_when_the_one_that_started_them_is_killed(moat_process, alone):
    data = tiny_images(alone / "data")
    methods = ("compare", "fgsm", "fast", "--data", data, "--width", 8, "--batch-size", 16, "--epochs", 4000)
    process = moat_process(*methods, "--out", "runs", "--on", 2)
    records = [alone / "runs" / name / "run.json" for name in ("fgsm", "fast")]
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in records) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    while time.monotonic() < deadline and not all(read_json(path)["status"] == "interrupted" for path in records):
        time.sleep(0.1)
    assert [read_json(path)["status"] for path in records] == ["interrupted"] * 2


def test_runs_at_a_time_share_the_cores(monkeypatch):
    monkeypatch.setattr("moatlab.runtime.distributed.cores", lambda: 8)
    assert machine_for(Machine(), "2") == Machine(threads=4)
    assert machine_for(Machine(), "100") == Machine(threads=1)
    assert machine_for(Machine(threads=3), "2") == Machine(threads=3)
    assert machine_for(Machine(), None) == machine_for(Machine(), "ray") == Machine()


def test_without_ray_it_is_named_and_nothing_is_begun(moat, alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    ending = moat("compare", "fgsm", "fast", "--on", "ray")
    assert (ending.code, ending.out) == (2, "")
    assert 'pip install "moatlab[ray]"' in ending.err
    assert not list(alone.rglob("run.json"))


def test_runs_are_given_to_ray_and_to_nothing_else(moat):
    ending = moat("reproduce", "figure1a", "--preset", "mini", "--on", "slurm")
    assert ending.code == 2
    assert "--on slurm" in ending.err


def test_an_error_of_one_job_is_its_result_and_the_others_continue():
    def work(number):
        if number == 1:
            raise RunFailed("no luck")
        return 10 * number

    results = dict(each(work, [(0,), (1,), (2,)], None, Machine()))
    assert (results[0], str(results[1]), results[2]) == (0, "no luck", 20)
    assert isinstance(results[1], RunFailed)
    with pytest.raises(UserError):
        list(each(work, [(0,)], "nothing", Machine()))
