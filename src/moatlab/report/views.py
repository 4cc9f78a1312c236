"""What a page shows of a run, read from its folder. A file that is missing or damaged is named, the rest is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from moatlab.data import Images, load_images
from moatlab.evaluation.target import load_subject
from moatlab.models import users_code
from moatlab.models.weights import read_weights
from moatlab.report.portrait import draw_portrait
from moatlab.runtime.errors import NotWritten, UserError
from moatlab.runtime.files import read_json, remove_leftovers, write_json
from moatlab.training.recipe import Recipe, load_recipe, parse_eps
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
        """On test images, by attack: of the quick look at the end of training, then of the cards, which count more, the
        one of more images last."""
        final = self.record.final if self.record else None
        found = {name: final[name] for name in ("clean", "fgsm", "pgd7")} if final else {}
        for card in sorted(self.cards, key=lambda card: int(card["data"]["images"])):
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
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and is_run(folder)]
        if not is_run(path) and not inside:
            raise UserError(f"{path} holds no run")
        found += [path] if is_run(path) else inside
    return list(dict.fromkeys(found))


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.json", "recipe.toml", "model.safetensors"))


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
    for path in (folder / "eval.json", folder / "eval_aa.json"):
        if path.exists() and (card := _read(view, partial(_read_card, path, identity, view.recipe))):
            view.cards.append(card)
    if identity and view.record and view.record.status == "finished":  # or it is still changing
        path = folder / "portrait.json"
        view.portrait = _known_portrait(path, identity[0])
        if view.portrait is None:
            view.portrait = _read(view, lambda: _draw(view, path, images, data_dir, trust_model_code))
    return view


def _read(view: RunView, read: Callable[[], T]) -> T | None:
    try:
        return read()
    except UserError as error:
        view.problems.append(str(error))
        return None


def _read_record(run: RunFolder) -> RunRecord:
    record = run.read_record()
    final = {"clean", "fgsm", "pgd7", "images"} <= (record.final or {"images": 0}).keys()
    if "passes" not in record.counted or (record.final and not final):
        raise UserError(f"{run.record} is damaged: it lacks what a run writes")
    return record


def _read_metrics(run: RunFolder, record: RunRecord | None) -> list[dict[str, Any]]:
    metrics = run.read_metrics()
    if record and record.status == "finished" and record.metrics != run.metrics_sha256:
        raise UserError(f"{run.metrics} is damaged, or was changed after the run")
    return metrics


def _identity(folder: Path) -> tuple[str, str, str]:
    """The checksum of the model's file, what builds it, and the checksum of its data, as cards and portraits name them.
    No code is run for it."""
    description = read_weights(folder)[1]
    weights, model, data = (description.get(name) for name in ("sha256", "model", "data_sha256"))
    if not (weights and model and data):
        raise UserError(f"the model in {folder} was not written by a run of moatlab")
    return weights, model, data


def _read_card(path: Path, identity: tuple[str, str, str] | None, recipe: Recipe | None) -> dict[str, Any]:
    """A card whose numbers may stand beside those of other runs: of this very model, on its own test images, under the
    run's own threat."""
    card = read_json(path)
    if not fits(card, Card):
        raise UserError(f"{path} is not a card that moat eval wrote")
    if identity is None:
        raise UserError(f"{path} is left out: whether it is of this run's model can't be told")
    weights, model, data = identity
    if (card["subject"]["weights"], card["subject"]["model"]) != (weights, model):
        raise UserError(f"{path} is of another model than this run's; evaluate it again")
    if card["data"]["sha256"] != data:
        raise UserError(f"{path} is left out: it is on other images than the run's own")
    asked = card["settings"]
    if recipe and (asked["norm"], parse_eps(asked["eps"], asked["norm"])) != (recipe.norm, recipe.eps_value):
        at = f"{asked['norm']} eps {asked['eps']}"
        raise UserError(f"{path} is left out: it is at {at}, the run at {recipe.norm} eps {recipe.eps}")
    if asked.get("precision", "fp32") != "fp32":
        raise UserError(f"{path} is left out: it is of the model in {asked['precision']}; evaluate it in fp32")
    return card


def _known_portrait(path: Path, weights: str) -> dict[str, Any] | None:
    try:
        portrait = read_json(path)
    except UserError:
        return None
    return portrait if fits(portrait, Portrait) and portrait["weights"] == weights else None


def _draw(
    view: RunView, path: Path, images: ReadImages, data_dir: Path | None, trust_model_code: bool
) -> dict[str, Any]:  # fmt: skip
    subject = load_subject(view.folder, data_dir=data_dir, trust_model_code=trust_model_code, read_images=images)
    with users_code(f"the model in {view.folder} can't be attacked"):
        portrait = draw_portrait(subject)
    view.portrait_is_new = True
    remove_leftovers(path)
    try:
        write_json(path, portrait)
    except NotWritten as error:
        view.problems.append(str(error))
    return portrait


# --- what files must hold to be shown


class Threat(TypedDict):
    eps: str
    norm: Literal["linf", "l2"]


class Measured(TypedDict):
    accuracy: float


class Flag(TypedDict):
    name: str
    evidence: str
    meaning: str


class Counted(TypedDict):
    images: int
    sha256: str


class Named(TypedDict):
    weights: str
    model: str


class Card(TypedDict):
    subject: Named
    data: Counted
    settings: Threat
    results: dict[str, Measured]
    flags: list[Flag]


class Curve(TypedDict):
    eps: list[float]
    accuracy: list[float]
    images: int


Example = TypedDict(
    "Example",
    {"class": str, "predicted": str, "attacked": str, "image": str, "adversarial": str, "change": str,
     "magnified": float},
)  # fmt: skip
Surface = TypedDict("Surface", {"image": int, "class": str, "loss": list[list[float]], "wrong": list[list[int]]})


class Portrait(Threat):
    weights: str
    steps: int
    curve: Curve
    examples: Annotated[list[Example], Field(min_length=1)]
    surface: Surface


def fits(fields: dict[str, Any], kind: Any) -> bool:
    try:
        TypeAdapter(kind).validate_python(fields, strict=True)
    except ValidationError:
        return False
    return True
