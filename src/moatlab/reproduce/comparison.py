"""Several runs as one: the same recipe for each method, one table, one plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moatlab.reproduce.pool import each
from moatlab.runtime import console
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import write_json
from moatlab.training.recipe import Recipe, slug
from moatlab.training.run_folder import RunFolder, RunRecord
from moatlab.training.trainer import train


def compare(
    recipes: list[Recipe], out: str | Path, *, data_dir: Path | None = None, resume: bool = False,
    on: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Train each recipe into a folder of its own below `out`; return (and write to `compare.json`) their test
    accuracies, costs and collapses side by side, with a plot of PGD-7 accuracy over the epochs. `on` says where they
    are trained: see `pool.each`."""
    out = Path(out)
    folders = {slug(recipe.method): recipe for recipe in recipes}
    if len(folders) < len(recipes):
        raise UserError("each method can be named once")
    for name, recipe in folders.items():
        RunFolder(out / name).check(recipe, resume=resume)
    jobs = [(recipe, (out / name).absolute(), data_dir, resume) for name, recipe in folders.items()]
    for number, record in each(_train, jobs, on, threads=recipes[0].threads, gpus=recipes[0].device != "cpu"):
        if isinstance(record, Exception):
            raise record
        console.note(f"run {number + 1} of {len(jobs)} is done\n")
    rows, histories, events = [], {}, {}
    for name in folders:
        record = RunFolder(out / name).read_record()
        assert record.final is not None
        rows.append({
            "method": record.method, **record.final, "passes": record.counted["passes"],
            "train_seconds": record.train_seconds, "collapsed_at": record.collapsed_at,
            "kept_epoch": record.kept_epoch, "alarms": record.alarms, "run": str(out / name),
        })  # fmt: skip
        histories[record.method] = RunFolder(out / name).read_metrics()
        events[record.method] = [event for event in RunFolder(out / name).read_events() if "epoch" in event]
    from moatlab.report.page import publish
    from moatlab.report.plots import plot_pgd7

    first, plot = recipes[0], out / "pgd7.png"
    plot_pgd7(plot, histories, events, title=first.setting, images=first.watched)
    result = {"setting": first.setting, "bn_in_attack": first.bn_in_attack, "rows": rows, "plot": str(plot),
              "report": str(out / "report.html")}  # fmt: skip
    write_json(out / "compare.json", result)
    runs = [out / name for name in folders]
    publish(runs, out / "report.html", data_dir=data_dir, trust_model_code=first.names_code)
    return result


def _train(recipe: Recipe, folder: Path, data_dir: Path | None, resume: bool) -> RunRecord:
    return train(recipe, folder, data_dir=data_dir, resume=resume)
