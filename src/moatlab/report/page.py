"""The page: one HTML file about one run or several, with nothing to load from anywhere.

Text goes through a template that escapes it, whatever file it came from; the one script is named by its hash in the
page's security policy, so that no other could run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from moatlab.report.charts import COLOURS, Band, Series, line_chart, pareto, scatter, surface
from moatlab.report.plots import plot_portrait, plot_run
from moatlab.report.views import RunView, find_runs, gather
from moatlab.runtime import console
from moatlab.runtime.errors import NotWritten, RunFailed, UserError
from moatlab.runtime.files import atomic, make_folder, remove_leftovers
from moatlab.training.recipe import parse_eps

__all__ = ["find_runs", "publish", "write_report"]

HERE = Path(__file__).parent
ATTACKS = ("clean", "fgsm", "pgd7", "pgd50", "cw50", "mim50", "apgd-ce", "apgd-t", "fab-t", "square", "aa-fast", "aa")
STRONGEST = ("aa", "pgd50", "pgd7")
ACCURACIES = {"clean": 6, "fgsm": 4, "pgd7": 1}  # and their colours
CARD_SHOWN = ("subject", "data", "settings", "results", "all_attacks", "flags", "measured", "audit", "environment")


def write_report(
    folders: list[Path], out: Path, *, data_dir: Path | None = None, trust_model_code: bool = False,
    title: str | None = None, top: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a page about the runs in `folders`; `top` holds tables and claims to stand above them."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file, such as {out / 'report.html'}")
    views = gather(folders, data_dir=data_dir, trust_model_code=trust_model_code)
    for view in views:
        try:
            draw_pictures(view)
        except NotWritten as error:
            view.problems.append(str(error))
    page = render(views, title=title, top=top)
    make_folder(out.parent)
    remove_leftovers(out)
    with atomic(out) as file:
        file.write(page.encode(errors="replace"))  # a name from the disk, or from a file, may be no text


def publish(
    folders: list[Path], out: Path, *, data_dir: Path | None, trust_model_code: bool, title: str | None = None,
    top: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write a page about runs that are done, whatever becomes of it."""
    try:
        write_report(folders, out, data_dir=data_dir, trust_model_code=trust_model_code, title=title, top=top)
    except (UserError, RunFailed) as error:
        console.warn(f"no report was made: {error}")


def draw_pictures(view: RunView) -> None:
    """The plots of a finished run as PNG, in its folder, once for each portrait."""
    curves, portrait = view.folder / "curves.png", view.folder / "portrait.png"
    if view.portrait is None:
        return
    if view.metrics and (view.portrait_is_new or not curves.exists()):
        plot_run(curves, view.metrics, view.collapsed_at, title=view.method)
    if view.portrait_is_new or not portrait.exists():
        plot_portrait(portrait, view.portrait, title=view.method)


def render(views: list[RunView], *, title: str | None = None, top: dict[str, Any] | None = None) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    columns = [name for name in ATTACKS if any(name in view.accuracy for view in views)]
    runs = [_run(view, number, columns) for number, view in enumerate(views)]
    settings = list(dict.fromkeys(run["setting"] for run in runs if run["setting"]))
    problems = [
        problem if str(view.folder) in problem else f"{view.folder}: {problem}"
        for view in views
        for problem in view.problems
    ]
    for problem in problems:
        console.warn(problem)
    return environment.from_string((HERE / "page.html").read_text(encoding="utf-8")).render(
        title=title or (", ".join(view.label for view in views) if len(views) <= 4 else f"{len(views)} runs"),
        settings=settings if len(settings) == 1 else [],
        style=Markup((HERE / "page.css").read_text(encoding="utf-8")),  # ours: no text of a run is in it
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        warnings=_warnings(views) + ([("in the tables", flag) for flag in top["flags"]] if top else []),
        problems=problems + (top["failures"] if top else []),
        columns=columns,
        columns_note=_note_on_columns(views),
        runs=runs,
        plots=_plots(views),
        accuracies=ACCURACIES,
        version=version("moatlab"),
        top=top,
    )


def _warnings(views: list[RunView]) -> list[tuple[str, str]]:
    found = [(f"{view.label}: {flag['name']}", f"{flag['meaning']} ({flag['evidence']})")
             for view in views for flag in view.flags]  # fmt: skip
    told = "catastrophic-overfitting"
    collapsed = [view for view in views if view.collapsed_at and told not in {flag["name"] for flag in view.flags}]
    return found + [
        (f"{view.label}: collapsed", f"robustness was lost at epoch {view.collapsed_at} and did not come back")
        for view in collapsed
    ]


def _note_on_columns(views: list[RunView]) -> str:
    """On how many test images each column was measured."""
    counts = {f"{card['data']['images']:,} ({', '.join(card['results'])})" for view in views for card in view.cards}
    for view in views:
        measured = {name for card in view.cards for name in card["results"]}
        if view.record and view.record.final and (quick := [name for name in ACCURACIES if name not in measured]):
            counts.add(f"{view.record.final['images']:,} ({', '.join(quick)})")
    return f"Test images: {'; '.join(sorted(counts))}. pgd7 is a quick look of seven steps." if counts else ""


def _plots(views: list[RunView]) -> list[dict[str, Any]]:
    """What compares the runs: over the epochs, against cost, by radius."""
    curves = [
        Series(
            view.label, number,
            [(line["epoch"], 100 * line["pgd7"]) for line in view.metrics],
            [(line["epoch"], 100 * line["pgd7"]) for line in view.metrics if line["comparable"]]
            if not all(line["comparable"] for line in view.metrics) else None,
            _marks(view),
        )
        for number, view in enumerate(views)
        if view.metrics
    ]  # fmt: skip
    plots = []
    if curves:
        note = "PGD-7 on the watched images after each epoch. Of cycles the ends are bold. A cross: the collapse."
        drawing = line_chart(curves, x_label="epoch", y_label="PGD-7 accuracy (%)", x_unit="epoch")
        plots.append(_plot("epochs", "Robustness over the epochs", drawing, note, _keys(views, curves)))
    tried = [view for view in views if view.accuracy and view.record]
    measure = next((name for name in STRONGEST if tried and all(name in view.accuracy for view in tried)), None)
    if measure:
        points = [
            (view.label, number, view.record.counted["passes"], 100 * view.accuracy[measure])
            for number, view in enumerate(views)
            if view.record and measure in view.accuracy
        ]
        threats = {(recipe.data, recipe.norm, recipe.eps_value) if (recipe := view.recipe) else None for view in tried}
        alike = len(threats) == 1
        front = pareto([(x, y) for _, _, x, y in points]) if alike else []
        drawing = scatter(
            points, x_label="passes over the training set", y_label=f"accuracy under {measure} (%)", front=front
        )  # fmt: skip
        note = "Robustness, and what training cost."
        if not alike:
            note += " The runs differ in data, norm or radius, so that their robustness does not compare."
        elif len(front) > 1:  # or one run beats all others
            note = "The dashed line joins the runs that no other beats in both robustness and cost."
        plots.append(_plot("cost", "Robustness against cost", drawing, note, _keys(views, points)))
    return plots + [
        _by_radius(views, norm) for norm in dict.fromkeys(one["norm"] for one in _portraits(views).values())
    ]


def _portraits(views: list[RunView]) -> dict[int, dict[str, Any]]:
    return {number: view.portrait for number, view in enumerate(views) if view.portrait}


def _by_radius(views: list[RunView], norm: str) -> dict[str, Any]:
    """Robustness by radius, of the runs that were trained in this norm."""
    portraits = {number: portrait for number, portrait in _portraits(views).items() if portrait["norm"] == norm}
    curves = [Series(views[number].label, number, _curve(portrait)) for number, portrait in portraits.items()]
    scale, x_label = (255, "eps x 255 (L-inf)") if norm == "linf" else (1, "eps (L2)")
    own = {scale * parse_eps(portrait["eps"], norm) for portrait in portraits.values()}
    guide = own.pop() if len(own) == 1 else None
    drawing = line_chart(curves, x_label=x_label, y_label="robust accuracy (%)", x_unit="eps", guide=guide)
    counts = " or ".join(dict.fromkeys(str(portrait["curve"]["images"]) for portrait in portraits.values()))
    steps = " or ".join(dict.fromkeys(str(portrait["steps"]) for portrait in portraits.values()))
    note = (
        f"A quick attack of {steps} steps on {counts} test images; who falls at a radius counts as fallen at larger "
        f"ones.{' The dashed line: the radius trained for.' if guide is not None else ''}"
    )
    return _plot(f"radius-{norm}", "Robustness by radius", drawing, note, _keys(views, curves))


def _plot(name: str, title: str, drawing: Markup, note: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": name, "title": title, "drawing": drawing, "note": note, "runs": runs}


def _keys(views: list[RunView], drawn: Sequence[Any]) -> list[dict[str, Any]]:
    """The legend of a plot: the runs that are in it."""
    colours = {one.colour if isinstance(one, Series) else one[1] for one in drawn}
    return [{"colour": number % COLOURS, "label": views[number].label} for number in sorted(colours)]


def _curve(portrait: dict[str, Any]) -> list[tuple[float, float]]:
    scale = 255 if portrait["norm"] == "linf" else 1
    curve = portrait["curve"]
    return [(round(scale * eps, 3), 100 * share) for eps, share in zip(curve["eps"], curve["accuracy"], strict=True)]


def _marks(view: RunView) -> tuple[tuple[float, float], ...]:
    return tuple((line["epoch"], 100 * line["pgd7"]) for line in view.metrics if line["epoch"] == view.collapsed_at)


def _run(view: RunView, number: int, columns: list[str]) -> dict[str, Any]:
    record, accuracy, portrait = view.record, view.accuracy, view.portrait
    stages = list(dict.fromkeys(line["stage"] for line in view.metrics))
    collapsed = f"epoch {view.collapsed_at}" if view.collapsed_at else "no"
    if record and record.kept_epoch:
        collapsed = f"epoch {record.alarms[-1]}, kept {record.kept_epoch}"
    fields: dict[str, Any] = {
        "label": view.label, "colour": number % COLOURS, "setting": view.recipe.setting if view.recipe else "",
        "numbers": [f"{100 * accuracy[name]:.1f}" if name in accuracy else "" for name in columns],
        "passes": f"{record.counted['passes']:g}" if record else "",
        "time": console.duration(record.train_seconds) if record else "",
        "collapsed": collapsed if record and record.final else (record.status if record else "unknown"),
        "stages": stages if len(stages) > 1 else [],
        "watched": view.recipe.watched if view.recipe else "watched images",
        "files": _files(view),
    }  # fmt: skip
    if view.metrics:
        series = [
            Series(name, kind, [(line["epoch"], 100 * line[name]) for line in view.metrics],
                   marks=_marks(view) if name == "pgd7" else ())
            for name, kind in ACCURACIES.items()
        ]  # fmt: skip
        bands = [Band(line["epoch"] - 0.5, line["epoch"] + 0.5, stages.index(line["stage"])) for line in view.metrics]
        fields["curves"] = line_chart(
            series, x_label="epoch", y_label="accuracy (%)", x_unit="epoch", bands=bands if len(stages) > 1 else ()
        )
    if portrait:
        fields["surface"] = surface(portrait["surface"]["loss"], portrait["surface"]["wrong"])
        fields["surface_note"] = (
            f"Cross-entropy around test image {portrait['surface']['image']} (a {portrait['surface']['class']}, the "
            f"dot) up to {portrait['eps']} to each side; red where the model is wrong. Smooth is good; where it bends, "
            "one step along the gradient does not lead to where the loss is high."
        )
        fields["examples"] = portrait["examples"]
        magnified = portrait["examples"][0]["magnified"]
        fields["examples_note"] = (
            f"Each column: the image, the image attacked within eps {portrait['eps']}, and the difference magnified "
            f"{magnified:.0f} times (grey is none)."
        )
    return fields


def _files(view: RunView) -> list[tuple[str, str]]:
    found = []
    if view.recipe:
        found.append(("recipe.toml", view.recipe.to_toml()))
    for card in view.cards:
        shown = {name: card[name] for name in CARD_SHOWN if name in card}
        attacks = ", ".join(card["results"])
        found.append((f"evaluation card: {attacks}", json.dumps(shown, indent=1)))
    if view.events:
        found.append(("events", "\n".join(str(event.get("message", event["event"])) for event in view.events)))
    return found
