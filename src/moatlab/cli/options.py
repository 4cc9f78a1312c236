"""Options shared by commands. Options of a recipe are generated from its fields."""

import functools
import json
import os
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from moatlab.runtime import console, trust
from moatlab.runtime.environment import is_device
from moatlab.runtime.errors import UserError
from moatlab.training.presets import PRESETS, default_preset
from moatlab.training.recipe import NEEDED, Recipe, option_name, read_recipe_file

Command = Callable[..., Any]
FILE = click.Path(path_type=Path, readable=False)  # not checked here; shells complete it


def _importable(context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """Add the current folder to the import path if the option names the user's own code, or trusts a file that does, or
    code in this folder was named before. Remember what is named, except by `moat plan`, which imports nothing."""
    here, names_code = Path.cwd(), isinstance(value, str) and ":" in value
    if (value is True or names_code or trust.is_root(here)) and str(here) not in sys.path:
        sys.path.append(str(here))
    if names_code and context.info_name != "plan" and not context.resilient_parsing:
        trust.remember(value)
    return value


def _device(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not is_device(value):
        raise UserError(f"--device {value}: must be auto, cpu, cuda, cuda:1 or mps")
    return value


def _hush(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        context.find_root().with_resource(console.verbosity(False))


quiet_option = click.option(
    "-q", "--quiet", is_flag=True, expose_value=False, callback=_hush, help="Print only results and errors."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
data_dir_option = click.option(
    "--data-dir", type=FILE, envvar="MOAT_DATA", show_envvar=True, help="Folder searched first for data sets."
)
trust_help = "Run model code that a file from elsewhere names."
trust_option = click.option("--trust-model-code", is_flag=True, callback=_importable, help=trust_help)
on_option = click.option(
    "--on", metavar="N|ray[:ADDRESS]", help="Train N runs at a time here, or on a Ray cluster, local or at ADDRESS."
)
which_option = click.option(
    "--which", type=click.Choice(["last", "best", "average"]), default="last", help="Weights of the run."
)
device_option = click.option("--device", default="auto", callback=_device, help="auto, cpu, cuda, cuda:1 or mps")
threads_help = "CPU threads; affects the last bits  [default: OMP_NUM_THREADS or all cores]"
threads_option = click.option("--threads", type=click.IntRange(1, 1024), help=threads_help)
model_option = functools.partial(click.option, "--model", callback=_importable)

GROUPS = {
    "Data and model": "data data_dir image_size stream augment holdout "
    "model width stem shortcut final_norm activation dropout std init trust_model_code",
    "Threat model": "eps eps_warmup norm bn_in_attack",
    "Optimisation": "epochs optimizer schedule warmup lr momentum cycle_momentum weight_decay batch_size "
    "average average_decay label_smoothing awp",
    "Monitoring": "monitor monitor_every monitor_images on_collapse check_every then on_nan trackers",
    "Machine": "seed threads device precision deterministic on",
}


# What --help shows of a command with the options of a recipe, in this order; --help-all shows all.
USUAL = (
    "budget trials space clean_floor data image_size model init preset epochs eps seed seeds methods images plan "
    "out resume on threads device as_json"
)


class Grouped(click.Command):
    """A command whose help lists its own options first, then the shared ones under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = self.help_records(ctx)
        groups = {heading: [name for name in names.split() if name in records] for heading, names in GROUPS.items()}
        shared = {title: [records.pop(name) for name in names] for title, names in groups.items() if len(names) > 1}
        for heading, rows in {"Options": list(records.values()), **shared}.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def help_records(self, ctx: click.Context) -> dict[str | None, tuple[str, str]]:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        return {option.name: record for option in options if (record := option.get_help_record(ctx))}


class WithRecipe(Grouped):
    """A command with an option for each field of a recipe. Its --help shows the usual ones."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if ctx.meta.get("all options"):
            super().format_options(ctx, formatter)
            return
        records = self.help_records(ctx)
        shown = [name for name in [*USUAL.split(), "quiet"] if name in records]
        with formatter.section("Options"):
            formatter.write_dl([records[name] for name in shown])
        more = sum("--help" not in flags for name, (flags, _) in records.items() if name not in shown)
        formatter.write(f"\nmoat {ctx.info_name} --help-all shows {more} more options.\n")


def _help_all(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        context.meta["all options"] = True
        click.echo(context.get_help(), color=context.color)
        context.exit()


def complete_method(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:  # noqa: ARG001
    """The names of the method language, with numbers where they need some."""
    from moatlab.methods.stages import STAGES

    names = [name if name != "pgd" else "pgd:7" for name in STAGES]
    return [name for name in [*names, "moat:2", "moat:5", "imoat:1,2,3", "imoat:2,5,8"] if name.startswith(start)]


def completing(names: Iterable[str]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Shell completion from a list of names; the value itself is checked elsewhere."""
    return lambda _context, _parameter, start: [name for name in names if name.startswith(start)]


method_argument = click.argument("method", required=False, shell_complete=complete_method)
methods_argument = click.argument("methods", nargs=-1, required=True, shell_complete=complete_method)


def recipe_options(
    *fixed: str, preset: str = "mini; CIFAR: laptop, with a GPU paper; others: own"
) -> Callable[[Command], Command]:
    """--preset, --recipe, --threads, --device and an option for each field of `Recipe` but the method and `fixed`."""

    def add(command: Command) -> Command:
        everything: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _help_all}
        command = click.option("--help-all", **everything, help="Show all options and exit.")(command)
        command = threads_option(device_option(command))
        for name, field in reversed(Recipe.model_fields.items()):
            if name in ("method", *fixed):
                continue
            flags = option_name(name) + (f"/--no-{name.replace('_', '-')}" if field.annotation is bool else "")
            kind: Any = field.annotation
            if typing.get_origin(kind) is typing.Literal:
                kind = click.Choice(typing.get_args(kind))
            elif kind == int | None:
                kind = int
            elif kind not in (int, float, bool):
                kind = str
            callback = _importable if name == "model" else None
            option = click.option(flags, name, type=kind, default=None, callback=callback, help=field.description)
            command = option(command)
        command = click.option("--recipe", "file", type=FILE, help="Recipe file, such as a run's recipe.toml.")(command)
        usual = f"Settings to start from  [default: {preset}]"
        return click.option("--preset", type=click.Choice(list(PRESETS)), help=usual)(command)

    return add


def running_options(command: Command) -> Command:
    """Where and how a run is executed; no part of its recipe."""
    resume = click.option("--resume", is_flag=True, help="Resume the run in --out, or start it.")
    out = click.option("--out", type=FILE, help="Run folder  [default: runs/NAME]")
    return data_dir_option(trust_option(out(resume(json_option(command)))))


def explain_preset(data: str, preset: str | None, file: Path | None) -> None:
    """Print why CIFAR gets a small network, unless it was chosen by a preset or by a complete recipe."""
    if preset or (file and read_recipe_file(file).keys() >= NEEDED):
        return
    if default_preset(data) == "laptop":
        console.note("no CUDA GPU: using the preset laptop; for the paper's network, use --preset paper")


def let_be_deterministic(recipe: Recipe) -> None:
    """Must run before CUDA is used: cuBLAS reads the variable once."""
    if recipe.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def print_json(fields: dict[str, Any]) -> None:
    click.echo(json.dumps(fields, indent=1))


def print_file(path: Path) -> None:
    """Print a result as its file has it."""
    print_json(json.loads(path.read_text(encoding="utf-8")))
