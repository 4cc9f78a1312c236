"""The loss of a stage, and stages of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, cast

from moatlab.methods.cost import Cost
from moatlab.methods.entry import Argument, StageEntry
from moatlab.methods.stages import STAGES
from moatlab.runtime.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from moatlab.methods.context import Context
    from moatlab.methods.entry import BatchStage, LossStage
    from moatlab.methods.language import Stage


def prepare_loss(stage: Stage, context: Context, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The loss of a stage on a batch, to be called where the weights are those to train. A batch is made at once."""
    entry, named = stage.entry, stage.arguments(context.threat)
    if entry.kind != "batch":
        return lambda: cast("LossStage", entry.code)(context, x, y, stage.value, **named)
    made, target = cast("BatchStage", entry.code)(context, x, y, stage.value, **named)
    if own := entry.loss:
        return lambda: own(context, x, made, target, **named)
    return lambda: context.cross_entropy(context.forward(made), target)


def add_stage(
    name: str,
    stage: BatchStage | LossStage,
    *,
    kind: Literal["batch", "loss", "replay"] = "batch",
    forwards: int = 0,
    input_backwards: int = 0,
    double_backwards: int = 0,
    trained: int = 1,
    argument: Argument | None = None,
    named: Mapping[str, Argument] | None = None,
) -> None:
    """Add a stage to the method language: `"mine | fast | pgd:2"`.

    `stage(context, x, y, value, **named)` returns images and targets (`batch`) or the loss (`loss`, `replay`); a replay
    stage gets each batch `value` times in a row and must be the only stage. What it puts into `context.memory` is there
    at the next step, and in checkpoints. `argument` describes the number after the colon, `named` further ones.

    `forwards`, `input_backwards` and `double_backwards` are its calls of the model in a step, apart from the `trained`
    forwards, whose backward pass reaches the weights; a run checks them.
    """
    known = STAGES.get(name)
    if not name.isidentifier() or name in ("moat", "imoat") or (known and known.code is not stage):
        raise UserError(f"'{name}' can't name a stage: it is in use, or not an identifier")
    if kind == "replay" and argument is None:
        raise UserError(f"'{name}' needs an argument: how often each batch is trained on")
    cost = Cost(forwards + trained, input_backwards, trained, double_backwards)
    STAGES[name] = StageEntry(stage, lambda _: cost, "your own", "", argument, kind, named=named or {})
