"""Stages with several gradient steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moatlab.methods.cost import Cost
from moatlab.methods.entry import STEPS, StageEntry

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context
    from moatlab.methods.entry import Batch


def pgd(context: Context, x: Tensor, y: Tensor, steps: int) -> Batch:
    """A random start and K projected steps of max(eps/4, eps/K); the step size is Wang et al.'s."""
    step_size = max(context.eps / 4, context.eps / steps)
    return context.climb(x + context.noise(x), x, y, steps=steps, step_size=step_size), y


STAGES = {"pgd": StageEntry(pgd, lambda steps: Cost(steps + 1, steps, 1), "Madry et al., 2018", STEPS)}
