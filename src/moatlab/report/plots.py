"""Plots, drawn without a display."""

from __future__ import annotations

import base64
import io
import re
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from moatlab.methods.language import parse_method
from moatlab.runtime.files import atomic, remove_leftovers

# Okabe and Ito's colours, which stay apart for colour-blind eyes too.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
BANDS = ["#EEF1F4", "#E3EDF7", "#FBF0E0", "#E9F4EC"]
MARKERS = "os^Dv<>PX*h"


def plot_bench(path: Path, result: dict[str, Any]) -> None:
    """Two bar charts of `moat bench`: steps against the machine's limit, epochs against the sum of their passes."""
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = {name: result[name] for name in ("inference", "attack_step", "training_step")}
    labels = [f"{name.replace('_', ' ')}\n{row['images_per_second']:,.0f} images/s" for name, row in steps.items()]
    bars = left.barh(labels, [100 * row["share_of_limit"] for row in steps.values()], color=COLOURS[1])
    left.bar_label(bars, fmt="%.0f %%", label_type="center", color="white")
    left.axvline(100, color="#444444", linewidth=1)
    left.set_xlim(right=max(115, left.get_xlim()[1]))
    left.set_xlabel(f"% of the machine's {result['limit']['gemm_gflops']:.0f} GFLOP/s")
    epochs = result["epochs"]
    labels = [f"{method}\n{row['seconds']:.1f} s" for method, row in epochs.items()]
    right.barh(labels, [100 * row["overhead"] for row in epochs.values()], color=COLOURS[0])
    right.axvline(0, color="#444444", linewidth=1)
    right.set_xlim(right=max(15, right.get_xlim()[1]))
    right.set_xlabel("% beyond its passes")
    right.set_title("an epoch of mini, width 16", fontsize=9)
    left.set_title("one step", fontsize=9)
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    setting = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in result["setting"].items())
    environment = result["environment"]
    machine = f"{environment['cpu']}, {result['limit']['threads']} threads, {environment['device']}"
    figure.suptitle(f"{setting}; {machine}", fontsize=8, color="#444444")
    _save(figure, path)


def plot_pgd7(
    path: Path, histories: dict[str, list[dict[str, Any]]], events: dict[str, list[dict[str, Any]]], *, title: str,
    images: str,
) -> None:  # fmt: skip
    """PGD-7 accuracy over the epochs, a line for each method: figure 1 of the paper.

    Within a cycle accuracy falls at each benign stage, so a bold line joins the ends of cycles, which can be compared.
    A cross marks the monitor's alarm, a ring the epoch at which robustness is back.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (spec, lines), colour in zip(histories.items(), cycle(COLOURS), strict=False):
        method = parse_method(spec)
        points = [(line["epoch"], 100 * line["pgd7"]) for line in lines]
        ends = [(line["epoch"], 100 * line["pgd7"]) for line in lines if line["comparable"]]
        if len(method.stages) > 1:
            axes.plot(*zip(*points, strict=True), linewidth=1, alpha=0.35, color=colour)
        label = spec if len(method.stages) == 1 else f"{spec} (bold: the ends of its cycles)"
        axes.plot(
            [e for e, _ in ends], [v for _, v in ends], marker="o", markersize=4, linewidth=2, color=colour, label=label
        )
        for event in events[spec]:
            place, alarm = (event["epoch"], 100 * event["pgd7"]), event["event"] == "collapse"
            axes.plot(*place, marker="x" if alarm else "o", markersize=12, markerfacecolor="none", color=colour)
            if alarm:
                label = f"{spec}: alarm, {event['action']}"
                box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
                options: dict[str, Any] = {"fontsize": 8, "color": colour, "bbox": box, "zorder": 4}
                axes.annotate(label, place, (9, 9), textcoords="offset points", **options)
    _dress(axes, "epoch", f"PGD-7 accuracy on {images} (%)", title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    _save(figure, path)


def plot_run(path: Path, metrics: list[dict[str, Any]], collapsed_at: int | None, *, title: str) -> None:
    """Accuracies over the epochs of one run, its stages behind them, its collapse crossed out."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    stages = list(dict.fromkeys(line["stage"] for line in metrics))
    for line in metrics if len(stages) > 1 else []:
        shade = BANDS[stages.index(line["stage"]) % len(BANDS)]
        axes.axvspan(line["epoch"] - 0.5, line["epoch"] + 0.5, color=shade, linewidth=0)
    for name, colour in zip(("clean", "fgsm", "pgd7"), COLOURS, strict=False):
        values = [100 * line[name] for line in metrics]
        axes.plot([line["epoch"] for line in metrics], values, color=colour, label=name, linewidth=2)
    for line in metrics:
        if line["epoch"] == collapsed_at:
            axes.plot(line["epoch"], 100 * line["pgd7"], "x", color=COLOURS[2], markersize=12, label="collapse")
    for number, stage in enumerate(stages if len(stages) > 1 else []):
        axes.plot([], [], "s", color=BANDS[number % len(BANDS)], markersize=9, label=stage)
    _dress(axes, "epoch", "accuracy on the watched images (%)", title)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    _save(figure, path)


def plot_portrait(path: Path, portrait: dict[str, Any], *, title: str) -> None:
    """Robustness by radius, the loss around one image, and examples."""
    figure = Figure(figsize=(9, 6.4))
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1), left=0.08, right=0.96, top=0.94, bottom=0.02, hspace=0.25)
    curve, radius = portrait["curve"], figure.add_subplot(grid[0, 0])
    scale = 255 if portrait["norm"] == "linf" else 1
    radius.plot([scale * eps for eps in curve["eps"]], [100 * share for share in curve["accuracy"]], marker="o",
                color=COLOURS[1])  # fmt: skip
    _dress(radius, "eps x 255" if scale == 255 else "eps", f"robust accuracy (%), {curve['images']} images", title)
    loss = np.array(portrait["surface"]["loss"])
    wrong = np.array(portrait["surface"]["wrong"], dtype=bool)
    ticks = np.linspace(-1, 1, len(loss))
    along, beside = np.meshgrid(ticks, ticks, indexing="ij")
    landscape = figure.add_subplot(grid[0, 1], projection="3d")
    landscape.plot_surface(along, beside, loss, facecolors=np.where(wrong, COLOURS[0], COLOURS[5]), linewidth=0.1,
                           edgecolor="white", rstride=1, cstride=1, shade=False)  # fmt: skip
    landscape.set_xlabel("gradient")
    landscape.set_ylabel("random")
    landscape.set_title(f"loss around image {portrait['surface']['image']}; red: wrong", fontsize=9)
    examples, kinds = portrait["examples"], ("image", "adversarial", "change")
    columns = [np.concatenate([_pixels(example[kind]) for kind in kinds]) for example in examples]
    side, strip = columns[0].shape[1], figure.add_subplot(grid[1, :])
    strip.imshow(np.concatenate(columns, axis=1), interpolation="nearest")
    strip.set_axis_off()
    for number, example in enumerate(examples):
        for answer, height in ((example["predicted"], -0.35), (example["attacked"], -0.12)):
            colour = COLOURS[2] if answer == example["class"] else COLOURS[0]
            where = ((number + 0.5) * side, height * side)
            strip.text(*where, answer, fontsize=7, color=colour, ha="center", parse_math=False)
    _save(figure, path)


def _pixels(png: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"))


def plot_result(path: Path, result: dict[str, Any]) -> None:
    """A reproduced table or figure, as PNG or PDF by the file's name."""
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    {"table": _plot_table, "curves": _plot_curves, "bars": _plot_bars, "steps": _plot_steps}[result["kind"]](
        axes, result
    )
    seeds = f"{len(result['seeds'])} seed" + "s" * (len(result["seeds"]) != 1)
    title = f"{result['experiment']}: {result['title']}\npreset {result['preset']}: {result['setting']}; {seeds}"
    axes.set_title(title, fontsize=8, color="#444444", wrap=True)
    _save(figure, path)


def _plot_table(axes: Axes, result: dict[str, Any]) -> None:
    """Robustness against cost: every row a point, with its 95 % interval."""
    costs = [row["cost"]["passes"] for row in result["rows"]]
    for number, row in enumerate(result["rows"]):
        column, passes = row["columns"]["aa"], costs[number]
        near = [other for other, cost in enumerate(costs) if abs(cost - passes) < max(costs) / 50]
        passes += (near.index(number) - (len(near) - 1) / 2) * max(costs) / 60  # or they would hide each other
        low, high = column["interval"]
        error = [[100 * (column["mean"] - low)], [100 * (high - column["mean"])]]
        fallen = sum(epoch is not None for epoch in row["collapsed_at"])
        label = row["row"] + (f" (collapsed in {fallen} of {len(row['seeds'])})" if fallen else "")
        axes.errorbar(
            passes, 100 * column["mean"], yerr=error, fmt=MARKERS[number % len(MARKERS)], capsize=3, markersize=8,
            color=COLOURS[number % len(COLOURS)], label=label,
        )  # fmt: skip
    _dress(axes, "passes over the training set (nearly equal costs side by side)", "accuracy under AutoAttack (%)", "")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=-axes.get_ylim()[1] / 50)  # so that who has nothing left is seen whole
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _plot_curves(axes: Axes, result: dict[str, Any]) -> None:
    for run in result["runs"]:
        methods = [row["method"] for row in result["rows"]]
        colour, first = COLOURS[methods.index(run["method"]) % len(COLOURS)], run["seed"] == result["seeds"][0]
        lines = run["history"]
        axes.plot([line["epoch"] for line in lines], [100 * line["pgd7"] for line in lines], color=colour, linewidth=2,
                  alpha=1.0 if first else 0.5, label=run["method"] if first else None)  # fmt: skip
        for line in lines:
            if line["epoch"] == run["collapsed_at"]:
                axes.plot(line["epoch"], 100 * line["pgd7"], "x", color=colour, markersize=12, markeredgewidth=2)
    if any(run["collapsed_at"] for run in result["runs"]):
        axes.plot([], [], "x", color="#444444", markersize=8, markeredgewidth=2, label="collapsed from here on")
    _dress(axes, "epoch", "PGD-7 accuracy on the watched images (%)", "")
    axes.legend(frameon=False, fontsize=8)


def _plot_bars(axes: Axes, result: dict[str, Any]) -> None:
    width = 0.8 / len(result["rows"])
    for number, row in enumerate(result["rows"]):
        columns = list(row["columns"].values())
        places = [place + (number - (len(result["rows"]) - 1) / 2) * width for place in range(len(columns))]
        errors = np.array([[one["mean"] - one["interval"][0], one["interval"][1] - one["mean"]] for one in columns]).T
        axes.bar(places, [100 * one["mean"] for one in columns], width, yerr=100 * errors, capsize=2,
                 color=COLOURS[number % len(COLOURS)], label=row["row"])  # fmt: skip
    axes.set_xticks(range(len(columns)), list(row["columns"]))
    _dress(axes, "", "accuracy (%)", "")
    axes.legend(frameon=False, fontsize=8, title="stage I")


def _plot_steps(axes: Axes, result: dict[str, Any]) -> None:
    rows = [row for row in result["rows"] if re.fullmatch(r"moat:\d+", row["row"])]  # others have no K
    steps = [int(row["row"].partition(":")[2]) for row in rows]
    for number, name in enumerate(result["rows"][0]["columns"]):
        means = [100 * row["columns"][name]["mean"] for row in rows]
        axes.plot(steps, means, marker=MARKERS[number], color=COLOURS[number], label=name)
    _dress(axes, "steps K of stage III", "accuracy (%)", "")
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _dress(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=8, color="#444444", wrap=True, parse_math=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if x_label == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _save(figure: Figure, path: Path) -> None:
    """As PNG or PDF, by its name; without a date, so that equal results give equal files."""
    remove_leftovers(path)
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
    with atomic(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150, metadata=metadata)
