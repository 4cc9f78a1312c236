"""What a page shows of a run, read from its folder. A file that is missing or damaged is named, the rest is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from moatlab.errors import UserError
from moatlab.files import read_json
from moatlab.models import users_code
from moatlab.portrait import draw_portrait
from moatlab.recipe import Recipe, load_recipe
from moatlab.runfolder import RunFolder, RunRecord
from moatlab.subject import load_subject

T = TypeVar("T")


@dataclass
class RunView:
    """One run on a page."""

    folder: Path
    recipe: Recipe | None = None
    record: RunRecord | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    cards: list[dict[str, Any]] = field(default_factory=list)
    portrait: dict[str, Any] | None = None
    portrait_is_new: bool = False
    problems: list[str] = field(default_factory=list)
    label: str = ""

    @property
    def method(self) -> str:
        return self.recipe.method if self.recipe else self.folder.name

    @property
    def accuracy(self) -> dict[str, float]:
        """On test images, by attack: of the quick look at the end of training, then of the cards, which count more."""
        final = self.record.final if self.record else None
        found = {name: final[name] for name in ("clean", "fgsm", "pgd7")} if final else {}
        for card in self.cards:
            found |= {name: result["accuracy"] for name, result in card["results"].items()}
        return found

    @property
    def flags(self) -> list[dict[str, str]]:
        return list({flag["name"]: flag for card in self.cards for flag in card["flags"]}.values())

    @property
    def collapsed_at(self) -> int | None:
        return self.record.collapsed_at if self.record else None


def find_runs(paths: list[Path]) -> list[Path]:
    """Run folders, and those inside folders of runs."""
    found = []
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name run folders, such as runs/moat-2_mini_s0")
        inside = sorted(record.parent for record in path.glob("*/run.json"))
        is_run = any((path / name).exists() for name in ("run.json", "recipe.toml", "model.safetensors"))
        if not is_run and not inside:
            raise UserError(f"{path} holds no run")
        found += [path] if is_run else inside
    return list(dict.fromkeys(found))


def gather(folders: list[Path], *, data_dir: Path | None, trust_model_code: bool) -> list[RunView]:
    views = [view_run(folder, data_dir=data_dir, trust_model_code=trust_model_code) for folder in folders]
    methods = [view.method for view in views]
    names = [view.folder.resolve().name for view in views]
    for view, name in zip(views, names, strict=True):
        view.label = view.method
        if methods.count(view.method) > 1:
            view.label = name if names.count(name) == 1 else str(view.folder)
    return views


def view_run(folder: Path, *, data_dir: Path | None, trust_model_code: bool) -> RunView:
    run, view = RunFolder(folder), RunView(folder)
    view.recipe = _read(view, lambda: load_recipe(run.recipe))
    view.record = _read(view, run.read_record)
    view.metrics = _read(view, partial(_read_metrics, run, view.record)) or []
    view.events = _read(view, run.read_events) or []
    view.portrait = _read(view, lambda: _portrait(view, data_dir, trust_model_code))
    for path in (folder / "eval.json", folder / "eval_aa.json"):
        if path.exists() and (card := _read(view, partial(_read_card, path, view.portrait))):
            view.cards.append(card)
    return view


def _read(view: RunView, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except UserError as error:
        view.problems.append(str(error))
        return None


def _read_metrics(run: RunFolder, record: RunRecord | None) -> list[dict[str, Any]]:
    metrics = run.read_metrics()
    if record and record.status == "finished" and record.metrics != run.metrics_sha256:
        raise UserError(f"{run.metrics} is damaged, or was changed after the run")
    return metrics


def _read_card(path: Path, portrait: dict[str, Any] | None) -> dict[str, Any]:
    card = read_json(path)
    if not {"results", "flags", "data", "settings", "subject"} <= card.keys():
        raise UserError(f"{path} is not a card that moat eval wrote")
    if portrait and card["subject"].get("sha256") != portrait["model"]:
        raise UserError(f"{path} is of another model than this run's; evaluate it again")
    return card


def _portrait(view: RunView, data_dir: Path | None, trust_model_code: bool) -> dict[str, Any] | None:
    """The one that is there if it is of this model, or a new one."""
    path, status = view.folder / "portrait.json", view.record.status if view.record else None
    if status not in (None, "finished"):
        return None  # the model is still changing
    subject = load_subject(view.folder, data_dir=data_dir, trust_model_code=trust_model_code)
    if path.exists() and (known := _read(view, lambda: read_json(path))) and known.get("model") == subject.sha256:
        return known
    view.portrait_is_new = True
    with users_code(f"the model in {view.folder} can't be attacked"):
        return draw_portrait(subject, path)
