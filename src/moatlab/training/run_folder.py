"""The folder of a run, and the files that training writes there.

recipe.toml     settings of the run                checkpoint.pt            state, to resume bit for bit
run.json        results (`RunRecord`)              checkpoint_previous.pt   the checkpoint before it
metrics.jsonl   one line per epoch                 model.safetensors        the model, all that `moatlab.load` needs
events.jsonl    alarms and other events            model_best.safetensors   the best epoch on held-out images
                                                   model_average.safetensors   the average of the weights
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moatlab.attacks.catalog import WATCHED
from moatlab.runtime.console import counted, duration
from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import RunFile, is_locked, locked, read_json, read_whole, remove_leftovers, write_json
from moatlab.runtime.intervals import wilson
from moatlab.runtime.sheet import Line, Sheet, percent, percent_range
from moatlab.training.recipe import Recipe, load_recipe, option_name

LOGS = {".log", ".txt", ".out", ".err"}  # the output of a job may be in the run's folder


@dataclass
class RunRecord:
    """The content of `run.json`. Accuracies are fractions; `planned` and `counted` costs are passes over the training
    set; `monitoring` is in calls of the model, each on up to 250 images. `environment` has threads and device."""

    status: str  # running, stopped (by --max-steps), interrupted, failed, finished
    recipe: str  # checksum of the recipe
    method: str
    cycle: str
    epochs: int
    steps_per_epoch: int
    setting: str
    planned: dict[str, float]
    counted: dict[str, float]
    flops: float  # of the counted cost
    data: dict[str, Any]
    environment: dict[str, Any]
    steps_done: int = 0
    healing: dict[str, float] = field(default_factory=dict)  # beyond the plan, because of a collapse
    monitoring: dict[str, float] = field(default_factory=dict)
    train_seconds: float = 0.0
    monitor_seconds: float = 0.0
    best: dict[str, float] | None = None
    model: str | None = None  # checksum in model.safetensors
    metrics: str | None = None  # checksum of metrics.jsonl, once complete
    outcome: str | None = None  # of a finished run: robust, collapsed, overfitted, untrained, undecided
    outcome_reason: str = ""
    collapsed_at: int | None = None
    recovered: list[list[int]] = field(default_factory=list)  # first and last epoch of each collapse that ended
    alarms: list[int] = field(default_factory=list)
    kept_epoch: int | None = None
    skipped_steps: int = 0
    checks: list[tuple[int, float]] = field(default_factory=list)  # --check-every: step, pgd7 accuracy
    final: dict[str, Any] | None = None
    message: str | None = None

    @property
    def progress(self) -> str:
        """`finished`, or such as `interrupted after step 120 of 819`."""
        steps = self.epochs * self.steps_per_epoch
        return self.status if self.status == "finished" else f"{self.status} after step {self.steps_done} of {steps}"

    @property
    def remark(self) -> str:
        """The outcome, if it is not simply robust."""
        if self.kept_epoch:
            return f"collapsed at epoch {self.alarms[-1]}; model of epoch {self.kept_epoch}"
        lost = {
            "collapsed": f"COLLAPSED at epoch {self.collapsed_at}",
            "overfitted": "OVERFITTED: robustness was lost slowly, without a collapse",
            "untrained": "UNTRAINED: accuracy never rose clearly above chance",
            "undecided": f"outcome undecided: {self.outcome_reason}",
        }
        spells = ", ".join(f"{first} to {last}" if first != last else f"{first}" for first, last in self.recovered)
        back = f"recovered after epoch {spells}" if spells and self.outcome == "robust" else ""
        return lost.get(self.outcome or "", back)

    @property
    def state(self) -> str:
        """What the accuracies are of, or how far the run is."""
        if self.final:
            return f"{self.method} on {counted(self.final['images'], 'test image')}"
        return f"{self.method}: {self.progress}"

    def cost_and_place(self, folder: Path) -> str:
        healing = self.healing.get("passes", 0)
        extra = f" ({healing:+g} beyond the plan, for healing)" if healing else ""
        if self.final and not healing and self.counted["passes"] < self.planned["passes"]:
            extra = f" of {self.planned['passes']:g} planned"
        times = f"training {duration(self.train_seconds)}, monitor {duration(self.monitor_seconds)}"
        return f"{counted(self.counted['passes'], 'pass')}{extra}; {times}; the run is in {folder}"

    def text(self, folder: Path) -> str:
        """The lines that `moat train` ends with."""
        remark = f"  ({self.remark})" if self.kept_epoch else f"  {self.remark}" if self.remark else ""
        accuracy = [f"{name} {percent(self.final[name])} %" for name in WATCHED] if self.final else []
        first = f"{self.state}: {'  '.join(accuracy)}{remark}" if accuracy else self.state
        if self.final and "pgd7_average" in self.final:
            averaged = "  ".join(f"{name} {percent(self.final[f'{name}_average'])} %" for name in WATCHED)
            first += f"\naverage of its weights: {averaged}"
        return f"{first}\n{self.cost_and_place(folder)}"

    def html(self, folder: Path) -> str:
        """A card for a notebook: accuracies with intervals, a collapse, the setting."""
        rows = []
        if self.final:
            images = self.final["images"]
            shares = {name: self.final[name] for name in WATCHED}
            rows = [(name, percent(one), percent_range(wilson(one * images, images))) for name, one in shares.items()]
        lines = [Line(self.remark, alert=True)] if self.remark else []
        lines += [Line(self.setting), Line(self.cost_and_place(folder))]
        return Sheet(self.state, ("attack", "accuracy %", "95 %"), rows, lines).html()


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
        self.average_model = self.path / RunFile.AVERAGE_MODEL

    @property
    def checkpoints(self) -> list[Path]:
        """The existing ones, newest first."""
        return [path for path in (self.checkpoint, self.previous_checkpoint) if path.exists()]

    @property
    def is_begun(self) -> bool:
        return bool(self.checkpoints) or self.record.exists()

    @contextmanager
    def for_one_process(self) -> Iterator[None]:
        """Create and lock the folder. Remove it again if it is new and no checkpoint was written."""
        made = not self.path.exists()
        weights = (self.model, self.best_model, self.average_model)
        files = (self.recipe, self.record, self.metrics, self.events, self.checkpoint, *weights)
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
            raise UserError(f"{self.record} was written by another version of moatlab ({error})") from None

    def read_current_record(self) -> RunRecord:
        """The record; a run that was killed, and so could not write its last status, is interrupted."""
        record = self.read_record()
        if record.status == "running" and not is_locked(self.path):
            record.status = "interrupted"
        return record

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
            raise UserError(f"{path} is damaged: a line lacks one of {', '.join(sorted(needed))}")
        return lines

    def finished_record(self, recipe: Recipe) -> RunRecord | None:
        """The record, if the run of this recipe is finished, its metrics are unchanged and its model exists."""
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
        """Refuse to overwrite a run, or to resume one with another recipe."""
        for place in (self.path, *self.path.parents):
            if place.exists() and not place.is_dir():
                raise UserError(f"--out {self.path}: {place} is a file, not a folder; name another")
        if not self.is_begun:
            own = (self.recipe, self.metrics, self.events)  # of a start that was killed
            found = self.path.iterdir() if self.path.exists() else ()
            others = [path for path in found if path.name[0] != "." and path not in own]
            if foreign := [path.name for path in others if path.is_dir() or path.suffix not in LOGS]:
                raise UserError(f"--out {self.path} has other files ({min(foreign)}); name a folder for the run")
            return
        if not resume:
            raise UserError(f"--out {self.path} has a run already; add --resume, or name another folder")
        before = load_recipe(self.recipe)
        pairs = {option_name(name).lstrip("-"): (getattr(before, name), new) for name, new in recipe}
        changes = [f"{name} = {old}, not {new}" for name, (old, new) in pairs.items() if old != new]
        if changes and not (len(changes) == 1 and recipe.epochs > before.epochs):  # see checkpoint.extend
            started = f"the run in {self.path} was started with {', '.join(changes)}"
            raise UserError(f"{started}; leave {'these' if len(changes) > 1 else 'this'} out, or use another folder")
