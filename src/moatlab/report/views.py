"""The runs of a page, read from their folders. Missing or damaged files are listed, the rest is shown."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from moatlab.attacks.catalog import WATCHED
from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.evaluation.card import Card
from moatlab.evaluation.red_flags import Flag
from moatlab.evaluation.target import Subject, Target, load_target
from moatlab.models.weights import read_weights, set_weights
from moatlab.report.portrait import Portrait, draw_portrait
from moatlab.runtime.errors import NotWritten, UserError, users_code
from moatlab.runtime.files import RunFile, read_json, remove_leftovers, write_json
from moatlab.training.api import TrainedRun
from moatlab.training.recipe import Recipe, load_recipe
from moatlab.training.run_folder import RunFolder, RunRecord

ReadImages = Callable[[str, Path | None], Images]
T = TypeVar("T")


@dataclass
class RunView:
    """One run on a page."""

    folder: Path
    recipe: Recipe | None = None
    record: RunRecord | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    portrait: Portrait | None = None
    portrait_is_new: bool = False
    problems: list[str] = field(default_factory=list)
    label: str = ""

    @property
    def method(self) -> str:
        return self.recipe.method if self.recipe else self.folder.name

    @property
    def accuracy(self) -> dict[str, float]:
        """Test accuracy by attack. Cards override the measurement at the end of training, larger cards smaller ones."""
        final = self.record.final if self.record else None
        found = {name: final[name] for name in WATCHED} if final else {}
        for card in sorted(self.cards, key=lambda card: card.data.images):
            found |= {name: result.accuracy for name, result in card.results.items()}
        return found

    @property
    def images(self) -> dict[str, int]:
        """The number of test images behind each of these accuracies."""
        final = self.record.final if self.record else None
        found = dict.fromkeys(WATCHED, int(final["images"])) if final else {}
        for card in sorted(self.cards, key=lambda card: card.data.images):
            found |= dict.fromkeys(card.results, card.data.images)
        return found

    @property
    def flags(self) -> list[Flag]:
        return list({flag.name: flag for card in self.cards for flag in card.flags}.values())

    @property
    def collapsed_at(self) -> int | None:
        return self.record.collapsed_at if self.record else None


def find_runs(paths: list[Path]) -> list[Path]:
    """The run folders among `paths`, and those one level below."""
    found = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; give a run folder, such as runs/moat-2_mini_s0")
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and is_run(folder)]
        if not is_run(path) and not inside:
            raise UserError(f"{path} contains no run")
        found += [path] if is_run(path) else inside
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RunFile.RECORD, RunFile.RECIPE, RunFile.MODEL))


@dataclass(frozen=True)
class Source:
    """Where models and images come from: memory, or files."""

    data_dir: Path | None
    trust_model_code: bool
    trained: dict[Path, TrainedRun]  # models in memory, by folder
    read_images: ReadImages = field(default_factory=lambda: cache(load_images))  # shared by the runs

    def target(self, folder: Path) -> Target:
        run = self.trained.get(folder)
        if run is None:
            options: dict[str, Any] = {"data_dir": self.data_dir, "trust_model_code": self.trust_model_code}
            return load_target(folder, read_images=self.read_images, **options)
        tensors, description = read_weights(folder)
        model = copy.deepcopy(run.model)  # may have been changed since
        set_weights(model, tensors, folder)
        recipe = load_recipe(RunFolder(folder).recipe)
        images = run.images or self.read_images(recipe.data, self.data_dir)
        weights = str(description["sha256"])
        subject = Subject(name="", model=recipe.model, file=None, data=recipe.data, sha256="", weights=weights)
        return Target(model, subject, folder / RunFile.CARD, images, recipe.threat)


def gather(folders: list[Path], source: Source) -> list[RunView]:
    """Read the runs. The label of a run is its method; if that is not unique, its folder's name or path."""
    views = [_view(folder, source) for folder in folders]
    methods = [view.method for view in views]
    names = [view.folder.resolve().name for view in views]
    for view, method, name in zip(views, methods, names, strict=True):
        folder = name if names.count(name) == 1 else str(view.folder)
        view.label = method if methods.count(method) == 1 else folder
    return views


def _view(folder: Path, source: Source) -> RunView:
    run, view = RunFolder(folder), RunView(folder)
    view.recipe = _read(view, lambda: load_recipe(run.recipe))
    view.record = _read(view, lambda: _read_record(run))
    view.metrics = _read(view, lambda: _read_metrics(run, view.record)) or []
    view.events = _read(view, run.read_events) or []
    identity = _read(view, lambda: _identity(folder))
    for path in (folder / RunFile.CARD, folder / RunFile.AA_CARD):
        if path.exists() and (card := _read(view, partial(_read_card, path, identity, view.recipe))):
            view.cards.append(card)
    if identity and view.record and view.record.status == "finished":  # not while it may still change
        weights = identity["weights"]
        view.portrait = _read(view, lambda: _portrait(view, weights, source))
    return view


def _read(view: RunView, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except UserError as error:
        view.problems.append(str(error))
        return None


def _read_record(run: RunFolder) -> RunRecord:
    record = run.read_current_record()
    if "passes" not in record.counted or (record.final and not {*WATCHED, "images"} <= record.final.keys()):
        raise UserError(f"{run.record} is damaged: it lacks passes or final accuracies")
    return record


def _read_metrics(run: RunFolder, record: RunRecord | None) -> list[dict[str, Any]]:
    metrics = run.read_metrics()
    if record and record.status == "finished" and record.metrics != run.metrics_sha256:
        raise UserError(f"{run.metrics} is damaged or was changed after the run")
    return metrics


def _identity(folder: Path) -> dict[str, str]:
    """The checksums of the model and its data, and the model's factory; read without running code."""
    description = read_weights(folder)[1]
    names = {"weights": "sha256", "factory": "model", "data": "data_sha256"}
    if not all(description.get(name) for name in names.values()):
        raise UserError(f"the model in {folder} was not written by moatlab")
    return {name: str(description[key]) for name, key in names.items()}


def _read_card(path: Path, identity: dict[str, str] | None, recipe: Recipe | None) -> Card:
    """A card that can be compared with other runs: of this model, on its test images, at its threat, in fp32."""
    card = Card.read(path)
    if identity is None:
        raise UserError(f"{path} is left out: it may be of another model")
    threat = recipe.threat if recipe else card.settings.threat
    if reason := card.mismatch(threat=threat, **identity):
        raise UserError(f"{path} is left out: {reason}; evaluate the run again")
    return card


def _portrait(view: RunView, weights: str, source: Source) -> Portrait:
    """As cached in the run folder, or drawn again if that is missing, damaged or of other weights."""
    path = view.folder / RunFile.PORTRAIT
    with suppress(UserError, ValidationError, TypeError):
        if (portrait := Portrait(**read_json(path))).weights == weights:
            return portrait
    target = source.target(view.folder)
    with users_code(f"the model in {view.folder} could not be attacked"):
        portrait = draw_portrait(target)
    view.portrait_is_new = True
    remove_leftovers(path)
    try:
        write_json(path, portrait.model_dump(by_alias=True))
    except NotWritten as error:
        view.problems.append(str(error))
    return portrait
