"""Random numbers for evaluation: functions of the seed, their purpose and the number of the example, nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moatlab.attacks.norms import Norm, unit
from moatlab.runtime.randomness import generator

BLOCK, BLOCK_NUMBERS = 128, 2**22  # examples that share a generator; fewer of large images


@dataclass(frozen=True)
class Draws:
    """The draws of some examples, named by their numbers in the data set.

    Batch size, chunk, order, shard and which examples are still standing change no draw. They are made on the CPU, so
    the device changes none either.
    """

    seed: int
    examples: Tensor  # int64, on the CPU

    @classmethod
    def numbered(cls, seed: int, count: int) -> Draws:
        return cls(seed, torch.arange(count))

    def of(self, rows: Tensor) -> Draws:
        return Draws(self.seed, self.examples[rows.cpu()])

    def each(self, purpose: str, shape: tuple[int, ...], *counters: int, normal: bool = False) -> Tensor:
        """U(0, 1), or N(0, 1), of the given shape for each example. A whole block is drawn for any of its examples."""
        draw = torch.randn if normal else torch.rand
        size = max(min(BLOCK, BLOCK_NUMBERS // math.prod(shape)), 1)
        values = torch.empty(len(self.examples), *shape, dtype=torch.float32, device="cpu")
        blocks, places = self.examples // size, self.examples % size
        for block in sorted(set(blocks.tolist())):
            rows = (blocks == block).nonzero().squeeze(1)
            draws = generator(self.seed, purpose, *counters, block)
            values[rows] = draw(size, *shape, generator=draws, dtype=torch.float32, device="cpu")[places[rows]]
        return values

    def shared(self, purpose: str, count: int, *counters: int) -> list[float]:
        """U(0, 1), the same for all examples."""
        draws = generator(self.seed, purpose, *counters)
        numbers: list[float] = torch.rand(count, generator=draws, dtype=torch.float32, device="cpu").tolist()
        return numbers


def start_in_ball(x: Tensor, eps: float, norm: Norm, draws: Draws, purpose: str, *counters: int) -> Tensor:
    """x plus noise that is uniform in the ball."""
    shape = tuple(x.shape[1:])
    if norm == "linf":
        return x + (2 * eps * draws.each(purpose, shape, *counters) - eps).to(x)
    direction = unit(draws.each(purpose, shape, *counters, normal=True), norm)
    radius = eps * draws.each(f"{purpose} radius", (1, 1, 1), *counters) ** (1 / x[0].numel())
    return x + (radius * direction).to(x)


def start_on_sphere(x: Tensor, eps: float, norm: Norm, draws: Draws, purpose: str, *counters: int) -> Tensor:
    """x plus noise of norm eps, as Auto-PGD starts: uniform noise (L-inf) or Gaussian noise (L2), scaled."""
    shape = tuple(x.shape[1:])
    noise = draws.each(purpose, shape, *counters, normal=norm == "l2")
    return x + eps * unit((2 * noise - 1 if norm == "linf" else noise).to(x), norm)
