"""Images a second of an attack step and of a training step: ours against the plain way, side by side in one run.

The plain way is what most public code does: contiguous tensors, `loss.backward()` for the attack (which computes
every weight gradient and throws it away), SGD one parameter after another. The sides alternate and the median counts,
because machines are noisy. Also: the peak memory of a step.

    python benchmarks/steps.py [--width 64] [--batch-size 128] [--side 32] [--repeats 5]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks import Probe
from moatlab.models.preact_resnet import PreActResNet18

EPS = 8 / 255


def plain_attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return (x.detach() + EPS * x.grad.sign()).clamp(0, 1)


def our_attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    gradient, _ = Probe(model).gradient(x, y)
    return (x + EPS * gradient.sign()).clamp(0, 1)


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def alternate(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each side; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(repeats + 1):
        for name, run in sides.items():
            begun = time.perf_counter()
            run()
            if round_:
                seconds[name].append(time.perf_counter() - begun)
    return {name: min(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("--width", 64), ("--batch-size", 128), ("--side", 32), ("--repeats", 5)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()

    torch.manual_seed(0)
    plain = PreActResNet18(classes=10, width=options.width)
    ours = PreActResNet18(classes=10, width=options.width)
    ours.load_state_dict(plain.state_dict())
    ours.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.rand(options.batch_size, 3, options.side, options.side)
    y = torch.randint(10, (options.batch_size,))
    x_ours = x.contiguous(memory_format=torch.channels_last)
    settings = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
    plain_sgd = torch.optim.SGD(plain.parameters(), **settings, foreach=False)
    our_sgd = torch.optim.SGD(ours.parameters(), **settings, fused=True)

    agreement = (plain_attack(plain, x, y) - our_attack(ours, x_ours, y)).abs().gt(1e-6).float().mean().item()
    print(f"PreAct ResNet-18 width {options.width}, batch {options.batch_size}, {options.side}x{options.side}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}, median of {options.repeats}")  # fmt: skip
    print(f"the two attacks differ in {100 * agreement:.3f} % of the pixels (signs of gradients near 0)")
    print(f"{'':<16}{'plain img/s':>12}{'ours img/s':>12}{'ratio':>8}")
    work: dict[str, dict[str, Callable[[], object]]] = {
        "attack step": {"plain": lambda: plain_attack(plain, x, y), "ours": lambda: our_attack(ours, x_ours, y)},
        "training step": {
            "plain": lambda: training_step(plain, plain_sgd, x, y),
            "ours": lambda: training_step(ours, our_sgd, x_ours, y),
        },
    }
    for name, sides in work.items():
        seconds = alternate(sides, options.repeats)
        speeds = {side: options.batch_size / value for side, value in seconds.items()}
        ratio = speeds["ours"] / speeds["plain"]
        print(f"{name:<16}{speeds['plain']:>12.1f}{speeds['ours']:>12.1f}{ratio:>8.2f}")
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gibibytes = kilobytes / 1024 ** (3 if sys.platform == "darwin" else 2)
    print(f"peak memory of this process, both sides together: {gibibytes:.2f} GiB")


if __name__ == "__main__":
    main()
