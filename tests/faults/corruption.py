"""Files torn, flipped, cut, swapped: what reads them must say so in a sentence, or answer as if nothing were wrong."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from faults.commands import Ended, moat, without_times

OPTIONS = ("--width", 8, "--batch-size", 16, "--threads", 1, "--epochs", 2, "--holdout", 16)


def damage(content: bytes, other: bytes, draws: random.Random) -> tuple[str, bytes]:
    """The content of a file after one of the things that happen to files. `other` is a file of the same kind."""
    kinds = ["bit flipped", "bytes changed", "cut", "torn", "longer", "block of zeros", "swapped", "emptied"]
    kind = draws.choices(kinds, weights=[6, 3, 3, 2, 1, 2, 2, 0.3])[0]
    place = draws.randrange(len(content))
    if draws.random() < 0.5:  # where the structure of most formats is
        place = draws.choice([place % min(len(content), 600), len(content) - 1 - place % min(len(content), 200)])
    changed = bytearray(content)
    match kind:
        case "bit flipped":
            changed[place] ^= 1 << draws.randrange(8)
        case "bytes changed":
            for _ in range(draws.randrange(1, 20)):
                changed[draws.randrange(len(content))] = draws.randrange(256)
        case "cut":
            del changed[place:]
        case "torn":  # the length was written, the rest was not
            changed[place:] = bytes(len(content) - place)
        case "longer":
            changed += draws.randbytes(draws.randrange(1, 5000))
        case "block of zeros":
            changed[place : place + 512] = bytes(len(changed[place : place + 512]))
        case "swapped":
            changed = bytearray(other)
        case "emptied":
            changed = bytearray()
    return kind, bytes(changed)


class Target:
    """A file, a command that reads it, and what that command says of the file as it was written."""

    def __init__(self, name: str, file: str, other: bytes, command: Callable[[Path], Ended], result: Any) -> None:
        self.name, self.file, self.other, self.command, self.result = name, file, other, command, result


class Corruption:
    """A folder with one of each kind of file, of which a copy is damaged again and again."""

    def __init__(self, folder: Path, tiny: Path) -> None:
        self.folder, self.whole, self.tiny = folder, folder / "whole", tiny
        self.whole.mkdir(parents=True)
        self.write_cifar(self.whole / "cifar-10-batches-bin", self.whole / "pickled")
        runs = {
            "stopped": (0, 7), "other": (1, 7), "finished": (0, None),
        }  # fmt: skip
        for name, (seed, steps) in runs.items():
            more = ("--seed", seed, *(("--max-steps", steps) if steps else ()))
            ended = moat("train", "moat:2", "--data", tiny, *OPTIONS, *more, "--out", self.whole / name)
            assert ended.code == 0, ended.err
        for name in ("binary", "pickled"):
            ended = moat(*self.train_on(self.whole, name), "--max-steps", 1)
            assert ended.code == 0, ended.err
        shutil.copytree(self.whole / "finished", self.whole / "evaluated")
        self.attacks = ("--attacks", "clean,pgd7,apgd-ce", "--eps", "16/255")
        assert moat("eval", self.whole / "evaluated", *self.attacks, "--save-adversarial").code == 0
        self.targets = list(self.make_targets())

    def write_cifar(self, binary: Path, pickled: Path) -> None:
        draws = np.random.default_rng(0)
        binary.mkdir()
        pickled.mkdir()
        for stem in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
            pixels, labels = draws.integers(0, 256, (20, 3072), np.uint8), draws.integers(0, 10, 20)
            records = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
            (binary / f"{stem}.bin").write_bytes(records.tobytes())
            content = {b"data": pixels, b"labels": labels.tolist()}
            (pickled / stem).write_bytes(pickle.dumps(content, protocol=2))

    def train_on(self, folder: Path, layout: str) -> tuple[object, ...]:
        data = folder / {"binary": "cifar-10-batches-bin", "pickled": "pickled"}[layout]
        return (
            "train", "standard", "--data", "cifar10", "--data-dir", data, "--width", 8, "--batch-size", 50,
            "--holdout", 0, "--threads", 1, "--epochs", 1, "--out", folder / f"run-{layout}", "--resume",
        )  # fmt: skip

    def make_targets(self) -> Any:
        def resume(folder: Path) -> Ended:
            return moat("train", "moat:2", "--data", self.tiny, *OPTIONS, "--out", folder / "stopped", "--resume")

        def by_recipe(folder: Path) -> Ended:
            run = folder / "stopped"
            return moat("train", "--recipe", run / "recipe.toml", "--out", run, "--resume")

        def evaluate(folder: Path) -> Ended:
            return moat("eval", folder / "finished", *self.attacks)

        def verify(folder: Path) -> Ended:
            return moat("verify", folder / "evaluated" / "eval.json", "--json")

        def trained(folder: Path) -> Any:
            run = folder / "stopped"
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            record = json.loads((run / "run.json").read_text())
            return (run / "model.safetensors").read_bytes(), without_times(lines), without_times(record)

        def card(folder: Path) -> Any:
            card = json.loads((folder / "finished" / "eval.json").read_text())
            card["subject"].pop("name")
            return without_times(card)

        def model(layout: str) -> Callable[[Path], Any]:
            return lambda folder: (folder / f"run-{layout}" / "model.safetensors").read_bytes()

        def other(file: str) -> bytes:
            return (self.whole / "other" / Path(file).name).read_bytes()

        for name in ("checkpoint.pt", "checkpoint_previous.pt", "run.json", "metrics.jsonl"):
            file = f"stopped/{name}"
            yield Target(name, file, other(file), resume, trained)
        yield Target("recipe.toml", "stopped/recipe.toml", other("recipe.toml"), by_recipe, trained)
        file = "finished/model.safetensors"
        yield Target("model.safetensors", file, other(file), evaluate, card)
        cards = (self.whole / "evaluated" / "eval.json").read_bytes()
        yield Target("eval.json", "evaluated/eval.json", cards.replace(b"16/255", b"8/255"), verify, None)
        saved = (self.whole / "evaluated" / "eval_adversarial.npz").read_bytes()
        yield Target("eval_adversarial.npz", "evaluated/eval_adversarial.npz", saved[: len(saved) // 2], verify, None)
        for layout, suffix in (("binary", ".bin"), ("pickled", "")):
            where = {"binary": "cifar-10-batches-bin", "pickled": "pickled"}[layout]
            file, swapped = f"{where}/data_batch_2{suffix}", self.whole / where / f"data_batch_3{suffix}"

            def train(folder: Path, layout: str = layout) -> Ended:
                return moat(*self.train_on(folder, layout))

            yield Target(f"CIFAR, {layout}", file, swapped.read_bytes(), train, model(layout))

    def expected(self, target: Target) -> Any:
        """What comes out when nothing is damaged."""
        copy = shutil.copytree(self.whole, self.folder / "as-it-was")
        ended = target.command(copy)
        assert ended.code == 0, (target.name, ended.err)
        result = target.result(copy) if target.result else json.loads(ended.out) | {"card": None}
        shutil.rmtree(copy)
        return result

    def many(self, count: int, seed: int = 0) -> dict[str, Any]:
        """Damage files `count` times; each time the answer is a sentence, or the answer of the whole file."""
        draws, expected = random.Random(seed), [self.expected(target) for target in self.targets]
        found: Counter[str] = Counter()
        for number in range(count):
            target, answer = self.targets[number % len(self.targets)], expected[number % len(self.targets)]
            copy = shutil.copytree(self.whole, self.folder / "damaged")
            content = (copy / target.file).read_bytes()
            kind, changed = damage(content, target.other, draws)
            (copy / target.file).write_bytes(changed)
            where = f"{target.name}, {kind}, number {number} of seed {seed}"
            ended = target.command(copy)
            if ended.code == 0:
                result = target.result(copy) if target.result else json.loads(ended.out) | {"card": None}
                found["harmless" if result == answer else "wrong"] += 1
                if result != answer:
                    print(f"{where}: another answer")
            else:
                assert ended.code in (1, 2), f"{where}: {ended}"
                assert ended.last_line.startswith("moat: "), f"{where}: {ended}"
                assert len(ended.last_line) > 30, f"{where}: {ended}"
                found["told"] += 1
            assert not list(copy.rglob("*.tmp")), where
            shutil.rmtree(copy)
        return {"corruptions": count, "wrong": 0, **found}
