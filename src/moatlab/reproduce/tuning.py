"""`moat tune`: search methods and settings for the most robust model within a budget, by successive halving.

All trials are trained for a part of the budget, the better ones again for twice as much, up to the whole budget, each
time with a schedule of that length. They are compared on held-out images, never on the test set.
"""

import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from moatlab.data.loading import load_images
from moatlab.data.sizes import Sizes, find_sizes
from moatlab.evaluation.target import load_target
from moatlab.report.fronts import front_of, plot_front
from moatlab.report.page import publish
from moatlab.reproduce.held_out import right_under_both
from moatlab.reproduce.pool import each, machine_for
from moatlab.reproduce.space import SHARES, Space, read_space
from moatlab.reproduce.trials import Measured, Trials, Unit
from moatlab.reproduce.tuning_page import for_page
from moatlab.runtime import console
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import NotWritten, RunFailed, UserError
from moatlab.runtime.files import atomic, make_folder, read_json, write_json
from moatlab.training.api import train_recipe
from moatlab.training.budget import Budget, cycle_of, price, within
from moatlab.training.estimate import measured_seconds
from moatlab.training.making import draft_recipe
from moatlab.training.recipe import Recipe, option_name, validated
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session, split

HELD_OUT, LARGE = 2000, 20_000  # images held out of a training set of at least so many
WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class Search:
    """What a search is asked for; the same for all its processes."""

    trials: Trials
    budget: Budget
    options: dict[str, Any]  # of the recipe
    clean_floor: float
    clean_weight: float
    machine: Machine
    data_dir: Path | None
    seconds_per_forward: float = 0.0
    verbose: bool = False

    @property
    def sizes(self) -> Sizes:
        first = draft_recipe("standard", **self.options)
        return find_sizes(first.data, first.image_size)

    def recipe(self, unit: Unit) -> Recipe:
        """Of a trial, with the epochs that the rung's share of the budget allows: at least a whole cycle."""
        fields = dict(self.trials.read_fields(unit.trial))
        shares = {name: fields.pop(name) for name in SHARES if name in fields}
        first = draft_recipe(**self.options | fields | {"seed": unit.seed})
        sizes = self.sizes

        def price_of(recipe: Recipe) -> float:
            return price(recipe, sizes, self.budget.kind, self.seconds_per_forward)

        share = 2.0 ** (unit.rung - self.trials.rungs + 1)
        shortest = price_of(first.model_copy(update={"epochs": cycle_of(first)}))
        limit = self.budget.times(share)
        recipe = within(limit if shortest <= limit.amount else self.budget.times(1), first, price_of)
        if shortest > limit.amount:
            recipe = recipe.model_copy(update={"epochs": cycle_of(first)})
        epochs = recipe.epochs
        watched = {"monitor_every": max(epochs // 3, 1), "monitor_images": min(500, recipe.holdout)}
        ramps = {name: round(share * epochs, 3) for name, share in shares.items()}
        return validated(recipe.model_dump() | watched | ramps)


def tune(
    budget: str,
    out: Path,
    *,
    trials: int = 24,
    rungs: int = 3,
    seeds: int = 2,
    seed: int | None = None,
    space: Path | None = None,
    storage: str | None = None,
    clean_floor: float = 0.0,
    clean_weight: float = 0.0,
    on: str | None = None,
    machine: Machine | None = None,
    data_dir: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Search, and write the winner's `recipe.toml`, `tune.json` and a page into `out`; return what the JSON has.

    `trials` choices are drawn from `space` and trained for a quarter of the budget (with three `rungs`), two fifths of
    them for half of it, and two fifths of those for all of it, with `seeds` seeds. The most images right under PGD-10
    on the cross-entropy and on the margin win, plus `clean_weight` times the clean accuracy; trials with a clean
    accuracy below `clean_floor` lose. Called again, it resumes.
    """
    limit, machine, seed = Budget.parse(budget), machine_for(machine or Machine(), on), seed or 0
    given = {name: value for name, value in options.items() if value is not None}
    if late := next((name for name in SHARES if name in given), None):
        share = f"give it as a share of the run, {late} = [...] in --space"
        raise UserError(f"{option_name(late)}: runs have different lengths; {share}")
    if "file" in given:
        given["file"] = str(given["file"])
    searched = _without(read_space(space), given)
    first = draft_recipe("standard", **given)
    sizes = find_sizes(first.data, first.image_size)
    if "holdout" not in given:
        given["holdout"] = HELD_OUT if sizes.train >= LARGE and "file" not in given else first.holdout
    if not given["holdout"]:
        raise UserError("moat tune compares trials on held-out images; use --holdout 1000")
    given["monitor"] = "holdout"
    first = _checked(draft_recipe("standard", **given), limit, machine, data_dir, sizes)
    settings = {"budget": budget, "trials": trials, "rungs": rungs, "seeds": seeds, "seed": seed, "storage": storage}
    settings |= {"clean_floor": clean_floor, "clean_weight": clean_weight, "space": searched.text, "options": given}
    make_folder(out)
    asked = Trials(out.absolute(), searched, trials, rungs, seeds, seed, storage=storage)
    with asked.alone():
        second, study = _agree(out, settings, first, machine, sizes, limit)
    asked = replace(asked, study=study)
    search = Search(asked, limit, given, clean_floor, clean_weight, machine, data_dir, second, console.is_heard())
    held_out = console.counted(given["holdout"], "held-out image")
    console.note(f"{trials} trials, {limit} for a run at the last of {rungs} rungs, compared on {held_out}")
    jobs = 1 if on is None else int(on) if on.isdecimal() else trials  # of Ray as many at a time as fit
    for _, ended in each(partial(work, search), [()] * jobs, on, machine):
        if isinstance(ended, Exception):
            raise ended
    with asked.alone("conclusion"):
        return conclude(search, settings)


def _checked(recipe: Recipe, budget: Budget, machine: Machine, data_dir: Path | None, sizes: Sizes) -> Recipe:
    """Find mistakes that would make every trial fail (data, model, device, budget) before the first one."""
    price(recipe, sizes, budget.kind)
    with machine.in_use() as device:
        images = load_images(recipe.data, data_dir, image_size=recipe.image_size)
        Session(recipe, device, images).batches.close()
    return recipe


def _without(space: Space, given: dict[str, Any]) -> Space:
    """What is given as an option is not searched."""
    return replace(space, choices={name: value for name, value in space.choices.items() if name not in given})


def _agree(
    out: Path, settings: dict[str, Any], recipe: Recipe, machine: Machine, sizes: Sizes, budget: Budget
) -> tuple[float, str]:
    """Write the settings of a new search, or compare them with those of the one in the folder. Return the seconds per
    forward of an image, which are measured once, and the name of Optuna's study."""
    path = out / "search.json"
    if path.exists():
        before = read_json(path)
        for name, value in settings.items():
            if before[name] != value:
                raise UserError(f"{out} has a search with another {name.replace('_', ' ')}; use another --out folder")
        return float(before["seconds_per_forward"]), before["study"]
    second = measured_seconds(recipe, machine, sizes) if budget.kind == "seconds" else 0.0
    study = f"moat tune {uuid.uuid4().hex}"
    write_json(path, settings | {"seconds_per_forward": second, "study": study})
    return second, study


def work(search: Search) -> int:
    """Train what is left to train; return how many runs this process made."""
    made = 0
    while True:
        with console.verbosity(search.verbose), search.trials.claimed() as claim:
            if claim is False:
                return made
            if isinstance(claim, Unit):
                measured = attempt(search, claim)
                search.trials.write(claim, measured)
                _report(search, claim, measured)
                made += 1
                continue
        time.sleep(WAIT_SECONDS)


def attempt(search: Search, unit: Unit) -> Measured:
    """Train and measure; a failure is a result too."""
    try:
        recipe = search.recipe(unit)
        folder = search.trials.run_folder(unit, recipe.epochs)
        with console.verbosity(False):
            train_recipe(recipe, folder, machine=search.machine, data_dir=search.data_dir, resume=True)
        return measure_trial(search, recipe, folder)
    except NotWritten:
        raise  # the disk is full: all others would fail too
    except (UserError, RunFailed) as error:
        return Measured(failure=str(error))


def measure_trial(search: Search, recipe: Recipe, folder: Path) -> Measured:
    """On the held-out images, in float32; of the averaged weights if there are some."""
    record, which = RunFolder(folder).read_record(), "last" if recipe.average == "none" else "average"
    with search.machine.in_use() as device, console.verbosity(False):
        target = load_target(
            folder, which=which, data_dir=search.data_dir, device=str(device), trust_model_code=recipe.names_code
        )
        whole = recipe.model_copy(update={"monitor_images": None})
        _, x, y = split(load_images(recipe.data, search.data_dir, image_size=recipe.image_size), whole, device)
        clean, robust = right_under_both(target.model, x, y, recipe.threat)
    value = robust + search.clean_weight * clean if clean >= search.clean_floor else clean - 1
    return Measured(
        value=value,
        robust=robust,
        clean=clean,
        epochs=recipe.epochs,
        passes=record.counted["passes"],
        flops=record.flops or 0.0,
        seconds=record.train_seconds,
        outcome=record.outcome,
    )


def _report(search: Search, unit: Unit, measured: Measured) -> None:
    fields = search.trials.read_fields(unit.trial)
    where = f"trial {unit.trial + 1} of {search.trials.count}, rung {unit.rung + 1} of {search.trials.rungs}"
    found = f"robust {100 * measured.robust:.1f} %, clean {100 * measured.clean:.1f} %, {measured.passes:.4g} passes"
    console.note(f"{where}: {measured.failure or found}   {fields.get('method', '')}")


def conclude(search: Search, settings: dict[str, Any]) -> dict[str, Any]:
    """Name the winner; write recipe.toml, tune.json, tune.png and tune.html."""
    trials, out = search.trials, search.trials.out
    last = trials.rungs - 1
    ranked = [(value, trial) for value, trial in trials.ranking(last) if value is not None]
    if not ranked:
        raise RunFailed(f"no trial succeeded; {out}/trials/000/rung0_s0/result.json says why the first one failed")
    winner = search.recipe(Unit(ranked[0][1], last, 0))
    usual = winner.model_copy(update={"monitor_every": 1, "monitor_images": None})
    with atomic(out / "recipe.toml") as file:
        file.write(usual.to_toml().encode())
    rows = []
    for trial in range(trials.count):
        units = [unit for rung in range(trials.rungs) for unit in trials.units(rung) or [] if unit.trial == trial]
        found = [(unit, measured) for unit in units if (measured := trials.result(unit))]
        runs = [{"rung": unit.rung, "seed": unit.seed, **measured.model_dump()} for unit, measured in found]
        rows.append({"trial": trial, "fields": trials.read_fields(trial), "runs": runs})
    result = {
        **settings,
        "setting": usual.setting,
        "winner": ranked[0][1],
        "ranking": [{"trial": trial, "value": value} for value, trial in ranked],
        "importances": trials.importances(),
        "trials": rows,
        "front": front_of(rows),
    }
    write_json(out / "tune.json", result)
    plot_front(out / "tune.png", result)
    firsts = [unit for unit in trials.units(last) or [] if unit.seed == 0]
    folders = [trials.run_folder(unit, search.recipe(unit).epochs) for unit in firsts]
    top = for_page(result, out / "tune.png")
    shown = [folder for folder in folders if (folder / "run.json").exists()]
    names = {"title": "moat tune", "top": top, "trust_model_code": usual.names_code}
    publish(shown, out / "tune.html", data_dir=search.data_dir, **names)
    return result
