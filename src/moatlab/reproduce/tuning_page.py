"""The page of a search: the winner, all trials, and how much each choice matters."""

import base64
from pathlib import Path
from typing import Any

from moatlab.report.fronts import last_runs
from moatlab.reproduce.tables import Line

SHOWN = ("lr", "weight_decay", "activation", "average", "label_smoothing", "eps_warmup")


def for_page(result: dict[str, Any], picture: Path) -> dict[str, Any]:
    """The parts of a page above its runs."""
    runs, fields = last_runs(result["trials"]), {one["trial"]: one["fields"] for one in result["trials"]}
    order = sorted(runs, key=lambda trial: (-runs[trial]["rung"], -runs[trial]["value"]))
    names = [name for name in SHOWN if any(name in one for one in fields.values())]
    lines = []
    for trial in order:
        run, marks = runs[trial], "winner" if trial == result["winner"] else "front" if trial in result["front"] else ""
        numbers = [f"{100 * run['robust']:.1f}", f"{100 * run['clean']:.1f}", f"{run['passes']:.4g}"]
        chosen = [_short(fields[trial].get(name)) for name in names]
        lines.append(Line(str(fields[trial].get("method", trial)), [*numbers, str(run["rung"] + 1), marks, *chosen]))
    columns = ["robust %", "clean %", "passes", "rung", "", *names]
    tables = [{"title": "Trials", "columns": columns, "lines": lines}]
    if result["importances"]:
        shares = [Line(name, [f"{100 * share:.0f} %"]) for name, share in result["importances"].items()]
        tables.append({"title": "Importance of each choice", "first": "choice", "columns": ["share"], "lines": shares})
    failures = [
        f"trial {one['trial'] + 1}: {run['failure']}"
        for one in result["trials"]
        for run in one["runs"]
        if run["failure"]
    ]
    return {
        "paper_tables": tables,
        "conditions": f"Budget {result['budget']}: {result['setting']}.",
        "explained": (
            "Robust: right under PGD-10 on the cross-entropy and on the margin, on held-out images, mean over seeds; "
            "values are of the last rung that a trial reached, and rungs differ in cost. The winner was chosen by "
            "these numbers, so they are too high for it: evaluate it on test images (moat train --recipe recipe.toml, "
            "moat eval). Importance: what a choice explains of the values at the first rung (PED-ANOVA)."
        ),
        "claims": [],
        "flags": [],
        "failures": failures,
        "picture": base64.b64encode(picture.read_bytes()).decode(),
    }


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value if value is not None else "")
