"""Processes killed with SIGKILL at random moments, started again, and compared with ones that were left alone."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from faults.commands import outcome_of_run, run, start, without_times

# The shortest runs that reach every stage, and every number of steps, of each method.
METHODS = {"fgsm": 2, "kim": 2, "gradalign": 2, "moat:2": 3, "imoat:1,2,3": 9}
MINI = ("--data", "mini", "--width", 8, "--batch-size", 500, "--holdout", 50, "--threads", 1)
FIXTURE = Path(__file__).parent.parent / "fixtures" / "mini_moat2.safetensors"
EVERY = (0, 1, 600)  # seconds between checkpoints: at every step, at some, at the ends of epochs only


def kill_after_its_first_file(process: Any, first: Path, seconds: float) -> str:
    """SIGKILL some time after `first` appears. Where was it then? `begun`, or `ended` if it was faster."""
    while process.poll() is None and not first.exists():
        time.sleep(0.005)
    time.sleep(seconds)
    ended = process.poll() is not None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return "ended" if ended else "begun"


class TrainingKills:
    """Runs of some methods, undisturbed; then as many that are killed and resumed as one likes."""

    def __init__(self, folder: Path, options: tuple[object, ...] = MINI, methods: dict[str, int] = METHODS) -> None:
        self.folder, self.options, self.epochs = folder, options, methods
        self.expected: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        for method in methods:
            begun = time.monotonic()
            out = folder / "whole" / str(len(self.expected))
            ended = run(folder, *self.command(method, out))
            assert ended.code == 0, ended.err
            self.seconds[method] = time.monotonic() - begun
            self.expected[method] = outcome_of_run(out)

    def command(self, method: str, out: Path) -> tuple[object, ...]:
        return ("train", method, *self.options, "--epochs", self.epochs[method], "--out", out)

    def one(self, number: int, method: str, moment: float, every: int) -> str:
        """`moment` is from 0 (its folder was just made) to 1 (about its end)."""
        out = self.folder / f"killed-{number}"
        command = (*self.command(method, out), "--checkpoint-every", every, "--resume")
        where = kill_after_its_first_file(start(self.folder, *command), out, moment * self.seconds[method])
        lines = (out / "metrics.jsonl").read_bytes().count(b"\n") if (out / "metrics.jsonl").exists() else 0
        ended = run(self.folder, *command)
        assert ended.code == 0, ended.err
        found, expected = outcome_of_run(out), self.expected[method]
        for part, value in expected.items():
            assert found[part] == value, f"{method} killed at {moment:.3f}, {every} s between checkpoints: {part}"
        shutil.rmtree(out)
        return where if where == "ended" else f"after {lines} epochs"


def train(folder: Path, count: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    runs, draws = TrainingKills(folder, **more), random.Random(seed)
    methods = list(runs.epochs)
    jobs = [(n, methods[n % len(methods)], draws.uniform(0, 1), EVERY[n // len(methods) % 3]) for n in range(count)]
    with ThreadPoolExecutor(2) as pool:
        places = Counter(pool.map(lambda job: runs.one(*job), jobs))
    return {"kills": count, "identical": count, "killed": dict(sorted(places.items()))}


def evaluate(folder: Path, count: int, seed: int = 0, images: int = 40) -> dict[str, Any]:
    """The same for `moat eval --attacks aa`: the same card, and the same saved examples, each time."""
    draws, command = random.Random(seed), ("--attacks", "aa", "--n", images, "--save-adversarial")

    def place(name: str) -> Path:
        (folder / name).mkdir()
        return Path(shutil.copy(FIXTURE, folder / name / "model.safetensors"))

    def result(model: Path) -> tuple[Any, bytes, list[str]]:
        card = json.loads(model.with_name("model.safetensors.eval.json").read_text())
        card["subject"].pop("name")
        saved = model.with_name("model.safetensors.eval_adversarial.npz").read_bytes()
        return without_times(card), saved, sorted(path.name for path in model.parent.iterdir())

    begun, whole = time.monotonic(), place("whole")
    assert run(folder, "eval", whole, *command).code == 0
    seconds, expected = time.monotonic() - begun, result(whole)

    def one(number: int) -> str:
        model = place(f"killed-{number}")
        first = model.with_name("model.safetensors.eval.partial")
        where = kill_after_its_first_file(start(folder, "eval", model, *command), first, moments[number] * seconds)
        ended = run(folder, "eval", model, *command)
        assert ended.code == 0, ended.err
        card, saved, files = result(model)
        assert card == expected[0], f"killed at {moments[number]:.3f}"
        assert files == expected[2]
        assert saved_examples(saved) == saved_examples(expected[1])
        return where

    moments = [draws.uniform(0, 1) for _ in range(count)]
    with ThreadPoolExecutor(2) as pool:
        places = Counter(pool.map(one, range(count)))
    return {"kills": count, "identical": count, "killed": dict(places)}


def saved_examples(archive: bytes) -> dict[str, bytes]:
    """By name: a zip archive also holds the time."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        return {name: members.read(name) for name in members.namelist()}
