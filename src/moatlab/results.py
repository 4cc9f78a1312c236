"""The result of a reproduction: the paper's numbers and ours side by side, and the claims; as JSON, Markdown, LaTeX."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moatlab.claims import check_claims, paper_rows
from moatlab.environment import describe_environment
from moatlab.files import atomic, make_folder, write_json
from moatlab.intervals import interval
from moatlab.outcomes import Outcome, as_runs
from moatlab.paper import COLUMNS, Experiment, Row


def make_result(
    experiment: Experiment, rows: list[Row], outcomes: dict[tuple[Row, int], Outcome], *, others: list[Outcome],
    failures: list[dict[str, str]], facts: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    by_row = {row: [one for (of, _), one in outcomes.items() if of == row] for row in rows}
    by_row = {row: found for row, found in by_row.items() if found}
    measured = {row.method: as_runs(found) for row, found in by_row.items()}
    for method in {one["method"] for one in others} - measured.keys():
        measured[method] = as_runs([one for one in others if one["method"] == method])
    held_out = any(one["best"] for found in by_row.values() for one in found)
    anybody = next(iter(outcomes.values()), None)
    return {
        "experiment": experiment.name, "kind": experiment.kind, "title": experiment.title, **facts,
        "images": anybody and anybody["last"]["images"],
        "rows": _rows(experiment, by_row, "last"),
        "best_rows": _rows(experiment, by_row, "best") if held_out else None,
        "claims": [asdict(claim) for claim in check_claims(experiment, measured)],
        "claims_in_paper": [asdict(claim) for claim in check_claims(experiment, paper_rows(experiment))],
        "failures": failures,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["moat", *sys.argv[1:]]),
        "environment": describe_environment(),
        "runs": [one for found in by_row.values() for one in found],
    }  # fmt: skip


def _rows(experiment: Experiment, by_row: dict[Row, list[Outcome]], which: str) -> list[dict[str, Any]]:
    """One entry for each row: in every column the paper's number and ours, then what it cost, against fgsm too."""
    base = next((found for row, found in by_row.items() if row.method == "fgsm"), None)
    paper_base = experiment.paper.get("fgsm", {}).get("minutes")
    entries = []
    for row, found in by_row.items():
        chosen = sorted((one for one in found if one[which]), key=lambda one: int(one["seed"]))
        if not chosen:
            continue
        paper = experiment.paper.get(row.method, {})
        columns = {
            name: _column(
                [one[which]["accuracy"][name] for one in chosen], chosen[0][which]["images"][name], paper.get(name)
            )
            for name in COLUMNS
        }
        minutes = paper.get("minutes")
        cost = {
            "passes": _mean(chosen, "passes"),
            "seconds": _mean(chosen, "train_seconds"),
            "steady_seconds": _mean(chosen, "steady_seconds"),
            "passes_to_fgsm": _mean(chosen, "passes") / _mean(base, "passes") if base else None,
            "seconds_to_fgsm": _mean(chosen, "steady_seconds") / _mean(base, "steady_seconds") if base else None,
            "paper_minutes": minutes,
            "paper_to_fgsm": minutes / paper_base if minutes and paper_base else None,
        }
        entries.append({
            "row": row.label, "method": chosen[0]["method"], "in_paper": row.in_paper,
            "seeds": [one["seed"] for one in chosen], "columns": columns, "cost": cost,
            "epochs": [one[which]["epoch"] for one in chosen],
            "collapsed_at": [one["collapsed_at"] for one in chosen],
            "flags": sorted({flag for one in chosen for flag in one[which]["flags"]}),
        })  # fmt: skip
    return entries


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    return statistics.fmean(one[name] for one in outcomes)


def _column(values: list[float], images: int, paper: float | None) -> dict[str, Any]:
    mean = statistics.fmean(values)
    return {
        "paper": paper, "mean": mean, "sd": statistics.stdev(values) if len(values) > 1 else None,
        "interval": interval(values, images), "difference": None if paper is None else mean - paper, "seeds": values,
    }  # fmt: skip


def write_result(out: Path, result: dict[str, Any]) -> None:
    """`table2a.json`, `.md` and `.tex` in the sweep's folder."""
    name = result["experiment"]
    make_folder(out)
    write_json(out / f"{name}.json", result)
    for suffix, text in (("md", as_markdown(result)), ("tex", as_latex(result))):
        with atomic(out / f"{name}.{suffix}") as file:
            file.write(text.encode())


# --- for people

HEADINGS = {"clean": "Clean", "fgsm": "FGSM", "pgd50": "PGD50", "cw50": "CW50", "mim50": "MIM50", "aa": "AA"}
TWO_TABLES = (("rows", "The last epoch, as in the paper"), ("best_rows", "The best epoch on held-out images"))
MARKS = {"holds": "holds", "does not hold": "**does not hold**", "not decided": "not decided at this scale"}


def cell(column: dict[str, Any]) -> str:
    """Ours in percent, with the standard deviation over seeds if there are some."""
    spread = f" ± {100 * column['sd']:.1f}" if column["sd"] is not None else ""
    return f"{100 * column['mean']:.1f}{spread}"


def as_markdown(result: dict[str, Any]) -> str:
    lines = [f"# {result['experiment']}: {result['title']}", ""]
    lines += [f"{conditions(result)}", ""]
    for key, title in TWO_TABLES:
        if not result[key]:
            continue
        lines += [f"## {title}", "", *_markdown_rows(result[key], result["images"]), ""]
    lines += ["## 95 % intervals", "", *_markdown_intervals(result["rows"]), ""]
    lines += ["## The claims", "", *_markdown_claims(result), ""]
    lines += [f"Failed: {one['run']}: {one['message']}" for one in result["failures"]]
    environment = result["environment"]
    lines += [
        f"`{result['command']}`, {result['date']}, {environment['cpu']}, {environment['cpus']} CPUs, "
        f"GPU {environment['gpu']}, torch {environment['torch']}, moatlab {environment['moatlab']}."
    ]
    return "\n".join(lines) + "\n"


def conditions(result: dict[str, Any]) -> str:
    images = result["images"] or {}
    seeds = f"{len(result['seeds'])} seed" + "s" * (len(result["seeds"]) != 1)
    counts = f"the first {images.get('pgd50'):,} test images" if images else "no images"
    fewer = f" (AutoAttack: the first {images['aa']:,})" if images and images["aa"] != images["pgd50"] else ""
    return f"Preset `{result['preset']}`: {result['setting']}; {seeds}; {counts}{fewer}."


def _markdown_rows(rows: list[dict[str, Any]], images: dict[str, int] | None) -> list[str]:
    ours = [f"{HEADINGS[name]}{f' ({images[name]})' if images else ''}" for name in COLUMNS]
    with_paper = any(row["columns"]["clean"]["paper"] is not None for row in rows)
    lines = [
        "| method | "
        + " | ".join(ours)
        + " | collapsed | passes | s | time / fgsm |"
        + (" paper's |" if with_paper else ""),
        "|---" * (len(ours) + 5 + with_paper) + "|",
    ]
    for row in rows:
        cost = row["cost"]
        fates = [epoch is not None for epoch in row["collapsed_at"]]
        numbers = [f"{sum(fates)} of {len(fates)}", f"{cost['passes']:g}", f"{cost['seconds']:.0f}"]
        numbers += [ratio(cost["seconds_to_fgsm"])] + [ratio(cost["paper_to_fgsm"])] * with_paper
        lines.append(
            f"| `{row['row']}` | " + " | ".join([cell(row["columns"][name]) for name in COLUMNS] + numbers) + " |"
        )
        if row["columns"]["clean"]["paper"] is not None:
            papers = [row["columns"][name] for name in COLUMNS]
            shown = [f"*{100 * one['paper']:.1f}* ({100 * one['difference']:+.1f})" for one in papers]
            lines.append("| *paper* (difference) | " + " | ".join([*shown, "", "", "", "", ""]) + " |")
    return lines


def _markdown_intervals(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| method | " + " | ".join(HEADINGS[name] for name in COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        bounds = [row["columns"][name]["interval"] for name in COLUMNS]
        lines.append(
            f"| `{row['row']}` | " + " | ".join(f"{100 * low:.1f}-{100 * high:.1f}" for low, high in bounds) + " |"
        )
    return lines


def _markdown_claims(result: dict[str, Any]) -> list[str]:
    in_paper = {claim["name"]: claim for claim in result["claims_in_paper"]}
    numbers = any(claim["verdict"] != "not decided" for claim in result["claims_in_paper"])
    lines = ["| claim | here | the numbers |" + (" in the paper's own table |" if numbers else "")]
    lines.append("|---" * (3 + numbers) + "|")
    for claim in result["claims"]:
        line = f"| {claim['sentence']} | {MARKS[claim['verdict']]} | {claim['numbers']} |"
        paper = in_paper[claim["name"]]
        told = MARKS[paper["verdict"]] + (f": {paper['numbers']}" if paper["verdict"] == "does not hold" else "")
        lines.append(line + (f" {told} |" if numbers else ""))
    return lines


def ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def as_latex(result: dict[str, Any]) -> str:
    """A booktabs table: our numbers, the paper's in grey below each (needs the packages booktabs and xcolor)."""
    lines = [
        f"% {result['experiment']}: {conditions(result)}", r"\begin{tabular}{lrrrrrrrr}", r"\toprule",
        "Method & " + " & ".join(HEADINGS.values()) + r" & Passes & Time/FGSM \\", r"\midrule",
    ]  # fmt: skip
    for row in result["rows"]:
        cost, columns = row["cost"], row["columns"]
        ours = [f"${cell(columns[name])}$".replace("±", r"\pm") for name in COLUMNS]
        name = r"\texttt{" + row["row"].replace("|", r"\textbar{}") + "}"
        lines.append(" & ".join([name, *ours, f"{cost['passes']:g}", ratio(cost["seconds_to_fgsm"])]) + r" \\")
        if columns["clean"]["paper"] is not None:
            papers = [rf"\textcolor{{gray}}{{{100 * columns[name]['paper']:.1f}}}" for name in COLUMNS]
            lines.append(" & ".join(["", *papers, "", ratio(cost["paper_to_fgsm"])]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def for_page(result: dict[str, Any]) -> dict[str, Any]:
    """The tables and claims as the page's template wants them."""
    tables = []
    for key, title in TWO_TABLES:
        rows = []
        for row in result[key] or []:
            cost, columns = row["cost"], [row["columns"][name] for name in COLUMNS]
            ours = [cell(column) for column in columns] + [f"{cost['passes']:g}", ratio(cost["seconds_to_fgsm"])]
            in_paper = columns[0]["paper"] is not None
            rows.append({"kind": "main" if in_paper else "", "name": row["row"], "cells": ours})
            if in_paper:
                theirs = [f"{100 * one['paper']:.1f} ({100 * one['difference']:+.1f})" for one in columns]
                cells = [*theirs, "", ratio(cost["paper_to_fgsm"])]
                rows.append({"kind": "paper", "name": "paper (difference)", "cells": cells})
        if rows:
            tables.append({"title": title, "columns": [*HEADINGS.values(), "passes", "time / fgsm"], "rows": rows})
    told = result["claims_in_paper"] if result["kind"] == "table" else []
    verdicts = {claim["name"]: claim["verdict"] for claim in told}
    claims = [{**claim, "in_paper": verdicts.get(claim["name"], "no numbers")} for claim in result["claims"]]
    return {"paper_tables": tables, "claims": claims}
