"""How often single-step training collapses on `mini`, measured with an independent training loop.

    python benchmarks/collapse.py [--seeds 6] [--methods fgsm fast]      about ten minutes for six seeds of one method

The setting is the preset `mini`. Network, attack, training and measurement are reimplemented with contiguous tensors,
PyTorch's SGD and its global generator. Only the images and the definition of a collapse come from moatlab. Random
draws differ from those of `moat train`, so compare how many seeds collapse, not single seeds. Two runs at a time, one
thread each. Writes docs/results/collapse.json.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moatlab
from moatlab.runtime.environment import describe_environment
from moatlab.training.outcome import outcome_of

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "collapse.json"
EPS, EPOCHS, BATCH, PEAK, TRAINED, WATCHED = 16 / 255, 21, 128, 0.2, 5000, 500
MEAN, STD = ((torch.tensor(v).view(3, 1, 1)) for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs or stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        beside = x if self.shortcut is None else self.shortcut(active)
        return beside + self.conv2(F.relu(self.bn2(self.conv1(active))))


class Network(nn.Module):
    """PreAct ResNet-18 of width 16."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 16, 16, 32, 32, 64, 64, 128, 128]
        self.stem = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(*(Block(a, b, b // a) for a, b in pairwise(widths)))
        self.bn, self.linear = nn.BatchNorm2d(128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.relu(self.bn(self.blocks(self.stem((x - MEAN) / STD)))).mean((2, 3)))


def gradient_sign(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(net(x), y), x)[0].sign()


def inside(z: Tensor, x: Tensor) -> Tensor:
    return torch.minimum(torch.maximum(z, x - EPS), x + EPS).clamp(0, 1)


def random_start(x: Tensor) -> Tensor:
    return inside(x + torch.empty_like(x).uniform_(-EPS, EPS), x)


def adversarial(method: str, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    if method == "fgsm":
        return inside(x + EPS * gradient_sign(net, x, y), x)
    start = random_start(x)
    return inside(start + 1.25 * EPS * gradient_sign(net, start, y), x)


def accuracies(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    net.eval()
    z = random_start(x)
    for _ in range(7):
        z = inside(z + EPS / 4 * gradient_sign(net, z, y), x)
    tried = {"clean": x, "fgsm": adversarial("fgsm", net, x, y), "pgd7": z}
    with torch.no_grad():
        found = {name: (net(images).argmax(1) == y).float().mean().item() for name, images in tried.items()}
    net.train()
    return found


def one(job: tuple[str, int]) -> dict[str, Any]:
    method, seed = job
    torch.set_num_threads(1)
    images = moatlab.load_images("mini")
    train_x, test_x = (
        part.permute(0, 3, 1, 2).float().div(255).contiguous() for part in (images.train_x, images.test_x)
    )
    held_x, held_y = train_x[TRAINED : TRAINED + WATCHED], images.train_y[TRAINED : TRAINED + WATCHED]
    torch.manual_seed(seed)
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=PEAK, momentum=0.9, weight_decay=5e-4)
    steps, watched = TRAINED // BATCH, []
    for epoch in range(EPOCHS):
        order = torch.randperm(TRAINED)
        for step in range(steps):
            share = (epoch * steps + step) / (EPOCHS * steps)
            optimizer.param_groups[0]["lr"] = PEAK * (1 - abs(2 * share - 1))
            chosen = order[step * BATCH : (step + 1) * BATCH]
            x, y = train_x[chosen], images.train_y[chosen]
            loss = F.cross_entropy(net(adversarial(method, net, x, y)), y)  # BatchNorm in train mode throughout
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        watched.append({"epoch": epoch + 1, "comparable": True, **accuracies(net, held_x, held_y)})
    row = {
        "method": method,
        "seed": seed,
        "collapsed_at": outcome_of(watched, 10).collapsed_at,
        "watched_pgd7": [check["pgd7"] for check in watched],
    }
    print(method, seed, row["collapsed_at"], flush=True)
    return row | {"final": accuracies(net, test_x, images.test_y)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--methods", nargs="+", choices=["fgsm", "fast"], default=["fast"])
    asked = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        rows = list(pool.map(one, [(method, seed) for method in asked.methods for seed in range(asked.seeds)]))
    RESULTS.write_text(json.dumps({"runs": rows, "environment": describe_environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
