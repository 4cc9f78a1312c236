"""The look of all plots: palette, axes, legend, file."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moatlab.runtime.files import atomic, remove_leftovers

# Okabe and Ito's palette, safe for colour-blind readers.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"]
GREY = "#444444"


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def dress(axes: Axes, x_label: str, y_label: str, title: str = "") -> None:
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=8, color=GREY, wrap=True, parse_math=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if x_label == "epoch":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(axes: Axes, columns: int = 4, size: int = 8) -> None:
    axes.figure.legend(loc="outside lower center", ncols=columns, frameon=False, fontsize=size)


def save(figure: Figure, path: Path) -> None:
    """PNG or PDF by suffix; without a date, so that equal results give equal files."""
    remove_leftovers(path)
    metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
    with atomic(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150, metadata=metadata)
