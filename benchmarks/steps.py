"""Images a second of an attack step and of a training step: ours against the plain way, side by side in one run.

The plain way is what most public code does: contiguous tensors, `loss.backward()` for the attack (which computes
every weight gradient and throws it away), SGD without fusing. Ours is what `moat train` does: channels-last tensors,
frozen parameters and the input's gradient alone, fused SGD, freed memory kept for the next step. Each side has a
process of its own; they take turns, and the medians are compared, because machines are noisy.

    python benchmarks/steps.py [--width 64] [--batch-size 128] [--side 32] [--repeats 5]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks import fgsm
from moatlab.environment import keep_freed_memory
from moatlab.models.preact_resnet import PreActResNet18

EPS = 8 / 255


def plain_fgsm(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    F.cross_entropy(model(x), y).backward()
    assert x.grad is not None
    return (x.detach() + EPS * x.grad.sign()).clamp(0, 1)


def side(ours: bool, options: argparse.Namespace, pipe: Connection) -> None:
    """One side's process: answers each name of a step with its seconds, and None with its peak memory in GiB."""
    torch.manual_seed(0)
    model = PreActResNet18(classes=10, width=options.width)
    x = torch.rand(options.batch_size, 3, options.side, options.side)
    y = torch.randint(10, (options.batch_size,))
    if ours:
        keep_freed_memory()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.contiguous(memory_format=torch.channels_last)
    sgd = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=ours, foreach=None if ours else False
    )
    while step := pipe.recv():
        begun = time.perf_counter()
        if step == "attack step":
            fgsm(model, x, y, eps=EPS) if ours else plain_fgsm(model, x, y)
        else:
            sgd.zero_grad()
            F.cross_entropy(model(x), y).backward()
            sgd.step()
        pipe.send(time.perf_counter() - begun)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pipe.send(kilobytes / 1024 ** (3 if sys.platform == "darwin" else 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("--width", 64), ("--batch-size", 128), ("--side", 32), ("--repeats", 5)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()

    print(f"PreAct ResNet-18 width {options.width}, batch {options.batch_size}, {options.side}x{options.side}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}, median of {options.repeats}")  # fmt: skip
    spawn = multiprocessing.get_context("spawn")
    pipes = {}
    for name, ours in (("plain", False), ("ours", True)):
        pipes[name], other_end = spawn.Pipe()
        spawn.Process(target=side, args=(ours, options, other_end), daemon=True).start()

    def ask(name: str, step: str | None) -> float:
        pipes[name].send(step)
        return float(pipes[name].recv())

    print(f"{'':<16}{'plain img/s':>12}{'ours img/s':>12}{'ratio':>8}")
    for step in ("attack step", "training step"):
        seconds: dict[str, list[float]] = {name: [] for name in pipes}
        for round_ in range(options.repeats + 1):
            for name in pipes:
                taken = ask(name, step)
                if round_:  # the first one warms up
                    seconds[name].append(taken)
        speed = {name: options.batch_size / statistics.median(times) for name, times in seconds.items()}
        print(f"{step:<16}{speed['plain']:>12.1f}{speed['ours']:>12.1f}{speed['ours'] / speed['plain']:>8.2f}")
    print(f"peak memory: plain {ask('plain', None):.2f} GiB, ours {ask('ours', None):.2f} GiB")


if __name__ == "__main__":
    main()
