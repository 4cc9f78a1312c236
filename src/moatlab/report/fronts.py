"""The trials of a search: which of them no other beats, and a plot of all."""

from pathlib import Path
from typing import Any

from moatlab.report.canvas import COLOURS, GREY, dress, legend_below, new_figure, save

Trials = list[dict[str, Any]]


def last_runs(trials: Trials) -> dict[int, dict[str, Any]]:
    """The longest run of each trial that has one: means over its seeds."""
    found = {}
    for trial in trials:
        done = [run for run in trial["runs"] if run["value"] is not None]
        if done:
            rung = max(run["rung"] for run in done)
            some = [run for run in done if run["rung"] == rung]
            names = ("value", "robust", "clean", "passes", "flops", "seconds")
            means = {name: sum(run[name] for run in some) / len(some) for name in names}
            found[trial["trial"]] = means | {"rung": rung, "seeds": len(some), "epochs": some[0]["epochs"]}
    return found


def front_of(trials: Trials) -> list[int]:
    """Trials that no other beats in robustness, clean accuracy and cost together."""
    runs = last_runs(trials)

    def beaten(one: dict[str, Any]) -> bool:
        return any(
            other["robust"] >= one["robust"]
            and other["clean"] >= one["clean"]
            and other["passes"] <= one["passes"]
            and (other["robust"], other["clean"], -other["passes"]) != (one["robust"], one["clean"], -one["passes"])
            for other in runs.values()
        )

    return [trial for trial, run in runs.items() if not beaten(run)]


def plot_front(path: Path, result: dict[str, Any]) -> None:
    """Robust against clean accuracy, and against cost; the front filled, the winner as a star."""
    figure, panels = new_figure(11, 4.4, 2)
    runs, front = last_runs(result["trials"]), {*result["front"]}
    rungs = max((run["rung"] for run in runs.values()), default=0)
    for axes, name, scale, label in (
        (panels[0], "clean", 100, "clean accuracy (%)"),
        (panels[1], "passes", 1, "passes over the training set"),
    ):
        for trial, run in runs.items():
            colour = COLOURS[(rungs - run["rung"]) % len(COLOURS)]
            won = trial == result["winner"]
            mark: dict[str, Any] = {"marker": "*" if won else "o", "markersize": 15 if won else 7}
            face = colour if trial in front else "white"
            place = (scale * run[name], 100 * run["robust"])
            axes.plot(*place, **mark, color=colour, markerfacecolor=face, linestyle="")
        dress(axes, label, "robust accuracy, held-out images (%)")
    for rung in range(rungs + 1):
        colour = COLOURS[(rungs - rung) % len(COLOURS)]
        panels[0].plot([], [], "o", color=colour, label=f"rung {rung + 1}, the last that it reached")
    panels[0].plot([], [], "o", color=GREY, label="filled: no other trial beats it")
    panels[0].plot([], [], "*", color=GREY, markersize=12, label="winner")
    legend_below(panels[0], columns=3)
    save(figure, path)
