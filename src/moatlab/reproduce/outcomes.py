"""A run's numbers, small enough to keep: what it cost, whether it collapsed, and every verdict of its evaluations."""

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from moatlab.attacks.catalog import WATCHED
from moatlab.evaluation.card import Card, evaluate_target
from moatlab.evaluation.target import Target, load_target
from moatlab.reproduce.claims import Run
from moatlab.reproduce.paper import COLUMNS, Asked, Part
from moatlab.runtime.device import Machine
from moatlab.runtime.environment import commit
from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import RunFile, read_json, write_json
from moatlab.training.collapse import GAP
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder

KEPT = ("epoch", "stage", "clean", "fgsm", "pgd7", "comparable", "train_seconds")  # of the metrics of an epoch


class Evaluated(BaseModel, extra="forbid", frozen=True):
    """The model of one epoch under the paper's attacks. `standing`: see `pack`."""

    model: str = ""  # its checksum
    epoch: int
    images: dict[str, int]
    accuracy: dict[str, float]
    standing: dict[str, str]
    flags: list[str]


class Outcome(BaseModel, extra="forbid", frozen=True):
    """What is kept of a run: the keys of outcome.json, and of each run in a result such as table2a.json.

    `last` and `best` are not set where they were not asked for; `best` is None where no images were held out.
    """

    method: str
    seed: int
    recipe: dict[str, Any]
    recipe_sha256: str
    images: int | None
    aa_images: int | None
    passes: float
    train_seconds: float
    steady_seconds: float
    collapsed_at: int | None
    final: dict[str, int | float]
    history: list[dict[str, Any]]
    last: Evaluated | None = None
    best: Evaluated | None = None
    data: dict[str, Any]
    environment: dict[str, Any]
    date: str | None
    commit: str | None

    def as_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_unset=True)

    def answers(self, recipe: Recipe, asked: Asked) -> bool:
        """Whether it is that of this recipe, with these parts, evaluated on as many images."""
        same = self.recipe_sha256 == recipe.sha256 and self.model_fields_set >= {*asked.parts}
        counts = (self.images, self.aa_images) == (asked.images, asked.aa_images)
        return same and (counts or "last" not in asked.parts)

    def part(self, part: Part) -> Evaluated | None:
        """The last or the best epoch, if it was evaluated; or what the run measured by itself at its end."""
        if part != "final":
            return self.last if part == "last" else self.best
        accuracy = {name: self.final[name] for name in WATCHED}
        images = dict.fromkeys(WATCHED, int(self.final["images"]))
        return Evaluated(epoch=self.recipe["epochs"], images=images, accuracy=accuracy, standing={}, flags=[])

    @property
    def machine(self) -> str:
        """What decides how fast a run is, and its last bits."""
        made_on, precision = self.environment, self.environment.get("precision", "fp32")
        short = f", {precision}" if precision != "fp32" else ""
        return f"{made_on['cpu']}, {made_on['threads']} threads, GPU {made_on['gpu']}{short}"

    @property
    def made(self) -> str:
        """When and at which commit the run was evaluated."""
        if self.date is None:
            return "an earlier commit, date not recorded"
        return f"{self.date} by commit {self.commit or 'unknown'}"

    @property
    def fell_slowly(self) -> bool:
        """Whether a run that collapsed shows no gap of FGSM over PGD-7 accuracy from then on: overfitting, but of the
        slow kind (Rice et al., 2020), which ends below the line of a collapse as well."""
        since = self.collapsed_at
        checks = [line for line in self.history if since and line["comparable"] and line["epoch"] >= since]
        return since is not None and all(check["fgsm"] - check["pgd7"] <= GAP for check in checks)


def read_outcomes(path: Path) -> list[Outcome]:
    """The runs in a result that `moat reproduce` wrote."""
    result = read_json(path)
    try:
        return [Outcome(**run) for run in result["runs"] + result["kept_runs"]]
    except (KeyError, TypeError, ValidationError):
        raise UserError(f"{path} is not a result that moat reproduce wrote, such as table2a.json") from None


def outcomes_in(folder: Path) -> list[Outcome]:
    """What an earlier sweep wrote into a run's folder, if it is whole: one, or none."""
    try:
        return [Outcome(**read_json(folder / RunFile.OUTCOME))]
    except (Damaged, ValidationError, TypeError):
        return []


def evaluate_run(folder: Path, recipe: Recipe, asked: Asked, machine: Machine, data_dir: Path | None) -> Outcome:
    """Evaluate a finished run with the paper's attacks, at the epochs asked for; write and return its outcome. A card
    that exists and answers the same is used as it is."""
    run = RunFolder(folder)
    record, metrics = run.read_record(), run.read_metrics()
    parts: dict[str, Any] = {}
    for which in [part for part in asked.parts if part != "final"]:
        if which == "best" and not run.best_model.exists():
            parts[which] = None
            continue
        with machine.in_use():
            target = load_target(folder, model=recipe.model, which=which, data_dir=data_dir, device=machine.device)
            if target.images.sha256 != record.data["sha256"]:
                raise UserError(f"{recipe.data} here is not the {recipe.data} that the run in {folder} was trained on")
            epoch = recipe.epochs if which == "last" or not record.best else int(record.best["epoch"])
            is_last = which == "best" and parts["last"].model == target.sha256
            parts[which] = parts["last"] if is_last else _evaluate(target, epoch, asked)
    as_recorded = ("train_seconds", "collapsed_at", "final", "data", "environment")
    outcome = Outcome(
        method=recipe.method,
        seed=recipe.seed,
        recipe=recipe.model_dump(mode="json"),
        recipe_sha256=recipe.sha256,
        images=asked.images,
        aa_images=asked.aa_images,
        passes=record.counted["passes"],
        steady_seconds=steady_seconds(metrics),
        history=[{name: line[name] for name in KEPT} for line in metrics],
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
        **{name: getattr(record, name) for name in as_recorded},
        **parts,
    )
    write_json(folder / RunFile.OUTCOME, outcome.as_dict())
    return outcome


def _evaluate(target: Target, epoch: int, asked: Asked) -> Evaluated:
    """Accuracy and verdicts in the paper's columns. AutoAttack, far slower than the rest, may have fewer images, and
    then a card of its own."""
    if asked.images == asked.aa_images:
        cards = [_card(target, [*COLUMNS], asked.images)]
    else:
        apart = replace(target, card=target.card.with_name(f"{target.card.stem}_aa.json"))
        cards = [_card(target, [*COLUMNS[:-1]], asked.images), _card(apart, ["clean", "aa"], asked.aa_images)]
    columns = {name: card for card in reversed(cards) for name in card.results}  # clean is that of the larger card
    return Evaluated(
        model=target.sha256,
        epoch=epoch,
        images={name: card.data.images for name, card in columns.items()},
        accuracy={name: card.results[name].accuracy for name, card in columns.items()},
        standing={name: pack([one is None for one in card.broken_by[name]]) for name, card in columns.items()},
        flags=list(dict.fromkeys(flag.name for card in cards for flag in card.flags)),
    )


def _card(target: Target, attacks: list[str], count: int | None) -> Card:
    """The card that exists, if it is about the same model and asks the same; or a new one."""
    with suppress(UserError):  # there is none, or a damaged one
        card, count_now = Card.read(target.card), count or len(target.images.test_y)
        wrong = card.mismatch(model=target.sha256, data=target.images.sha256, threat=target.threat)
        if not wrong and ([*card.results], card.settings.seed, card.data.images) == (attacks, 0, count_now):
            return card
    return evaluate_target(target, attacks=attacks, count=count)


def steady_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Training time with each epoch at the median of its stage: about what a machine with nothing else to do needs,
    where a pause or another job made some epochs slow."""
    by_stage: dict[str, list[float]] = {}
    for line in metrics:
        by_stage.setdefault(line["stage"], []).append(line["train_seconds"])
    return round(sum(len(seconds) * statistics.median(seconds) for seconds in by_stage.values()), 3)


def pack(flags: Sequence[bool]) -> str:
    """Verdicts as hexadecimal digits, the first image in the highest bit (after a leading 1)."""
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"


def unpack(text: str) -> list[bool]:
    return [digit == "1" for digit in f"{int(text, 16):b}"[1:]]


def as_runs(outcomes: Sequence[Outcome], part: Part = "last", *, timed: bool = True) -> dict[int, Run]:
    """The outcomes of one row, one for each seed, as claims see them. `timed`: their seconds are of one machine."""
    runs = {}
    for one in outcomes:
        if shown := one.part(part):
            robust = {name: unpack(text) for name, text in shown.standing.items()}
            seconds, collapsed = one.steady_seconds if timed else None, one.collapsed_at is not None
            runs[one.seed] = Run(shown.accuracy, one.passes, seconds, collapsed, robust, one.fell_slowly)
    return runs
