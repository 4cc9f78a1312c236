"""The entry of a stage: its code, the cost of a step, its source and its argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moatlab.methods.cost import Cost

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context

    Batch = tuple[Tensor, Tensor]
    BatchStage = Callable[[Context, Tensor, Tensor, Any], Batch]
    LossStage = Callable[[Context, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Argument:
    """The number after a stage's colon."""

    symbol: str
    whole: bool
    low: float
    high: float = math.inf
    default: float | None = None
    at_eps: Callable[[float], float] | None = None  # the default as a function of the L-inf radius

    def __str__(self) -> str:
        return f"a whole number from {self.low:g} to {self.high:g}" if self.whole else f"a number >= {self.low:g}"


@dataclass(frozen=True)
class StageEntry:
    """A *batch* stage turns (x, y) into (x, target) for the cross-entropy; the target may be soft. A *loss* stage
    returns the loss itself. `cost` maps the argument's value to the cost of one step.

    Stage files import torch inside functions only, so that a method is parsed and priced without it.
    """

    code: BatchStage | LossStage
    cost: Callable[[Any], Cost]
    source: str
    argument: Argument | None = None
    kind: Literal["batch", "loss"] = "batch"
    mixes_labels: bool = False


STEPS = Argument("K", whole=True, low=1, high=1000)
