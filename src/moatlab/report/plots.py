"""Plots as PNG or PDF, drawn without a display."""

import base64
import io
import re
from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from moatlab.attacks.catalog import WATCHED
from moatlab.attacks.norms import Threat
from moatlab.methods.language import parse_method
from moatlab.report.canvas import COLOURS, GREY, dress, legend_below, new_figure, save
from moatlab.report.portrait import Portrait

BANDS = ["#EEF1F4", "#E3EDF7", "#FBF0E0", "#E9F4EC"]
MARKERS = "os^Dv<>PX*h"
Lines = list[dict[str, Any]]  # of metrics.jsonl or events.jsonl


def plot_bench(path: Path, result: dict[str, Any]) -> None:
    """Bar charts of `moat bench`: steps against the machine's limit, epochs against the sum of their passes."""
    figure, (left, right) = new_figure(8, 3.6, columns=2)
    steps = {name: result[name] for name in ("inference", "attack_step", "training_step")}
    labels = [f"{name.replace('_', ' ')}\n{row['images_per_second']:,.0f} images/s" for name, row in steps.items()]
    bars = left.barh(labels, [100 * row["share_of_limit"] for row in steps.values()], color=COLOURS[1])
    left.bar_label(bars, fmt="%.0f %%", label_type="center", color="white")
    epochs = result["epochs"]
    labels = [f"{method}\n{row['seconds']:.1f} s" for method, row in epochs.items()]
    right.barh(labels, [100 * row["overhead"] for row in epochs.values()], color=COLOURS[0])
    limit = f"% of the machine's {result['limit']['gemm_gflops']:.0f} GFLOP/s"
    for axes, line, room, x_label, title in (
        (left, 100, 115, limit, "one step"),
        (right, 0, 15, "% beyond its passes", "an epoch of mini, width 16"),
    ):
        axes.axvline(line, color=GREY, linewidth=1)
        axes.set_xlim(right=max(room, axes.get_xlim()[1]))
        axes.set_xlabel(x_label)
        axes.set_title(title, fontsize=9)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    setting = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["setting"].items())
    environment = result["environment"]
    machine = f"{environment['cpu']}, {result['limit']['threads']} threads, {environment['device']}"
    figure.suptitle(f"{setting}; {machine}", fontsize=8, color=GREY)
    save(figure, path)


def plot_pgd7(path: Path, histories: dict[str, Lines], events: dict[str, Lines], *, title: str, images: str) -> None:
    """PGD-7 accuracy over the epochs, a line per method (figure 1 of the paper). Accuracy drops at each benign stage of
    a cycle, so a bold line joins the ends of cycles. A cross marks a collapse alarm, a ring the recovery."""
    figure, (axes,) = new_figure(7, 4.2)
    for (spec, lines), colour in zip(histories.items(), cycle(COLOURS), strict=False):
        in_cycles = len(parse_method(spec).slots) > 1
        if in_cycles:
            axes.plot(*_curve(lines, "pgd7"), linewidth=1, alpha=0.35, color=colour)
        label = f"{spec} (bold: ends of cycles)" if in_cycles else spec
        ends = _curve([line for line in lines if line["comparable"]], "pgd7")
        axes.plot(*ends, marker="o", markersize=4, linewidth=2, color=colour, label=label)
        for event in events[spec]:
            place, alarm = (event["epoch"], 100 * event["pgd7"]), event["event"] == "collapse"
            axes.plot(*place, marker="x" if alarm else "o", markersize=12, markerfacecolor="none", color=colour)
            if alarm:
                text = f"{spec}: alarm, {event['action']}"
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
                options: dict[str, Any] = {"fontsize": 8, "color": colour, "bbox": box, "zorder": 4}
                axes.annotate(text, place, (9, 9), textcoords="offset points", **options)
    dress(axes, "epoch", f"PGD-7 accuracy on {images} (%)", title)
    legend_below(axes, columns=2, size=10)
    save(figure, path)


def plot_run(path: Path, metrics: Lines, collapsed_at: int | None, *, title: str) -> None:
    """Accuracies over the epochs of one run; stages as background, a cross at the collapse."""
    figure, (axes,) = new_figure(7, 4)
    stages = list(dict.fromkeys(line["stage"] for line in metrics))
    shades = dict(zip(stages, cycle(BANDS), strict=False)) if len(stages) > 1 else {}
    for line in metrics if shades else []:
        axes.axvspan(line["epoch"] - 0.5, line["epoch"] + 0.5, color=shades[line["stage"]], linewidth=0)
    for name, colour in zip(WATCHED, COLOURS, strict=False):
        axes.plot(*_curve(metrics, name), color=colour, label=name, linewidth=2)
    if at := [line for line in metrics if line["epoch"] == collapsed_at]:
        axes.plot(*_curve(at, "pgd7"), "x", color=COLOURS[2], markersize=12, label="collapse")
    for stage, shade in shades.items():
        axes.plot([], [], "s", color=shade, markersize=9, label=stage)
    dress(axes, "epoch", "accuracy on the watched images (%)", title)
    legend_below(axes)
    save(figure, path)


def plot_portrait(path: Path, portrait: Portrait, *, title: str) -> None:
    """Robustness by radius, the loss surface of one image, and adversarial examples."""
    figure = Figure(figsize=(9, 6.4))
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1), left=0.08, right=0.96, top=0.94, bottom=0.02, hspace=0.25)
    radius, landscape = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1], projection="3d")
    radius.plot(*zip(*portrait.points, strict=True), marker="o", color=COLOURS[1])
    x_label = "eps x 255" if portrait.norm == "linf" else "eps"
    dress(radius, x_label, f"robust accuracy (%), {portrait.curve.images} images", title)
    loss, wrong = np.array(portrait.surface.loss), np.array(portrait.surface.wrong, dtype=bool)
    ticks = np.linspace(-1, 1, len(loss))
    surface: dict[str, Any] = {"rstride": 1, "cstride": 1, "shade": False, "linewidth": 0.1, "edgecolor": "white"}
    surface["facecolors"] = np.where(wrong, COLOURS[0], COLOURS[5])
    landscape.plot_surface(*np.meshgrid(ticks, ticks, indexing="ij"), loss, **surface)
    landscape.set(xlabel="gradient", ylabel="random")
    landscape.set_title(f"loss around image {portrait.surface.image}; red: misclassified", fontsize=9)
    pictures = [[_pixels(png) for png in (one.image, one.adversarial, one.change)] for one in portrait.examples]
    side, strip = pictures[0][0].shape[1], figure.add_subplot(grid[1, :])
    strip.imshow(np.concatenate([np.concatenate(column) for column in pictures], axis=1), interpolation="nearest")
    strip.set_axis_off()
    for number, one in enumerate(portrait.examples):
        for answer, height in ((one.predicted, -0.35), (one.attacked, -0.12)):
            colour, x = COLOURS[2] if answer == one.label else COLOURS[0], (number + 0.5) * side
            strip.text(x, height * side, answer, fontsize=7, color=colour, ha="center", parse_math=False)
    save(figure, path)


def _pixels(png: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))


def plot_result(path: Path, result: dict[str, Any]) -> None:
    """A reproduced table or figure."""
    is_table = result["kind"] == "table"
    figure, panels = new_figure(12 if is_table else 8, 4.6, 2 if is_table else 1)
    kinds = {"curves": _plot_curves, "bars": _plot_bars, "steps": _plot_steps, "radius": _plot_radius}
    if is_table:
        _plot_cost(panels[0], result)
        _plot_clean(panels[1], result)
        panels[1].set_ylim(panels[0].get_ylim())
        legend_below(panels[0])
    else:
        kinds[result["kind"]](panels[0], result)
    part = f"; NOT the whole data set: {result['data']['note']}" if result["data"]["note"] else ""
    setting = f"{result['setting']}; {seeds_text(result)}{part}"
    title = f"{result['experiment']}: {result['title']}\npreset {result['preset']}: {setting}"
    figure.suptitle(title, fontsize=8, color=GREY, wrap=True)
    save(figure, path)


def seeds_text(result: dict[str, Any]) -> str:
    """`1 seed`, `3 seeds`, or `1 to 3 seeds` if some rows have more than others."""
    counts = [len(row["seeds"]) for row in result["rows"]] or [len(result["seeds"])]
    fewer = f"{min(counts)} to " if min(counts) < max(counts) else ""
    return f"{fewer}{max(counts)} seed{'s' * (max(counts) != 1)}"


def _plot_cost(axes: Axes, result: dict[str, Any]) -> None:
    """Robustness against cost: a point per row, with its 95 % interval."""
    costs = [row["cost"]["passes"] for row in result["rows"]]
    for number, row in enumerate(result["rows"]):
        column, cost = row["columns"]["aa"], costs[number]
        near = [other for other, one in enumerate(costs) if abs(one - cost) < max(costs) / 50]
        cost += (near.index(number) - (len(near) - 1) / 2) * max(costs) / 60  # keep equal costs apart
        others = Counter(outcome for outcome in row["outcomes"] if outcome != "robust")
        found = ", ".join(f"{outcome} in {count} of {len(row['seeds'])}" for outcome, count in others.items())
        text = row["row"] + (f" ({found})" if found else "")
        axes.errorbar(cost, 100 * column["mean"], yerr=_errors([column]), label=text, **_point(number))
    dress(axes, "passes over the training set (nearly equal costs side by side)", "accuracy under AutoAttack (%)")
    axes.set_xlim(0, 1.05 * max(costs))
    axes.set_ylim(bottom=-axes.get_ylim()[1] / 50)  # so that a point at zero is not cut


def _plot_clean(axes: Axes, result: dict[str, Any]) -> None:
    """Robustness against clean accuracy, with the marks of the legend; intervals would cover each other."""
    for number, row in enumerate(result["rows"]):
        clean, robust = (100 * row["columns"][name]["mean"] for name in ("clean", "aa"))
        axes.errorbar(clean, robust, **_point(number))
    dress(axes, "clean accuracy (%)", "accuracy under AutoAttack (%)")


def _point(number: int) -> dict[str, Any]:
    """The mark of a row."""
    colour = COLOURS[number % len(COLOURS)]
    return {"fmt": MARKERS[number % len(MARKERS)], "color": colour, "capsize": 3, "markersize": 8}


def _plot_curves(axes: Axes, result: dict[str, Any]) -> None:
    methods = [row["method"] for row in result["rows"]]
    for run in result["runs"]:
        colour, first = COLOURS[methods.index(run["method"]) % len(COLOURS)], run["seed"] == result["seeds"][0]
        label, alpha = (run["method"], 1.0) if first else (None, 0.5)
        axes.plot(*_curve(run["history"], "pgd7"), color=colour, linewidth=2, alpha=alpha, label=label)
        at = [line for line in run["history"] if line["epoch"] == run["collapsed_at"]]
        axes.plot(*_curve(at, "pgd7"), "x", color=colour, markersize=12, markeredgewidth=2)
    if any(run["collapsed_at"] for run in result["runs"]):
        axes.plot([], [], "x", color=GREY, markersize=8, markeredgewidth=2, label="collapsed from here on")
    dress(axes, "epoch", "PGD-7 accuracy on the watched images (%)")
    axes.legend(frameon=False, fontsize=8)


def _plot_bars(axes: Axes, result: dict[str, Any]) -> None:
    rows, names = result["rows"], list(result["rows"][0]["columns"])
    width = 0.8 / len(rows)
    for number, row in enumerate(rows):
        columns = list(row["columns"].values())
        places = [place + (number - (len(rows) - 1) / 2) * width for place in range(len(columns))]
        options: dict[str, Any] = {"capsize": 2, "color": COLOURS[number % len(COLOURS)], "label": row["row"]}
        axes.bar(places, [100 * one["mean"] for one in columns], width, yerr=_errors(columns), **options)
    axes.set_xticks(range(len(names)), names)
    dress(axes, "", "accuracy (%)")
    axes.legend(frameon=False, fontsize=8, title="stage I")


def _plot_steps(axes: Axes, result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if re.fullmatch(r"moat:\d+", row["row"])]  # other methods have no K
    steps = [int(row["row"].partition(":")[2]) for row in rows]
    for number, name in enumerate(result["rows"][0]["columns"]):
        means = [100 * row["columns"][name]["mean"] for row in rows]
        axes.plot(steps, means, marker=MARKERS[number], color=COLOURS[number], label=name)
    dress(axes, "steps K of stage III", "accuracy (%)")
    legend_below(axes)


def _plot_radius(axes: Axes, result: dict[str, Any]) -> None:
    """A line per method through the means over seeds, and a mark per run that shows its outcome. Methods are slightly
    apart; runs with cycled momentum have a place of their own at the right."""
    rows = result["rows"]
    places = {row["eps"]: 255 * Threat.of(row["eps"]).eps for row in rows}
    beside = max(places.values()) + 3
    names = list(dict.fromkeys(row["row"].partition(f" {row['eps']}")[0] for row in rows))
    for number, name in enumerate(names):
        colour, apart = COLOURS[number % len(COLOURS)], (number - (len(names) - 1) / 2) * 0.3
        own = [row for row in rows if row["row"].startswith(f"{name} {row['eps']}")]
        line = {row["eps"]: 100 * row["columns"]["pgd7"]["mean"] for row in own if not row["cycle_momentum"]}
        axes.plot([places[eps] + apart for eps in line], list(line.values()), color=colour, linewidth=2, label=name)
        for row in own:
            x = apart + (beside if row["cycle_momentum"] else places[row["eps"]])
            for value, outcome in zip(row["columns"]["pgd7"]["seeds"], _outcomes(row), strict=True):
                axes.plot(x, 100 * value, **_mark(outcome, colour))
    outcomes = dict.fromkeys(outcome for row in rows for outcome in _outcomes(row))
    for outcome in outcomes:
        axes.plot([], [], **_mark(outcome, GREY), label=outcome)
    ticks = {place: f"{place:g}" for place in places.values()}
    if any(row["cycle_momentum"] for row in rows):
        axes.axvline(beside - 1.5, color=GREY, linewidth=0.8, linestyle=":")
        ticks[beside] = f"{beside - 3:g}, cycled\nmomentum"
    axes.set_xticks(list(ticks), list(ticks.values()))
    dress(axes, "radius of training and attack (eps x 255)", "PGD-7 accuracy on the test images (%)")
    axes.set_ylim(bottom=-axes.get_ylim()[1] / 50)  # so that a point at zero is not cut
    legend_below(axes, columns=len(names) + len(outcomes))


def _outcomes(row: dict[str, Any]) -> list[str]:
    """Of each seed; robust ones that had collapsed before are named apart."""
    pairs = zip(row["outcomes"], row["recovered"], strict=True)
    return ["recovered from a collapse" if outcome == "robust" and spells else outcome for outcome, spells in pairs]


def _mark(outcome: str, colour: str) -> dict[str, Any]:
    """Filled if robust, a hollow cross if collapsed, hollow otherwise."""
    shape = {"marker": "X", "markersize": 11} if outcome == "collapsed" else {"marker": "o", "markersize": 8}
    face = colour if outcome == "robust" else "white"
    return {**shape, "color": colour, "markerfacecolor": face, "markeredgewidth": 1.5, "linestyle": "", "zorder": 3}


def _curve(lines: Lines, name: str) -> tuple[list[int], list[float]]:
    lines = [line for line in lines if line[name] is not None]
    return [line["epoch"] for line in lines], [100 * line[name] for line in lines]


def _errors(columns: list[dict[str, Any]]) -> np.ndarray[Any, Any]:
    """95 % intervals as distances from the means, in percent."""
    return 100 * np.array([[one["mean"] - one["interval"][0], one["interval"][1] - one["mean"]] for one in columns]).T
