"""A run's numbers, small enough to keep: what it cost, whether it collapsed, and every verdict of its evaluations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moatlab.evaluation.card import evaluate_subject
from moatlab.evaluation.target import Subject, load_subject
from moatlab.reproduce.claims import Runs
from moatlab.reproduce.paper import COLUMNS, WATCHED, Part
from moatlab.runtime.device import left_as_found
from moatlab.runtime.environment import commit
from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import read_json, write_json
from moatlab.training.monitor import GAP
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunFolder

Outcome = dict[str, Any]


def evaluate_run(
    folder: Path, recipe: Recipe, parts: Sequence[Part], *, images: int | None, aa_images: int | None,
    data_dir: Path | None,
) -> Outcome:  # fmt: skip
    """Evaluate a finished run by the paper's attacks, as far as `parts` name its last epoch and its best one (None
    where no images were held out); write and return its outcome. A card that is there already and was asked the same is
    taken as it is."""
    run = RunFolder(folder)
    record, metrics = run.read_record(), run.read_metrics()
    assert record.final is not None
    evaluations: dict[str, Any] = {}
    with left_as_found(torch.device("cpu"), recipe.threads):
        for which in [part for part in parts if part != "final"]:
            if which == "best" and not run.best_model.exists():
                evaluations[which] = None
                continue
            subject = load_subject(folder, model=recipe.model, which=which, data_dir=data_dir, device=recipe.device)
            if subject.images.sha256 != record.data["sha256"]:
                raise UserError(f"{recipe.data} here is not the {recipe.data} that the run in {folder} was trained on")
            last = evaluations.get("last")
            if last and last["model"] == subject.sha256:
                evaluations[which] = last  # the best epoch is the last one
                continue
            evaluation = _evaluate(subject, images, aa_images)
            epoch = recipe.epochs if which == "last" or not record.best else record.best["epoch"]
            evaluations[which] = {"model": subject.sha256, "epoch": epoch, **evaluation}
    outcome = {
        "method": recipe.method, "seed": recipe.seed, "recipe": recipe.model_dump(mode="json"),
        "recipe_sha256": recipe.sha256, "images": images, "aa_images": aa_images,
        "passes": record.counted["passes"], "train_seconds": record.train_seconds,
        "steady_seconds": steady_seconds(metrics), "collapsed_at": record.collapsed_at, "final": record.final,
        "history": [{name: line[name] for name in KEPT} for line in metrics], **evaluations,
        "data": record.data, "environment": record.environment, "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
    }  # fmt: skip
    write_json(folder / "outcome.json", outcome)
    return outcome


KEPT = ("epoch", "stage", "clean", "fgsm", "pgd7", "comparable", "train_seconds")


def known_outcome(
    folder: Path, recipe: Recipe, parts: Sequence[Part], images: int | None, aa_images: int | None
) -> Outcome | None:
    """What an earlier sweep wrote into a run's folder, if it is whole and was asked the same."""
    try:
        known = read_json(folder / "outcome.json")
    except Damaged:
        return None
    return known if matches(known, recipe, parts, images, aa_images) else None


def read_outcomes(path: Path) -> list[Outcome]:
    """The runs in a result that `moat reproduce` wrote."""
    result = read_json(path)
    runs, kept = result.get("runs"), result.get("kept_runs", [])  # results of before kept none
    if isinstance(runs, list) and isinstance(kept, list):
        runs = runs + kept
        if all(isinstance(run, dict) and run.keys() >= WHOLE for run in runs):
            return runs
    raise UserError(f"{path} is not a result that moat reproduce wrote, such as table2a.json")


WHOLE = {"method", "seed", "recipe_sha256", "images", "aa_images", "passes", "train_seconds", "steady_seconds",
         "collapsed_at", "final", "history", "data", "environment"}  # fmt: skip


def matches(outcome: Outcome, recipe: Recipe, parts: Sequence[Part], images: int | None, aa_images: int | None) -> bool:
    """Whether an outcome is that of this recipe, with these parts, evaluated on as many images."""
    asked: dict[str, Any] = {"recipe_sha256": recipe.sha256}
    if "last" in parts:
        asked |= {"images": images, "aa_images": aa_images}
    return outcome.keys() >= WHOLE.union(parts) and all(outcome[name] == value for name, value in asked.items())


def part_of(outcome: Outcome, part: Part) -> dict[str, Any] | None:
    """The epoch, accuracies, counts of images, verdicts and flags of one part of an outcome, if it has that part."""
    if part != "final":
        return outcome.get(part)
    final = outcome["final"]
    return {
        "epoch": outcome["recipe"]["epochs"], "accuracy": {name: final[name] for name in WATCHED},
        "images": dict.fromkeys(WATCHED, final["images"]), "standing": {}, "flags": [],
    }  # fmt: skip


def _evaluate(subject: Subject, images: int | None, aa_images: int | None) -> dict[str, Any]:
    """Accuracy and verdicts in the paper's columns. AutoAttack, far slower than the rest, may have fewer images, and
    then a card of its own."""
    if images == aa_images:
        cards = [_card(subject, [*COLUMNS], images)]
    else:
        apart = replace(subject, card=subject.card.with_name(f"{subject.card.stem}_aa.json"))
        cards = [_card(subject, [*COLUMNS[:-1]], images), _card(apart, ["clean", "aa"], aa_images)]
    accuracy, standing, counts = {}, {}, {}
    for card in reversed(cards):  # clean accuracy is that of the larger card
        for name, result in card["results"].items():
            accuracy[name], counts[name] = result["accuracy"], card["data"]["images"]
            standing[name] = pack([verdict is None for verdict in card["broken_by"][name]])
    flags = list(dict.fromkeys(flag["name"] for card in cards for flag in card["flags"]))
    return {"images": counts, "accuracy": accuracy, "standing": standing, "flags": flags}


def _card(subject: Subject, attacks: list[str], count: int | None) -> dict[str, Any]:
    """The card that is there, if it is of the same model and asks the same; or a new one."""
    try:
        card = read_json(subject.card)
        asked = card["settings"]
        same = card["subject"]["sha256"] == subject.sha256 and card["data"]["sha256"] == subject.images.sha256
        wanted = (attacks, subject.eps, subject.norm, 0, count or len(subject.images.test_y))
        same = same and "precision" not in asked
        if same and tuple(asked[name] for name in ("attacks", "eps", "norm", "seed", "images")) == wanted:
            return card
    except (UserError, KeyError, TypeError):
        pass
    return evaluate_subject(subject, attacks=attacks, count=count)


def steady_seconds(metrics: Sequence[dict[str, Any]]) -> float:
    """Training time with each epoch at the median of its stage: what a machine with nothing else to do needs, about,
    where a pause or another job made some epochs slow."""
    by_stage: dict[str, list[float]] = {}
    for line in metrics:
        by_stage.setdefault(line["stage"], []).append(line["train_seconds"])
    return round(sum(len(seconds) * statistics.median(seconds) for seconds in by_stage.values()), 3)


def pack(flags: Sequence[bool]) -> str:
    """Verdicts as hexadecimal digits, the first image in the highest bit."""
    return f"{int('1' + ''.join('01'[flag] for flag in flags), 2):x}"


def unpack(text: str) -> list[bool]:
    return [digit == "1" for digit in f"{int(text, 16):b}"[1:]]


def as_runs(outcomes: Sequence[Outcome], part: Part = "last", *, timed: bool = True) -> Runs:
    """The outcomes of one row, one for each seed, as claims see them. `timed`: their seconds are of one machine."""
    seeds = {outcome["seed"]: outcome for outcome in outcomes}
    parts = {seed: found for seed, one in seeds.items() if (found := part_of(one, part))}
    names = {name for one in parts.values() for name in one["accuracy"]}
    judged = {name for one in parts.values() for name in one["standing"]}
    return Runs(
        accuracy={name: {seed: one["accuracy"][name] for seed, one in parts.items()} for name in names},
        cost={seed: seeds[seed]["passes"] for seed in parts},
        time={seed: seeds[seed]["steady_seconds"] for seed in parts if timed},
        collapsed={seed: seeds[seed]["collapsed_at"] is not None for seed in parts},
        standing={name: {seed: unpack(one["standing"][name]) for seed, one in parts.items()} for name in judged},
        slowly={seed: _fell_slowly(seeds[seed]) for seed in parts},
    )


def _fell_slowly(outcome: Outcome) -> bool:
    """Whether a run that collapsed shows no gap of FGSM over PGD-7 accuracy from then on: overfitting, but of the slow
    kind (Rice et al., 2020), which ends below the line of a collapse as well."""
    since = outcome["collapsed_at"]
    checks = [line for line in outcome["history"] if since and line["comparable"] and line["epoch"] >= since]
    return since is not None and all(check["fgsm"] - check["pgd7"] <= GAP for check in checks)
