"""Commands that train: `moat train`, `plan`, `compare` and `demo`."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from moatlab.cli import options as shared
from moatlab.data.sizes import Sizes, find_sizes
from moatlab.methods.cost import KINDS
from moatlab.runtime import console, distributed
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile
from moatlab.runtime.trust import is_trusted
from moatlab.training.front import BEST, Prefer
from moatlab.training.making import default_name, draft_recipe, make_recipe
from moatlab.training.recipe import Recipe, slug
from moatlab.training.resuming import resumed_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.trackers import NAMES


@click.command("train", cls=shared.WithRecipe, short_help="Train one model.")
@shared.method_argument
@shared.recipe_options()
@shared.running_options
@click.option("--budget", metavar="AMOUNT", help="Choose the epochs by time, passes or FLOPs: 30min, 60passes, 2PFLOP.")
@click.option("--prefer", type=click.Choice(["robust", "clean"]), help="What `best` maximises  [default: robust]")
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop after N steps, counted over the whole run.")
@click.option("--checkpoint-every", type=click.FloatRange(min=0), default=600.0, metavar="SECONDS")
@click.option(
    "--stream/--no-stream", default=None, help="Decode a folder's images per batch  [default: if over 1/4 of memory]"
)
@click.option(
    "--track",
    "trackers",
    multiple=True,
    type=click.Choice(NAMES),
    help="Where the numbers go as well; may be repeated  [default: tensorboard, if installed]",
)
def train_command(
    out: Path | None,
    resume: bool,
    as_json: bool,
    threads: int | None,
    device: str,
    budget: str | None,
    prefer: Prefer | None,
    **options: Any,
) -> None:
    """Train METHOD: fgsm, fast, nfgsm, pgd:K, gradalign, kim, standard, moat:K, imoat:K1,K2,K3, or a cycle of stages
    such as "cutmix | fast | pgd:2>5>8".

    \b
    moat train moat:2                             embedded data, in minutes
    moat train moat:2 --data cifar10              small; on a GPU the paper's size
    moat train moat:2 --data photos --model mynet:build --out runs/mine
    moat train fast --on-collapse heal            detect and repair a collapse
    moat train best --budget 30min                the best method measured
    moat train fgsm --epochs 3 --out runs/short
    moat train --resume --out runs/short          resume that run

    Presets: mini (embedded images, in minutes), mini-long (longer, attacks in eval mode), laptop (CIFAR on a CPU),
    paper (CIFAR on a GPU; network and attacks of Kim et al.), paper-fast (of Wong et al.), own (folders, .npz). moat
    plan shows their settings.
    """
    running = {name: options.pop(name) for name in ("data_dir", "max_steps", "checkpoint_every", "stream")}
    running["trackers"] = options.pop("trackers") or None
    if resume and not (options["method"] or options["file"]):
        if out is None or not (out / RunFile.RECIPE).exists():
            raise UserError(f"there is no run in {out} to resume" if out else "name the run to resume with --out")
        if not RunFolder(out).is_begun:
            options["file"] = out / RunFile.RECIPE
    best = options["method"] == BEST
    if budget is None and (best or prefer):
        raise UserError("moat train best needs a budget, such as --budget 30min, 60passes or 2PFLOP")
    recipe = None
    if out is None:
        recipe = draft_recipe(**options) if budget else make_recipe(**options)
        out = Path("runs") / default_name(recipe, options["preset"], BEST if best else None)
    from moatlab.runtime.device import Machine

    machine = Machine(device, threads)
    if resume and RunFolder(out).is_begun:
        known = options | ({"method": None} if best else {})
        recipe = resumed_recipe(RunFolder(out), budget=budget is not None, **known)
    else:
        if budget:
            from moatlab.training.best import recipe_within

            recipe = recipe_within(budget, prefer=prefer, machine=machine, **options)
        recipe = recipe or make_recipe(**options)
        shared.explain_preset(recipe.data, options["preset"], options["file"])
    shared.let_be_deterministic(recipe)
    from moatlab.training.api import train_recipe

    record = train_recipe(recipe, out, machine=machine, resume=resume, **running)
    if not distributed.is_first():
        return
    page = out / RunFile.REPORT
    if record.final and not (page.exists() and page.stat().st_mtime >= (out / RunFile.RECORD).stat().st_mtime):
        from moatlab.report.page import publish

        publish([out], page, data_dir=running["data_dir"], trust_model_code=recipe.names_code)
    if as_json:
        shared.print_file(out / RunFile.RECORD)
    elif record.final:
        click.echo(record.text(out))
        if page.exists():
            click.echo(f"report: {page}")
        options_of_eval = ["--trust-model-code"] if recipe.names_code and not is_trusted(recipe.model) else []
        if click.get_current_context().get_parameter_source("data_dir") is ParameterSource.COMMANDLINE:
            options_of_eval += ["--data-dir", str(running["data_dir"])]
        click.echo(f"next: {shlex.join(['moat', 'eval', str(out), *options_of_eval])}")


@click.command("plan", cls=shared.WithRecipe)
@shared.method_argument
@shared.recipe_options()
@shared.json_option
@click.option("--measure/--no-measure", default=True, help="Measure a few steps on a folder's or .npz file's sizes.")
def plan_command(as_json: bool, measure: bool, threads: int | None, device: str, **options: Any) -> None:
    """Show the cost of a run before it starts. Of a folder of images only file headers are read.

    \b
    moat plan imoat:2,5,8 --epochs 60
    moat plan moat:2 --data photos                time and memory on this machine
    moat plan "cutmix | fast | pgd:2>5>8" --json

    One pass is a forward and a backward pass over the training set.
    """
    from moatlab.data.loading import KNOWN_SIZES

    recipe = make_recipe(**options, trust_model_code=True)  # imports no code of the user's
    shared.explain_preset(recipe.data, options["preset"], options["file"])
    parsed, epochs = recipe.parsed_method, recipe.epochs
    images = find_sizes(recipe.data, recipe.image_size)
    count = images.train - recipe.holdout
    steps = count // recipe.batch_size
    if steps < 1:
        raise UserError(f"--batch-size {recipe.batch_size} is larger than the {count} images to train on")
    own: dict[str, Any] = {}
    if recipe.data not in KNOWN_SIZES:
        named = not recipe.names_code or options["model"] is not None  # a file's code is not imported
        own = describe_own(recipe, images, (device, threads) if measure and named else None)
    flops, work = recipe.planned_flops(images), recipe.planned_work(steps, recipe.batch_size, images.classes)
    cost = work.as_dict(steps * recipe.batch_size)
    if as_json:
        sizes = {"method": recipe.method, "epochs": epochs, "steps_per_epoch": steps}
        shared.print_json({**sizes, **cost, "flops": flops, **own})
        return
    click.echo(recipe.method + (f" = {parsed}" if str(parsed) != recipe.method else ""))
    click.echo(f"{recipe.setting}\n{console.counted(epochs, 'epoch')} of {console.counted(steps, 'step')}")
    if own:
        print_own(images, own)
    if any(stage.entry.at_most for stage in parsed.stages):
        click.echo("at most:")
    for name in ("passes", *KINDS):
        click.echo(f"{name.replace('_', '-'):<18}{cost[name]:>8g}  x the training set")
    if flops:
        click.echo(f"{'FLOPs':<18}{flops:>8.3g}")
    counts = Counter(str(parsed.stage_at(epoch, epochs)) for epoch in range(epochs))
    click.echo("stages: " + ", ".join(f"{count} x {stage}" for stage, count in counts.items()))


def describe_own(recipe: Recipe, images: Sizes, machine: tuple[str, int | None] | None) -> dict[str, Any]:
    """What `moat plan` adds for the user's own images; with a machine, the time and memory on it."""
    shape = [images.height, images.width, images.channels]
    own = {"images": images.train, "test_images": images.test, "classes": images.classes, "image_shape": shape}
    if machine is None:
        return own
    from moatlab.runtime.device import Machine
    from moatlab.training.estimate import estimate_run

    found = estimate_run(recipe, Machine(*machine), images)
    minutes = None if found.seconds is None else found.seconds / 60
    free = None if found.free is None else found.free / 1e9
    return own | {"minutes": minutes, "step_gigabytes": found.needed / 1e9, "free_gigabytes": free}


def print_own(images: Sizes, own: dict[str, Any]) -> None:
    resized = "resized and cropped to " if images.image_size else ""
    size = f"{resized}{images.width}x{images.height}"
    click.echo(f"{images.train:,} training and {images.test:,} test images in {images.classes} classes, {size}")
    if images.warning:
        console.warn(images.warning)
    if "minutes" in own:
        minutes = own["minutes"]
        time = f"about {console.duration(60 * minutes)} on this machine" if minutes else "unknown: too little memory"
        free = "" if own["free_gigabytes"] is None else f"; {own['free_gigabytes']:.1f} GB are free"
        click.echo(f"time: {time}\nmemory: about {own['step_gigabytes']:.1f} GB for a step{free}")


@click.command("compare", cls=shared.WithRecipe, short_help="Train several methods with the same recipe.")
@shared.methods_argument
@shared.recipe_options()
@shared.running_options
@shared.on_option
def compare_command(methods: tuple[str, ...], out: Path | None, **options: Any) -> None:
    """Train several METHODS with the same recipe; print one table and plot PGD-7 accuracy over the epochs.

    \b
    moat compare fgsm moat:2                      same as moat demo
    moat compare fgsm fast pgd:2 moat:2 --seed 1 --out runs/four
    moat compare moat:2 moat:5 --data cifar10 --on ray
    """
    running = {name: options.pop(name) for name in ("data_dir", "resume", "as_json", "on", "threads", "device")}
    recipes = [make_recipe(method, **options) for method in methods]
    out = out or Path("runs") / f"compare_{default_name(recipes[0], options['preset'], ' '.join(methods))}"
    folders = [RunFolder(out / slug(recipe.method)) for recipe in recipes]
    if running["resume"] and (begun := [folder for folder in folders if folder.is_begun]):
        others = options | {"file": options["file"] or begun[0].recipe}  # of the runs that are not begun
        recipes = [
            resumed_recipe(folder, method, **options) if folder in begun else make_recipe(method, **others)
            for method, folder in zip(methods, folders, strict=True)
        ]
    else:
        shared.explain_preset(recipes[0].data, options["preset"], options["file"])
    epochs = max(recipe.epochs for recipe in recipes)  # the step-wise default: 201 for cycles, 200 for others
    recipes = [recipe.model_copy(update={"epochs": epochs}) for recipe in recipes]
    shared.let_be_deterministic(recipes[0])
    run_comparison(recipes, out, **running)


@click.command("demo", short_help="FGSM collapses, MOAT does not; in minutes.")
@click.option("--seed", type=int, default=0, help="Seed of all random draws.")
@click.option("--out", type=shared.FILE, help="Folder of both runs  [default: runs/demo_sSEED]")
@shared.json_option
def demo_command(seed: int, out: Path | None, as_json: bool) -> None:
    """Show the paper's main result in minutes: FGSM training collapses, MOAT at the same cost does not.

    Run again, it resumes, or prints the table of the finished runs.
    """
    recipes = [make_recipe(method, preset="mini", seed=seed) for method in ("fgsm", "moat:2")]
    console.note("two runs of equal cost: fgsm, then moat:2\n")
    run_comparison(recipes, out or Path("runs") / f"demo_s{seed}", resume=True, as_json=as_json)


def run_comparison(recipes: list[Recipe], out: Path, *, as_json: bool, **running: Any) -> None:
    from moatlab.reproduce.comparison import compare

    result = compare(recipes, out, **running)
    if as_json:
        shared.print_file(out / "compare.json")
        return
    from moatlab.report.terminal import print_comparison

    print_comparison(result)
