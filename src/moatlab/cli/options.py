"""Options that commands share. Those of a recipe come from its fields."""

import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from moatlab.runtime.environment import is_device
from moatlab.runtime.errors import UserError
from moatlab.training.presets import PRESETS
from moatlab.training.recipe import Recipe, option_name

Command = Callable[..., Any]
FILE = click.Path(path_type=Path, readable=False)  # not looked at here; a shell can complete it


def _importable(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Once the user names code of their own, or trusts a file that does, modules of the current folder are found."""
    here = str(Path.cwd())
    if (value is True or (isinstance(value, str) and ":" in value)) and here not in sys.path:
        sys.path.append(here)
    return value


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else.")
data_dir_option = click.option(
    "--data-dir", type=FILE, envvar="MOAT_DATA", show_envvar=True, help="Where data sets are looked for first."
)
trust_option = click.option(
    "--trust-model-code",
    is_flag=True,
    callback=_importable,
    help="Import the module that a file names as its model: it can run anything.",
)
on_option = click.option(
    "--on", metavar="ray[:ADDRESS]", help="Give each run to a Ray cluster: one of this machine, or that at ADDRESS."
)


def _device(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not is_device(value):
        raise UserError(f"--device {value}: should be auto, cpu, cuda, cuda:1 or mps")
    return value


device_option = click.option(
    "--device", default="auto", show_default=True, callback=_device, help="auto, cpu, cuda, cuda:1 or mps"
)
threads_option = click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help="CPU threads; other numbers give other last bits  [default: OMP_NUM_THREADS, or all cores]",
)


def model_option(**settings: Any) -> Callable[[Command], Command]:
    return click.option("--model", callback=_importable, **settings)


GROUPS = {
    "Data and model": "data data_dir stream augment holdout model width shortcut final_norm std init trust_model_code",
    "The ball, and the attacks inside it": "eps norm bn_in_attack",
    "Optimisation": "epochs schedule lr momentum weight_decay batch_size",
    "Watching over the run": "monitor on_collapse then on_nan",
    "The machine": "seed threads device precision deterministic on",
}


class Grouped(click.Command):
    """A command whose help has its own options first, then those that many commands share, by what they are about."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.name: record for option in options if (record := option.get_help_record(ctx))}
        groups = {heading: [name for name in names.split() if name in records] for heading, names in GROUPS.items()}
        grouped = {
            heading: [records.pop(name) for name in names] for heading, names in groups.items() if len(names) > 1
        }
        for heading, rows in {"Options": list(records.values()), **grouped}.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def complete_method(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:  # noqa: ARG001
    """The methods that a shell offers: the names of the language, with numbers where they need some."""
    from moatlab.methods.stages import STAGES

    names = [name if name != "pgd" else "pgd:7" for name in STAGES]
    return [name for name in [*names, "moat:2", "moat:5", "imoat:1,2,3", "imoat:2,5,8"] if name.startswith(start)]


def completing(names: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """What a shell offers for a name; others are refused, or taken, elsewhere."""
    return lambda _context, _parameter, start: [name for name in names if name.startswith(start)]


method_argument = click.argument("method", required=False, shell_complete=complete_method)
methods_argument = click.argument("methods", nargs=-1, required=True, shell_complete=complete_method)


def recipe_options(*fixed: str, preset: str | None = None) -> Callable[[Command], Command]:
    """An option for every field of `Recipe` but the method and those that the command fixes, with a preset and a recipe
    file below them; and the machine's own, threads and device."""

    def add(command: Command) -> Command:
        command = threads_option(device_option(command))
        for name, field in reversed(Recipe.model_fields.items()):
            if name in ("method", *fixed):
                continue
            kinds = [kind for kind in typing.get_args(field.annotation) if kind is not types.NoneType]
            flags = option_name(name) + (f"/--no-{name.replace('_', '-')}" if field.annotation is bool else "")
            kind: Any = field.annotation
            if typing.get_origin(kind) is typing.Literal:
                kind = click.Choice(kinds)
            elif kind not in (int, float, bool):
                kind = str
            callback = _importable if name == "model" else None
            option = click.option(flags, name, type=kind, default=None, callback=callback, help=field.description)
            command = option(command)
        command = click.option("--recipe", "file", type=FILE, help="A recipe file, such as a run's recipe.toml.")(
            command
        )
        usual = preset or "mini, or paper for other data"
        help_text = f"Where the other options start from  [default: {usual}]"
        return click.option("--preset", type=click.Choice(list(PRESETS)), default=preset, help=help_text)(command)

    return add


def running_options(command: Command) -> Command:
    """Options that say where and how a run runs, and are no part of what it is."""
    resume = click.option("--resume", is_flag=True, help="Continue the run in --out, or start it.")
    out = click.option("--out", type=FILE, help="The run's folder  [default: runs/NAME]")
    return data_dir_option(trust_option(out(resume(json_option(command)))))


def let_be_deterministic(recipe: Recipe) -> None:
    """cuBLAS reads this when CUDA is first used."""
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def print_json(fields: dict[str, Any]) -> None:
    click.echo(json.dumps(fields, indent=1))


def print_file(path: Path) -> None:
    """A result as it is in its file."""
    print_json(json.loads(path.read_text(encoding="utf-8")))
