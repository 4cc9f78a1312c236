"""Random numbers for attacks: pure functions of the seed, the purpose and the number of the image."""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from moatlab.attacks.norms import Threat, unit
from moatlab.runtime.randomness import generator

BLOCK, BLOCK_NUMBERS = 128, 2**22  # images that share a generator, and their numbers, at most


@dataclass(frozen=True)
class Draws:
    """Random draws for images, identified by their index in the data set. They do not depend on batch size, chunk,
    order, shard or which images are still robust, nor on the device: all are made on the CPU."""

    seed: int
    examples: Tensor  # int64, on the CPU

    @classmethod
    def numbered(cls, seed: int, count: int) -> Self:
        return cls(seed, torch.arange(count))

    def of(self, rows: Tensor) -> Self:
        return replace(self, examples=self.examples[rows.cpu()])

    def each(self, purpose: str, shape: tuple[int, ...], *counters: int, normal: bool = False) -> Tensor:
        """U(0, 1), or N(0, 1), of the given shape for each image. A block is always drawn as a whole."""
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
        """U(0, 1), the same for all images."""
        draws = generator(self.seed, purpose, *counters)
        numbers: list[float] = torch.rand(count, generator=draws, dtype=torch.float32, device="cpu").tolist()
        return numbers

    def in_ball(self, x: Tensor, threat: Threat, purpose: str, *counters: int) -> Tensor:
        """x plus uniform noise in the ball; in L1 x plus Gaussian noise, projected, which changes only a few pixels."""
        shape = tuple(x.shape[1:])
        if threat.norm == "linf":
            return x + (2 * threat.eps * self.each(purpose, shape, *counters) - threat.eps).to(x)
        normal = self.each(purpose, shape, *counters, normal=True)
        if threat.norm == "l1":
            return threat.project(x + normal.to(x), x)
        return x + threat.fill(normal, self.each(f"{purpose} radius", (), *counters)).to(x)

    def on_sphere(self, x: Tensor, threat: Threat, purpose: str, *counters: int) -> Tensor:
        """The start of Auto-PGD in L-inf or L2: x plus uniform or Gaussian noise, scaled to norm eps."""
        noise = self.each(purpose, tuple(x.shape[1:]), *counters, normal=threat.norm == "l2")
        return x + threat.eps * unit((2 * noise - 1 if threat.norm == "linf" else noise).to(x), threat.norm)
