"""The loss of a stage, its batch for a training loop of your own, and stages of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.attacks.norms import Norm, Threat
from moatlab.data.given import images_and_labels
from moatlab.data.images import as_floats
from moatlab.methods.context import Context
from moatlab.methods.cost import Cost
from moatlab.methods.entry import Argument, StageEntry
from moatlab.methods.language import Stage, parse_method
from moatlab.methods.stages import STAGES
from moatlab.models.outputs import check_labels, giving_logits
from moatlab.runtime.device import device_of
from moatlab.runtime.errors import UserError

if TYPE_CHECKING:
    from moatlab.methods.entry import Batch, BatchStage, LossStage


def stage_loss(stage: Stage, context: Context, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a stage on a batch."""
    entry = STAGES[stage.name]
    if entry.kind == "loss":
        return cast("LossStage", entry.code)(context, x, y, stage.value)
    x, target = cast("BatchStage", entry.code)(context, x, y, stage.value)
    return F.cross_entropy(context.forward(x), target)


def make_batch(
    model: nn.Module,
    x: Any,
    y: Any = None,
    stage: str | Stage | None = None,
    *,
    eps: float | str,
    classes: int | None = None,
    norm: Norm = "linf",
    bn_in_attack: str = "train",
    generator: torch.Generator | None = None,
) -> Batch:
    """The images and targets of a batch stage, for a training loop of your own. The model is not changed.

        stage = moatlab.parse_method("moat:2").stage_at(epoch, epochs)
        x, target = moatlab.make_batch(model, x, y, stage, eps="8/255", classes=10)
        loss = F.cross_entropy(model(x), target)

    `x`, `y`: images as floats (N, C, H, W) in [0, 1] or bytes (N, H, W, C), and labels; or a `Dataset` or `DataLoader`
    of both in their place. `eps` is a number or text. Stages that mix labels need `classes`. Draws come from
    `generator`, on the device of the model; without one they are seeded from PyTorch's global generator.
    """
    if stage is None:
        raise UserError('name a stage, as in stage="fast"')
    stages = parse_method(stage).stages if isinstance(stage, str) else (stage,)
    if len(stages) > 1 or len(stages[0].values) > 1:
        raise UserError(f"'{stage}' is not one stage; use parse_method('{stage}').stage_at(epoch, epochs)")
    (only,) = stages
    entry = STAGES[only.name]
    if entry.kind != "batch":
        raise UserError(f"'{only}' has a loss of its own and makes no batch; use a batch stage")
    if classes is None and entry.mixes_labels:
        raise UserError(f"'{only}' mixes labels; give the number of classes, as in classes=10")
    threat = Threat.of(eps, norm)
    x, y = images_and_labels(x, y)
    if classes is not None:
        check_labels(int(y.min()), int(y.max()), classes)
    x, y = (tensor.to(device_of(model, x)) for tensor in (as_floats(x), y))
    if generator is None:
        generator = torch.Generator(device=x.device).manual_seed(int(torch.randint(2**62, ())))
    context = Context(model, model, threat, generator, classes or 0, bn_in_attack)
    with giving_logits(model, y):
        return cast("BatchStage", entry.code)(context, x, y, only.value)


def add_stage(
    name: str, stage: BatchStage, *, forwards: int = 0, input_backwards: int = 0, argument: Argument | None = None
) -> None:
    """Add a batch stage to the method language: `"mine | fast | pgd:2"`.

    `stage(context, x, y, value)` returns images and targets. `forwards` and `input_backwards` are its calls of the
    model in a step, without the trained pass; a run checks them. `argument` describes the number after the colon.
    """
    known = STAGES.get(name)
    if not name.isidentifier() or name in ("moat", "imoat") or (known and known.code is not stage):
        raise UserError(f"'{name}' can't name a stage: it is in use, or not an identifier")
    STAGES[name] = StageEntry(stage, lambda _: Cost(forwards + 1, input_backwards, 1), "your own", argument)
