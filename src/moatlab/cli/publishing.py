"""The commands that make something to show or to give away: `moat reproduce`, `moat report` and `moat export`."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from moatlab.cli import options as shared
from moatlab.reproduce.paper import EXPERIMENTS, experiment
from moatlab.runtime.errors import RunFailed


@click.command("reproduce", cls=shared.Grouped, short_help="A table or figure of the paper, beside the paper's.")
@click.argument("name", metavar="TABLE|FIGURE", shell_complete=shared.completing(EXPERIMENTS))
@shared.recipe_options("data", "schedule", "seed", "on_collapse", "then", preset="paper")
@click.option("--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="runs of each row: 0, 1, ...")
@click.option("--methods", multiple=True, metavar="NAMES", help='rows to train, such as "fgsm moat:2"  [default: all]')
@click.option("--n", "images", type=click.IntRange(min=1), help="test images to attack  [default: the preset's]")
@click.option("--n-aa", "aa_images", type=click.IntRange(min=1), help="and with AutoAttack  [default: the preset's]")
@click.option("--plan", is_flag=True, help="Print the rows, their recipes and costs; train nothing.")
@click.option(
    "--known", type=shared.FILE, multiple=True, metavar="FILE", help="an earlier result: its runs are not repeated"
)
@click.option("--yes", is_flag=True, help="Start also what takes days.")
@click.option("--out", type=shared.FILE, help="The sweep's folder  [default: runs/reproduce_PRESET_DATA_SCHEDULE]")
@shared.on_option
@shared.data_dir_option
@shared.json_option
def reproduce_command(
    name: str,
    methods: tuple[str, ...],
    plan: bool,
    known: tuple[Path, ...],
    out: Path | None,
    as_json: bool,
    threads: int | None,
    device: str,
    **options: Any,
) -> None:
    """A table or figure of the paper, trained, evaluated and set beside the paper's numbers; and its claims, checked.

    \b
    moat reproduce table2a                          at the paper's size, on a GPU
    moat reproduce table2a --preset mini --seeds 3  the same shape in hours of CPU
    moat reproduce figure1a --plan                  what it would take

    There are table1a (step-wise rate) and table2a (cyclic), figure1a (PGD-7 accuracy over the epochs), figure2a (what
    stage I trains on) and figure3a (the number of steps K) on CIFAR-10, and the same with b on CIFAR-100. Stopped, the
    same command resumes where it was; tables and figures of one preset share their runs.
    """
    from moatlab.reproduce.plan import describe_plan, plan_sweep

    running = {key: options.pop(key) for key in ("data_dir", "yes", "on")}
    sweep = plan_sweep(experiment(name), methods=split_methods(methods), **options)
    out = out or sweep.folder
    if plan:
        described = describe_plan(sweep, out)
        if as_json:
            shared.print_json(described)
            return
        click.echo(f"{sweep.experiment.name}: {sweep.experiment.title}\npreset {sweep.preset}: {sweep.setting}")
        for row in described["rows"] + described["additional_rows"]:
            click.echo(f"{row['run']:<28}{row['epochs']:>5} epochs{row['passes']:>9g} passes   {row['method']}")
        click.echo(f"{len(sweep.jobs)} runs, {sweep.passes:g} passes over the training set, into {out}")
        return
    from moatlab.reproduce.sweep import run_sweep
    from moatlab.runtime.device import Machine

    shared.let_be_deterministic(sweep.jobs[0].recipe)
    command = shlex.join(["moat", *sys.argv[1:]])
    result = run_sweep(sweep, out, machine=Machine(device, threads), known=list(known), command=command, **running)
    if as_json:
        shared.print_file(out / f"{name}.json")
    else:
        from moatlab.reproduce.tables import print_reproduction

        print_reproduction(result)
        click.echo(f"{name}.md, .tex, .json, .png, .pdf and .html are in {out}")
    if failures := result["failures"]:
        raise RunFailed(
            f"{len(failures)} of {len(sweep.jobs)} runs failed, the first, {failures[0]['run']}, because "
            f"{failures[0]['message']}; what the others gave is in {out}"
        )


def split_methods(texts: tuple[str, ...]) -> list[str] | None:
    """Methods with spaces between them; the spaces inside a cycle (`mixup | fast`) are no ends."""
    return [method for text in texts for method in re.split(r"(?<![|\s])\s+(?![|\s])", text.strip()) if method] or None


@click.command("report", cls=shared.Grouped, short_help="A page about one run or several.")
@click.argument("runs", nargs=-1, required=True, type=shared.FILE)
@click.option("-o", "--out", type=shared.FILE, help="The page  [default: report.html in the first folder]")
@shared.data_dir_option
@shared.trust_option
def report_command(runs: tuple[Path, ...], **options: Any) -> None:
    """One page about one run or several: what they reached, how they got there, what attacks do to them.

    \b
    moat report runs/moat-2_mini_s0
    moat report runs/demo_s0 -o report.html         all runs in a folder

    The page needs no network. What it shows of a model (robustness by radius, examples, the loss around one of them) is
    measured once and kept in the run's portrait.json. What is missing is named, and left out.
    """
    from moatlab.report.page import write_report

    click.echo(f"report: {write_report(list(runs), **options)}")


@click.command("export", cls=shared.Grouped, short_help="A run's model for other tools.")
@click.argument("run", type=shared.FILE)
@click.option("--format", "kind", type=click.Choice(["safetensors", "robustbench", "onnx"]), required=True)
@click.option(
    "--which", type=click.Choice(["last", "best"]), default="last", show_default=True, help="epoch of the run"
)
@click.option("--out", type=shared.FILE, help="The folder to write to  [default: RUN/export-FORMAT]")
@shared.trust_option
@shared.json_option
def export_command(run: Path, kind: str, as_json: bool, **options: Any) -> None:
    """The model of RUN for other tools, with a model card (README.md).

    \b
    moat export runs/moat-2_mini_s0 --format safetensors    to share
    moat export runs/moat-2_cifar10_s0 --format robustbench
    moat export runs/moat-2_mini_s0 --format onnx           for other runtimes
    """
    from moatlab.sharing.export import export_run

    files = export_run(run, kind, **options)
    if as_json:
        shared.print_json({"format": kind, "files": [str(path) for path in files]})
        return
    for path in files:
        click.echo(path)
