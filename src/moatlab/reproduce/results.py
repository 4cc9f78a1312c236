"""The result of a reproduction: the paper's numbers and ours, costs, and the claims."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moatlab.reproduce.claims import check_claims, check_paper
from moatlab.reproduce.outcomes import Evaluated, Outcome, as_runs, unpack
from moatlab.reproduce.paper import Experiment, Part, Row
from moatlab.reproduce.plan import Job, Sweep, describe
from moatlab.reproduce.tables import as_text
from moatlab.runtime.environment import commit, describe_environment
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import atomic, make_folder, write_json
from moatlab.runtime.intervals import interval


def make_result(
    sweep: Sweep,
    outcomes: dict[Job, Outcome],
    out: Path,
    *,
    others: dict[str, list[Outcome]],
    kept: Sequence[Outcome] = (),
    failures: Sequence[dict[str, str]] = (),
    command: str | None = None,
    note: str | None = None,
) -> dict[str, Any]:
    """`others`: method -> runs that are no rows here, for the claims. `kept`: runs to store in the file only."""
    experiment, part = sweep.experiment, sweep.experiment.parts[0]
    anybody = next(iter(outcomes.values()), None)
    images = {one.data["sha256"] for one in outcomes.values()}
    if anybody and len(images) > 1:
        raise UserError(f"the runs were trained on different versions of {anybody.data['name']} and can't be compared")
    by_row = {row: [one for job, one in outcomes.items() if job.row == row] for row in sweep.rows}
    by_method = {method: [one for one in found if one.data["sha256"] in images] for method, found in others.items()}
    by_method |= {row.method: found for row, found in by_row.items()}
    machines = sorted({one.machine for one in outcomes.values()})

    def timed(found: list[Outcome]) -> bool:
        return len({*machines, *(one.machine for one in found)}) == 1  # seconds of two machines can't be compared

    measured = {method: as_runs(found, part, timed=timed(found)) for method, found in by_method.items() if found}
    base = {row.suffix: found for row, found in by_row.items() if row.method == "fgsm"}

    def line(row: Row, part: Part, found: list[Outcome]) -> dict[str, Any]:
        fgsm = base.get(row.suffix) or by_method.get("fgsm", [])
        return _row(experiment, row, part, found, fgsm, timed(fgsm))

    def table(part: Part) -> list[dict[str, Any]]:
        rows = {row: [one for one in found if one.part(part)] for row, found in by_row.items()}
        return [line(row, part, found) for row, found in rows.items() if found]

    shown = anybody and anybody.part(part)
    return {
        **describe(sweep, out),
        "images": shown and shown.images,
        "data": anybody and anybody.data,
        "machines": machines,
        "made": sorted({one.made for one in outcomes.values()}),
        "rows": table(part),
        "best_rows": table("best") or None if "best" in sweep.asked.parts else None,
        "claims": [asdict(claim) for claim in check_claims(experiment, measured)],
        "claims_in_paper": [asdict(claim) for claim in check_paper(experiment)],
        "failures": [*failures],
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "note": note,
        "environment": describe_environment() | {"commit": commit()},
        "runs": [one.as_dict() for found in by_row.values() for one in found],
        "kept_runs": [one.as_dict() for one in kept],
    }


def _row(
    experiment: Experiment, row: Row, part: Part, outcomes: list[Outcome], base: list[Outcome], timed: bool
) -> dict[str, Any]:
    """The paper's number and ours in each column, and the cost, also relative to `base`, the runs of fgsm."""
    runs = sorted(outcomes, key=lambda one: one.seed)
    measured = [shown for one in runs if (shown := one.part(part))]
    paper = experiment.paper.get(row.method, {})
    minutes, paper_base = paper.get("minutes"), experiment.paper.get("fgsm", {}).get("minutes")
    passes, flops, steady = (_mean(runs, name) for name in ("passes", "flops", "steady_seconds"))
    return {
        "row": row.label,
        "method": runs[0].method,
        "in_paper": row.in_paper,
        **row.options,
        "seeds": [one.seed for one in runs],
        "columns": {
            name: _column([one.accuracy[name] for one in measured], measured[0].images[name], paper.get(name))
            for name in experiment.columns
        },
        "clean_of_aa": _clean_of_aa(measured),
        "cost": {
            "passes": passes,
            "flops": flops,
            "seconds": _mean(runs, "train_seconds"),
            "steady_seconds": steady,
            "passes_to_fgsm": passes / _mean(base, "passes") if base else None,
            "flops_to_fgsm": flops / _mean(base, "flops") if base else None,
            "seconds_to_fgsm": steady / _mean(base, "steady_seconds") if base and timed else None,
            "paper_minutes": minutes,
            "paper_to_fgsm": minutes / paper_base if minutes and paper_base else None,
        },
        "epochs": [one.epoch for one in measured],
        "outcomes": [one.outcome for one in runs],
        "collapsed_at": [one.collapsed_at for one in runs],
        "recovered": [one.recovered for one in runs],
        "flags": sorted({flag for one in measured for flag in one.flags}),
    }


def _clean_of_aa(measured: list[Evaluated]) -> float | None:
    """Clean accuracy on the first images, those of AutoAttack, where it has fewer than the other columns."""
    counts = measured[0].images
    if counts.get("aa", 0) == counts["clean"] or "aa" not in counts:
        return None
    return statistics.fmean(statistics.fmean(unpack(one.standing["clean"])[: counts["aa"]]) for one in measured)


def _mean(outcomes: Sequence[Outcome], name: str) -> float:
    return statistics.fmean(getattr(one, name) for one in outcomes)


def _column(values: list[float], images: int, paper: float | None) -> dict[str, Any]:
    mean = statistics.fmean(values)
    return {
        "paper": paper,
        "mean": mean,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "interval": interval(values, images),
        "difference": None if paper is None else mean - paper,
        "seeds": values,
    }


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Write `table2a.json`, `.md` and `.tex` into the sweep's folder."""
    name = result["experiment"]
    make_folder(out)
    write_json(out / f"{name}.json", result)
    for kind in ("md", "tex"):
        with atomic(out / f"{name}.{kind}") as file:
            file.write(as_text(result, kind).encode())
