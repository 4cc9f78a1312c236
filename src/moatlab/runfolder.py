"""A run is a folder: these are its files.

recipe.toml        what the run is                     checkpoint.pt       where it stands, to continue bit for bit
run.json           how it went (`RunRecord`)           model.safetensors   the model; `moatlab.load` needs nothing else
metrics.jsonl      one line per epoch                  model_best.safetensors   the best epoch on held-out images
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moatlab.errors import UserError
from moatlab.files import SCHEMA, atomic, read_json, write_json
from moatlab.recipe import Recipe, load_recipe, option_name


@dataclass
class RunRecord:
    """What `run.json` holds. Accuracies are fractions; `planned` and `counted` costs are in passes over the training
    set; `monitoring` is in calls of the model, each on up to 250 images."""

    status: str  # running, stopped (by --max-steps), interrupted, failed, finished
    method: str
    cycle: str
    epochs: int
    steps_per_epoch: int
    setting: str
    planned: dict[str, float]
    counted: dict[str, float]
    data: dict[str, Any]
    environment: dict[str, Any]
    steps_done: int = 0
    monitoring: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best: dict[str, float] | None = None
    collapsed_at: int | None = None
    final: dict[str, Any] | None = None
    message: str | None = None


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def best_model(self) -> Path:
        return self.path / "model_best.safetensors"

    def write_record(self, record: RunRecord) -> None:
        write_json(self.record, asdict(record))

    def read_record(self) -> RunRecord:
        try:
            return RunRecord(**read_json(self.record))
        except TypeError as error:
            raise UserError(f"{self.record} has other keys than this version of moatlab writes ({error})") from None

    def read_metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.metrics.read_text().splitlines()]

    def append_metrics(self, line: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps({"schema": SCHEMA, **line}) + "\n")
            file.flush()
            os.fsync(file.fileno())  # the checkpoint that follows relies on this line

    def finished_record(self) -> RunRecord | None:
        """The record, if there is one and it says that the run is done."""
        if not self.record.exists():
            return None
        record = self.read_record()
        return record if record.status == "finished" else None

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse to write over a run, or to continue one under another recipe."""
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"--out {self.path}: {place} is a file, not a folder; name another")
        holds_a_run = self.checkpoint.exists() or self.record.exists()
        if holds_a_run and not resume:
            raise UserError(f"--out {self.path} holds a run already; continue it with --resume, or name another folder")
        if holds_a_run:
            before = load_recipe(self.recipe)
            for name in Recipe.model_fields:
                old, new = getattr(before, name), getattr(recipe, name)
                if old != new:
                    raise UserError(
                        f"the run in {self.path} was started with {option_name(name).lstrip('-')} = {old}, not {new}; "
                        f"resume it with the same recipe, or name another folder"
                    )

    def write_recipe(self, recipe: Recipe) -> None:
        with atomic(self.recipe) as file:
            file.write(recipe.to_toml().encode())
