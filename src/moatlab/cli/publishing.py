"""The commands that make something to show or to give away: `moat reproduce`, `moat report` and `moat export`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from moatlab.cli.options import (
    FILE,
    Grouped,
    completing,
    data_dir_option,
    json_option,
    on_option,
    print_file,
    print_json,
    recipe_options,
    trust_option,
)
from moatlab.reproduce.paper import EXPERIMENTS, experiment
from moatlab.runtime.errors import RunFailed


@click.command("reproduce", cls=Grouped, short_help="A table or figure of the paper, beside the paper's.")
@click.argument("name", metavar="TABLE|FIGURE", shell_complete=completing(EXPERIMENTS))
@recipe_options("data", "schedule", "seed", "on_collapse", "then", preset="paper")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="runs of each row: 0, 1, ...")
@click.option("--methods", multiple=True, metavar="NAMES", help='rows to train, such as "fgsm moat:2"  [default: all]')
@click.option("--n", "images", type=click.IntRange(min=1), help="test images to attack  [default: the preset's]")
@click.option("--n-aa", "aa_images", type=click.IntRange(min=1), help="and by AutoAttack  [default: the preset's]")
@click.option("--plan", is_flag=True, help="Print the rows, their recipes and costs; train nothing.")
@click.option("--known", type=FILE, multiple=True, metavar="FILE", help="a result of before: its runs are not repeated")
@click.option("--yes", is_flag=True, help="Start also what takes days.")
@click.option("--out", type=FILE, help="The sweep's folder  [default: runs/reproduce_PRESET_DATA_SCHEDULE]")
@on_option
@data_dir_option
@json_option
def reproduce_command(
    name: str, preset: str, recipe_file: Path | None, seeds: int, methods: tuple[str, ...], images: int | None,
    aa_images: int | None, plan: bool, known: tuple[Path, ...], yes: bool, out: Path | None, on: str | None,
    data_dir: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """A table or figure of the paper, trained, evaluated and set beside the paper's numbers; and its claims, checked.

    \b
    moat reproduce table2a                          at the paper's size, on a GPU
    moat reproduce table2a --preset mini --seeds 3  the same shape in hours of CPU
    moat reproduce figure1a --plan                  what it would take

    There are table1a (step-wise rate) and table2a (cyclic), figure1a (PGD-7 accuracy over the epochs), figure2a (what
    stage I trains on) and figure3a (the number of steps K) on CIFAR-10, and the same with b on CIFAR-100. Stopped, the
    same command goes on where it was; tables and figures of one preset share their runs.
    """
    from moatlab.reproduce.sweep import describe_plan, plan_sweep, reproduce

    sweep = plan_sweep(
        experiment(name), preset, seeds=seeds, methods=split_methods(methods), images=images, aa_images=aa_images,
        file=recipe_file, **options,
    )  # fmt: skip
    out = out or sweep.folder
    if plan:
        described = describe_plan(sweep, out)
        if as_json:
            print_json(described)
            return
        click.echo(f"{sweep.experiment.name}: {sweep.experiment.title}\npreset {preset}: {sweep.setting}")
        for row in described["rows"] + described["additional_rows"]:
            click.echo(f"{row['run']:<28}{row['epochs']:>5} epochs{row['passes']:>9g} passes   {row['method']}")
        click.echo(f"{len(sweep.jobs)} runs, {sweep.passes:g} passes over the training set, into {out}")
        return
    result = reproduce(sweep, out, data_dir=data_dir, known=list(known), yes=yes, on=on)
    if as_json:
        print_file(out / f"{name}.json")
    else:
        print_reproduction(result)
        click.echo(f"{name}.md, .tex, .json, .png, .pdf and .html are in {out}")
    if failures := result["failures"]:
        raise RunFailed(
            f"{len(failures)} of {len(sweep.jobs)} runs failed, the first, {failures[0]['run']}, because "
            f"{failures[0]['message']}; what the others gave is in {out}"
        )


def print_reproduction(result: dict[str, Any]) -> None:
    """Ours (and the paper's) in percent, then the claims, in 80 columns."""
    from rich.console import Console
    from rich.table import Table

    from moatlab.reproduce.tables import MARKS, columns_of, conditions

    console = Console(highlight=False, emoji=False)
    names = columns_of(result)
    table = Table("method", *names.values(), "passes", "time", title=f"{result['experiment']}: {result['title']}")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in result["rows"]:
        columns, cost = row["columns"], row["cost"]
        ours = [f"{100 * columns[name]['mean']:.1f}" for name in names]
        times = f"{cost['seconds_to_fgsm']:.2f}" if cost["seconds_to_fgsm"] else ""
        table.add_row(row["row"], *ours, f"{cost['passes']:g}", times)
        if columns["clean"]["paper"] is not None:
            theirs = [f"{100 * columns[name]['paper']:.1f}" for name in names]
            table.add_row("  paper", *theirs, "", f"{cost['paper_to_fgsm']:.2f}", style="dim")
    console.print(table)
    console.print(f"{conditions(result)} Accuracy in %; time: against fgsm.", markup=False)
    console.print("\nThe paper's claims:")
    in_paper = {claim["name"]: claim["verdict"] for claim in result["claims_in_paper"]}
    for claim in result["claims"]:
        style = {"holds": "green", "does not hold": "red"}.get(claim["verdict"])
        console.print(f"{MARKS[claim['verdict']]}: {claim['sentence']}", markup=False, style=style)
        console.print(f"    {claim['numbers']}", markup=False)
        if in_paper[claim["name"]] == "does not hold":
            console.print("    (in the paper's own table it does not hold)", markup=False)
    for failure in result["failures"]:
        console.print(f"FAILED {failure['run']}: {failure['message']}", markup=False, style="red")


def split_methods(texts: tuple[str, ...]) -> list[str] | None:
    """Methods with spaces between them; the spaces inside a cycle (`mixup | fast`) are no ends."""
    return [method for text in texts for method in re.split(r"(?<![|\s])\s+(?![|\s])", text.strip()) if method] or None


@click.command("report", cls=Grouped, short_help="A page about one run or several.")
@click.argument("runs", nargs=-1, required=True, type=FILE)
@click.option("-o", "--out", type=FILE, help="The page  [default: report.html in the first folder]")
@data_dir_option
@trust_option
def report_command(runs: tuple[Path, ...], out: Path | None, data_dir: Path | None, trust_model_code: bool) -> None:
    """One page about one run or several: what they reached, how they got there, what attacks do to them.

    \b
    moat report runs/moat-2_mini_s0
    moat report runs/demo_s0 -o report.html         all runs in a folder

    The page needs no network. What it shows of a model (robustness by radius, examples, the loss around one of them) is
    measured once and kept in the run's portrait.json. What is missing is named, and left out.
    """
    from moatlab.report.page import find_runs, write_report

    out = out or runs[0] / "report.html"
    write_report(find_runs(list(runs)), out, data_dir=data_dir, trust_model_code=trust_model_code)
    click.echo(f"report: {out}")


@click.command("export", cls=Grouped, short_help="A run's model for other tools.")
@click.argument("run", type=FILE)
@click.option("--format", "kind", type=click.Choice(["safetensors", "robustbench", "onnx"]), required=True)
@click.option(
    "--which", type=click.Choice(["last", "best"]), default="last", show_default=True, help="epoch of the run"
)
@click.option("--out", type=FILE, help="The folder to write to  [default: RUN/export-FORMAT]")
@trust_option
@json_option
def export_command(
    run: Path, kind: str, which: str, out: Path | None, trust_model_code: bool, as_json: bool
) -> None:  # fmt: skip
    """The model of RUN for other tools, with a model card (README.md).

    \b
    moat export runs/moat-2_mini_s0 --format safetensors    to share
    moat export runs/moat-2_cifar10_s0 --format robustbench
    moat export runs/moat-2_mini_s0 --format onnx           for other runtimes
    """
    from moatlab.sharing.export import export

    files = export(run, kind, out, which=which, trust_model_code=trust_model_code)
    if as_json:
        print_json({"format": kind, "files": [str(path) for path in files]})
        return
    for path in files:
        click.echo(path)
