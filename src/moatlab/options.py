"""Options that commands share. Those of a recipe come from its fields."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from moatlab.recipe import PRESETS, Recipe, option_name

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
data_dir_option = click.option(
    "--data-dir", type=Path, envvar="MOAT_DATA", show_envvar=True, help="Where data sets are looked for first."
)
trust_option = click.option(
    "--trust-model-code", is_flag=True, help="Import the module that a file names as its model: it can run anything."
)
on_option = click.option(
    "--on", metavar="ray[:ADDRESS]", help="Give each run to a Ray cluster: one of this machine, or that at ADDRESS."
)


Command = Callable[..., Any]


def recipe_options(*fixed: str, preset: str | None = None) -> Callable[[Command], Command]:
    """An option for every field of `Recipe` but the method and those that the command fixes, a preset and a recipe file
    below them."""
    return lambda command: _recipe_options(command, {"method", *fixed}, preset)


def _recipe_options(command: Command, left_out: set[str], preset: str | None) -> Command:
    for name, field in reversed(Recipe.model_fields.items()):
        if name in left_out:
            continue
        kinds = [kind for kind in typing.get_args(field.annotation) if kind is not types.NoneType]
        flags = option_name(name) + (f"/--no-{name.replace('_', '-')}" if field.annotation is bool else "")
        kind: Any = field.annotation
        if typing.get_origin(kind) is typing.Literal:
            kind = click.Choice(kinds)
        elif kind not in (int, float, bool):
            kind = str
        command = click.option(flags, name, type=kind, default=None, help=str(field.description))(command)
    command = click.option("--recipe", "recipe_file", type=Path, help="A recipe file, such as a run's recipe.toml.")(
        command
    )
    presets = click.Choice(list(PRESETS))
    usual = preset or "mini, or paper for other data"
    help_text = f"Where the other options start from  [default: {usual}]"
    return click.option("--preset", type=presets, default=preset, help=help_text)(command)


def running_options(command: Command) -> Command:
    """Options that say where and how a run runs, and are no part of what it is."""
    command = click.option("--resume", is_flag=True, help="Continue the run in --out, or start it.")(
        json_option(command)
    )
    command = click.option("--out", type=Path, help="The run's folder  [default: runs/NAME]")(command)
    return data_dir_option(trust_option(command))


def print_json(fields: dict[str, Any]) -> None:
    click.echo(json.dumps(fields, indent=1))


def print_file(path: Path) -> None:
    """A result as it stands in its file."""
    print_json(json.loads(path.read_text(encoding="utf-8")))
