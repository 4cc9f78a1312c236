"""The report: one self-contained HTML file about one run or several."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from moatlab.attacks.catalog import CATALOG, NAMES, WATCHED
from moatlab.attacks.norms import NORM_NAMES, Threat
from moatlab.report.charts import COLOURS, Series, line_chart, pareto, scatter, surface
from moatlab.report.plots import plot_portrait, plot_run
from moatlab.report.template import fill, refuse_folder, write_text
from moatlab.report.views import RunView, Source, find_runs, gather
from moatlab.runtime.console import duration, rounded, verbosity, warn
from moatlab.runtime.errors import NotWritten, RunFailed, UserError
from moatlab.runtime.files import RunFile
from moatlab.training.api import TrainedRun

ACCURACIES = dict(zip(WATCHED, (6, 4, 1), strict=True))  # with their colours
LONG = {"first_broken_by", "broken_by", "adversarial"}  # fields of a card that are not shown
LONGEST_NAME = 80  # of the page of several runs
Run = str | Path | TrainedRun


def write_report(
    runs: Run | Sequence[Run],
    out: str | Path | None = None,
    *,
    data_dir: str | Path | None = None,
    trust_model_code: bool = False,
    verbose: bool | None = None,
) -> Path:
    """Write an HTML report and return its path: `out`, or report.html in the folder, or for several folders A and B
    report_A_B.html beside the first.

    `runs`: run folders, folders of run folders, or results of `train`. Robustness by radius, examples and the loss
    surface are measured once and cached in the run's portrait.json. `trust_model_code` allows running the code that a
    model names. `verbose`: progress and warnings on stderr; by default only in a terminal or a notebook.
    """
    each = [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else runs
    folders = [run.folder if isinstance(run, TrainedRun) else Path(run) for run in each]
    if not folders:
        raise UserError("give at least one run folder, such as runs/moat-2_mini_s0")
    out = Path(out) if out else default_path(list(dict.fromkeys(folders)))
    trained = {run.folder: run for run in each if isinstance(run, TrainedRun)}
    with verbosity(verbose):
        _write(find_runs(folders), out, data_dir=data_dir, trust_model_code=trust_model_code, trained=trained)
    return out


def default_path(folders: list[Path]) -> Path:
    if len(folders) == 1:
        return folders[0] / RunFile.REPORT
    names = [folder.resolve().name for folder in folders]
    joined = "_".join(names)
    short = joined if len(joined) <= LONGEST_NAME else f"{names[0][:LONGEST_NAME]}_and_{len(names) - 1}_more"
    return folders[0].parent / f"report_{short}.html"


def publish(folders: list[Path], out: Path, **options: Any) -> None:
    """Write the report of finished runs; an error is only a warning. Options: see `_write`."""
    try:
        _write(folders, out, **options)
    except (UserError, RunFailed) as error:
        warn(f"no report was written: {error}")


def _write(
    folders: list[Path],
    out: Path,
    *,
    data_dir: str | Path | None = None,
    trust_model_code: bool = False,
    trained: dict[Path, TrainedRun] | None = None,
    title: str | None = None,
    top: dict[str, Any] | None = None,
) -> None:
    """`top` is shown above the runs: tables and claims. `trained`: runs whose models are in memory, by folder."""
    refuse_folder(out, RunFile.REPORT)
    source = Source(Path(data_dir) if data_dir else None, trust_model_code, trained or {})
    views = gather(folders, source)
    for view in views:
        try:
            draw_pictures(view)
        except NotWritten as error:
            view.problems.append(str(error))
    write_text(out, render(views, title=title, top=top))


def draw_pictures(view: RunView) -> None:
    """Write curves.png and portrait.png to the folder of a finished run, once per portrait."""
    curves, portrait = view.folder / "curves.png", view.folder / "portrait.png"
    if view.portrait and view.metrics and (view.portrait_is_new or not curves.exists()):
        plot_run(curves, view.metrics, view.collapsed_at, title=view.method)
    if view.portrait and (view.portrait_is_new or not portrait.exists()):
        plot_portrait(portrait, view.portrait, title=view.method)


def render(views: list[RunView], *, title: str | None = None, top: dict[str, Any] | None = None) -> str:
    problems = []
    for folder, problem in [(str(view.folder), problem) for view in views for problem in view.problems]:
        problems.append(problem if folder in problem else f"{folder}: {problem}")
        warn(problems[-1])
    columns = [name for name in NAMES if any(name in view.accuracy for view in views)]
    settings = {view.recipe.setting for view in views if view.recipe}
    return fill(
        "page",
        title=title or (", ".join(view.label for view in views) if len(views) <= 4 else f"{len(views)} runs"),
        settings=settings if len(settings) == 1 else (),
        warnings=_warnings(views) + ([("in the tables", flag) for flag in top["flags"]] if top else []),
        problems=problems + (top["failures"] if top else []),
        columns=columns,
        columns_note=_note_on_columns(views),
        unfinished={
            view.label: card.subject.unfinished for view in views for card in view.cards if card.subject.unfinished
        },
        runs=[_run(view, number) for number, view in enumerate(views)],
        plots=_plots(views),
        accuracies=ACCURACIES,
        duration=duration,
        rounded=rounded,
        top=top,
    )


def _warnings(views: list[RunView]) -> list[tuple[str, str]]:
    found = []
    for view in views:
        found += [(f"{view.label}: {flag.name}", f"{flag.meaning} ({flag.evidence})") for flag in view.flags]
        if view.collapsed_at and "catastrophic-overfitting" not in {flag.name for flag in view.flags}:
            found.append((f"{view.label}: collapsed", f"robustness was lost at epoch {view.collapsed_at} for good"))
        elif view.record and view.record.outcome in ("overfitted", "untrained", "undecided"):
            found.append((f"{view.label}: {view.record.outcome}", view.record.remark.partition(": ")[2]))
    return found


def _note_on_columns(views: list[RunView]) -> str:
    """The number of test images behind each column."""
    counts = {f"{card.data.images:,} ({', '.join(card.results)})" for view in views for card in view.cards}
    for view in views:
        measured = {name for card in view.cards for name in card.results}
        if view.record and view.record.final and (quick := [name for name in WATCHED if name not in measured]):
            counts.add(f"{view.record.final['images']:,} ({', '.join(quick)})")
    note = f"Test images: {'; '.join(sorted(counts))}. pgd7: seven steps, a quick check." if counts else ""
    for view in views:  # a card on fewer images than the column `clean`
        most = max((card.data.images for card in view.cards), default=0)
        for card in [card for card in view.cards if card.data.images < most and "clean" in card.results]:
            clean = 100 * card.results["clean"].accuracy
            attacks = ", ".join(name for name in card.results if name != "clean")
            note += f" {view.label}: clean {clean:.1f} % on the {card.data.images:,} images of {attacks}."
    unlike = [name for name in NAMES if len({view.images[name] for view in views if name in view.images}) > 1]
    return note + (f" Measured on different images, so not comparable: {', '.join(unlike)}." if unlike else "")


def _plots(views: list[RunView]) -> list[dict[str, Any]]:
    """Comparisons of the runs: over the epochs, against cost, by radius."""
    plots = [_over_epochs(views), _against_cost(views)]
    norms = dict.fromkeys(view.portrait.norm for view in views if view.portrait)
    return [plot for plot in plots if plot] + [_by_radius(views, norm) for norm in norms]


def _over_epochs(views: list[RunView]) -> dict[str, Any] | None:
    curves = []
    for number, view in enumerate(views):
        ends = _curve(line for line in view.metrics if line["comparable"])
        bold = ends if len(ends) < len(_curve(view.metrics)) else None
        curves += [Series(view.label, number, _curve(view.metrics), bold, _marks(view))] if view.metrics else []
    if not curves:
        return None
    note = "PGD-7 on the watched images after each epoch."
    note += " Bold: ends of cycles." if any(one.bold for one in curves) else ""
    note += " Cross: the collapse." if any(one.marks for one in curves) else ""
    drawing = line_chart(curves, x_label="epoch", y_label="PGD-7 accuracy (%)")
    return _plot("epochs", "Robustness over the epochs", drawing, note, views, [one.colour for one in curves])


def _against_cost(views: list[RunView]) -> dict[str, Any] | None:
    """Under the strongest attack that all runs have in common; None for fewer than two runs."""
    tried = {number: view for number, view in enumerate(views) if view.accuracy and view.record}
    ranked = sorted((attack for attack in CATALOG.values() if attack.rank), key=lambda attack: -attack.rank)
    names = [one.name for one in ranked if tried and all(one.name in view.accuracy for view in tried.values())]
    if not names or len(tried) < 2:
        return None
    costs = {number: view.record.counted["passes"] for number, view in tried.items() if view.record}
    points = [(view.label, number, costs[number], 100 * view.accuracy[names[0]]) for number, view in tried.items()]
    threats = {(view.recipe.data, view.recipe.threat) if view.recipe else None for view in tried.values()}
    counts = {view.images[names[0]] for view in tried.values()}
    front = pareto([(x, y) for _, _, x, y in points]) if len(threats) == len(counts) == 1 else []
    y_label = f"accuracy under {names[0]} (%)"
    drawing = scatter(points, x_label="passes over the training set", y_label=y_label, front=front)
    note = "Robustness and training cost."
    if len(threats) > 1:
        note += " The runs differ in data, norm or radius: their robustness is not comparable."
    elif len(counts) > 1:
        note += " The runs were measured on different numbers of images: their robustness is not comparable."
    elif len(front) > 1:  # else one run beats all others
        note = "Dashed line: the runs that no other beats in both robustness and cost (Pareto front)."
    return _plot("cost", "Robustness against cost", drawing, note, views, tried)


def _by_radius(views: list[RunView], norm: str) -> dict[str, Any]:
    """Robustness by radius of the runs trained in this norm."""
    portraits = {n: view.portrait for n, view in enumerate(views) if view.portrait and view.portrait.norm == norm}
    curves = [Series(views[number].label, number, portrait.points) for number, portrait in portraits.items()]
    own = {one.scale * Threat.of(one.eps, norm).eps for one in portraits.values()}
    guide = own.pop() if len(own) == 1 else None
    x_label = f"eps{' x 255' if norm == 'linf' else ''} ({NORM_NAMES[norm]})"
    drawing = line_chart(curves, x_label=x_label, y_label="robust accuracy (%)", guide=guide)
    counts = " or ".join(dict.fromkeys(f"{one.steps} steps on {one.curve.images}" for one in portraits.values()))
    dashed = " Dashed line: the training radius." if guide is not None else ""
    note = f"PGD, {counts} test images. An image broken at a radius counts as broken at larger ones.{dashed}"
    return _plot(f"radius-{norm}", "Robustness by radius", drawing, note, views, portraits)


def _plot(
    name: str, title: str, drawing: Markup, note: str, views: list[RunView], numbers: Iterable[int]
) -> dict[str, Any]:
    """A plot and its legend."""
    runs = [{"colour": number % COLOURS, "label": views[number].label} for number in sorted(numbers)]
    return {"id": name, "title": title, "drawing": drawing, "note": note, "runs": runs}


def _curve(lines: Iterable[dict[str, Any]], name: str = "pgd7") -> list[tuple[float, float]]:
    return [(line["epoch"], 100 * line[name]) for line in lines if line[name] is not None]


def _marks(view: RunView) -> tuple[tuple[float, float], ...]:
    return tuple(_curve(line for line in view.metrics if line["epoch"] == view.collapsed_at))


def _run(view: RunView, number: int) -> dict[str, Any]:
    record, stages = view.record, list(dict.fromkeys(line["stage"] for line in view.metrics))
    outcome = (record and record.outcome) or ""
    outcome += f" at {view.collapsed_at}" if view.collapsed_at else ""
    if record and record.kept_epoch:
        outcome = f"collapsed at {record.alarms[-1]}, kept {record.kept_epoch}"
    if not (record and record.final):  # the outcome is that of the whole run
        outcome = f"alarm at {record.alarms[-1]}" if record and record.alarms else ""
    shown = stages if len(stages) > 1 else []
    fields: dict[str, Any] = {"view": view, "colour": number % COLOURS, "outcome": outcome, "stages": shown}
    if view.metrics:
        series = [
            Series(name, colour, _curve(view.metrics, name), marks=_marks(view) if name == "pgd7" else ())
            for name, colour in ACCURACIES.items()
        ]
        bands = [(line["epoch"] - 0.5, line["epoch"] + 0.5, stages.index(line["stage"])) for line in view.metrics]
        fields["curves"] = line_chart(series, x_label="epoch", y_label="accuracy (%)", bands=bands if shown else ())
    if view.portrait:
        fields["surface"] = surface(view.portrait.surface.loss, view.portrait.surface.wrong)
    return fields | {"files": _files(view)}


def _files(view: RunView) -> list[tuple[str, str]]:
    found = [(str(RunFile.RECIPE), view.recipe.to_toml())] if view.recipe else []
    for card in view.cards:
        shown = card.model_dump(exclude_unset=True, exclude=LONG)
        found.append((f"evaluation card: {', '.join(card.results)}", json.dumps(shown, indent=1)))
    if view.events:
        found.append(("events", "\n".join(str(event.get("message", event["event"])) for event in view.events)))
    return found
