"""Train several methods with the same recipe; one table, one plot, one page."""

from functools import partial
from pathlib import Path
from typing import Any

from moatlab.report.page import publish
from moatlab.report.plots import plot_pgd7
from moatlab.reproduce.pool import each, machine_for
from moatlab.runtime import console
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile, write_json
from moatlab.training.api import train_recipe
from moatlab.training.recipe import Recipe, slug
from moatlab.training.run_folder import RunFolder


def compare(
    recipes: list[Recipe],
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    resume: bool = False,
    on: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    verbose: bool | None = None,
) -> dict[str, Any]:
    """Train each recipe into its own folder below `out`. Return, and write to `compare.json`, test accuracies, costs
    and collapses, with a plot of PGD-7 accuracy over the epochs and a page.

    `on`: None trains one after another in this process, "2" two at a time, "ray" on a Ray cluster on this machine,
    "ray:ADDRESS" on a running cluster. `verbose`: progress on stderr  [default: if that is a terminal or a notebook].
    """
    out, data_dir = Path(out), Path(data_dir) if data_dir else None
    runs = {recipe.method: RunFolder(out / slug(recipe.method)) for recipe in recipes}
    if len({run.path for run in runs.values()}) < len(recipes):
        raise UserError("each method can be given only once")
    for recipe in recipes:
        runs[recipe.method].check(recipe, resume=resume)
    machine = machine_for(Machine(device, threads), on)
    work = partial(train_recipe, machine=machine, data_dir=data_dir, resume=resume)
    jobs = [(recipe, runs[recipe.method].path.absolute()) for recipe in recipes]
    with console.verbosity(verbose):
        for number, record in each(work, jobs, on, machine):
            if isinstance(record, Exception):
                raise record
            console.note(f"run {number + 1} of {len(jobs)} done\n")
        histories = {method: run.read_metrics() for method, run in runs.items()}
        events = {method: [one for one in run.read_events() if "epoch" in one] for method, run in runs.items()}
        first, plot, page = recipes[0], out / "pgd7.png", out / RunFile.REPORT
        plot_pgd7(plot, histories, events, title=first.setting, images=first.watched)
        result: dict[str, Any] = {"setting": first.setting, "bn_in_attack": first.bn_in_attack}
        result |= {"rows": [_row(run) for run in runs.values()], "plot": str(plot), "report": str(page)}
        write_json(out / "compare.json", result)
        publish([run.path for run in runs.values()], page, data_dir=data_dir, trust_model_code=first.names_code)
    return result


def _row(run: RunFolder) -> dict[str, Any]:
    record = run.read_record()
    assert record.final is not None
    kept = ("train_seconds", "outcome", "collapsed_at", "kept_epoch", "alarms")
    numbers = {"passes": record.counted["passes"]} | {name: getattr(record, name) for name in kept}
    return {"method": record.method, **record.final, **numbers, "run": str(run.path)}
