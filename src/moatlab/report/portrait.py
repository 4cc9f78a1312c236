"""A model's portrait, for a person to look at: robustness by radius, examples, and the loss around one of them.

None of it is a result to report (that is the card): a quick attack on few images.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moatlab.attacks.draws import Draws, start_in_ball
from moatlab.attacks.first_order import strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import steepest
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.batches import as_floats
from moatlab.evaluation.checks import device_of
from moatlab.evaluation.target import Subject
from moatlab.runtime import console
from moatlab.runtime.device import full_precision
from moatlab.runtime.randomness import generator
from moatlab.training.recipe import parse_eps

IMAGES = 200  # for robustness by radius
RADII = 8  # equal steps, up to 16/255 or the model's own radius
WIDEST = {"linf": 16 / 255, "l2": 1.0}
STEPS = 10
SHOWN = 8
SIDE = 25  # points of the loss surface along each direction
SURE = 30.0  # a loss beyond it is drawn as this


def draw_portrait(subject: Subject) -> dict[str, Any]:
    """What `portrait.json` holds."""
    x, y = subject.images.test_x[:IMAGES], subject.images.test_y[:IMAGES]
    device = device_of(subject.model, torch.empty(0))
    eps = parse_eps(subject.eps, subject.norm)
    with evaluating(subject.model), full_precision(), console.Bar("portrait", 3) as bar:
        images, labels = as_floats(x.to(device)), y.to(device)
        probe = Probe(subject.model)
        right = ~is_wrong(probe.logits(images), labels)
        curve = robustness_by_radius(probe, images, labels, right, max(WIDEST[subject.norm], eps), subject)
        bar.update(1, "examples")
        examples = shown_examples(probe, images[:SHOWN], labels[:SHOWN], eps, subject)
        bar.update(2, "loss surface")
        index = int(right.int().argmax())  # the first that is classified correctly, or the first of all
        surface = loss_surface(probe, images[index : index + 1], labels[index : index + 1], eps, subject)
    return {
        "weights": subject.weights, "eps": subject.eps, "norm": subject.norm, "steps": STEPS, "curve": curve,
        "examples": examples, "surface": {"image": index, "class": subject.images.classes[int(y[index])], **surface},
    }  # fmt: skip


def robustness_by_radius(
    probe: Probe, x: Tensor, y: Tensor, right: Tensor, widest: float, subject: Subject
) -> dict[str, Any]:
    """The share of images that stand at each radius. A larger ball holds the smaller one, so who fell stays down."""
    radii = [widest * number / RADII for number in range(RADII + 1)]
    standing, accuracy = right.clone(), [right.float().mean().item()]
    for number, eps in enumerate(radii[1:]):
        rows = standing.nonzero().squeeze(1)
        if len(rows):
            points = _attack(probe, x[rows], y[rows], eps, subject, rows, number)
            standing[rows] = ~is_wrong(probe.logits(points), y[rows])
        accuracy.append(standing.float().mean().item())
    return {"eps": radii, "accuracy": accuracy, "images": len(y)}


def _attack(probe: Probe, x: Tensor, y: Tensor, eps: float, subject: Subject, rows: Tensor, number: int) -> Tensor:
    draws = Draws(0, rows.cpu())
    start = start_in_ball(x, eps, subject.norm, draws, "portrait start", number)
    return strong_pgd(probe, x, y, eps=eps, step_size=eps / 4, steps=STEPS, norm=subject.norm, start=start)


def shown_examples(probe: Probe, x: Tensor, y: Tensor, eps: float, subject: Subject) -> list[dict[str, Any]]:
    """Images, what an attack makes of them, and the difference, magnified so that eps is the whole range."""
    points = _attack(probe, x, y, eps, subject, torch.arange(len(y)), RADII)
    changes = points - x
    scale = eps if subject.norm == "linf" else float(changes.abs().max().clamp(min=1e-12))
    names = subject.images.classes
    answers = [probe.logits(z).argmax(1).tolist() for z in (x, points)]
    return [
        {
            "class": names[int(y[i])], "predicted": names[answers[0][i]], "attacked": names[answers[1][i]],
            "image": as_png(x[i]), "adversarial": as_png(points[i]), "change": as_png(changes[i] / scale / 2 + 0.5),
            "magnified": 0.5 / scale,
        }
        for i in range(len(y))
    ]  # fmt: skip


def loss_surface(probe: Probe, x: Tensor, y: Tensor, eps: float, subject: Subject) -> dict[str, Any]:
    """Cross-entropy at x + a g + b r, clipped to [0, 1]: g is the attack's direction at x, r a random one, both of
    length eps; a and b go from -1 to 1. Where single steps mislead, the loss is low at a = 1 and high before it."""
    gradient, _logits = probe.gradient(x, y)
    toward = eps * steepest(gradient, subject.norm)
    noise = torch.randn(x.shape, generator=generator(0, "portrait direction"))
    beside = eps * steepest(noise.to(x), subject.norm)
    ticks = torch.linspace(-1, 1, SIDE, device=x.device)
    a, b = (grid.flatten()[:, None, None, None] for grid in torch.meshgrid(ticks, ticks, indexing="ij"))
    logits = probe.logits((x + a * toward + b * beside).clamp(0, 1))
    labels = y.expand(len(logits))
    loss = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none").clamp(max=SURE)
    grids = loss.view(SIDE, SIDE), is_wrong(logits, labels).view(SIDE, SIDE)
    return {"loss": [[round(value, 4) for value in row] for row in grids[0].tolist()], "wrong": grids[1].int().tolist()}


def as_png(image: Tensor) -> str:
    """An image (C, H, W) in [0, 1] as a PNG in base64."""
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels.squeeze(-1) if pixels.shape[2] == 1 else pixels)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
