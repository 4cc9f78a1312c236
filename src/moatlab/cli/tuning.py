"""`moat tune`: search the best recipe for a budget."""

import shlex
from pathlib import Path
from typing import Any

import click

from moatlab.cli import options as shared
from moatlab.training.making import draft_recipe
from moatlab.training.recipe import Recipe, slug


def show_space(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    """Print the default space and exit."""
    if value and not context.resilient_parsing:
        from moatlab.reproduce.space import DEFAULT

        click.echo(DEFAULT.read_text(encoding="utf-8"), nl=False)
        context.exit()


@click.command("tune", cls=shared.WithRecipe, short_help="Search the best recipe for a budget.")
@click.option("--budget", required=True, metavar="AMOUNT", help="Of one run: 30min, 60passes or 2PFLOP.")
@click.option("--trials", type=click.IntRange(1, 100_000), default=24, help="Recipes to try.")
@click.option("--rungs", type=click.IntRange(1, 8), default=3, help="Each trains 2/5 of the trials twice as long.")
@click.option("--seeds", type=click.IntRange(1, 100), default=2, help="Runs per recipe at the last rung.")
@click.option("--space", type=shared.FILE, help="What to search, a TOML file  [default: moat tune --show-space]")
@click.option("--show-space", is_flag=True, is_eager=True, callback=show_space, expose_value=False, help="Print it.")
@click.option("--clean-floor", type=click.FloatRange(0, 1), default=0.0, help="Lowest clean accuracy, such as 0.6.")
@click.option("--clean-weight", type=click.FloatRange(min=0), default=0.0, help="Weight of clean accuracy.")
@click.option("--storage", metavar="URL", help="Optuna's database, for many machines  [default: a file in --out]")
@click.option("--out", type=shared.FILE, help="Output folder  [default: runs/tune_DATA_BUDGET]")
@shared.recipe_options("epochs", "monitor", "monitor_every", "monitor_images", "on_collapse", "check_every", "then")
@shared.on_option
@shared.data_dir_option
@shared.trust_option
@shared.json_option
def tune_command(
    budget: str, out: Path | None, as_json: bool, threads: int | None, device: str, file: Path | None, **options: Any
) -> None:
    """Search methods and settings for the most robust model that a budget allows, by successive halving.

    \b
    moat tune --budget 60passes --data cifar10 --on 2
    moat tune --budget 10min --data photos --trials 40 --clean-floor 0.7

    Trials are compared on held-out images, under PGD-10 on the cross-entropy and on the margin. The same command
    resumes. Writes the winner's recipe.toml, a page and all trials. Options given here are not searched.
    """
    from moatlab.reproduce.tuning import tune
    from moatlab.runtime.device import Machine

    options["file"] = file
    of_recipe = (*Recipe.model_fields, "preset", "file", "trust_model_code")
    draft = draft_recipe("standard", **{name: value for name, value in options.items() if name in of_recipe})
    shared.let_be_deterministic(draft)
    out = out or Path("runs") / f"tune_{slug(Path(draft.data).name)}_{slug(budget)}"
    shared.explain_preset(draft.data, options["preset"], file)
    result = tune(budget, out, machine=Machine(device, threads), **options)
    if as_json:
        shared.print_file(out / "tune.json")
        return
    from moatlab.report.terminal import print_search

    print_search(result)
    click.echo(f"recipe.toml, tune.json and tune.html are in {out}")
    click.echo(f"next: moat train --recipe {shlex.quote(str(out / 'recipe.toml'))} --seed 100")
