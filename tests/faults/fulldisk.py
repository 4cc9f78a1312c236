"""A disk that is full: a small file system (tmpfs, for those who may mount one), or a limit on the size of files."""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from faults.commands import Ended, moat, outcome_of_run, without_times
from faults.kills import FIXTURE

OPTIONS = ("--width", 8, "--batch-size", 16, "--threads", 1, "--epochs", 2, "--holdout", 16)


def can_mount(folder: Path) -> bool:
    folder.mkdir(exist_ok=True)
    tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
    return tried.returncode == 0 and subprocess.run(["umount", folder], check=False).returncode == 0


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def small_files(bytes_each: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_each, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class FullDisk:
    """Commands whose files go to `place`, what they come to with room enough, and what is there before they start."""

    def __init__(self, folder: Path, tiny: Path) -> None:
        self.folder, self.tiny = folder, tiny
        self.expected: dict[str, Any] = {}
        for command in ("train", "compare", "eval"):
            place = folder / f"room-{command}"
            self.prepare(place)
            ended = self.run(command, place)
            assert ended.code == 0, ended.err
            self.expected[command] = self.outcome(command, place)
            self.size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
            shutil.rmtree(place)

    def prepare(self, place: Path) -> None:
        """An earlier result, which must outlive whatever happens."""
        place.mkdir(exist_ok=True)
        shutil.copy(FIXTURE, place / "model.safetensors")
        (place / "model.safetensors.eval.json").write_text('{"schema": 1, "an earlier": "card"}')

    def run(self, command: str, place: Path) -> Ended:
        common = ("--data", self.tiny, *OPTIONS, "--resume")
        match command:
            case "train":
                return moat("train", "moat:2", *common, "--checkpoint-every", 0, "--out", place / "run")
            case "compare":
                return moat("compare", "fgsm", "fast", *common, "--out", place / "both")
        chosen = ("--attacks", "fgsm,apgd-ce,apgd-t", "--n", 12, "--save-adversarial")
        return moat("eval", place / "model.safetensors", *chosen)

    def outcome(self, command: str, place: Path) -> Any:
        if command == "train":
            return outcome_of_run(place / "run")
        if command == "compare":
            rows = json.loads((place / "both" / "compare.json").read_text())["rows"]
            return [{name: value for name, value in without_times(row).items() if name != "run"} for row in rows]
        card = json.loads((place / "model.safetensors.eval.json").read_text())
        card["subject"].pop("name")
        return without_times(card)

    def check(self, place: Path, ended: Ended, where: str) -> str:
        """After a full disk: exit code 1 and a sentence that names it; the earlier files are whole."""
        assert "Traceback" not in ended.err, f"{where}: {ended.err}"
        assert (place / "model.safetensors").read_bytes() == FIXTURE.read_bytes(), where
        card = json.loads((place / "model.safetensors.eval.json").read_text())
        assert "an earlier" in card or ended.code == 0, where
        if ended.code == 0:
            return "there was room"
        assert ended.code == 1, f"{where}: {ended}"
        assert "disk at" in ended.last_line, f"{where}: {ended}"
        return "told"

    def check_afterwards(self, command: str, place: Path, where: str) -> None:
        """With room again it goes on, to what comes out of a run that always had room."""
        ended = self.run(command, place)
        assert ended.code == 0, f"{where}: {ended.err}"
        found = self.outcome(command, place)
        expected = self.expected[command]
        if command == "train":  # the events tell of the full disk
            found, expected = ({name: value for name, value in part.items() if name not in ("events", "files")}
                               for part in (found, expected))  # fmt: skip
        assert found == expected, where

    def on_small_disks(self, count: int, seed: int = 0) -> dict[str, Any]:
        """Each command with room for a random part of what it writes; then with more."""
        draws, found = random.Random(seed), Counter[str]()
        for number in range(count):
            command = ("train", "compare", "eval")[number % 3]
            kilobytes = 1000 + int(draws.random() ** 2 * {"train": 4500, "compare": 9000, "eval": 400}[command])
            where = f"{command} with {kilobytes} kB"
            with small_disk(self.folder / "disk", kilobytes) as place:
                self.prepare(place)
                ended = self.run(command, place)
                found[f"{command}: {self.check(place, ended, where)}"] += 1
                subprocess.run(["mount", "-o", "remount,size=100m", place], check=True)
                self.check_afterwards(command, place, where)
        return {"tries": count, **dict(sorted(found.items()))}

    def with_limits(self, limits: dict[str, list[int]]) -> dict[str, Any]:
        """The same by limits on the size of files, which everybody may set."""
        found = Counter[str]()
        for command, sizes in limits.items():
            for size in sizes:
                place, where = self.folder / f"limit-{command}-{size}", f"{command} with files of {size} bytes"
                self.prepare(place)
                with small_files(size):
                    ended = self.run(command, place)
                found[f"{command}: {self.check(place, ended, where)}"] += 1
                self.check_afterwards(command, place, where)
        return dict(found)
