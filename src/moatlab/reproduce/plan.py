"""The runs of a table or figure, their recipes and costs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moatlab.data.loading import KNOWN_SIZES
from moatlab.reproduce.paper import COLUMNS, Asked, Experiment, Row
from moatlab.runtime.errors import UserError
from moatlab.training.making import make_recipe
from moatlab.training.recipe import Recipe, option_name, slug

# Preset -> test images for all attacks, and for AutoAttack; others use all images.
EVALUATED = {"mini": (500, 200), "mini-long": (500, 200), "laptop": (1000, 1000)}
LAST_ONLY = ("laptop",)  # presets whose tables have no best epoch: half of the evaluation's time
SURVIVING = 0.3  # share of images still robust during an attack, to estimate its time


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    row: Row
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{slug(self.recipe.method)}{self.row.suffix}_s{self.recipe.seed}"

    @cached_property
    def passes(self) -> float:
        return self.recipe.parsed_method.cost(self.recipe.epochs).passes


@dataclass(frozen=True)
class Sweep:
    """The runs that `moat reproduce` was asked for."""

    experiment: Experiment
    preset: str
    jobs: list[Job]
    asked: Asked
    recipe_of: Callable[[Row, int], Recipe]  # row, seed -> recipe with the same options
    epochs: int | None = None  # None: the preset's
    more_seeds: bool = False  # show further seeds that are known already

    @property
    def passes(self) -> float:
        return sum(job.passes for job in self.jobs)

    def work(self, job: Job) -> float:
        """Passes over the training set to train a run and (estimated) to evaluate it."""
        from moatlab.attacks.ensemble import parts_of

        train, test, classes = KNOWN_SIZES[job.recipe.data]
        counts = dict.fromkeys(COLUMNS, self.asked.images) | {"aa": self.asked.aa_images}
        passes = sum(
            part.passes * (counts[name] or test)
            for name in COLUMNS[1:]
            for part in parts_of(name, job.recipe.threat, classes)
        )
        models = sum(part == "last" or (part == "best" and job.recipe.holdout > 0) for part in self.asked.parts)
        return job.passes + models * SURVIVING * passes / train

    @property
    def rows(self) -> list[Row]:
        return list(dict.fromkeys(job.row for job in self.jobs))

    @property
    def seeds(self) -> list[int]:
        return sorted({job.recipe.seed for job in self.jobs})

    @property
    def folder(self) -> Path:
        """The default folder: tables and figures of one preset, data set, schedule and length share their runs."""
        recipe, length = self.jobs[0].recipe, f"_{self.epochs}-epochs" if self.epochs else ""
        return Path("runs") / f"reproduce_{self.preset}_{recipe.data}_{recipe.schedule}{length}"

    @property
    def at_full_size(self) -> bool:
        return self.preset.startswith("paper")

    @property
    def setting(self) -> str:
        recipes = [job.recipe for job in self.jobs]
        lengths = " or ".join(map(str, sorted({recipe.epochs for recipe in recipes})))  # whole cycles may take more
        radii = sorted({recipe.threat for recipe in recipes}, key=lambda threat: threat.eps)
        setting = re.sub(r", seed \d+", "", recipes[0].setting)
        setting = setting.replace(recipes[0].threat.text, ", ".join(threat.text for threat in radii), 1)
        if not all(recipe.cycle_momentum for recipe in recipes):
            setting = setting.replace(", cycled momentum", "")
        return re.sub(r"\d+ epochs?", f"{lengths} epoch{'s' * (lengths != '1')}", setting, count=1)


def plan_sweep(
    experiment: Experiment,
    preset: str,
    *,
    seeds: int | None = None,
    methods: list[str] | None = None,
    images: int | None = None,
    aa_images: int | None = None,
    **options: Any,
) -> Sweep:
    """The runs of a table or figure, seed by seed. `methods` selects rows, or adds methods that are no rows. Without
    `seeds`: seed 0, and further seeds of its rows whose runs are known already."""
    if preset.startswith("mini") and experiment.data != "cifar10":
        raise UserError(f"{experiment.name} needs CIFAR-100, and {preset} has images of CIFAR-10; use --preset laptop")
    for name in experiment.rows[0].options:
        if options.get(name) is not None:
            raise UserError(f"{experiment.name} decides on {option_name(name)} by itself; leave it out")
    data = "mini" if preset.startswith("mini") else experiment.data
    # Only warn: the table shows what a collapse does to a run.
    options |= {"data": data, "schedule": experiment.schedule, "on_collapse": "warn"}
    options["epochs"] = options.get("epochs") or experiment.epochs

    def recipe_of(row: Row, seed: int) -> Recipe:
        recipe = make_recipe(row.method, preset=preset, seed=seed, **options | row.options)
        # Without held-out images, show test accuracy, as figure 1 of the paper does. Nothing is selected with it.
        watched = {"monitor": "test"} if recipe.holdout == 0 and options.get("monitor") is None else {}
        return recipe.model_copy(update=watched)

    rows = [row for method in methods for row in experiment.rows_of(method)] if methods else experiment.rows
    jobs = [Job(row, recipe_of(row, seed)) for seed in range(seeds or 1) for row in dict.fromkeys(rows)]
    for option, count in (("--n", images), ("--n-aa", aa_images)):
        if count and count > (there := KNOWN_SIZES[data][1]):
            raise UserError(f"{option} {count} is more than the {there:,} test images of {data}")
    usual, usual_aa = EVALUATED.get(preset, (None, None))
    images = images or usual
    aa_images = aa_images or min(filter(None, (usual_aa, images)), default=None)
    parts = tuple(part for part in experiment.parts if part != "best" or preset not in LAST_ONLY)
    asked = Asked(parts, images, aa_images)
    return Sweep(experiment, preset, jobs, asked, recipe_of, options.get("epochs"), more_seeds=seeds is None)


def describe(sweep: Sweep, out: Path) -> dict[str, Any]:
    """The keys that a plan and a result share."""
    names = {"experiment": sweep.experiment.name, "kind": sweep.experiment.kind, "title": sweep.experiment.title}
    return names | {"preset": sweep.preset, "setting": sweep.setting, "seeds": sweep.seeds, "folder": str(out)}


def describe_plan(sweep: Sweep, out: Path) -> dict[str, Any]:
    """What would run: the rows of the table or figure and, apart, those that the paper does not have."""
    rows: dict[str, list[Any]] = {"rows": [], "additional_rows": []}
    for job in sweep.jobs:
        recipe = job.recipe
        names = {"row": job.row.label, "method": recipe.method, "seed": recipe.seed, "run": job.name}
        numbers = {"epochs": recipe.epochs, "passes": job.passes, "recipe": recipe.model_dump(mode="json")}
        usual = job.row.in_paper or (not sweep.experiment.in_paper and job.row in sweep.experiment.rows)
        rows["rows" if usual else "additional_rows"].append(names | numbers)
    counts = {"images": sweep.asked.images, "aa_images": sweep.asked.aa_images, "passes": sweep.passes}
    return describe(sweep, out) | counts | rows
