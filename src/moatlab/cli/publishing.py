"""Commands that publish: `moat reproduce`, `report` and `export`."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from moatlab.cli import options as shared
from moatlab.reproduce.paper import EXPERIMENTS, experiment
from moatlab.runtime.console import counted
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.training.presets import default_preset


@click.command("reproduce", cls=shared.WithRecipe, short_help="Reproduce a table or figure of the paper.")
@click.argument("name", metavar="TABLE|FIGURE", shell_complete=shared.completing(EXPERIMENTS))
@shared.recipe_options("data", "schedule", "seed", "on_collapse", "then", preset="laptop; with a GPU: paper")
@click.option(
    "--seeds", type=click.IntRange(1, 1000), help="Runs per row, seeds 0, 1, ...  [default: 1, and those already there]"
)
@click.option("--methods", multiple=True, metavar="NAMES", help='Rows to train, such as "fgsm moat:2"  [default: all]')
@click.option("--n", "images", type=click.IntRange(min=1), help="Test images to attack  [default: the preset's]")
@click.option("--n-aa", "aa_images", type=click.IntRange(min=1), help="Same for AutoAttack  [default: the preset's]")
@click.option("--plan", is_flag=True, help="Print rows and costs; train nothing.")
@click.option("--known", type=shared.FILE, multiple=True, metavar="FILE", help="Earlier result whose runs are reused.")
@click.option("--note", metavar="TEXT", help='Shown with the result, such as "other jobs ran during training".')
@click.option("--yes", is_flag=True, help="Start even if it takes days.")
@click.option("--out", type=shared.FILE, help="Output folder  [default: runs/reproduce_PRESET_DATA_SCHEDULE...]")
@shared.on_option
@shared.data_dir_option
@shared.json_option
def reproduce_command(
    name: str, plan: bool, out: Path | None, as_json: bool, threads: int | None, device: str, **options: Any
) -> None:
    """Train and evaluate a table or figure of the paper, compare with the paper's numbers and check its claims.

    \b
    moat reproduce table2a --preset paper           the paper's settings, on a GPU
    moat reproduce table2a --preset mini --seeds 3  small, in hours on a CPU
    moat reproduce figure1a --plan                  show its cost
    moat reproduce radius                           robustness by training radius

    On CIFAR-10: table1a (step-wise schedule), table2a (cyclic), figure1a (PGD-7 accuracy over the epochs), figure2a
    (data of stage I), figure3a (number of steps K); with b instead of a, on CIFAR-100. Not in the paper: radius (PGD-7
    accuracy of fgsm, fast, nfgsm and moat:2 trained at 4 to 16/255). After an interruption, the same command resumes.
    Tables and figures of one preset and length share their runs.
    """
    from moatlab.reproduce.plan import describe_plan, plan_sweep

    running = {key: options.pop(key) for key in ("data_dir", "known", "yes", "on", "note")}
    wanted, preset = experiment(name), options.pop("preset")
    shared.explain_preset(wanted.data, preset, None)
    methods = split_methods(options.pop("methods"))
    sweep = plan_sweep(wanted, preset or default_preset(wanted.data), methods=methods, **options)
    out = out or sweep.folder
    if plan:
        described = describe_plan(sweep, out)
        if as_json:
            shared.print_json(described)
            return
        click.echo(f"{sweep.experiment.name}: {sweep.experiment.title}\npreset {sweep.preset}: {sweep.setting}")
        for row in described["rows"] + described["additional_rows"]:
            click.echo(f"{row['run']:<28}{row['epochs']:>5} epochs{row['passes']:>9g} passes   {row['method']}")
        cost = f"{counted(sweep.passes, 'pass')} over the training set"
        click.echo(f"{counted(len(sweep.jobs), 'run')}, {cost}, into {out}")
        return
    from moatlab.reproduce.sweep import run_sweep
    from moatlab.runtime.device import Machine

    shared.let_be_deterministic(sweep.jobs[0].recipe)
    command = shlex.join(["moat", *sys.argv[1:]])
    result = run_sweep(sweep, out, machine=Machine(device, threads), command=command, **running)
    if as_json:
        shared.print_file(out / f"{name}.json")
    else:
        from moatlab.reproduce.tables import print_reproduction

        print_reproduction(result)
        click.echo(f"{name}.md, .tex, .json, .png, .pdf and .html are in {out}")
    if failures := result["failures"]:
        count, first = f"{len(failures)} of {len(sweep.jobs)} runs", failures[0]
        raise RunFailed(f"{count} failed, the first ({first['run']}): {first['message']}; other results are in {out}")


def split_methods(texts: tuple[str, ...]) -> list[str] | None:
    """Split at spaces, except those inside a cycle (`mixup | fast`)."""
    return [method for text in texts for method in re.split(r"(?<![|\s])\s+(?![|\s])", text.strip()) if method] or None


@click.command("report", cls=shared.Grouped, short_help="Write an HTML report about runs, or a leaderboard.")
@click.argument("runs", metavar="RUNS|CARDS...", nargs=-1, required=True, type=shared.FILE)
@click.option("-o", "--out", type=shared.FILE, help="Output file  [default: report.html in RUNS, or leaderboard.html]")
@shared.data_dir_option
@shared.trust_option
def report_command(runs: tuple[Path, ...], out: Path | None, **options: Any) -> None:
    """Write an HTML report about one run or several, or a leaderboard of evaluated models.

    \b
    moat report runs/moat-2_mini_s0
    moat report runs/demo_s0 -o report.html  all runs in a folder
    moat report runs/fgsm runs/fast          writes runs/report_fgsm_fast.html
    moat report runs/*/eval.json             leaderboard of these cards

    A report has accuracies, training curves and adversarial examples. Robustness by radius, examples and the loss
    surface are measured once and cached in the run's portrait.json. Missing files are listed on the page.

    With cards (or folders of cards, such as *.eval.json) instead of runs it is a leaderboard: robust and clean
    accuracy, cost and red flags of each model, as .html and, with the same name, as .json and .md.

    The pages need no network.
    """
    from moatlab.report.board import is_about_cards

    if is_about_cards(runs):
        from moatlab.report.leaderboard import write_leaderboard

        click.echo(f"leaderboard: {', '.join(map(str, write_leaderboard(runs, out)))}")
        return
    from moatlab.report.page import write_report

    click.echo(f"report: {write_report(list(runs), out, **options)}")


@click.command("export", cls=shared.Grouped, short_help="Export a model for other tools.")
@click.argument("run", type=shared.FILE)
@click.option("--format", "kind", type=click.Choice(["safetensors", "hub", "robustbench", "onnx"]), required=True)
@shared.which_option
@click.option("--out", type=shared.FILE, help="Output folder  [default: RUN/hub or RUN/export-FORMAT]")
@click.option("--push", "repo", metavar="USER/NAME", help="Upload the folder to the Hugging Face hub.")
@shared.trust_option
@shared.json_option
def export_command(run: Path, kind: str, repo: str | None, as_json: bool, **options: Any) -> None:
    """Export the model of RUN for other tools, with a model card (README.md).

    \b
    moat export runs/moat-2_mini_s0 --format safetensors    the weights
    moat export runs/moat-2_mini_s0 --format hub --push me/moat-2
    moat export runs/moat-2_cifar10_s0 --format robustbench
    moat export runs/moat-2_mini_s0 --format onnx           for other runtimes
    """
    from moatlab.sharing.export import export_run
    from moatlab.sharing.hub import check_push, push

    if repo:
        if kind != "hub":
            raise UserError("--push needs --format hub")
        check_push(repo)
        options["repo"] = repo
    files = export_run(run, kind, **options)
    address = push(files, repo) if repo else None
    if as_json:
        pushed = {"url": address} if address else {}
        shared.print_json({"format": kind, "files": [str(path) for path in files], **pushed})
    else:
        click.echo("\n".join([*map(str, files), *([address] if address else [])]))
