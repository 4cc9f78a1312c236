"""Every stage of the field on `mini` at equal cost: 42 passes, three seeds, raw and averaged weights from one run.

    python benchmarks/field.py                     trains what is not in docs/results/field-mini.json yet

A screening: PGD-50-10 on 500 test images, AutoAttack on 200 for seed 0 only. Two runs at a time, one thread each; each
finished run is written at once, so that it can be stopped at any time and resumed on another machine.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from moatlab.methods.language import parse_method
from moatlab.runtime.environment import commit
from moatlab.training.making import make_recipe
from moatlab.training.recipe import slug
from moatlab.training.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "docs" / "results" / "field-mini.json"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
PASSES, IMAGES, AA_IMAGES = 42, 500, 200
EPOCHS = {"auto:2": 20}  # its plan is a bound: about 41.5 passes are counted
METHODS = [
    *("standard", "mixup", "cutmix", "fgsm", "fast", "nfgsm", "zerograd", "aaer", "aaer:over=nfgsm", "kim", "pgd:2"),
    *("auto:2",),
    *("gradalign:0.5", "elle", "trades:2", "mart:2", "nuat", "gat", "liet", "pgi", "free:4", "yopo:5"),
    *("moat:2", "imoat:1,2,3", "mixup | nfgsm | pgd:2", "mixup | liet | pgd:2", "mixup | pgi | pgd:2"),
    *("mixup | zerograd | pgd:2", "mixup | fast | trades:2", "mixup | fast | mart:2", "mixup | fast | trades:2>5>8"),
]


def epochs_of(spec: str) -> int:
    """The whole cycles (or replays) whose cost is nearest to 42 passes."""
    if spec in EPOCHS:
        return EPOCHS[spec]
    method = parse_method(spec)
    unit = max(len(method.slots), method.replays)
    return min(range(unit, 64, unit), key=lambda epochs: abs(method.cost(epochs).passes - PASSES))


def one(job: tuple[Path, str, int]) -> dict[str, Any]:
    from moatlab.evaluation.card import evaluate_target
    from moatlab.evaluation.target import load_target
    from moatlab.runtime.device import Machine
    from moatlab.training.api import train_recipe

    folder, spec, seed = job
    out = RunFolder(folder / f"{slug(spec)}_s{seed}")
    recipe = make_recipe(spec, seed=seed, epochs=epochs_of(spec), average="ema", monitor_every=3)
    record = train_recipe(recipe, out.path, machine=Machine(threads=1), resume=True)
    found: dict[str, Any] = {}
    for which in ("last", "average"):
        with Machine(threads=1).in_use():
            target = load_target(out.path, which=which)
            results = dict(evaluate_target(target, attacks=["clean", "pgd50"], count=IMAGES).results)
            if seed == 0:
                results |= {"aa": evaluate_target(target, attacks=["clean", "aa"], count=AA_IMAGES).results["aa"]}
        found[which] = {name: result.accuracy for name, result in results.items()}
    kept = {name: getattr(record, name) for name in ("outcome", "collapsed_at", "flops", "train_seconds", "final")}
    cost = {"epochs": recipe.epochs, "passes": record.counted["passes"]}
    made = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), "cpu": record.environment["cpu"]}
    return {"method": spec, "seed": seed, **cost, **kept, **found, **made}


def write_page(rows: list[dict[str, Any]]) -> None:
    """Replace the table in field-mini.md, between two comments."""
    path = RESULT.with_suffix(".md")
    text = path.read_text(encoding="utf-8") if path.exists() else "# The field on `mini`, at equal cost\n\n"
    before, _, after = text.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n\n{page(rows)}\n\n{END}{after.partition(END)[2]}", encoding="utf-8")


def page(rows: list[dict[str, Any]]) -> str:
    """The table of field-mini.md: means over seeds in %, of the last weights / of their average."""
    lines = ["| method | epochs | passes | TFLOP | seconds | clean | PGD-50-10 | AutoAttack (seed 0) | outcome |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|--:|---|"]
    for spec in METHODS:
        if not (some := [row for row in rows if row["method"] == spec]):
            continue
        first, shown = some[0], []
        for name in ("clean", "pgd50", "aa"):
            pairs = [[row[which][name] for row in some if name in row[which]] for which in ("last", "average")]
            shown.append(" / ".join(f"{100 * mean(values):.1f}" if values else "" for values in pairs))
        outcomes = ", ".join(f"{count} {name}" for name, count in Counter(row["outcome"] for row in some).items())
        seconds = f"{mean(row['train_seconds'] for row in some):.0f}"
        cost = [str(first["epochs"]), f"{first['passes']:.3g}", f"{first['flops'] / 1e12:.3g}", seconds]
        method = spec.replace("|", "\\|")
        lines.append(f"| `{method}` | " + " | ".join([*cost, *shown, outcomes]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "field")
    folder = parser.parse_args().runs
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["runs"] if RESULT.exists() else []
    done = {(row["method"], row["seed"]) for row in rows}
    jobs = [(folder, spec, seed) for seed in range(3) for spec in METHODS if (spec, seed) not in done]
    with ProcessPoolExecutor(2) as pool:
        for future in as_completed([pool.submit(one, job) for job in jobs]):
            rows.append(future.result())
            rows.sort(key=lambda row: (METHODS.index(row["method"]), row["seed"]))
            RESULT.write_text(json.dumps({"runs": rows}, indent=1) + "\n", encoding="utf-8")
            write_page(rows)
            print(f"{len(rows)} of {3 * len(METHODS)} runs done", flush=True)


if __name__ == "__main__":
    main()
