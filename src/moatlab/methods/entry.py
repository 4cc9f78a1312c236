"""What the method language knows of a stage: its argument, the cost of a step, its code and its source."""

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
    """What may follow a stage's colon."""

    symbol: str
    whole: bool
    low: float
    high: float = math.inf
    default: float | None = None
    at_eps: Callable[[float], float] | None = None  # the default of a run with this L-inf radius

    def __str__(self) -> str:
        if not self.whole:
            return f"a number >= {self.low:g}"
        return f"a whole number from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class StageEntry:
    """A *batch* stage makes (x, target) from (x, y), to be trained with cross-entropy; the target may be soft. It fits
    into anybody's loop. A *loss* stage returns the loss itself. `cost` is that of one step, by the argument's value.

    Stage files import torch inside functions only: a method can be parsed and priced without it.
    """

    code: BatchStage | LossStage
    cost: Callable[[Any], Cost]
    source: str
    argument: Argument | None = None
    kind: Literal["batch", "loss"] = "batch"
    mixes_labels: bool = False


STEPS = Argument("K", whole=True, low=1, high=1000)
