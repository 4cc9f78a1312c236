"""Reproduce a table or figure as a sweep that can be resumed: missing runs are trained and evaluated."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.report.page import publish
from moatlab.report.plots import plot_result
from moatlab.reproduce.benchmark import seconds_per_pass
from moatlab.reproduce.outcomes import Outcome, evaluate_run, outcomes_in, read_outcomes
from moatlab.reproduce.paper import EXPERIMENTS, Asked, Row
from moatlab.reproduce.plan import Job, Sweep
from moatlab.reproduce.pool import each, machine_for
from moatlab.reproduce.results import make_result, write_result
from moatlab.reproduce.tables import for_page
from moatlab.runtime import console
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import NotWritten, RunFailed, UserError, users_code
from moatlab.runtime.files import RunFile
from moatlab.training.api import train_recipe
from moatlab.training.recipe import Recipe, load_recipe
from moatlab.training.run_folder import RunFolder

LONG = 86400.0  # seconds: without a GPU, more than this needs --yes


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    machine: Machine | None = None,
    data_dir: Path | None = None,
    known: Sequence[Path] = (),
    yes: bool = False,
    on: str | None = None,
    command: str | None = None,
    note: str | None = None,
) -> dict[str, Any]:
    """Train and evaluate the missing runs; write and return the result, which lists runs that failed.

    `known`: earlier results, whose runs are not repeated. `on`: where to train (see `pool.each`). `yes`: start even if
    it takes days. `command`: recorded in the result. `note`: a remark on its conditions, shown with it.
    """
    machine = machine_for(machine or Machine(), on)
    for job in [*sweep.jobs, *_in_folder(sweep, out)]:
        RunFolder(out / job.name).check(job.recipe, resume=True)
    before = [outcome for path in known for outcome in read_outcomes(path)]
    if sweep.more_seeds:
        sweep = _with_known_seeds(sweep, out, before)
    outcomes = {job: found for job in sweep.jobs if (found := _known(sweep, job, out, before))}
    missing = [job for job in sweep.jobs if job not in outcomes]
    if missing:
        images = load_images(missing[0].recipe.data, data_dir)
        _check_images(sweep, outcomes, images)
        _announce(sweep, missing, out, images, machine, on, yes=yes)
    work = partial(train_and_evaluate, asked=sweep.asked, machine=machine, data_dir=data_dir)
    tasks = [(job.recipe, (out / job.name).absolute()) for job in missing]
    failures: list[dict[str, str]] = []
    done, progress = 0.0, console.Bar("", sum(map(sweep.work, missing)))  # not displayed, estimates the time left
    for count, (number, outcome) in enumerate(each(work, tasks, on, machine), 1):
        job = missing[number]
        if isinstance(outcome, NotWritten):
            raise outcome  # the disk is full: the other runs would fail too
        if isinstance(outcome, Exception):
            failures.append({"run": str(out / job.name), "message": str(outcome)})
            console.warn(f"{job.name} failed: {outcome}; the other runs continue")
        else:
            outcomes[job] = outcome
        done += sweep.work(job)
        if count < len(missing):
            console.note(f"{count} of {len(missing)} runs done, about {progress.eta(done)} left\n")
    name = sweep.experiment.name
    kept = _kept(out / f"{name}.json", outcomes.values())
    others = _others(sweep, out, before)
    remarks = {"command": command, "note": note}
    result = make_result(sweep, outcomes, out, others=others, kept=kept, failures=failures, **remarks)
    write_result(out, result)
    picture = None
    if outcomes:
        for suffix in ("pdf", "png"):
            plot_result(out / f"{name}.{suffix}", result)
        picture = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
    folders = [RunFolder(out / job.name) for job in sweep.jobs if job.recipe.seed == 0]
    paths = [folder.path for folder in folders if folder.record.exists()]
    title, top = f"{name}: {sweep.experiment.title}", for_page(result) | {"picture": picture}
    trust = sweep.jobs[0].recipe.names_code
    publish(paths, out / f"{name}.html", data_dir=data_dir, trust_model_code=trust, title=title, top=top)
    return result


def train_and_evaluate(recipe: Recipe, folder: Path, asked: Asked, machine: Machine, data_dir: Path | None) -> Outcome:
    train_recipe(recipe, folder, machine=machine, data_dir=data_dir, resume=True)
    with users_code(f"{folder.name} can't be evaluated", RunFailed):
        return evaluate_run(folder, recipe, asked, machine, data_dir)


def _check_images(sweep: Sweep, known: dict[Job, Outcome], images: Images) -> None:
    """Refuse images other than those of known runs and, at the paper's size, an incomplete data set."""
    data = sweep.jobs[0].recipe.data
    if sweep.at_full_size and images.note:
        part = f"{data} is incomplete ({images.note}), and the paper uses all of it"
        raise UserError(f"{part}; run moat data get {data}, name its folder with --data-dir, or use --preset laptop")
    if other := next((job for job, one in known.items() if one.data["sha256"] != images.sha256), None):
        trained = f"{other.name} was trained on another {data}"
        raise UserError(f"{trained}; name that one with --data-dir, or use a new --out folder without --known")


def _announce(
    sweep: Sweep, missing: list[Job], out: Path, images: Images, machine: Machine, on: str | None, *, yes: bool
) -> None:
    """Print what will run and how long it takes, estimated from a few real steps; without `yes`, refuse what takes
    days. A Ray cluster at an address may have other hardware: nothing is timed or refused."""
    name, preset = sweep.experiment.name, sweep.preset
    done = f" ({len(sweep.jobs) - len(missing)} done already)" if len(missing) < len(sweep.jobs) else ""
    passes = console.counted(sum(job.passes for job in missing), "pass")
    console.note(f"{name}: {sweep.experiment.title}\npreset {preset}: {sweep.setting}")
    console.note(f"{console.counted(len(missing), 'run')} to do{done}, {passes} over the training set")
    left = f"the time on {on} is not estimated"
    if on is None or on.isdecimal() or on == "ray":
        console.note("timing a few steps ...")
        seconds, has_gpu = seconds_per_pass(missing[0].recipe, machine, images)
        seconds *= sum(map(sweep.work, missing)) / (int(on) if on and on.isdecimal() else 1)
        left = f"about {console.duration(seconds)} on this machine, evaluation included"
        if not has_gpu and not yes and (sweep.at_full_size or seconds > LONG):
            small = "mini" if sweep.experiment.data == "cifar10" else "laptop"
            smaller = f", or use --preset {small}, which takes hours" if sweep.at_full_size else ""
            would = f"{name} with --preset {preset} would take {left}, without a GPU"
            raise UserError(f"{would}; add --yes to start it anyway{smaller}")
    console.note(f"{left}; runs are written to {out}; if stopped, the same command resumes them\n")


def _in_folder(sweep: Sweep, out: Path) -> list[Job]:
    """Runs in the sweep's folder, of other rows and seeds too, with the recipes that they should have."""
    jobs = []
    for path in sorted(out.glob(f"*/{RunFile.RECIPE}")):
        recipe = load_recipe(path)
        rows = [Row(recipe.method, recipe.method), *sweep.experiment.rows_of(recipe.method)]
        some = [Job(row, sweep.recipe_of(row, recipe.seed)) for row in rows]
        jobs += [job for job in some if job.name == path.parent.name][:1]  # others are not runs of a sweep
    return jobs


def _kept(path: Path, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Runs of the result to be replaced that are not in the new one: this file may be their only copy."""

    def identity(one: Outcome) -> tuple[Any, ...]:
        return one.recipe_sha256, one.images, one.aa_images, one.environment.get("threads")

    there = set(map(identity, outcomes))
    try:
        return [one for one in read_outcomes(path) if identity(one) not in there] if path.exists() else []
    except UserError as error:
        console.warn(f"{error}; replacing it")
        return []


def _known(sweep: Sweep, job: Job, out: Path, before: list[Outcome]) -> Outcome | None:
    """The outcome of an earlier run, from the sweep's folder or an earlier result."""
    found = (*outcomes_in(out / job.name), *before)
    return next((one for one in found if one.answers(job.recipe, sweep.asked)), None)


def _with_known_seeds(sweep: Sweep, out: Path, before: list[Outcome]) -> Sweep:
    """With the runs of other seeds that need no training: tables may have more seeds of some rows than of others."""
    there = [one for path in out.glob(f"*/{RunFile.OUTCOME}") for one in outcomes_in(path.parent)]
    seeds = sorted({one.seed for one in (*before, *there)} - {*sweep.seeds})
    jobs = [Job(row, sweep.recipe_of(row, seed)) for seed in seeds for row in sweep.rows]
    return replace(sweep, jobs=[*sweep.jobs, *(job for job in jobs if _known(sweep, job, out, before))])


def _others(sweep: Sweep, out: Path, before: list[Outcome]) -> dict[str, list[Outcome]]:
    """Method -> earlier runs of the same setting that are no rows here; claims may compare with them."""
    ours = {row.method for row in sweep.rows}
    methods = dict.fromkeys(row.method for one in EXPERIMENTS.values() for row in one.rows if row.method not in ours)
    found = {}
    for row in [Row(method, method) for method in methods]:
        jobs = [Job(row, sweep.recipe_of(row, seed)) for seed in sweep.seeds]
        found[row.method] = [one for job in jobs if (one := _known(sweep, job, out, before))]
    return {method: outcomes for method, outcomes in found.items() if outcomes}
