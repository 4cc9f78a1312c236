"""Speed and verdicts of our evaluation and of other libraries, on the same model, images and radius.

PGD-50-10 is compared with torchattacks, adv-lib and foolbox, AutoAttack with pyautoattack (the reference), on a robust
and a collapsed model of the demo and on the CIFAR-10 ResNet-18 included in pyautoattack. Each library runs in its own
process; they take turns, and medians are compared. Peers get a contiguous model in eval mode, as from a user. Ours is
the time that `moatlab.evaluate` records for clean accuracy and the attack, without red flags, which peers do not check.
Only ours keeps freed memory (`environment.keep_freed_memory`), as the command does; with `--keep-for-all` peers do too.

    make demo && make bench-setup
    python benchmarks/evaluation.py [--runs runs/demo_s0] [--images 500] [--repeats 2] [--only pgd aa resnet]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from sides import ask, has_cifar10, installed, record, recorded, start, tell
from torch import Tensor, nn

import moatlab
from moatlab.data.images import as_floats
from moatlab.models.weights import read_weights
from moatlab.runtime.environment import keep_freed_memory

BATCH = 250
Attack = Callable[[nn.Module, Tensor, Tensor, float], Tensor]


def of_the_demo(runs: Path, name: str, images: int) -> tuple[nn.Module, Tensor, Tensor, float]:
    data = moatlab.load_images("mini")
    return moatlab.load(runs / name), as_floats(data.test_x[:images]).contiguous(), data.test_y[:images], 16 / 255


def resnet18() -> tuple[nn.Module, Tensor, Tensor, float]:
    from pyautoattack.examples import resnet

    model: nn.Module = resnet.ResNet18().eval()
    weights, _ = read_weights(Path(resnet.__file__).with_name("model_test.pt"))
    model.load_state_dict(weights)
    data = moatlab.load_images("cifar10")
    return model, as_floats(data.test_x[:16]).contiguous(), data.test_y[:16], 8 / 255


def side(name: str, keep: bool, problem: Callable[..., Any], arguments: tuple[Any, ...], pipe: Connection) -> None:
    """The process of one library: runs once per request, and answers with seconds and the robust images."""
    if keep:
        keep_freed_memory()
    model, x, y, eps = problem(*arguments)
    while pipe.recv():
        if name in OURS.values():
            result = moatlab.evaluate(model, x, y, attacks=[name], eps=eps)
            seconds = result.cost["clean"].seconds + result.cost[name].seconds
            robust = result.robust[name]
        else:
            begun = time.perf_counter()
            z = PEERS[name](model, x, y, eps)
            seconds = time.perf_counter() - begun
            with torch.no_grad():
                robust = torch.cat([model(part).argmax(1) for part in z.split(BATCH)]) == y
        pipe.send((seconds, robust.tolist()))


def in_batches(attack: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([attack(*part) for part in zip(x.split(BATCH), y.split(BATCH), strict=True)])


def by_torchattacks(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    import torchattacks

    restarts = [torchattacks.PGD(model, eps=eps, alpha=eps / 4, steps=50) for _ in range(10)]
    return in_batches(torchattacks.MultiAttack(restarts), x, y)


def by_adv_lib(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    for name in ("torchvision", "visdom"):  # imported by modules of adv_lib that are not used here
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["torchvision"].models = None  # type: ignore[attr-defined]
    sys.modules["visdom"].Visdom = None  # type: ignore[attr-defined]
    from adv_lib.attacks.projected_gradient_descent import pgd_linf

    def attack(images: Tensor, labels: Tensor) -> Tensor:
        return pgd_linf(model, images, labels, eps, steps=50, restarts=10, absolute_step_size=eps / 4)  # type: ignore[no-any-return]

    return in_batches(attack, x, y)


def by_foolbox(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    import foolbox

    bounded = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    attack = foolbox.attacks.LinfPGD(steps=50, abs_stepsize=eps / 4, random_start=True).repeat(10)
    return in_batches(lambda images, labels: attack(bounded, images, labels, epsilons=eps)[1], x, y)


def by_pyautoattack(model: nn.Module, x: Tensor, y: Tensor, eps: float) -> Tensor:
    from pyautoattack import AutoAttack

    return AutoAttack(model, eps=eps, norm="Linf", seed=0).run_standard_evaluation(x, y, batch_size=BATCH)[0]  # type: ignore[no-any-return]


OURS = {"pgd": "pgd50", "aa": "aa"}
PEERS: dict[str, Attack] = {
    "torchattacks": by_torchattacks, "adv_lib": by_adv_lib, "foolbox": by_foolbox, "pyautoattack": by_pyautoattack,
}  # fmt: skip


def compare(
    title: str, attack: str, problem: Callable[..., Any], arguments: tuple[Any, ...], bound: float, repeats: int,
    keep_for_all: bool, without: list[str],
) -> bool:  # fmt: skip
    """Measure, record the row, and return whether the bounds are met."""
    peers = ["torchattacks", "adv_lib", "foolbox"] if attack == "pgd" else ["pyautoattack"]
    peers = [peer for peer in peers if peer not in without and installed(peer)]
    if not peers:
        return True
    ours = OURS[attack]
    pipes = {name: start(side, name, keep_for_all, problem, arguments) for name in [*peers, ours]}
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    robust: dict[str, Tensor] = {}
    for round_ in range(repeats):
        for name, pipe in pipes.items():
            if round_ and seconds[name][0] > 3 * min(seconds[peer][0] for peer in peers):
                continue  # too slow to be the fastest
            taken, verdicts = ask(pipe, True)
            seconds[name].append(taken)
            robust[name] = torch.tensor(verdicts)
            tell(f"  {title}: {name} {taken:.1f} s, {100 * robust[name].float().mean():.1f} %")
    for pipe in pipes.values():
        pipe.send(False)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    percent = {name: 100 * which.float().mean().item() for name, which in robust.items()}
    fastest = min(peers, key=lambda name: median[name])
    ratio = median[fastest] / median[ours]
    excess = percent[ours] - min(percent[name] for name in peers)
    agree = 100 * (robust[ours] == robust[fastest]).float().mean().item()
    print(f"{title:<34}{ratio:6.2f} times {fastest} (bound {bound:g}); robust {percent[ours]:.1f} %, "
          f"{excess:+.1f} points; {agree:.1f} % of verdicts agree", flush=True)  # fmt: skip
    passes = ratio >= bound and excess <= 0.2 + 1e-6
    row = {
        "what": title, "attack": ours, "images": len(robust[ours]), "seconds": seconds, "robust_percent": percent,
        "fastest_peer": fastest, "ratio": ratio, "bound": bound, "excess_points": excess,
        "verdicts_agree_percent": agree, "passes": passes,
    }  # fmt: skip
    part = "evaluation" + (" (freed memory kept for all)" if keep_for_all else "")
    others = [other for other in recorded(part) or [] if other["what"] != title]
    record(part, [*others, row])
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo_s0"))
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=["pgd", "aa", "resnet"], default=["pgd", "aa", "resnet"])
    parser.add_argument("--without", nargs="*", default=[], choices=list(PEERS), help="peers to leave out")
    parser.add_argument("--keep-for-all", action="store_true", help="keep freed memory for the peers too")
    options = parser.parse_args()
    how = (options.repeats, options.keep_for_all, options.without)
    robust, collapsed = ((options.runs, name, options.images) for name in ("moat-2", "fgsm"))
    passed = []
    if "pgd" in options.only:
        passed.append(compare("PGD-50-10, robust model", "pgd", of_the_demo, robust, 2.2, *how))
        passed.append(compare("PGD-50-10, collapsed model", "pgd", of_the_demo, collapsed, 20, *how))
    if "aa" in options.only:
        passed.append(compare("AutoAttack, collapsed model", "aa", of_the_demo, collapsed, 5, *how))
        passed.append(compare("AutoAttack, robust model", "aa", of_the_demo, robust, 1.5, 1, *how[1:]))
    if "resnet" in options.only and has_cifar10():
        passed.append(compare("AutoAttack, CIFAR-10 ResNet-18", "aa", resnet18, (), 1.3, 1, *how[1:]))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
