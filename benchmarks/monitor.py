"""Missed and false alarms of the monitor: whole runs on `mini`, their checks replayed one by one.

    python benchmarks/monitor.py                  trains what is not in build/monitor yet (about two hours on two cores)

Two runs at a time, one thread each. Writes docs/results/monitor.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from moatlab.methods.language import parse_method
from moatlab.training.making import make_recipe
from moatlab.training.outcome import judge, outcome_of
from moatlab.training.recipe import slug
from moatlab.training.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
CLASSES = 10
SEEDS = {"fgsm": 5, "fast": 5, "moat:2": 5, "imoat:2,5,8": 2, "pgd:2": 2, "pgd:7": 2}
ANSWERS = [("fast", 0, "heal"), ("fast", 3, "heal"), ("fast", 0, "rollback"), ("fgsm", 0, "stop")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "monitor")
    folder = parser.parse_args().runs
    jobs = [(folder, method, seed, "warn") for method, seeds in SEEDS.items() for seed in range(seeds)]
    jobs += [(folder, *answer) for answer in ANSWERS]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(one, jobs))
    watched, answered = rows[: -len(ANSWERS)], rows[-len(ANSWERS) :]
    collapses = [row for row in watched if row["collapsed_at"]]
    in_time = [row for row in collapses if row["checks_late"] is not None and row["checks_late"] <= 1]
    false = [row for row in watched if row["alarms"] and not row["collapsed_at"]]
    summary = {"runs": len(watched), "collapses": len(collapses), "alarmed_in_time": len(in_time), "false": len(false)}
    print(json.dumps(summary))
    result = {"summary": summary, "runs": watched, "answers": answered}
    (ROOT / "docs" / "results" / "monitor.json").write_text(json.dumps(result, indent=1) + "\n")


def one(job: tuple[Path, str, int, str]) -> dict[str, Any]:
    folder, method, seed, answer = job
    out = RunFolder(folder / f"{slug(method)}_s{seed}{'' if answer == 'warn' else '_' + answer}")
    if not (out.record.exists() and json.loads(out.record.read_text())["status"] == "finished"):
        from moatlab.runtime.device import Machine
        from moatlab.training.api import train_recipe

        recipe = make_recipe(method, seed=seed, on_collapse=answer)
        train_recipe(recipe, out.path, machine=Machine(threads=1), resume=True)
    lines = [json.loads(line) for line in out.metrics.read_text().splitlines()]
    record = json.loads(out.record.read_text())
    row = {"method": method, "seed": seed, "final": record["final"], "passes": record["counted"]["passes"]}
    if answer != "warn":
        names = ("alarms", "collapsed_at", "kept_epoch", "healing")
        stages = [line["stage"] for line in lines]
        return {**row, "answer": answer, **{name: record[name] for name in names}, "stages": stages}
    return {**row, **replay(lines, method)}


def replay(lines: list[dict[str, Any]], method: str) -> dict[str, Any]:
    """The monitor's verdict at each comparable check, given only the checks up to it."""
    checks = [line for line in lines if parse_method(method).ends_cycle(line["epoch"] - 1)]
    collapse = outcome_of(checks, CLASSES).collapsed_at
    alarmed, alarms, alarmed_at = False, [], []
    for number, check in enumerate(checks):
        verdict = judge(checks[: number + 1], CLASSES, alarmed=alarmed)
        if verdict == "collapsed" and not alarmed:
            alarms.append(check["epoch"])
        alarmed = verdict == "collapsed" or (alarmed and verdict == "low")
        if alarmed:
            alarmed_at.append(check["epoch"])
    late = None
    if collapse:  # checks from the start of the collapse until the alarm is on
        since = [check["epoch"] for check in checks if check["epoch"] >= collapse]
        late = next((number for number, epoch in enumerate(since) if epoch in alarmed_at), None)
    return {"collapsed_at": collapse, "alarms": alarms, "checks_late": late}


if __name__ == "__main__":
    main()
