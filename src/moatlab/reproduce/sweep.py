"""The paper's tables and figures: planned, run as a sweep that can be continued, and set beside the paper's numbers."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moatlab.data import KNOWN_SIZES
from moatlab.reproduce.paper import COLUMNS, EXPERIMENTS, Experiment, Part, Row
from moatlab.reproduce.pool import each
from moatlab.runtime import console
from moatlab.runtime.errors import NotWritten, RunFailed, UserError
from moatlab.training.recipe import Recipe, load_recipe, make_recipe, slug

# Test images for all attacks, and for AutoAttack; None is all of them.
EVALUATED: dict[str, tuple[int | None, int | None]] = {
    "mini": (500, 200), "mini-long": (500, 200), "small": (1000, 500), "paper": (None, None), "paper-kim": (None, None),
}  # fmt: skip
LONG = 86400.0  # seconds after which a machine without a GPU is not started unasked
STEPS = 3  # that the pace is measured by, after a first one that warms up
STANDING = 0.3  # of the images to the end of an attack: for the time left only


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    row: Row
    recipe: Recipe

    @property
    def name(self) -> str:
        return f"{slug(self.recipe.method)}_s{self.recipe.seed}"

    @property
    def passes(self) -> float:
        return self.recipe.parsed_method.cost(self.recipe.epochs).passes


@dataclass(frozen=True)
class Sweep:
    """What `moat reproduce` was asked for."""

    experiment: Experiment
    preset: str
    jobs: list[Job]
    images: int | None
    aa_images: int | None
    recipe_of: Callable[[str, int], Recipe]  # of any method and seed, by the same options

    @property
    def passes(self) -> float:
        return sum(job.passes for job in self.jobs)

    def work(self, job: Job) -> float:
        """Training and evaluation of a run in passes over the training set, the latter estimated."""
        from moatlab.attacks.ensemble import parts_of

        train, test, classes = KNOWN_SIZES[job.recipe.data]
        counts = dict.fromkeys(COLUMNS, self.images) | {"aa": self.aa_images}
        passes = sum(
            part.work * (counts[name] or test)
            for name in COLUMNS[1:]
            for part in parts_of(name, eps=job.recipe.eps_value, norm=job.recipe.norm, classes=classes)
        )
        models = sum(part == "last" or (part == "best" and job.recipe.holdout > 0) for part in self.experiment.parts)
        return job.passes + models * STANDING * passes / train

    @property
    def rows(self) -> list[Row]:
        return list(dict.fromkeys(job.row for job in self.jobs))

    @property
    def seeds(self) -> list[int]:
        return sorted({job.recipe.seed for job in self.jobs})

    @property
    def folder(self) -> Path:
        """The default one: tables and figures of the same preset, data and schedule share their runs."""
        recipe = self.jobs[0].recipe
        return Path("runs") / f"reproduce_{self.preset}_{recipe.data}_{recipe.schedule}"

    @property
    def setting(self) -> str:
        lengths = " or ".join(map(str, sorted({job.recipe.epochs for job in self.jobs})))  # cycles may end later
        setting = re.sub(r", seed \d+", "", self.jobs[0].recipe.setting)
        return re.sub(r"\d+ epochs", f"{lengths} epochs", setting, count=1)


def plan_sweep(
    experiment: Experiment, preset: str, *, seeds: int = 1, methods: list[str] | None = None,
    images: int | None = None, aa_images: int | None = None, **options: Any,
) -> Sweep:  # fmt: skip
    """The runs of a table or figure, seed by seed. `methods` chooses rows, or adds rows of the user's own."""
    data = experiment.data
    if preset.startswith("mini"):
        if data != "cifar10":
            raise UserError(
                f"{experiment.name} is of CIFAR-100, and {preset} holds images of CIFAR-10; use --preset small"
            )
        data = "mini"
    # What a collapse does to a run is what the table is to show.
    options |= {"data": data, "schedule": experiment.schedule, "on_collapse": "warn"}

    def recipe_of(method: str, seed: int) -> Recipe:
        recipe = make_recipe(method, preset=preset, seed=seed, **options)
        if recipe.holdout == 0 and options.get("monitor") is None:
            # As in the paper's figure 1. It is for display: nothing is chosen by it.
            return make_recipe(method, preset=preset, seed=seed, **(options | {"monitor": "test"}))
        return recipe

    known = {row.method: row for row in experiment.rows} | {row.label: row for row in experiment.rows}
    rows = [known.get(method, Row(method, method, in_paper=False)) for method in methods or list(known)]
    jobs = [Job(row, recipe_of(row.method, seed)) for seed in range(seeds) for row in dict.fromkeys(rows)]
    usual, (_, there, _) = EVALUATED[preset], KNOWN_SIZES[data]
    for option, count in (("--n", images), ("--n-aa", aa_images)):
        if count and count > there:
            raise UserError(f"{option} {count} is more than the {there:,} test images of {data}")
    images = usual[0] if images is None else images
    aa_images = (
        (min(usual[1], images) if usual[1] and images else usual[1] or images) if aa_images is None else aa_images
    )
    return Sweep(experiment, preset, jobs, images, aa_images, recipe_of)


def describe_plan(sweep: Sweep, out: Path) -> dict[str, Any]:
    """What would run: the paper's rows, and ours apart."""

    def described(job: Job) -> dict[str, Any]:
        return {
            "row": job.row.label, "method": job.recipe.method, "seed": job.recipe.seed, "run": job.name,
            "epochs": job.recipe.epochs, "passes": job.passes, "recipe": job.recipe.model_dump(mode="json"),
        }  # fmt: skip

    return {
        "experiment": sweep.experiment.name, "title": sweep.experiment.title, "preset": sweep.preset,
        "setting": sweep.setting, "seeds": sweep.seeds, "images": sweep.images, "aa_images": sweep.aa_images,
        "passes": sweep.passes, "folder": str(out),
        "rows": [described(job) for job in sweep.jobs if job.row.in_paper],
        "additional_rows": [described(job) for job in sweep.jobs if not job.row.in_paper],
    }  # fmt: skip


def reproduce(
    sweep: Sweep, out: Path, *, data_dir: Path | None = None, known: list[Path] | None = None, yes: bool = False,
    on: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train and evaluate what is missing, and return (and write) the result. Runs that failed are named in it."""
    from moatlab.report.page import publish
    from moatlab.report.plots import plot_result
    from moatlab.reproduce.outcomes import read_outcomes
    from moatlab.reproduce.results import make_result, write_result
    from moatlab.reproduce.tables import for_page
    from moatlab.training.run_folder import RunFolder

    for job in [*sweep.jobs, *_found(sweep, out)]:
        RunFolder(out / job.name).check(job.recipe, resume=True)
    before = [outcome for path in known or [] for outcome in read_outcomes(path)]
    outcomes = {job: found for job in sweep.jobs if (found := _known(sweep, job, out, before))}
    missing = [job for job in sweep.jobs if job not in outcomes]
    failures: list[dict[str, str]] = []
    pace = _announce(sweep, missing, outcomes, out, data_dir, yes=yes) if missing else None
    first = sweep.jobs[0].recipe
    wanted = (sweep.experiment.parts, sweep.images, sweep.aa_images, data_dir)
    tasks = [(job.recipe, (out / job.name).absolute(), *wanted) for job in missing]
    done: list[Job] = []
    for number, outcome in each(_carry_out, tasks, on, threads=first.threads, gpus=first.device != "cpu"):
        job = missing[number]
        if isinstance(outcome, NotWritten):
            raise outcome  # the disk is full: the others could not be written either
        if isinstance(outcome, Exception):
            failures.append({"run": str(out / job.name), "message": str(outcome)})
            console.warn(f"{job.name} failed: {outcome}; going on with the others")
        else:
            outcomes[job] = outcome
        done.append(job)
        if pace and len(done) < len(missing):
            left = pace.eta(sum(map(sweep.work, done)))
            console.note(f"{len(done)} of {len(missing)} runs done, about {left} left\n")
    name = sweep.experiment.name
    kept = _kept(out / f"{name}.json", list(outcomes.values()))
    result = make_result(
        sweep.experiment, sweep.rows, {(job.row, job.recipe.seed): outcome for job, outcome in outcomes.items()},
        others=_others(sweep, out, before), kept=kept, failures=failures,
        facts={"preset": sweep.preset, "setting": sweep.setting, "seeds": sweep.seeds, "folder": str(out)},
    )  # fmt: skip
    write_result(out, result)
    picture = None
    if outcomes:
        plot_result(out / f"{name}.pdf", result)
        plot_result(out / f"{name}.png", result)
        picture = base64.b64encode((out / f"{name}.png").read_bytes()).decode()
    shown = [out / job.name for job in sweep.jobs if job.recipe.seed == 0 and RunFolder(out / job.name).record.exists()]
    publish(
        shown, out / f"{name}.html", data_dir=data_dir, trust_model_code=sweep.jobs[0].recipe.names_code,
        title=f"{name}: {sweep.experiment.title}", top=for_page(result) | {"picture": picture},
    )  # fmt: skip
    return result


def _carry_out(
    recipe: Recipe, folder: Path, parts: tuple[Part, ...], images: int | None, aa_images: int | None,
    data_dir: Path | None,
) -> dict[str, Any]:  # fmt: skip
    """One run: trained, and evaluated."""
    from moatlab.models import users_code
    from moatlab.reproduce.outcomes import evaluate_run
    from moatlab.training.trainer import train

    train(recipe, folder, data_dir=data_dir, resume=True)
    with users_code(f"{folder.name} can't be evaluated", RunFailed):
        return evaluate_run(folder, recipe, parts, images=images, aa_images=aa_images, data_dir=data_dir)


def _announce(
    sweep: Sweep, missing: list[Job], known: dict[Job, dict[str, Any]], out: Path, data_dir: Path | None, *, yes: bool
) -> console.Pace:
    """Say what will run and how long it will take, by a few real steps; ask first where that is days."""
    first = missing[0].recipe
    console.note(f"{sweep.experiment.name}: {sweep.experiment.title}")
    console.note(f"preset {sweep.preset}: {sweep.setting}")
    trained = sum(job.passes for job in missing)
    done = f" ({len(sweep.jobs) - len(missing)} are done)" if len(missing) < len(sweep.jobs) else ""
    console.note(f"{len(missing)} runs to do{done}, {trained:g} passes over the training set; timing a few steps ...")
    seconds, gpu, images = seconds_per_pass(first, data_dir, whole=sweep.preset.startswith("paper"))
    if strange := next((job for job, one in known.items() if one["data"]["sha256"] != images), None):
        raise UserError(
            f"{first.data} here is not the {first.data} that {strange.name} was trained on; name the folder that holds "
            "it with --data-dir, or begin in another --out folder, without --known"
        )
    work = sum(map(sweep.work, missing))
    left = f"about {console.duration(seconds * work)} on this machine, evaluation included"
    smaller = f"--preset {'mini' if sweep.experiment.data == 'cifar10' else 'small'} shows the same shape in hours"
    if not gpu and not yes and (sweep.preset.startswith("paper") or seconds * work > LONG):
        raise UserError(
            f"{sweep.experiment.name} at --preset {sweep.preset} would take {left}, which has no GPU; to start it all "
            f"the same, add --yes{'; ' + smaller if sweep.preset.startswith('paper') else ''}"
        )
    console.note(f"{left}; the runs go to {out}; stopped, the same command goes on where it was\n")
    return console.Pace(work, 0.0)


def seconds_per_pass(recipe: Recipe, data_dir: Path | None, *, whole: bool) -> tuple[float, bool, str]:
    """The time of one pass over the training set, by the fastest of a few steps of fgsm (two passes each); whether
    there is a GPU; the checksum of the images. `whole`: data that is not the official set is refused."""
    from moatlab.methods.language import Stage
    from moatlab.methods.stages import stage_loss
    from moatlab.runtime.device import left_as_found
    from moatlab.training.setup import choose_device, context_of, prepare

    with left_as_found(choose_device(recipe.device), recipe.threads):
        session = prepare(recipe, data_dir, continuing=False)
        if whole and session.images.note:
            raise UserError(
                f"{recipe.data} here is not the whole set ({session.images.note}), and the paper's numbers are of "
                f"the whole; name a folder that holds it with --data-dir, get it by moat data get {recipe.data}, "
                "or use --preset small"
            )
        taken = []
        for step in range(STEPS + 1):
            begun = time.perf_counter()
            loss = stage_loss(Stage("fgsm"), context_of(session, step), *session.batches.at(step))
            loss.backward()  # type: ignore[no-untyped-call]
            session.optimizer.step()
            loss.item()  # waits for the device
            taken.append(time.perf_counter() - begun)
    seconds = min(taken[1:]) / 2 * session.steps_per_epoch
    return seconds, session.device.type != "cpu", session.images.sha256


def _found(sweep: Sweep, out: Path) -> list[Job]:
    """The runs of other rows and seeds that are in the sweep's folder, with the recipes that they should have."""
    jobs = []
    for path in sorted(out.glob("*/recipe.toml")):
        recipe = load_recipe(path)
        job = Job(Row(recipe.method, recipe.method), sweep.recipe_of(recipe.method, recipe.seed))
        if job.name == path.parent.name:  # or it is no run of a sweep
            jobs.append(job)
    return jobs


def _kept(path: Path, outcomes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in the result that is about to be replaced which are not in the new one: they may be nowhere else."""
    from moatlab.reproduce.outcomes import read_outcomes

    def asked(one: dict[str, Any]) -> tuple[Any, ...]:
        return one["recipe_sha256"], one["images"], one["aa_images"]

    there = set(map(asked, outcomes))
    try:
        return [one for one in read_outcomes(path) if asked(one) not in there] if path.exists() else []
    except UserError as error:
        console.warn(f"{error}; it is written anew")
        return []


def _known(sweep: Sweep, job: Job, out: Path, before: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The outcome of a run that was done before: in the sweep's folder, or in an earlier result."""
    from moatlab.reproduce.outcomes import known_outcome, matches

    asked = (job.recipe, sweep.experiment.parts, sweep.images, sweep.aa_images)
    return known_outcome(out / job.name, *asked) or next((one for one in before if matches(one, *asked)), None)


def _others(sweep: Sweep, out: Path, before: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs of the same setting that are no rows here, by method: claims may compare with them. They are in the sweep's
    folder, or in earlier results."""
    ours = {row.method for row in sweep.rows}
    found: dict[str, list[dict[str, Any]]] = {}
    for method in dict.fromkeys(row.method for one in EXPERIMENTS.values() for row in one.rows):
        for seed in sweep.seeds if method not in ours else []:
            job = Job(Row(method, method), sweep.recipe_of(method, seed))
            if one := _known(sweep, job, out, before):
                found.setdefault(method, []).append(one)
    return found
