"""The outcome of a run in a small file: costs, collapse, history, and the verdict on every evaluated image."""

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
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder

# From metrics.jsonl, and from run.json.
KEPT = ("epoch", "stage", "clean", "fgsm", "pgd7", "alignment", "zero_gradients", "comparable", "train_seconds")
COPIED = ("flops", "train_seconds", "outcome", "collapsed_at", "recovered", "final", "data", "environment")


class Evaluated(BaseModel, extra="forbid", frozen=True):
    """The model of one epoch under the paper's attacks. `standing`: its robust images, see `pack`."""

    model: str = ""  # SHA-256
    epoch: int
    images: dict[str, int]
    accuracy: dict[str, float]
    standing: dict[str, str]
    flags: list[str]


class Outcome(BaseModel, extra="forbid", frozen=True):
    """The keys of outcome.json, and of each run in a result such as table2a.json. `last` and `best` are unset if not
    asked for; `best` is None if no images were held out."""

    method: str
    seed: int
    recipe: dict[str, Any]
    recipe_sha256: str
    images: int | None
    aa_images: int | None
    passes: float
    flops: float
    train_seconds: float
    steady_seconds: float
    outcome: str
    collapsed_at: int | None
    recovered: list[list[int]]
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
        """Whether it is of this recipe and has these parts, evaluated on as many images."""
        same = self.recipe_sha256 == recipe.sha256 and self.model_fields_set >= {*asked.parts}
        counts = (self.images, self.aa_images) == (asked.images, asked.aa_images)
        return same and (counts or "last" not in asked.parts)

    def part(self, part: Part) -> Evaluated | None:
        """The last or best epoch, if it was evaluated; `final`: the run's own test accuracies."""
        if part != "final":
            return self.last if part == "last" else self.best
        accuracy = {name: self.final[name] for name in WATCHED}
        images = dict.fromkeys(WATCHED, int(self.final["images"]))
        return Evaluated(epoch=self.recipe["epochs"], images=images, accuracy=accuracy, standing={}, flags=[])

    @property
    def machine(self) -> str:
        """What determines the speed of a run, and its last bits."""
        made_on, precision = self.environment, self.environment.get("precision", "fp32")
        short = f", {precision}" if precision != "fp32" else ""
        return f"{made_on['cpu']}, {made_on['threads']} threads, GPU {made_on['gpu']}{short}"

    @property
    def made(self) -> str:
        """When and at which commit the run was evaluated."""
        if self.date is None:
            return "an earlier commit, date not recorded"
        return f"{self.date} at commit {self.commit or 'unknown'}"


def read_outcomes(path: Path) -> list[Outcome]:
    """The runs in a result of `moat reproduce`."""
    result = read_json(path)
    try:
        return [Outcome(**run) for run in result["runs"] + result["kept_runs"]]
    except (KeyError, TypeError, ValidationError):
        raise UserError(f"{path} is not a result of moat reproduce, such as table2a.json") from None


def outcomes_in(folder: Path) -> list[Outcome]:
    """The outcome in a run's folder, in a list; an empty list if it is missing or damaged."""
    try:
        return [Outcome(**read_json(folder / RunFile.OUTCOME))]
    except (Damaged, ValidationError, TypeError):
        return []


def evaluate_run(folder: Path, recipe: Recipe, asked: Asked, machine: Machine, data_dir: Path | None) -> Outcome:
    """Evaluate a finished run with the paper's attacks; write and return its outcome. Matching cards are reused."""
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
                raise UserError(f"{folder} was trained on another {recipe.data}; name that one with --data-dir")
            epoch = recipe.epochs if which == "last" or not record.best else int(record.best["epoch"])
            is_last = which == "best" and parts["last"].model == target.sha256
            parts[which] = parts["last"] if is_last else _evaluate(target, epoch, asked)
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
        **{name: getattr(record, name) for name in COPIED},
        **parts,
    )
    write_json(folder / RunFile.OUTCOME, outcome.as_dict())
    return outcome


def _evaluate(target: Target, epoch: int, asked: Asked) -> Evaluated:
    """Accuracy and verdicts in the paper's columns. AutoAttack, far slower, may use fewer images and a second card."""
    if asked.images == asked.aa_images:
        cards = [_card(target, [*COLUMNS], asked.images)]
    else:
        apart = replace(target, card=target.card.with_name(f"{target.card.stem}_aa.json"))
        cards = [_card(target, [*COLUMNS[:-1]], asked.images), _card(apart, ["clean", "aa"], asked.aa_images)]
    columns = {name: card for card in reversed(cards) for name in card.results}  # clean: from the larger card
    return Evaluated(
        model=target.sha256,
        epoch=epoch,
        images={name: card.data.images for name, card in columns.items()},
        accuracy={name: card.results[name].accuracy for name, card in columns.items()},
        standing={name: pack([one is None for one in card.broken_by[name]]) for name, card in columns.items()},
        flags=list(dict.fromkeys(flag.name for card in cards for flag in card.flags)),
    )


def _card(target: Target, attacks: list[str], count: int | None) -> Card:
    """The existing card if model, attacks and images match, otherwise a new one."""
    with suppress(UserError):  # missing or damaged
        card, count_now = Card.read(target.card), count or len(target.images.test_y)
        wrong = card.mismatch(model=target.sha256, data=target.images.sha256, threat=target.threat)
        if not wrong and ([*card.results], card.settings.seed, card.data.images) == (attacks, 0, count_now):
            return card
    return evaluate_target(target, attacks=attacks, count=count)


def steady_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Training time with each epoch at the median of its stage: a pause, or another job, does not count."""
    by_stage: dict[str, list[float]] = {}
    for line in metrics:
        by_stage.setdefault(line["stage"], []).append(line["train_seconds"])
    return round(sum(len(seconds) * statistics.median(seconds) for seconds in by_stage.values()), 3)


def pack(flags: Sequence[bool]) -> str:
    """Verdicts as hexadecimal digits: a leading 1, then a bit per image, the first one highest."""
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"


def unpack(text: str) -> list[bool]:
    return [digit == "1" for digit in f"{int(text, 16):b}"[1:]]


def as_runs(outcomes: Sequence[Outcome], part: Part = "last", *, timed: bool = True) -> dict[int, Run]:
    """Outcomes of one row as the runs that claims compare, by seed. `timed`: all from one machine."""
    runs = {}
    for one in outcomes:
        if shown := one.part(part):
            robust = {name: unpack(text) for name, text in shown.standing.items()}
            costs = (one.passes, one.flops, one.steady_seconds if timed else None)
            runs[one.seed] = Run(shown.accuracy, one.outcome, *costs, shown.images, robust)
    return runs
