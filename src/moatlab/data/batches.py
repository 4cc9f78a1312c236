"""Batches by counter: the batch of step s is a pure function of (seed, s)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moatlab.randomness import generator

PADDING = 4


@dataclass(frozen=True)
class Batches:
    """The training images of a run, as uint8 on its device, and the order it takes them in."""

    x: Tensor  # uint8, (N, H, W, C)
    y: Tensor
    batch_size: int
    augment: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.y) // self.batch_size  # a last partial batch is dropped

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of a step: images as float32 in [0, 1], shape (B, C, H, W), channels last in memory."""
        chosen = self.numbers(step)
        images = self.x[chosen]
        if self.augment:
            images = crop_and_flip(images, generator(self.seed, "augment", step, device=self.x.device))
        return as_floats(images), self.y[chosen]

    def numbers(self, step: int) -> Tensor:
        """Which of the training images are in the batch of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.y), self.seed, epoch, self.x.device)
        return order[position * self.batch_size : (position + 1) * self.batch_size]


@lru_cache(maxsize=2)
def epoch_order(count: int, seed: int, epoch: int, device: torch.device) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch)).to(device)


def crop_and_flip(images: Tensor, draws: torch.Generator) -> Tensor:
    """Each image of (B, H, W, C) shifted by up to 4 pixels over a black border and mirrored half of the time.

    One gather for the whole batch: an image's rows and columns are index vectors, a mirrored one's run backwards.
    """
    count, height, width, _ = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    top, left = torch.randint(2 * PADDING + 1, (2, count, 1), generator=draws, device=device)
    mirrored = torch.randint(2, (count, 1), generator=draws, device=device).bool()
    rows = top + torch.arange(height, device=device)
    columns = torch.arange(width, device=device)
    columns = left + torch.where(mirrored, columns.flip(0), columns)
    which = torch.arange(count, device=device)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]]


def as_floats(images: Tensor) -> Tensor:
    """(B, H, W, C) bytes as (B, C, H, W) floats in [0, 1]; the same memory order, which is called channels last."""
    return images.permute(0, 3, 1, 2).float().div_(255)
