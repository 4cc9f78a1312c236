"""A run is a folder: these are its files.

recipe.toml     what the run is                    checkpoint.pt            where it is, to resume bit for bit
run.json        how it went (`RunRecord`)          checkpoint_previous.pt   where it was before
metrics.jsonl   one line per epoch                 model.safetensors        the model; `moatlab.load` needs nothing else
events.jsonl    what happened: alarms and the like model_best.safetensors   the best epoch on held-out images

Beside them are cards (eval.json), a portrait, an outcome (of `moat reproduce`) and a page.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import RunFile, atomic, locked, read_json, read_whole, remove_leftovers, write_json
from moatlab.training.recipe import Recipe, load_recipe, option_name

LOGS = {".log", ".txt", ".out", ".err"}  # a job's own output may be in the run's folder


@dataclass
class RunRecord:
    """What `run.json` holds. Accuracies are fractions; `planned` and `counted` costs are in passes over the training
    set; `monitoring` is in calls of the model, each on up to 250 images. `environment` names threads and device."""

    status: str  # running, stopped (by --max-steps), interrupted, failed, finished
    recipe: str  # the checksum of its recipe
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
    healing: dict[str, float] = field(default_factory=dict)  # beyond the plan, because of a collapse
    monitoring: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best: dict[str, float] | None = None
    model: str | None = None  # the checksum in model.safetensors
    metrics: str | None = None  # the checksum of metrics.jsonl, once it is whole
    collapsed_at: int | None = None
    alarms: list[int] = field(default_factory=list)
    kept_epoch: int | None = None
    skipped_steps: int = 0
    final: dict[str, Any] | None = None
    message: str | None = None


class RunFolder:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / RunFile.RECIPE
        self.record = self.path / RunFile.RECORD
        self.metrics = self.path / RunFile.METRICS
        self.events = self.path / RunFile.EVENTS
        self.checkpoint = self.path / RunFile.CHECKPOINT
        self.previous_checkpoint = self.path / RunFile.PREVIOUS_CHECKPOINT
        self.model = self.path / RunFile.MODEL
        self.best_model = self.path / RunFile.BEST_MODEL

    @property
    def checkpoints(self) -> list[Path]:
        """Those that exist, the newest first."""
        return [path for path in (self.checkpoint, self.previous_checkpoint) if path.exists()]

    @contextmanager
    def for_one_process(self) -> Iterator[None]:
        """The folder, made if need be, while no other process may work in it. Removed where it came to nothing."""
        made = not self.path.exists()
        files = (self.recipe, self.record, self.metrics, self.events, self.checkpoint, self.model, self.best_model)
        with locked(self.path):
            for path in files:
                remove_leftovers(path)
            try:
                yield
            finally:
                if made and not self.checkpoints:
                    shutil.rmtree(self.path, ignore_errors=True)

    def write_record(self, record: RunRecord) -> None:
        write_json(self.record, asdict(record))

    def read_record(self) -> RunRecord:
        try:
            return RunRecord(**read_json(self.record))
        except TypeError as error:
            raise UserError(f"{self.record} has other keys than this version of moatlab writes ({error})") from None

    def read_metrics(self) -> list[dict[str, Any]]:
        needed = {"epoch", "stage", "clean", "fgsm", "pgd7", "comparable", "train_seconds"}
        return self._read_lines(self.metrics, needed)

    def read_events(self) -> list[dict[str, Any]]:
        return self._read_lines(self.events, {"event"}) if self.events.exists() else []

    def _read_lines(self, path: Path, needed: set[str]) -> list[dict[str, Any]]:
        try:
            lines = [dict(json.loads(line)) for line in read_whole(path).splitlines()]
        except (OSError, ValueError, TypeError, RecursionError):
            raise UserError(f"{path} is missing or damaged") from None
        if not all(needed <= line.keys() for line in lines):
            raise UserError(f"{path} is damaged: a line of it lacks one of {', '.join(sorted(needed))}")
        return lines

    def finished_record(self, recipe: Recipe) -> RunRecord | None:
        """The record, if it says that the run of this recipe is done, its metrics are as they were, and its model
        exists (or else it is made again from the checkpoint)."""
        try:
            record = self.read_record()
        except Damaged:
            return None
        whole = record.recipe == recipe.sha256 and record.metrics == self.metrics_sha256 and self.model.exists()
        return record if record.status == "finished" and whole else None

    @property
    def metrics_sha256(self) -> str | None:
        try:
            return hashlib.sha256(read_whole(self.metrics)).hexdigest()
        except OSError:
            return None

    def check(self, recipe: Recipe, *, resume: bool) -> None:
        """Refuse to write over a run, or to resume one under another recipe."""
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"--out {self.path}: {place} is a file, not a folder; name another")
        holds_a_run = bool(self.checkpoints) or self.record.exists()
        if holds_a_run and not resume:
            raise UserError(f"--out {self.path} holds a run already; continue it with --resume, or name another folder")
        if not holds_a_run and self.path.exists():
            files = {path.name for path in (self.recipe, self.metrics, self.events)}  # of a start that was killed
            there = [path for path in self.path.iterdir() if path.name[0] != "." and path.name not in files]
            strangers = [path.name for path in there if path.is_dir() or path.suffix not in LOGS]
            if strangers:
                raise UserError(f"--out {self.path} holds other files ({min(strangers)}); name a folder for the run")
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
