"""Files that are whole or not there; a disk that fails at any one write; folders for one process at a time."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.commands import moat, outcome_of_run
from faults.fulldisk import OPTIONS
from moatlab.runtime.errors import Damaged, NotWritten, UserError
from moatlab.runtime.files import (
    append_line,
    as_line,
    atomic,
    locked,
    read_json,
    remove_leftovers,
    restore_lines,
    write_json,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda name: name not in ("schema", "checksum")), values, max_size=5))
def test_what_is_written_is_read_back(tmp_path_factory, fields):
    path = tmp_path_factory.mktemp("json") / "file.json"
    write_json(path, fields)
    assert json.dumps(read_json(path)) == json.dumps(fields)


def test_a_change_by_hand_is_noticed(tmp_path):
    write_json(tmp_path / "card.json", {"accuracy": 0.18, "seed": 0})
    (tmp_path / "card.json").write_text((tmp_path / "card.json").read_text().replace("0.18", "0.81"))
    with pytest.raises(Damaged, match=r"card\.json .*checksum"):
        read_json(tmp_path / "card.json")


def test_a_file_that_fails_half_way_leaves_the_one_before_and_nothing_else(tmp_path):
    def write_half():
        with atomic(tmp_path / "file") as file:
            file.write(b"aft")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("before")
    with pytest.raises(
        NotWritten, match=r"file can't be written to the disk at /\S* \(No space left on device, .* MiB free\)"
    ):
        write_half()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "before")]


def test_the_one_before_can_be_kept(tmp_path):
    for content in (b"1", b"2", b"3"):
        with atomic(tmp_path / "new", previous=tmp_path / "old") as file:
            file.write(content)
    assert ((tmp_path / "new").read_bytes(), (tmp_path / "old").read_bytes()) == (b"3", b"2")


def test_what_a_killed_process_left_is_removed_and_no_more(tmp_path):
    for name in (".run.json.17.tmp", ".run.json.4711.tmp", ".other.json.17.tmp", "run.json"):
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path / "run.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.json.17.tmp", "run.json"]


lines = st.lists(st.fixed_dictionaries({"epoch": st.integers(), "loss": st.floats(0, 1)}), max_size=4)


@given(lines, st.binary(max_size=40), st.none() | st.integers(0, 60))
def test_lines_are_restored_whatever_became_of_their_file(tmp_path_factory, wanted, after, cut):
    path = tmp_path_factory.mktemp("lines") / "metrics.jsonl"
    content = b"".join(map(as_line, wanted)) + after
    path.write_bytes(content if cut is None else content[:cut])
    restore_lines(path, wanted)
    assert path.read_bytes() == b"".join(map(as_line, wanted))
    append_line(path, {"epoch": 99})
    assert path.read_bytes().splitlines()[-1] == b'{"schema": 1, "epoch": 99}'


HOLDER = """
import sys, time
from pathlib import Path
from moatlab.runtime.files import locked
with locked(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_for_one_process_and_free_when_that_one_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "mine\n"
    with pytest.raises(UserError, match="another process uses"), locked(tmp_path):
        pass
    process.kill()
    process.communicate()
    with locked(tmp_path):
        pass


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_a_second_training_in_the_same_folder_is_refused_and_changes_nothing(here, tiny):
    command = ("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run", "--resume")
    assert moat(*command, "--max-steps", 3).code == 0
    before = {path: path.read_bytes() for path in (here / "run").iterdir()}
    with locked(here / "run"):
        ended = moat(*command)
    assert ended.code == 2
    assert "another process uses run" in ended.last_line
    assert {path: path.read_bytes() for path in (here / "run").iterdir()} == before


def test_a_second_evaluation_of_the_same_model_is_refused(here, tiny):
    assert moat("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run").code == 0
    (here / "run" / "eval.partial").mkdir()
    with locked(here / "run" / "eval.partial"):
        assert moat("eval", "run", "--attacks", "fgsm").code == 2
    assert moat("eval", "run", "--attacks", "fgsm").code == 0
    assert not (here / "run" / "eval.partial").exists()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert moat("train", "moat:2", "--data", tiny, *OPTIONS, "--out", folder / "run").code == 0
    return outcome_of_run(folder / "run")


class FailingDisk:
    """The n-th time that a file is brought to the disk there is no room; from then on never, or the next time."""

    def __init__(self, monkeypatch, first, forever):
        self.count, self.failures, self.real = 0, 0, os.fsync

        def fsync(handle):
            self.count += stat.S_ISREG(os.fstat(handle).st_mode)
            if self.count == first or (forever and self.count > first):
                self.failures += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.real(handle)

        monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("forever", [True, False])
def test_a_disk_that_is_full_at_any_write_loses_nothing(here, tiny, undisturbed, monkeypatch, forever):
    command, warned = ("train", "moat:2", "--data", tiny, *OPTIONS, "--resume"), 0
    for first in range(1 if forever else 3, 100, 4):  # every fourth; others with the other kind of full disk
        out = here / f"run-{first}"
        with monkeypatch.context() as patch:
            disk = FailingDisk(patch, first, forever)
            ended = moat(*command, "--out", out)
        if not disk.failures:
            break
        assert "Traceback" not in ended.err
        if "no report was written" in ended.err:  # the run itself was done by then
            assert ended.code == 0, (first, ended)
            assert moat(*command, "--out", out).code == 0
            assert (out / "report.html").exists()
        elif forever or ended.code != 0:
            assert ended.code == 1, (first, ended)
            assert "disk at" in ended.last_line, ended
            assert not list(here.rglob("*.tmp"))
            assert moat(*command, "--out", out).code == 0
        warned += "training continues" in ended.err
        found = outcome_of_run(out)
        for part in ("models", "lines"):
            assert found[part] == undisturbed[part], (first, part)
    assert first > 10
    assert warned > 1


def test_a_terminal_that_closes_is_met_with_a_checkpoint(here, tiny):
    command = [sys.executable, "-m", "moatlab", "train", "moat:2", "--data", str(tiny), *map(str, OPTIONS)]
    process = subprocess.Popen(
        [*command, "--epochs", "3000", "--out", "run"], stderr=subprocess.PIPE, text=True, cwd=here,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip
    while not (here / "run" / "run.json").exists():
        assert process.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGHUP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGHUP, err
    assert "nothing is lost" in err
    assert read_json(here / "run" / "run.json")["status"] == "interrupted"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", [("train", "fgsm"), ("compare", "fgsm")])
def test_a_folder_that_cannot_be_written_to_is_named(tiny, command):
    ended = moat(*command, "--data", tiny, *OPTIONS, "--out", "/proc/moat/run")  # not even root may
    assert ended.code == 1
    assert "/proc/moat/run" in ended.last_line
    assert "can't be written to the disk at /proc" in ended.last_line


@pytest.mark.parametrize(("name", "code"), [("checkpoint.pt", 0), ("recipe.toml", 2), ("run.json", 1)])
def test_a_file_that_cannot_be_read_is_named_and_replaced_only_where_it_can_be(here, tiny, name, code):
    """A folder in its place, which not even root can read as a file, or write over."""
    command = ("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run", "--resume")
    assert moat(*command, "--max-steps", 3).code == 0
    (here / "run" / name).unlink()
    (here / "run" / name).mkdir()
    ended = moat(*command)
    assert (ended.code, name in ended.err) == (code, True), ended


def test_output_that_cannot_be_written_is_told_without_a_traceback(here):
    command = [sys.executable, "-m", "moatlab", "plan", "fgsm"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=here, check=False)
    assert (ended.returncode, ended.stderr) == (1, "moat: cannot write output: No space left on device\n")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=here) as process:
        process.stdout.close()  # as `| head -0` does
        assert "Traceback" not in process.stderr.read()
