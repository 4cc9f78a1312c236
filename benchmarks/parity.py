"""Compare our verdicts with those of the reference AutoAttack (the package `pyautoattack`), attack by attack.

500 test images of mini, three seeds, three norms, on the small robust model in tests/fixtures. Then three models that
only seem robust, each with the red flag that must be raised: logits times 10,000, inputs rounded to 8 levels, and the
collapsed FGSM model in tests/fixtures. Nothing is timed, so cells run in parallel, one thread each. Finished cells are
kept in build/parity; a stopped run resumes.

    make parity        or: python benchmarks/parity.py [--images 500] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "tests" / "fixtures"
CELLS = ROOT / "build" / "parity"
OUT = ROOT / "docs" / "results" / "parity.json"
EPS = {"linf": "16/255", "l2": "128/255", "l1": "4"}
ATTACKS = ("apgd-ce", "apgd-t", "fab-t", "square", "aa")
# model -> flags, at least one of which must be raised
PLANTED = {
    "scaled": {"zero-gradients"},
    "quantised": {"square-beats-gradients", "zero-gradients"},
    "collapsed": {"catastrophic-overfitting"},
}


@dataclass(frozen=True)
class Cell:
    side: str
    norm: str
    attack: str
    seed: int
    images: int
    model: str = "robust"

    @property
    def path(self) -> Path:
        return CELLS / f"{self.model}-{self.side}-{self.norm}-{self.attack}-{self.seed}-{self.images}.json"


def load_model(name: str) -> Any:
    import torch
    from torch import nn

    import moatlab

    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 1e4  # type: ignore[no-any-return]

    class Quantised(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.round(x * 7) / 7)  # type: ignore[no-any-return]

    model = moatlab.load(FIXTURES / ("mini_fgsm.safetensors" if name == "collapsed" else "mini_moat2.safetensors"))
    return {"scaled": Scaled, "quantised": Quantised}.get(name, lambda same: same)(model).eval().requires_grad_(False)


def cells(images: int, seeds: int) -> list[Cell]:
    """The slowest cells first. FAB is deterministic, so it has one seed."""
    order = sorted(ATTACKS, key=lambda attack: ("aa", "square", "fab-t", "apgd-t", "apgd-ce").index(attack))
    planted = [Cell(side, "linf", "aa", 0, images, model) for model in PLANTED for side in ("reference", "ours")]
    return planted + [
        Cell(side, norm, attack, seed, images)
        for attack in order
        for seed in range(seeds if attack != "fab-t" else 1)
        for norm in EPS
        for side in ("reference", "ours")
    ]


def run(cell: Cell) -> None:
    """Store which images are robust, and whether each example found is in the ball, in [0, 1] and misclassified."""
    import torch

    torch.set_num_threads(1)
    import moatlab
    from moatlab.attacks.norms import Threat, distance
    from moatlab.data.images import as_floats

    data = moatlab.load_images("mini")
    x, y = as_floats(data.test_x[: cell.images]).contiguous(), data.test_y[: cell.images]
    model = load_model(cell.model)
    eps = Threat.of(EPS[cell.norm], cell.norm).eps
    flags: list[str] = []
    if cell.side == "ours":
        result = moatlab.evaluate(
            model, x, y, attacks=[cell.attack], eps=eps, norm=cell.norm, seed=cell.seed, keep_adversarial=True
        )
        stand = result.robust[cell.attack]
        flags = [flag.name for flag in result.flags]
        z = x.clone()
        for rows, points in result.adversarial.get(cell.attack, []):
            z[rows] = points
    else:
        from pyautoattack import AutoAttack

        norm = {"linf": "Linf", "l2": "L2", "l1": "L1"}[cell.norm]
        reference = AutoAttack(model, eps=eps, norm=norm, seed=cell.seed)
        if cell.attack != "aa":
            reference.attacks_to_run = [cell.attack]
        z, _ = reference.run_standard_evaluation(x, y, batch_size=250)
        with torch.no_grad():
            stand = model(z).argmax(1) == y
    with torch.no_grad():
        wrong = model(z).argmax(1) != y
    near = distance(z.double() - x.double(), cell.norm) <= eps + 1e-6 * max(1, eps)
    holds = bool((wrong | stand)[: cell.images].all() and near.all() and ((z >= 0) & (z <= 1)).all())
    CELLS.mkdir(parents=True, exist_ok=True)
    content = {**asdict(cell), "examples_hold": holds, "flags": flags, "stand": stand.int().tolist()}
    cell.path.write_text(json.dumps(content))


def summary(images: int, seeds: int) -> dict[str, Any]:
    found = {cell: json.loads(cell.path.read_text()) for cell in cells(images, seeds)}
    rows = []
    for norm in EPS:
        for attack in ATTACKS:
            numbers = range(seeds if attack != "fab-t" else 1)
            stand = {
                side: [found[Cell(side, norm, attack, seed, images)]["stand"] for seed in numbers]
                for side in ("reference", "ours")
            }
            percent = {side: [100 * sum(one) / images for one in ones] for side, ones in stand.items()}
            mean = sum(percent["reference"]) / len(numbers)
            spread = max(percent["reference"]) - min(percent["reference"])
            limit = 0.2 if attack == "aa" else max(0.4, spread)
            agreement = [
                100 * sum(a == b for a, b in zip(*pair, strict=True)) / images
                for pair in zip(stand["reference"], stand["ours"], strict=True)
            ]
            holds = all(found[Cell("ours", norm, attack, seed, images)]["examples_hold"] for seed in numbers)
            above = max(percent["ours"]) - mean
            rows.append(
                {
                    "norm": norm, "attack": attack, "reference": percent["reference"], "ours": percent["ours"],
                    "reference_mean": mean, "reference_spread": spread, "largest_excess": above, "limit": limit,
                    "verdicts_agree": agreement, "our_examples_hold": holds,
                    "passes": bool(above <= limit + 1e-9 and holds and (attack != "aa" or min(agreement) >= 99)),
                }
            )  # fmt: skip
    planted = []
    for model, flags in PLANTED.items():
        theirs, ours = (found[Cell(side, "linf", "aa", 0, images, model)] for side in ("reference", "ours"))
        percent = [100 * sum(one["stand"]) / images for one in (theirs, ours)]
        planted.append(
            {
                "model": model, "attack": "aa", "reference": percent[0], "ours": percent[1], "flags": ours["flags"],
                "our_examples_hold": ours["examples_hold"],
                "passes": percent[1] <= percent[0] + 0.2 and ours["examples_hold"] and bool(flags & {*ours["flags"]}),
            }
        )  # fmt: skip
    from moatlab.runtime.environment import describe_environment

    return {
        "images": images, "seeds": seeds, "eps": EPS, "data": "mini, test",
        "model": "tests/fixtures/mini_moat2.safetensors",
        "unit": "robust accuracy in %; limit and largest_excess in points; verdicts_agree in %",
        "rows": rows, "planted": planted, "environment": describe_environment(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    every = cells(options.images, options.seeds)
    missing = [cell for cell in every if not cell.path.exists()]
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        waiting = {pool.submit(run, cell): cell for cell in missing}
        for count, done in enumerate(as_completed(waiting), len(every) - len(missing) + 1):
            done.result()
            print(f"{count} of {len(every)}: {waiting[done].path.stem}", file=sys.stderr, flush=True)
    result = summary(options.images, options.seeds)
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        ours, theirs = (", ".join(f"{value:.1f}" for value in row[side]) for side in ("ours", "reference"))
        verdict = "ok" if row["passes"] else "FAILS"
        print(f"{row['norm']:<5}{row['attack']:<9}ours {ours:<18} reference {theirs:<18} {verdict}")
    for row in result["planted"]:
        verdict = "ok" if row["passes"] else "FAILS"
        print(f"{row['model']:<14}ours {row['ours']:.1f} reference {row['reference']:.1f} {row['flags']} {verdict}")
    sys.exit(not all(row["passes"] for row in [*result["rows"], *result["planted"]]))


if __name__ == "__main__":
    main()
