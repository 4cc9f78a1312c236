"""A model's portrait: robustness by radius, adversarial examples and the loss surface around one image.

A quick attack on few images, for illustration; results to report are in the card.
"""

import base64
import io
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import cross_entropy

from moatlab.attacks.draws import Draws
from moatlab.attacks.first_order import pgd, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, Threat, per_image
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.images import as_floats
from moatlab.evaluation.checks import images_at_once
from moatlab.evaluation.target import Target
from moatlab.runtime.console import Bar
from moatlab.runtime.device import device_of, full_precision
from moatlab.runtime.randomness import generator

IMAGES = 200  # for robustness by radius
RADII = 8  # equal steps, up to WIDEST or the training radius
WIDEST = {"linf": 16 / 255, "l2": 1.0, "l1": 24.0}
STEPS = 10
SHOWN = 8
SIDE = 25  # points of the loss surface per direction
SURE = 30.0  # losses are clipped here


class Curve(BaseModel, extra="forbid", strict=True):
    eps: list[float]
    accuracy: list[float]
    images: int


class Example(BaseModel, extra="forbid", strict=True, populate_by_name=True):
    """An image, its adversarial example and their difference, as PNG in base64, with the predicted classes."""

    label: Annotated[str, Field(alias="class")]
    predicted: str
    attacked: str
    image: str
    adversarial: str
    change: str
    magnified: float


class Surface(BaseModel, extra="forbid", strict=True, populate_by_name=True):
    image: int
    label: Annotated[str, Field(alias="class")]
    loss: list[list[float]]
    wrong: list[list[int]]  # 1 where the model misclassifies


class Portrait(BaseModel, extra="forbid", strict=True):
    """The content of `portrait.json`."""

    weights: str | None  # checksum of the model's file
    eps: str
    norm: Norm
    steps: int
    curve: Curve
    examples: Annotated[list[Example], Field(min_length=1)]
    surface: Surface

    @property
    def scale(self) -> int:
        """L-inf radii are shown in units of 1/255."""
        return 255 if self.norm == "linf" else 1

    @property
    def points(self) -> list[tuple[float, float]]:
        """The curve in displayed units, accuracy in percent."""
        pairs = zip(self.curve.eps, self.curve.accuracy, strict=True)
        return [(round(self.scale * eps, 3), 100 * share) for eps, share in pairs]


def draw_portrait(target: Target) -> Portrait:
    """Uses the batch size of an evaluation, so that large images fit into memory."""
    device, threat, names = device_of(target.model, torch.empty(0)), target.threat, target.images.classes
    with evaluating(target.model), full_precision(), Bar("portrait", 3) as bar:
        x, y = as_floats(target.images.test_x[:IMAGES].to(device)), target.images.test_y[:IMAGES].to(device)
        probe = Probe(target.model, batch_size=images_at_once(x[0].numel()))
        right = ~is_wrong(probe.logits(x), y)
        curve = robustness_by_radius(probe, x, y, right, threat)
        bar.update(1, "examples")
        examples = shown_examples(probe, x[:SHOWN], y[:SHOWN], threat, names)
        bar.update(2, "loss surface")
        index = int(right.int().argmax())  # the first correctly classified image, or image 0
        loss, wrong = loss_surface(probe, x[index : index + 1], y[index : index + 1], threat)
    weights = target.subject.weights
    surface = Surface(image=index, label=names[int(y[index])], loss=loss, wrong=wrong)
    return Portrait(
        weights=weights, eps=threat.text, norm=threat.norm, steps=STEPS, curve=curve, examples=examples, surface=surface
    )


def robustness_by_radius(probe: Probe, x: Tensor, y: Tensor, right: Tensor, threat: Threat) -> Curve:
    """A larger ball contains the smaller one, so a broken image stays broken and is not attacked again."""
    widest, at_once = max(WIDEST[threat.norm], threat.eps), probe.batch_size or len(x)
    radii = [widest * number / RADII for number in range(RADII + 1)]
    robust, accuracy = right.clone(), [right.float().mean().item()]
    for number, eps in enumerate(radii[1:]):
        left = robust.nonzero().squeeze(1)
        for rows in left.tensor_split(-(-len(left) // at_once)) if len(left) else ():
            points = _attack(strong_pgd, probe, x[rows], y[rows], Threat(threat.norm, eps), rows, number)
            robust[rows] = ~is_wrong(probe.logits(points), y[rows])
        accuracy.append(robust.float().mean().item())
    return Curve(eps=radii, accuracy=accuracy, images=len(y))


def _attack(
    attack: Callable[..., Tensor], probe: Probe, x: Tensor, y: Tensor, threat: Threat, rows: Tensor, number: int
) -> Tensor:
    eps, norm, start = threat.eps, threat.norm, Draws(0, rows.cpu()).in_ball(x, threat, "portrait start", number)
    return attack(probe, x, y, eps=eps, step_size=eps / 4, steps=STEPS, norm=norm, start=start)


def shown_examples(probe: Probe, x: Tensor, y: Tensor, threat: Threat, names: Sequence[str]) -> list[Example]:
    """The first adversarial iterate of an image, or the last iterate if it is robust. The difference is magnified so
    that eps spans the whole range."""
    found, last = (_attack(attack, probe, x, y, threat, torch.arange(len(y)), RADII) for attack in (strong_pgd, pgd))
    points = torch.where(per_image(is_wrong(probe.logits(found), y)), found, last)
    changes = points - x
    scale = threat.eps if threat.norm == "linf" else float(changes.abs().max().clamp(min=1e-12))
    answers = [probe.logits(z).argmax(1).tolist() for z in (x, points)]
    return [
        Example(
            label=names[int(y[i])],
            predicted=names[answers[0][i]],
            attacked=names[answers[1][i]],
            image=as_png(x[i]),
            adversarial=as_png(points[i]),
            change=as_png(changes[i] / scale / 2 + 0.5),
            magnified=0.5 / scale,
        )
        for i in range(len(y))
    ]


def loss_surface(probe: Probe, x: Tensor, y: Tensor, threat: Threat) -> tuple[list[list[float]], list[list[int]]]:
    """Cross-entropy at clip(x + a g + b r, 0, 1), and where the model misclassifies. g is the attack direction at x, r
    a random one, both of length eps; a and b are in [-1, 1]. If FGSM overshoots, the loss peaks before a = 1."""
    gradient, _logits = probe.gradient(x, y)
    noise = torch.randn(x.shape, generator=generator(0, "portrait direction")).to(x)
    toward, beside = (threat.eps * threat.steepest(direction) for direction in (gradient, noise))
    ticks = torch.linspace(-1, 1, SIDE, device=x.device)
    b, labels, losses, wrong = ticks.view(-1, 1, 1, 1), y.expand(SIDE), [], []
    for a in ticks:
        logits = probe.logits((x + a * toward + b * beside).clamp(0, 1))
        loss = cross_entropy(logits.double(), labels, reduction="none").clamp(max=SURE)
        losses.append([round(value, 4) for value in loss.tolist()])
        wrong.append(is_wrong(logits, labels).int().tolist())
    return losses, wrong


def as_png(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as a PNG in base64."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
