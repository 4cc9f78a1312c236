"""What a page shows of a run, read from its folder. A file that is missing or damaged is named, the rest is shown."""

from collections.abc import Callable
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
from moatlab.evaluation.target import load_target
from moatlab.models.weights import read_weights
from moatlab.report.portrait import Portrait, draw_portrait
from moatlab.runtime.errors import NotWritten, UserError, users_code
from moatlab.runtime.files import RunFile, read_json, remove_leftovers, write_json
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
        """On test images, by attack: of the quick look at the end of training, then of the cards, which count more, the
        one of more images last."""
        final = self.record.final if self.record else None
        found = {name: final[name] for name in WATCHED} if final else {}
        for card in sorted(self.cards, key=lambda card: card.data.images):
            found |= {name: result.accuracy for name, result in card.results.items()}
        return found

    @property
    def flags(self) -> list[Flag]:
        return list({flag.name: flag for card in self.cards for flag in card.flags}.values())

    @property
    def collapsed_at(self) -> int | None:
        return self.record.collapsed_at if self.record else None


def find_runs(paths: list[Path]) -> list[Path]:
    """Run folders, and those inside folders of runs."""
    found = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name run folders, such as runs/moat-2_mini_s0")
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and is_run(folder)]
        if not is_run(path) and not inside:
            raise UserError(f"{path} holds no run")
        found += [path] if is_run(path) else inside
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (RunFile.RECORD, RunFile.RECIPE, RunFile.MODEL))


def gather(folders: list[Path], *, data_dir: Path | None, trust_model_code: bool) -> list[RunView]:
    images = cache(load_images)  # runs share theirs
    views = [_view(folder, images, data_dir, trust_model_code) for folder in folders]
    methods = [view.method for view in views]
    names = [view.folder.resolve().name for view in views]
    for view, name in zip(views, names, strict=True):
        view.label = view.method
        if methods.count(view.method) > 1:
            view.label = name if names.count(name) == 1 else str(view.folder)
    return views


def _view(folder: Path, images: ReadImages, data_dir: Path | None, trust_model_code: bool) -> RunView:
    run, view = RunFolder(folder), RunView(folder)
    view.recipe = _read(view, lambda: load_recipe(run.recipe))
    view.record = _read(view, lambda: _read_record(run))
    view.metrics = _read(view, lambda: _read_metrics(run, view.record)) or []
    view.events = _read(view, run.read_events) or []
    identity = _read(view, lambda: _identity(folder))
    for path in (folder / RunFile.CARD, folder / RunFile.AA_CARD):
        if path.exists() and (card := _read(view, partial(_read_card, path, identity, view.recipe))):
            view.cards.append(card)
    if identity and view.record and view.record.status == "finished":  # or it is still changing
        view.portrait = _known_portrait(folder / RunFile.PORTRAIT, identity["weights"])
        if view.portrait is None:
            view.portrait = _read(view, lambda: _draw(view, images, data_dir, trust_model_code))
    return view


def _read(view: RunView, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except UserError as error:
        view.problems.append(str(error))
        return None


def _read_record(run: RunFolder) -> RunRecord:
    record = run.read_record()
    final = {*WATCHED, "images"} <= (record.final or {"images": 0}).keys()
    if "passes" not in record.counted or (record.final and not final):
        raise UserError(f"{run.record} is damaged: it lacks what a run writes")
    return record


def _read_metrics(run: RunFolder, record: RunRecord | None) -> list[dict[str, Any]]:
    metrics = run.read_metrics()
    if record and record.status == "finished" and record.metrics != run.metrics_sha256:
        raise UserError(f"{run.metrics} is damaged, or was changed after the run")
    return metrics


def _identity(folder: Path) -> dict[str, str]:
    """The checksum of the model's file, what builds it, and the checksum of its data, as cards and portraits name them.
    No code is run for it."""
    description = read_weights(folder)[1]
    names = {"weights": "sha256", "factory": "model", "data": "data_sha256"}
    if not all(description.get(name) for name in names.values()):
        raise UserError(f"the model in {folder} was not written by a run of moatlab")
    return {name: str(description[key]) for name, key in names.items()}


def _read_card(path: Path, identity: dict[str, str] | None, recipe: Recipe | None) -> Card:
    """A card whose numbers may be shown beside those of other runs: of this very model, on its own test images, under
    the run's own threat, in fp32."""
    card = Card.read(path)
    if identity is None:
        raise UserError(f"{path} is left out: it is not known whether it is of this run's model")
    threat = recipe.threat if recipe else card.settings.threat
    if reason := card.mismatch(threat=threat, **identity):
        raise UserError(f"{path} is left out: {reason}; evaluate the run again")
    return card


def _known_portrait(path: Path, weights: str) -> Portrait | None:
    try:
        portrait = Portrait(**read_json(path))
    except (UserError, ValidationError, TypeError):
        return None
    return portrait if portrait.weights == weights else None


def _draw(view: RunView, images: ReadImages, data_dir: Path | None, trust_model_code: bool) -> Portrait:
    target = load_target(view.folder, data_dir=data_dir, trust_model_code=trust_model_code, read_images=images)
    with users_code(f"the model in {view.folder} can't be attacked"):
        portrait = draw_portrait(target)
    view.portrait_is_new, path = True, view.folder / RunFile.PORTRAIT
    remove_leftovers(path)
    try:
        write_json(path, portrait.model_dump(by_alias=True))
    except NotWritten as error:
        view.problems.append(str(error))
    return portrait
