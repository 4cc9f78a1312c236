"""A table or figure of the paper as a sweep that can be continued: what is missing is trained and evaluated."""

import base64
from collections.abc import Iterable, Sequence
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
from moatlab.reproduce.pool import each
from moatlab.reproduce.results import make_result, write_result
from moatlab.reproduce.tables import for_page
from moatlab.runtime import console
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import NotWritten, RunFailed, UserError, users_code
from moatlab.runtime.files import RunFile
from moatlab.training.api import train_recipe
from moatlab.training.recipe import Recipe, load_recipe
from moatlab.training.run_folder import RunFolder

LONG = 86400.0  # seconds: a machine without a GPU is not started on more unless it is asked to


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
) -> dict[str, Any]:
    """Train and evaluate what is missing, and return (and write) the result. Runs that failed are named in it.

    `known` are earlier results, whose runs are not repeated; `on` is where runs are trained (see `pool.each`); `yes`
    also starts what takes days; `command` is recorded as what made the result.
    """
    machine = machine or Machine()
    for job in [*sweep.jobs, *_in_folder(sweep, out)]:
        RunFolder(out / job.name).check(job.recipe, resume=True)
    before = [outcome for path in known for outcome in read_outcomes(path)]
    outcomes = {job: found for job in sweep.jobs if (found := _known(sweep, job, out, before))}
    missing = [job for job in sweep.jobs if job not in outcomes]
    if missing:
        images = load_images(missing[0].recipe.data, data_dir)
        _check_images(sweep, outcomes, images)
        _announce(sweep, missing, out, images, machine, on, yes=yes)
    work = partial(train_and_evaluate, asked=sweep.asked, machine=machine, data_dir=data_dir)
    tasks = [(job.recipe, (out / job.name).absolute()) for job in missing]
    failures: list[dict[str, str]] = []
    done, progress = 0.0, console.Bar("", sum(map(sweep.work, missing)))  # never shown: for the time left
    for count, (number, outcome) in enumerate(each(work, tasks, on, machine), 1):
        job = missing[number]
        if isinstance(outcome, NotWritten):
            raise outcome  # the disk is full: the others could not be written either
        if isinstance(outcome, Exception):
            failures.append({"run": str(out / job.name), "message": str(outcome)})
            console.warn(f"{job.name} failed: {outcome}; continuing with the others")
        else:
            outcomes[job] = outcome
        done += sweep.work(job)
        if count < len(missing):
            console.note(f"{count} of {len(missing)} runs done, about {progress.eta(done)} left\n")
    name = sweep.experiment.name
    kept = _kept(out / f"{name}.json", outcomes.values())
    others = _others(sweep, out, before)
    result = make_result(sweep, outcomes, out, others=others, kept=kept, failures=failures, command=command)
    write_result(out, result)
    picture = None
    if outcomes:
        for suffix in ("pdf", "png"):
            plot_result(out / f"{name}.{suffix}", result)
        picture = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
    folders = [RunFolder(out / job.name) for job in sweep.jobs if job.recipe.seed == 0]
    publish(
        [folder.path for folder in folders if folder.record.exists()],
        out / f"{name}.html",
        data_dir=data_dir,
        trust_model_code=sweep.jobs[0].recipe.names_code,
        title=f"{name}: {sweep.experiment.title}",
        top=for_page(result) | {"picture": picture},
    )
    return result


def train_and_evaluate(recipe: Recipe, folder: Path, asked: Asked, machine: Machine, data_dir: Path | None) -> Outcome:
    train_recipe(recipe, folder, machine=machine, data_dir=data_dir, resume=True)
    with users_code(f"{folder.name} can't be evaluated", RunFailed):
        return evaluate_run(folder, recipe, asked, machine, data_dir)


def _check_images(sweep: Sweep, known: dict[Job, Outcome], images: Images) -> None:
    """Refuse other images than those of runs that are known and, at the paper's size, a part of a data set."""
    data = sweep.jobs[0].recipe.data
    if sweep.at_full_size and images.note:
        raise UserError(
            f"{data} here is not the whole set ({images.note}), and the paper's numbers are of the whole; name a "
            f"folder that holds it with --data-dir, get it with moat data get {data}, or use --preset small"
        )
    if strange := next((job for job, one in known.items() if one.data["sha256"] != images.sha256), None):
        raise UserError(
            f"{data} here is not the {data} that {strange.name} was trained on; name the folder that holds it with "
            "--data-dir, or begin in another --out folder, without --known"
        )


def _announce(
    sweep: Sweep, missing: list[Job], out: Path, images: Images, machine: Machine, on: str | None, *, yes: bool
) -> None:
    """Print what will run and how long it takes, from a few real steps; refuse what takes days unless it is asked for.

    A Ray cluster at an address has other machines, maybe with GPUs: nothing is timed here, or refused.
    """
    name, preset = sweep.experiment.name, sweep.preset
    done = f" ({len(sweep.jobs) - len(missing)} are done)" if len(missing) < len(sweep.jobs) else ""
    passes = sum(job.passes for job in missing)
    console.note(f"{name}: {sweep.experiment.title}\npreset {preset}: {sweep.setting}")
    console.note(f"{len(missing)} runs to do{done}, {passes:g} passes over the training set")
    left = f"the time on {on} is not estimated"
    if on is None or ":" not in on:
        console.note("timing a few steps ...")
        seconds, has_gpu = seconds_per_pass(missing[0].recipe, machine, images)
        seconds *= sum(map(sweep.work, missing))
        left = f"about {console.duration(seconds)} on this machine, evaluation included"
        if not has_gpu and not yes and (sweep.at_full_size or seconds > LONG):
            small = "mini" if sweep.experiment.data == "cifar10" else "small"
            smaller = f"; --preset {small} shows the same shape in hours" if sweep.at_full_size else ""
            would = f"{name} at --preset {preset} would take {left}, which has no GPU"
            raise UserError(f"{would}; to start it all the same, add --yes{smaller}")
    console.note(f"{left}; the runs go to {out}; stopped, the same command resumes them\n")


def _in_folder(sweep: Sweep, out: Path) -> list[Job]:
    """The runs of other rows and seeds that are in the sweep's folder, with the recipes that they should have."""
    paths = sorted(out.glob(f"*/{RunFile.RECIPE}"))
    jobs = {path: _job(sweep, recipe.method, recipe.seed) for path in paths if (recipe := load_recipe(path))}
    return [job for path, job in jobs.items() if job.name == path.parent.name]  # or it is no run of a sweep


def _job(sweep: Sweep, method: str, seed: int) -> Job:
    return Job(Row(method, method), sweep.recipe_of(method, seed))


def _kept(path: Path, outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Runs in the result that is about to be replaced which are not in the new one: they may be nowhere else."""

    def identity(one: Outcome) -> tuple[Any, ...]:
        return one.recipe_sha256, one.images, one.aa_images, one.environment.get("threads")

    there = set(map(identity, outcomes))
    try:
        return [one for one in read_outcomes(path) if identity(one) not in there] if path.exists() else []
    except UserError as error:
        console.warn(f"{error}; it is replaced")
        return []


def _known(sweep: Sweep, job: Job, out: Path, before: list[Outcome]) -> Outcome | None:
    """The outcome of a run that was done before: in the sweep's folder, or in an earlier result."""
    found = (*outcomes_in(out / job.name), *before)
    return next((one for one in found if one.answers(job.recipe, sweep.asked)), None)


def _others(sweep: Sweep, out: Path, before: list[Outcome]) -> dict[str, list[Outcome]]:
    """Runs of the same setting that are no rows here, by method: claims may compare with them. They are in the sweep's
    folder, or in earlier results."""
    ours = {row.method for row in sweep.rows}
    methods = dict.fromkeys(row.method for one in EXPERIMENTS.values() for row in one.rows if row.method not in ours)
    jobs = {method: [_job(sweep, method, seed) for seed in sweep.seeds] for method in methods}
    found = {method: [one for job in some if (one := _known(sweep, job, out, before))] for method, some in jobs.items()}
    return {method: outcomes for method, outcomes in found.items() if outcomes}
