"""The entry of a stage: its code, the cost of a step, its arguments, its source and when to use it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from moatlab.methods.cost import Cost

if TYPE_CHECKING:
    from torch import Tensor
Batch: TypeAlias = "tuple[Tensor, Tensor]"
BatchStage: TypeAlias = "Callable[..., Batch]"  # (context, x, y, value, **named)
LossStage: TypeAlias = "Callable[..., Tensor]"


@dataclass(frozen=True)
class Argument:
    """A number (or one of `choices`) of a stage: the one after its colon, or one given by name."""

    symbol: str
    whole: bool = False
    low: float = 0
    high: float = math.inf
    default: float | str | None = None
    at_eps: Callable[[float], float] | None = None  # the default as a function of the L-inf radius
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} >= {self.low:g}" if math.isinf(self.high) else f"{kind} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class StageEntry:
    """A *batch* stage turns (x, y) into (x, target), trained with the cross-entropy (the target may be soft) or with
    its own `loss(context, x, adversarial, target, **named)`. A *loss* stage returns the loss itself. A *replay* stage
    does too, and gets each batch as often in a row as its argument is.

    `cost` maps the argument's value to the cost of one step in batches; `extra`, the step within the epoch and the
    number of classes to further images. Stage files import torch inside functions only, so that a method is parsed and
    priced without it.
    """

    code: BatchStage | LossStage
    cost: Callable[[Any], Cost]
    source: str
    use: str = ""  # when to use it, for `moat methods`
    argument: Argument | None = None
    kind: Literal["batch", "loss", "replay"] = "batch"
    mixes_labels: bool = False
    named: Mapping[str, Argument] = field(default_factory=dict)
    loss: LossStage | None = None
    extra: Callable[[int, int], Cost] | None = None
    linf_only: bool = False
    at_most: bool = False  # whether the cost is a bound, which its mean over the steps so far keeps
    keeps: bool = False  # whether it remembers something of each training image


STEPS = Argument("K", whole=True, low=1, high=1000)


def always(*kinds: int) -> Callable[[Any], Cost]:
    """The cost of a stage that does not depend on its argument."""
    return lambda _: Cost(*kinds)


def geometric(low: float, high: float) -> Callable[[float], float]:
    """A weight that is `low` at the radius 8/255, `high` at 16/255, and geometric between and beyond."""
    return lambda eps: round(float(low * (high / low) ** (255 * eps / 8 - 1)), 4)


def weight(default: float, at_eps: Callable[[float], float] | None = None) -> dict[str, Argument]:
    """The argument `lambda`, the weight of a regulariser."""
    return {"lambda": Argument("LAMBDA", default=default, at_eps=at_eps)}
