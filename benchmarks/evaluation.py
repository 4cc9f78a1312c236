"""Evaluation against its peers, side by side in one run: the same model, images and radius, verdicts compared.

PGD-50-10 against torchattacks and adv-lib, AutoAttack against pyautoattack (the reference): on a robust and on a
collapsed model of the demo, and on the CIFAR-10 ResNet-18 that comes with pyautoattack. The sides take turns and the
medians are compared. Peers get the model as they would from a user: contiguous, in eval mode. Ours is what
`moatlab.evaluate` records for the attack, plain accuracy included and red flags (which peers do not look for) apart.

    make demo && pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/evaluation.py [--runs runs/demo_s0] [--images 500] [--repeats 2] [--only pgd aa resnet]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moatlab
from moatlab.data.batches import as_floats
from moatlab.environment import describe_environment, keep_freed_memory
from moatlab.models import read_weights

OUT = Path(__file__).resolve().parents[1] / "docs" / "results" / "evaluation.json"
BATCH = 250
Side = Callable[[nn.Module, Tensor, Tensor, float], tuple[float, Tensor]]


def ours(attack: str) -> Side:
    def side(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> tuple[float, Tensor]:
        result = moatlab.evaluate(model, x, y, attacks=[attack], eps=eps)
        return result.cost["clean"]["seconds"] + result.cost[attack]["seconds"], result.robust[attack]

    return side


def timed(attack: Callable[[nn.Module, Tensor, Tensor, float], Tensor]) -> Side:
    """A peer's function from images to adversarial images, as a side: which images does the model still get right?"""

    def side(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> tuple[float, Tensor]:
        begun = time.perf_counter()
        z = attack(model, x, y, eps)
        seconds = time.perf_counter() - begun
        with torch.no_grad():
            return seconds, torch.cat([model(part).argmax(1) for part in z.split(BATCH)]) == y

    return side


def in_batches(attack: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([attack(*part) for part in zip(x.split(BATCH), y.split(BATCH), strict=True)])


def by_torchattacks(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    import torchattacks

    restarts = [torchattacks.PGD(model, eps=eps, alpha=eps / 4, steps=50) for _ in range(10)]
    return in_batches(torchattacks.MultiAttack(restarts), x, y)


def by_adv_lib(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    for name in ("torchvision", "visdom"):  # imported by parts of it that are not used here
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchvision"].models = None  # type: ignore[attr-defined]
    sys.modules["visdom"].Visdom = None  # type: ignore[attr-defined]
    from adv_lib.attacks.projected_gradient_descent import pgd_linf

    def attack(images: Tensor, labels: Tensor) -> Tensor:
        return pgd_linf(model, images, labels, eps, steps=50, restarts=10, absolute_step_size=eps / 4)  # type: ignore[no-any-return]

    return in_batches(attack, x, y)


def by_pyautoattack(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    from pyautoattack import AutoAttack

    return AutoAttack(model, eps=eps, norm="Linf", seed=0).run_standard_evaluation(x, y, batch_size=BATCH)[0]  # type: ignore[no-any-return]


def compare(
    title: str, sides: dict[str, Side], model: nn.Module, x: Tensor, y: Tensor, eps: float, repeats: int, bound: float
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    stand: dict[str, Tensor] = {}
    for _ in range(repeats):
        for name, side in sides.items():
            taken, stand[name] = side(model, x, y, eps)
            seconds[name].append(taken)
            print(
                f"  {title}: {name} {taken:.1f} s, {100 * stand[name].float().mean():.1f} %",
                file=sys.stderr,
                flush=True,
            )
    median = {name: statistics.median(times) for name, times in seconds.items()}
    percent = {name: 100 * which.float().mean().item() for name, which in stand.items()}
    peers = [name for name in sides if name != "moatlab"]
    fastest = min(peers, key=lambda name: median[name])
    ratio = median[fastest] / median["moatlab"]
    excess = percent["moatlab"] - min(percent[name] for name in peers)
    agree = 100 * (stand["moatlab"] == stand[fastest]).float().mean().item()
    print(f"{title:<34}{ratio:6.2f} times {fastest} (bound {bound:g}); robust {percent['moatlab']:.1f} %, "
          f"{excess:+.1f} points; {agree:.1f} % of verdicts agree", flush=True)  # fmt: skip
    return {
        "what": title, "images": len(y), "eps": eps, "seconds": seconds, "robust_percent": percent, "fastest_peer":
        fastest, "ratio": ratio, "bound": bound, "excess_points": excess, "verdicts_agree_percent": agree,
        "passes": ratio >= bound and excess <= 0.2 + 1e-6,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo_s0"))
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=["pgd", "aa", "resnet"], default=["pgd", "aa", "resnet"])
    options = parser.parse_args()
    keep_freed_memory()
    rows = []
    pgd: dict[str, Side] = {}
    for name, peer in (("torchattacks", by_torchattacks), ("adv_lib", by_adv_lib)):
        if importlib.util.find_spec(name):
            pgd[name] = timed(peer)
        else:
            print(f"{name} is not installed and is left out", file=sys.stderr)
    pgd["moatlab"] = ours("pgd50")
    aa = {"pyautoattack": timed(by_pyautoattack), "moatlab": ours("aa")}

    if {"pgd", "aa"} & {*options.only}:
        data = moatlab.load_images("mini")
        x, y = as_floats(data.test_x[: options.images]).contiguous(), data.test_y[: options.images]
        robust, collapsed = (moatlab.load(options.runs / name) for name in ("moat-2", "fgsm"))
        eps = 16 / 255
        if "pgd" in options.only:
            rows.append(compare("PGD-50-10, robust model", pgd, robust, x, y, eps, options.repeats, 2.2))
            rows.append(compare("PGD-50-10, collapsed model", pgd, collapsed, x, y, eps, options.repeats, 20))
        if "aa" in options.only:
            rows.append(compare("AutoAttack, collapsed model", aa, collapsed, x, y, eps, options.repeats, 5))
            rows.append(compare("AutoAttack, robust model", aa, robust, x, y, eps, 1, 1.5))
    if "resnet" in options.only:
        from pyautoattack.examples import resnet

        model = resnet.ResNet18().eval()
        weights, _ = read_weights(Path(resnet.__file__).with_name("model_test.pt"))
        model.load_state_dict(weights)
        data = moatlab.load_images("cifar10")
        x, y = as_floats(data.test_x[:16]).contiguous(), data.test_y[:16]
        rows.append(compare("AutoAttack, CIFAR-10 ResNet-18", aa, model, x, y, 8 / 255, 1, 1.3))
    kept = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
    measured = {row["what"] for row in rows}
    kept = [row for row in kept if row["what"] not in measured]  # of an earlier run with other --only
    OUT.write_text(json.dumps({"rows": kept + rows, "environment": describe_environment()}, indent=1) + "\n")
    sys.exit(not all(row["passes"] for row in rows))


if __name__ == "__main__":
    main()
