"""`moat` as faults are tried on it: in this process or in one of its own, with nothing of the user's in reach."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from moatlab.cli import main

TIMES = ("train_seconds", "monitor_seconds", "seconds")


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.splitlines() or [""])[-1]


def moat(*arguments: object) -> Ended:
    """A command in this process. Whatever is raised beside its exit code comes out, as a traceback would."""
    out, err = io.StringIO(), io.StringIO()
    argv, path = ["moat", *map(str, arguments)], [*sys.path]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(sys, "path", path))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            main.run()
        except SystemExit as ending:
            return Ended(ending.code, out.getvalue(), err.getvalue())
    raise AssertionError("the command did not end")


def start(folder: Path, *arguments: object, **more: Any) -> subprocess.Popen[str]:
    """A command as a process of its own, in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "MOAT_DATA"}
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "moatlab", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=environment, **(pipes | more))


def run(folder: Path, *arguments: object, **more: Any) -> Ended:
    process = start(folder, *arguments, **more)
    out, err = process.communicate(timeout=600)
    return Ended(process.returncode, out, err)


def without_times(value: Any) -> Any:
    """Seconds differ from run to run, and with them checksums; the machine may; nothing else does."""
    if isinstance(value, dict):
        left_out = (*TIMES, "checksum", "metrics", "environment")
        return {name: without_times(part) for name, part in value.items() if name not in left_out}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def outcome_of_run(folder: Path) -> dict[str, Any]:
    """All that a finished run leaves which must not depend on what happened on the way."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    models = {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}
    files = sorted(path.name for path in folder.iterdir() if "tfevents" not in path.name)
    record = json.loads((folder / "run.json").read_text())
    return {
        "models": models, "lines": without_times(lines), "record": without_times(record), "files": files,
        "events": (folder / "events.jsonl").read_text(),
    }  # fmt: skip
