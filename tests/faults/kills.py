"""Processes killed with SIGKILL at random moments, again and again, and compared with ones that were left alone."""

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
EVERY = (1, 600)  # seconds between checkpoints: within epochs, and at their ends only


def live_and_die(process: Any, sign: Path, seconds: float) -> bool:
    """SIGKILL some time after the process has written `sign`. Did it come to that, or was the process faster?"""
    before = sign.stat().st_mtime_ns if sign.exists() else 0
    while process.poll() is None and (not sign.exists() or sign.stat().st_mtime_ns == before):
        time.sleep(0.01)
    time.sleep(seconds)
    killed = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return killed


class Training:
    """Runs of some methods, undisturbed; and such that are killed again and again, resumed each time, and compared."""

    def __init__(self, folder: Path, options: tuple[object, ...], methods: dict[str, int]) -> None:
        self.folder, self.options, self.epochs = folder, options, methods
        self.expected: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

        def undisturbed(method: str) -> None:
            begun, out = time.monotonic(), folder / f"whole-{list(methods).index(method)}"
            ended = run(folder, *self.command(method, out))
            assert ended.code == 0, ended.err
            self.expected[method], self.seconds[method] = outcome_of_run(out), time.monotonic() - begun

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(undisturbed, methods))

    def command(self, method: str, out: Path) -> tuple[object, ...]:
        return ("train", method, *self.options, "--epochs", self.epochs[method], "--out", out)

    def chain(self, number: int, method: str, every: int, kills: int, seed: int) -> Counter[str]:
        """One run that is killed up to `kills` times, at random moments."""
        out, draws, found = self.folder / f"killed-{number}", random.Random(f"{seed} {number}"), Counter[str]()
        command = (*self.command(method, out), "--checkpoint-every", every, "--resume")
        where = f"{method}, {every} s between checkpoints, chain {number}"
        expected = self.expected[method]
        for _ in range(kills):
            life = draws.uniform(0, 2 * self.seconds[method] / kills)
            if not live_and_die(start(self.folder, *command), out / "run.json", life):
                break
            found["kills"] += 1
            # What is on the disk is the beginning of what it should become; a last line may be torn.
            lines = (out / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
            done = [without_times(json.loads(line)) for line in lines]
            assert done == expected["lines"][: len(done)], where
            found[f"after {len(done)} epochs"] += 1
        ended = run(self.folder, *command)
        assert ended.code == 0, f"{where}: {ended.err}"
        outcome = outcome_of_run(out)
        for part, value in expected.items():
            assert outcome[part] == value, f"{where}: {part}"
        shutil.rmtree(out)
        return found


def train(
    folder: Path, kills: int, *, chains: int = 1, options: tuple[object, ...] = MINI, methods: dict[str, int] = METHODS,
    every: tuple[int, ...] = EVERY, seed: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """`chains` runs for each method and time between checkpoints, each killed `kills` times."""
    runs = Training(folder, options, methods)
    jobs = [(method, seconds) for seconds in every for method in methods for _ in range(chains)]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda job: runs.chain(job[0], *job[1], kills, seed), enumerate(jobs))
        places = sum(found, Counter[str]())
    return {"runs": len(jobs), "identical": len(jobs), **dict(sorted(places.items()))}


def evaluate(folder: Path, chains: int, kills: int, *, seed: int = 0, images: int = 30) -> dict[str, Any]:
    """The same for `moat eval --attacks aa`: the same card, and the same saved examples, each time."""
    command = ("--attacks", "aa", "--n", images, "--save-adversarial")

    def place(name: str) -> Path:
        (folder / name).mkdir()
        return Path(shutil.copy(FIXTURE, folder / name / "model.safetensors"))

    def result(model: Path) -> tuple[Any, dict[str, bytes], list[str]]:
        card = json.loads(model.with_name("model.safetensors.eval.json").read_text())
        card["subject"].pop("name")
        saved = model.with_name("model.safetensors.eval_adversarial.npz").read_bytes()
        return without_times(card), saved_examples(saved), sorted(path.name for path in model.parent.iterdir())

    begun, whole = time.monotonic(), place("whole")
    assert run(folder, "eval", whole, *command).code == 0
    seconds, expected = time.monotonic() - begun, result(whole)

    def chain(number: int) -> Counter[str]:
        model, draws, found = place(f"killed-{number}"), random.Random(f"{seed} {number}"), Counter[str]()
        sign = model.with_name("model.safetensors.eval.partial")
        for _ in range(kills):
            if not live_and_die(start(folder, "eval", model, *command), sign, draws.uniform(0, 2 * seconds / kills)):
                break
            found["kills"] += 1
        ended = run(folder, "eval", model, *command)
        assert ended.code == 0, ended.err
        assert result(model) == expected, f"chain {number}"
        return found

    with ThreadPoolExecutor(2) as pool:
        found = sum(pool.map(chain, range(chains)), Counter[str]())
    return {"evaluations": chains, "identical": chains, **found}


def saved_examples(archive: bytes) -> dict[str, bytes]:
    """By name: a zip archive also holds the time."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        return {name: members.read(name) for name in members.namelist()}
