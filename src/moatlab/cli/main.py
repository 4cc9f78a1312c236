"""The command line: thin. It parses, calls, prints; torch is imported by the commands that need it."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import click

from moatlab.cli.measuring import bench_command, eval_command, verify_command
from moatlab.cli.options import (
    FILE,
    Grouped,
    completing,
    data_dir_option,
    json_option,
    method_argument,
    methods_argument,
    on_option,
    print_file,
    print_json,
    recipe_options,
    running_options,
)
from moatlab.cli.publishing import export_command, report_command, reproduce_command
from moatlab.runtime import console, distributed
from moatlab.runtime.errors import Interrupted, RunFailed, UserError
from moatlab.training.recipe import Recipe, default_name, make_recipe

COST_NAMES = ("forwards", "input_backwards", "weight_backwards", "double_backwards")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(version("moatlab"), prog_name="moat")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback where something goes wrong.")
@click.pass_context
def cli(context: click.Context) -> None:
    """Train robust image classifiers at single-step cost.

    \b
    moat demo                 FGSM training collapses, MOAT at its cost does not
    moat train moat:2         train one model
    moat plan imoat:2,5,8     what a run costs, before it runs
    moat eval RUN             its accuracy under every attack of the paper
    moat report RUN ...       a page to look at
    moat reproduce table2a    a table or figure of the paper
    """
    if distributed.launched() > 1 and context.invoked_subcommand not in ("train", "eval"):
        raise UserError(f"torchrun is for moat train and moat eval; start moat {context.invoked_subcommand} by itself")


@cli.command("train", cls=Grouped, short_help="Train one model.")
@method_argument
@recipe_options()
@running_options
@click.option("--max-steps", type=click.IntRange(min=0), help="Stop after so many steps of the whole run.")
@click.option("--checkpoint-every", type=click.FloatRange(min=0), default=600.0, show_default=True, metavar="SECONDS")
@click.option("--stream/--no-stream", default=None, help="Leave the images of a folder on the disk, and decode them "
              "batch by batch  [default: where they would fill a quarter of the memory]")  # fmt: skip
def train_command(
    method: str | None, preset: str | None, recipe_file: Path | None, out: Path | None, resume: bool, as_json: bool,
    data_dir: Path | None, trust_model_code: bool, max_steps: int | None, checkpoint_every: float,
    stream: bool | None, **options: Any,
) -> None:  # fmt: skip
    """Train METHOD: fgsm, fast, nfgsm, pgd:K, gradalign, kim, standard, moat:K, imoat:K1,K2,K3, or a cycle of stages
    such as "cutmix | fast | pgd:2>5>8".

    \b
    moat train moat:2                             on the embedded data, in minutes
    moat train imoat:2,5,8 --data cifar10         at the paper's size
    moat train moat:2 --data photos --model mynet:build --out runs/mine
    moat train fast --on-collapse heal            watched, and mended
    moat train fgsm --epochs 3 --out runs/short
    moat train --resume --out runs/short          goes on with what is there

    Presets: mini (the embedded images, in minutes), mini-long (the same for longer, attacks in eval mode), small
    (CIFAR, a narrow model), paper, paper-kim (the model and attacks of Kim et al.). moat plan shows what they fill in.
    """
    if resume and not (method or recipe_file):
        if out is None or not (out / "recipe.toml").exists():
            raise UserError(f"there is no run in {out} to go on with" if out else "say which run goes on, by --out")
        recipe_file = out / "recipe.toml"
    recipe = make_recipe(method, preset=preset, file=recipe_file, trust_model_code=trust_model_code, **options)
    out = out or Path("runs") / default_name(recipe, preset)
    from moatlab.training.trainer import train

    record = train(
        recipe, out, data_dir=data_dir, resume=resume, max_steps=max_steps, checkpoint_every=checkpoint_every,
        stream=stream,
    )  # fmt: skip
    if not distributed.is_first():
        return
    page = out / "report.html"
    if record.final and not (page.exists() and page.stat().st_mtime >= (out / "run.json").stat().st_mtime):
        from moatlab.report.page import publish

        publish([out], page, data_dir=data_dir, trust_model_code=recipe.names_code)
    if as_json:
        print_file(out / "run.json")
    elif record.final:
        accuracy = "  ".join(f"{name} {100 * record.final[name]:.1f} %" for name in ("clean", "fgsm", "pgd7"))
        collapse = f"  COLLAPSED at epoch {record.collapsed_at}" if record.collapsed_at else ""
        if record.kept_epoch:
            collapse = f"  (of epoch {record.kept_epoch}: collapsed at epoch {record.alarms[-1]})"
        click.echo(f"{record.method} on {record.final['images']:,} test images: {accuracy}{collapse}")
        healing = record.healing["passes"]
        extra = f" ({healing:+g} beyond the plan, for healing)" if healing else ""
        click.echo(f"{record.counted['passes']:g} passes{extra}; the run is in {out}")
        if page.exists():
            click.echo(f"report: {page}")
        click.echo(f"next: moat eval {out}{' --trust-model-code' if recipe.names_code else ''}")


@cli.command("plan", cls=Grouped)
@method_argument
@recipe_options()
@json_option
def plan_command(
    method: str | None, preset: str | None, recipe_file: Path | None, as_json: bool, **options: Any
) -> None:
    """The cost of a run, before it runs. Touches no data.

    \b
    moat plan imoat:2,5,8 --epochs 60
    moat plan "cutmix | fast | pgd:2>5>8" --json

    One pass is a forward and a backward over the training set.
    """
    recipe = make_recipe(method, preset=preset, file=recipe_file, trust_model_code=True, **options)  # imports nothing
    parsed, epochs = recipe.parsed_method, recipe.epochs
    cost = parsed.cost(epochs).as_dict()
    from moatlab.data import KNOWN_SIZES

    steps = None  # unknown for a folder, which is not looked at
    if recipe.data in KNOWN_SIZES:
        count = KNOWN_SIZES[recipe.data][0] - recipe.holdout
        steps = count // recipe.batch_size
        if steps < 1:
            raise UserError(f"--batch-size {recipe.batch_size} is larger than the {count} images to train on")
    if as_json:
        print_json({"method": recipe.method, "epochs": epochs, "steps_per_epoch": steps, **cost})
        return
    click.echo(f"{recipe.method}" + (f" = {parsed}" if str(parsed) != recipe.method else ""))
    click.echo(recipe.setting)
    click.echo(f"{epochs} epochs of {steps or 'unknown'} steps")
    for name in ("passes", *COST_NAMES):
        click.echo(f"{name.replace('_', '-'):<18}{cost[name]:>8g}  x the training set")
    counts: dict[str, int] = {}
    for epoch in range(epochs):
        stage = parsed.stage_at(epoch, epochs)
        counts[str(stage)] = counts.get(str(stage), 0) + 1
    click.echo("stages: " + ", ".join(f"{count} x {stage}" for stage, count in counts.items()))


@cli.command("compare", cls=Grouped, short_help="Train several methods by the same recipe.")
@methods_argument
@recipe_options()
@running_options
@on_option
def compare_command(
    methods: tuple[str, ...], preset: str | None, recipe_file: Path | None, out: Path | None, resume: bool,
    as_json: bool, data_dir: Path | None, trust_model_code: bool, on: str | None, **options: Any,
) -> None:  # fmt: skip
    """Train several METHODS by the same recipe: one table on the test images, one plot of PGD-7 accuracy.

    \b
    moat compare fgsm moat:2                      as moat demo
    moat compare fgsm fast pgd:2 moat:2 --seed 1 --out runs/four
    moat compare moat:2 moat:5 --data cifar10 --on ray
    """
    options |= {"preset": preset, "file": recipe_file, "trust_model_code": trust_model_code}
    recipes = [make_recipe(method, **options) for method in methods]
    epochs = max(recipe.epochs for recipe in recipes)  # step-wise, a cycle's default is 201 where others have 200
    recipes = [recipe.model_copy(update={"epochs": epochs}) for recipe in recipes]
    out = out or Path("runs") / f"compare_{default_name(recipes[0], preset, ' '.join(methods))}"
    run_comparison(recipes, out, data_dir=data_dir, resume=resume, as_json=as_json, on=on)


@cli.command("demo", short_help="The paper's point, in minutes.")
@click.option("--seed", type=int, default=0, show_default=True, help="decides every random draw")
@click.option("--out", type=FILE, help="The folder of the two runs  [default: runs/demo_sSEED]")
@json_option
def demo_command(seed: int, out: Path | None, as_json: bool) -> None:
    """The paper's point in minutes: FGSM training collapses, MOAT at the same cost does not.

    Started again, it continues where it was, or shows its table.
    """
    recipes = [make_recipe(method, preset="mini", seed=seed) for method in ("fgsm", "moat:2")]
    out = out or Path("runs") / f"demo_s{seed}"
    console.note("two runs, which cost the same: fgsm, then moat:2\n")
    run_comparison(recipes, out, data_dir=None, resume=True, as_json=as_json)


def run_comparison(
    recipes: list[Recipe], out: Path, *, data_dir: Path | None, resume: bool, as_json: bool, on: str | None = None
) -> None:
    from moatlab.reproduce.comparison import compare

    result = compare(recipes, out, data_dir=data_dir, resume=resume, on=on)
    if as_json:
        print_file(out / "compare.json")
        return
    from moatlab.report.terminal import print_comparison

    print_comparison(result)


@cli.group("data")
def data_group() -> None:
    """The data sets: which there are, and how to get them."""


@data_group.command("list")
@data_dir_option
def data_list_command(data_dir: Path | None) -> None:
    """The data sets by name, and where each one is."""
    from moatlab.data import available

    for name, description, where in available(data_dir):
        click.echo(f"{name:<10}{description}")
        click.echo(f"{'':<10}{where or f'not here yet: moat data get {name}'}")
    click.echo(f"{'FOLDER':<10}your own images: FOLDER/train/CLASS/IMAGE, FOLDER/test/CLASS/IMAGE,")
    click.echo(f"{'':<10}or FOLDER/CLASS/IMAGE, of which a tenth is set apart for testing")


@data_group.command("get")
@click.argument("name", shell_complete=completing(["cifar10", "cifar100"]))
@data_dir_option
def data_get_command(name: str, data_dir: Path | None) -> None:
    """Fetch the data set NAME, unless it is here already, and say where it is."""
    from moatlab.data import get_images_folder

    click.echo(get_images_folder(name, data_dir))


@cli.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Let the tab key complete commands, options, methods and files.

    \b
    eval "$(moat completion bash)"                in ~/.bashrc
    eval "$(moat completion zsh)"                 in ~/.zshrc
    moat completion fish | source                 in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    completion = get_completion_class(shell)
    assert completion is not None
    if shell == "bash":
        click.echo("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}  # or bash would end a word within moat:2")
    click.echo(completion(cli, {}, "moat", "_MOAT_COMPLETE").source())


@cli.command("env")
@json_option
def env_command(as_json: bool) -> None:
    """Versions and hardware, for a bug report or a results table."""
    from moatlab.runtime.environment import describe_environment

    facts = describe_environment()
    if as_json:
        print_json(facts)
    else:
        for name, value in facts.items():
            click.echo(f"{name:<10}{value}")


for command in (eval_command, verify_command, report_command, export_command, reproduce_command, bench_command):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command line and turn every ending into an exit code and at most one sentence."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        cli.main(arguments, standalone_mode=False)
        sys.stdout.flush()  # here a full disk can still be told of
        distributed.disconnect()
        sys.exit(0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(0)
    except (UserError, RunFailed, Interrupted, click.ClickException, OSError) as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        if isinstance(error, OSError):
            abandon_stdout()
        message = sentence(error)
        if isinstance(error, Interrupted):
            message += ", continue by starting it again" + (
                " with --resume" if {"train", "compare"} & {*arguments[:1]} else ""
            )
        if distributed.may_speak():
            with suppress(OSError):
                click.echo(f"moat: {' '.join(message.split())}", err=True)
        code = 2 if isinstance(error, UserError | click.ClickException) else 1
        end(128 + error.signal_number if isinstance(error, Interrupted) else code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("moat: interrupted", err=True)
        sys.exit(130)


def end(code: int) -> NoReturn:
    """One of several processes ends at once: to take leave of the others, it would have to wait for them."""
    if distributed.launched() == 1:
        sys.exit(code)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def sentence(error: Exception) -> str:
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else f"output can't be written: {error.strerror}"
    return str(error)


def abandon_stdout() -> None:
    """What could not be written (a full disk, a reader that is gone) must not be tried again when Python ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
