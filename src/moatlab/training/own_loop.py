"""The batch of a stage, for a training loop of your own."""

from typing import Any, cast

import torch
from torch import nn

from moatlab.attacks.norms import Norm, Threat
from moatlab.data.given import images_and_labels
from moatlab.data.images import as_floats
from moatlab.methods.context import Context
from moatlab.methods.entry import Batch, BatchStage
from moatlab.methods.language import Stage, parse_method
from moatlab.models.outputs import check_labels, giving_logits
from moatlab.runtime.device import device_of
from moatlab.runtime.errors import UserError


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
    if len(stages) > 1:
        raise UserError(f"'{stage}' is not one stage; use parse_method('{stage}').stage_at(epoch, epochs)")
    (only,) = stages
    entry = only.entry
    if entry.kind != "batch" or entry.loss:
        raise UserError(f"'{only}' has a loss of its own and makes no batch; use a batch stage")
    if classes is None and entry.mixes_labels:
        raise UserError(f"'{only}' mixes labels; give the number of classes, as in classes=10")
    threat = Threat.to_train(eps, norm)
    x, y = images_and_labels(x, y)
    if classes is not None:
        check_labels(int(y.min()), int(y.max()), classes)
    x, y = (tensor.to(device_of(model, x)) for tensor in (as_floats(x), y))
    if generator is None:
        generator = torch.Generator(device=x.device).manual_seed(int(torch.randint(2**62, ())))
    context = Context(model, model, threat, generator, classes or 0, bn_in_attack)
    with giving_logits(model, y):
        return cast("BatchStage", entry.code)(context, x, y, only.value, **only.arguments(threat))
