"""Plots, drawn without a display."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moatlab.files import atomic
from moatlab.methods import parse_method

# Okabe and Ito's colours, which stay apart for colour-blind eyes too.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]


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
    with atomic(path) as file:
        figure.savefig(file, format="png", dpi=150)


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
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"PGD-7 accuracy on {images} (%)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize=8, color="#444444", wrap=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    with atomic(path) as file:
        figure.savefig(file, format="png", dpi=150)
