"""The result of a reproduction: the paper's numbers and ours side by side, what it cost, and the claims."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moatlab.evaluation.intervals import interval
from moatlab.reproduce.claims import check_claims, paper_rows
from moatlab.reproduce.outcomes import Outcome, as_runs, part_of
from moatlab.reproduce.paper import Experiment, Part, Row
from moatlab.reproduce.tables import as_latex, as_markdown
from moatlab.runtime.environment import commit, describe_environment
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import atomic, make_folder, write_json


def make_result(
    experiment: Experiment, rows: list[Row], outcomes: dict[tuple[Row, int], Outcome], *,
    others: dict[str, list[Outcome]], kept: list[Outcome], failures: list[dict[str, str]], facts: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """`others`: runs that are no rows, by method; claims may compare with them. `kept`: runs to hold on to, no more."""
    images = {one["data"]["sha256"] for one in outcomes.values()}
    if len(images) > 1:
        name = next(iter(outcomes.values()))["data"]["name"]
        raise UserError(f"the runs were trained on different images called {name}; not compared")
    others = {method: [one for one in found if one["data"]["sha256"] in images] for method, found in others.items()}
    by_row = {row: [one for (of, _), one in outcomes.items() if of == row] for row in rows}
    by_row = {row: found for row, found in by_row.items() if found}
    by_method = {method: found for method, found in others.items() if found}
    by_method |= {row.method: found for row, found in by_row.items()}
    part = experiment.parts[0]
    machines = sorted({machine(one) for one in outcomes.values()})

    def timed(found: list[Outcome]) -> bool:
        return len({*machines, *map(machine, found)}) == 1  # seconds of two machines do not compare

    measured = {method: as_runs(found, part, timed=timed(found)) for method, found in by_method.items()}
    base = by_method.get("fgsm", [])
    anybody = next(iter(outcomes.values()), None)
    shown = part_of(anybody, part) if anybody else None
    best = _rows(experiment, by_row, "best", base, timed=timed(base)) if "best" in experiment.parts else []
    return {
        "experiment": experiment.name, "kind": experiment.kind, "title": experiment.title, **facts,
        "images": shown and shown["images"],
        "data": anybody and anybody["data"], "machines": machines,
        "made": sorted({made(one) for one in outcomes.values()}),
        "rows": _rows(experiment, by_row, part, base, timed=timed(base)),
        "best_rows": best or None,
        "claims": [asdict(claim) for claim in check_claims(experiment, measured)],
        "claims_in_paper": [asdict(claim) for claim in check_claims(experiment, paper_rows(experiment))],
        "failures": failures,
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["moat", *sys.argv[1:]]),
        "environment": describe_environment() | {"commit": commit()},
        "runs": [one for found in by_row.values() for one in found],
        "kept_runs": kept,
    }  # fmt: skip


def machine(outcome: Outcome) -> str:
    """What decides how fast a run is, and its last bits."""
    environment = outcome["environment"]
    precision = environment.get("precision", "fp32")
    short = f", {precision}" if precision != "fp32" else ""
    return f"{environment['cpu']}, {environment['threads']} threads, GPU {environment['gpu']}{short}"


def made(outcome: Outcome) -> str:
    """When and by which commit a run was evaluated."""
    return f"{outcome['date']} by commit {outcome['commit'] or 'unknown'}" if "date" in outcome else "earlier"


def _rows(
    experiment: Experiment, by_row: dict[Row, list[Outcome]], part: Part, base: list[Outcome], *, timed: bool
) -> list[dict[str, Any]]:  # fmt: skip
    """One entry for each row: in every column the paper's number and ours, then what it cost, also against `base`, the
    runs of fgsm."""
    paper_base = experiment.paper.get("fgsm", {}).get("minutes")
    entries = []
    for row, found in by_row.items():
        chosen = sorted((one for one in found if part_of(one, part)), key=lambda one: int(one["seed"]))
        measured = [shown for one in chosen if (shown := part_of(one, part))]
        if not chosen:
            continue
        paper = experiment.paper.get(row.method, {})
        columns = {
            name: _column([one["accuracy"][name] for one in measured], measured[0]["images"][name], paper.get(name))
            for name in experiment.columns
        }
        minutes = paper.get("minutes")
        cost = {
            "passes": _mean(chosen, "passes"),
            "seconds": _mean(chosen, "train_seconds"),
            "steady_seconds": _mean(chosen, "steady_seconds"),
            "passes_to_fgsm": _mean(chosen, "passes") / _mean(base, "passes") if base else None,
            "seconds_to_fgsm": _mean(chosen, "steady_seconds") / _mean(base, "steady_seconds")
            if base and timed
            else None,
            "paper_minutes": minutes,
            "paper_to_fgsm": minutes / paper_base if minutes and paper_base else None,
        }
        entries.append({
            "row": row.label, "method": chosen[0]["method"], "in_paper": row.in_paper,
            "seeds": [one["seed"] for one in chosen], "columns": columns, "cost": cost,
            "epochs": [one["epoch"] for one in measured],
            "collapsed_at": [one["collapsed_at"] for one in chosen],
            "flags": sorted({flag for one in measured for flag in one["flags"]}),
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
