"""Stages without an attack: plain images, and images mixed with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moatlab.methods.entry import StageEntry, always

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context
    from moatlab.methods.entry import Batch


def standard(_context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    return x, y


def mixup(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """lambda x + (1 - lambda) x', labels alike; one lambda ~ U(0, 1) per batch, x' a shuffle of x."""
    weight, other_x, other_y = context.shuffled(x, y)
    return other_x.lerp(x, weight), context.soft_labels(y, other_y, weight)


def cutmix(context: Context, x: Tensor, y: Tensor, _: None) -> Batch:
    """A box of x' pasted into x: lambda ~ U(0, 1), sides sqrt(1 - lambda), labels by the exact area."""
    import torch

    weight, other_x, other_y = context.shuffled(x, y)
    side = torch.sqrt(1 - weight)
    inside = []
    for size in x.shape[2:]:
        centre = torch.rand((), generator=context.generator, device=x.device) * size
        position = torch.arange(size, device=x.device) + 0.5  # pixel centres; the box is clipped at the border
        inside.append((position - centre).abs() < side * size / 2)
    box = inside[0][:, None] & inside[1][None, :]
    return torch.where(box, other_x, x), context.soft_labels(y, other_y, 1 - box.float().mean())


PLAIN = always(1, 0, 1)
STAGES = {
    "standard": StageEntry(standard, PLAIN, "plain images", "no robustness; stage I of MOAT without mixing"),
    "mixup": StageEntry(mixup, PLAIN, "Zhang et al., 2018", "stage I of MOAT", mixes_labels=True),
    "cutmix": StageEntry(cutmix, PLAIN, "Yun et al., 2019", "stage I of MOAT, variant", mixes_labels=True),
}
