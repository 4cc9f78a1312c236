"""The short form of `make soak`."""

import pytest

from faults import fuzz, kills
from faults.corruption import Corruption
from faults.fulldisk import FullDisk


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MOAT_DATA", raising=False)


def test_runs_that_are_killed_at_random_moments_and_resumed_are_byte_identical(tmp_path, tiny):
    options = ("--data", tiny, "--width", 8, "--batch-size", 8, "--threads", 1, "--holdout", 16)
    figures = kills.train(tmp_path, 2, options=options, methods={"moat:2": 3}, every=(0,))
    assert figures["identical"] == 1


def test_a_damaged_file_is_told_of_or_does_no_harm(tmp_path, tiny):
    figures = Corruption(tmp_path / "files", tiny).many(12, seed=1)
    assert figures["told"] > 4
    assert figures["wrong"] == 0


def test_any_command_line_is_done_or_refused():
    figures = fuzz.in_process(150)
    assert figures["exit code 0"] > 4
    assert figures["exit code 2"] > 50


def test_any_command_line_is_done_or_refused_as_a_process_too(tmp_path):
    fuzz.as_processes(tmp_path, 6)


def test_a_full_disk_is_named_and_loses_nothing(tmp_path, tiny):
    disk = FullDisk(tmp_path, tiny)
    # nothing fits; metrics fit and no model does; the model fits and no checkpoint does
    limits = {"train": [0, 4000, 800_000], "compare": [20_000], "eval": [100, 9000]}
    figures = disk.with_limits(limits)
    assert figures == {"train: told": 3, "compare: told": 1, "eval: told": 2}
