"""Plots, drawn without a display."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moatlab.files import atomic

# Okabe and Ito's colours, which stay apart for colour-blind eyes too.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]


def plot_pgd7(path: Path, histories: dict[str, list[dict[str, Any]]], *, title: str, images: str) -> None:
    """PGD-7 accuracy over the epochs, a line for each method: figure 1 of the paper."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for (method, lines), colour in zip(histories.items(), cycle(COLOURS), strict=False):
        epochs, values = [line["epoch"] for line in lines], [100 * line["pgd7"] for line in lines]
        axes.plot(epochs, values, marker="o", markersize=3.5, linewidth=1.8, color=colour, label=method)
    axes.set_xlabel("epoch")
    axes.set_ylabel(f"PGD-7 accuracy on {images} (%)")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize=8, color="#444444", wrap=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with atomic(path) as file:
        figure.savefig(file, format="png", dpi=150)
