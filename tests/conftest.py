"""The command line inside this process, away from the user's files; and a data set that trains in a moment."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import settings

from images_for_tests import tiny_images
from moatlab.cli import main
from moatlab.runtime.console import verbosity

# Tests run side by side, each worker on a core of its own (torch is not imported yet, and will use one thread): two
# that share cores by threads would wait for each other.
worker = os.environ.get("PYTEST_XDIST_WORKER")
if worker and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

settings.register_profile("no hurry", deadline=None)  # another process may be using the machine
settings.load_profile("no hurry")


class Ended(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty current folder, an empty cache, no data of the user's, and no npm to fetch some with."""
    nothing = tmp_path / "bin"
    nothing.mkdir()
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(nothing))
    monkeypatch.delenv("MOAT_DATA", raising=False)
    return here


@pytest.fixture
def aloud():
    """The library prints its notes and warnings, as it does where a person watches."""
    with verbosity(True):
        yield


@pytest.fixture
def portrait_steps():
    """Of the attack on a portrait, which would take most of the time of a short run; tests/report has more."""
    return 2


@pytest.fixture
def moat(portrait_steps, alone, monkeypatch, capsys):
    """`moat("plan", "moat:2")` runs the command in this process and returns its exit code, stdout and stderr."""
    monkeypatch.setattr("moatlab.report.portrait.STEPS", portrait_steps)

    def run(*arguments: object) -> Ended:
        modules = set(sys.modules)
        capsys.readouterr()
        try:
            with monkeypatch.context() as patched:
                patched.setattr(sys, "argv", ["moat", *map(str, arguments)])
                patched.setattr(sys, "path", [*sys.path])
                importlib.invalidate_caches()
                with pytest.raises(SystemExit) as ending:
                    main.run()
        finally:  # a model of this test must not be the next test's
            for name in set(sys.modules) - modules:
                if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(alone):
                    del sys.modules[name]
        captured = capsys.readouterr()
        return Ended(ending.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def moat_process(alone):
    """The same as a process of its own, the way a shell starts it."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "moatlab", *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=alone, env=os.environ.copy(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


@pytest.fixture(scope="module")
def browser():
    """Chromium, where it is installed; `make test-browser` insists on it. Left open to the end of a whole
    session it was seen to hang when it was closed, so each module closes its own."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chromium and os.environ.get("MOAT_BROWSER") != "required":
        pytest.skip("no Chromium here")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Two classes of 8x8 images, dark and bright: 40 of each to train on and 10 of each to test."""
    return tiny_images(tmp_path_factory.mktemp("data") / "tiny")


@pytest.fixture(scope="session")
def tiny_options(tiny):
    """Options of a run that trains 5 steps an epoch, each in milliseconds."""
    return ("--data", tiny, "--width", 8, "--batch-size", 16, "--holdout", 0, "--threads", 1)
