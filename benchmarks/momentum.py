"""Do fgsm and fast collapse with cycled momentum? Three seeds on `mini`, attacks in train and in eval mode; and
gradalign with a smaller weight, because with the authors' it does not train there.

    python benchmarks/momentum.py                  trains what is not in build/momentum yet (about forty minutes)

Two runs at a time, one thread each. Writes docs/results/momentum.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from moatlab.training.making import make_recipe
from moatlab.training.outcome import outcome_of
from moatlab.training.recipe import slug
from moatlab.training.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
KEPT = ("epoch", "clean", "fgsm", "pgd7", "alignment", "comparable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "momentum")
    folder = parser.parse_args().runs
    jobs: list[Any] = [(folder, *job) for job in product(range(3), ("train", "eval"), (False, True), ("fgsm", "fast"))]
    jobs += [(folder, seed, "train", False, "gradalign:0.5") for seed in range(3)]
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(one, jobs))
    (ROOT / "docs" / "results" / "momentum.json").write_text(json.dumps({"runs": rows}, indent=1) + "\n")


def one(job: tuple[Path, int, str, bool, str]) -> dict[str, Any]:
    from moatlab.runtime.device import Machine
    from moatlab.training.api import train_recipe

    folder, seed, mode, cycled, method = job
    out = RunFolder(folder / f"{slug(method)}_{mode}_{'cycled' if cycled else 'constant'}_s{seed}")
    recipe = make_recipe(method, seed=seed, bn_in_attack=mode, cycle_momentum=cycled)
    record = train_recipe(recipe, out.path, machine=Machine(threads=1), resume=True)
    history = [{name: line[name] for name in KEPT} for line in out.read_metrics()]
    verdict, setting = outcome_of(history, record.data["classes"]), {"bn_in_attack": mode, "cycle_momentum": cycled}
    outcome = {"outcome": verdict.outcome, "collapsed_at": verdict.collapsed_at}
    return {"method": method, "seed": seed, **setting, **outcome, "final": record.final, "history": history}


if __name__ == "__main__":
    main()
