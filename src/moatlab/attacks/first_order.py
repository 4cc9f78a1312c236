"""Gradient attacks inside the eps-ball and the image range [0, 1]: FGSM, PGD, CW and MIM."""

from collections.abc import Callable

import torch
from torch import Tensor

from moatlab.attacks.active import keep_broken, side_by_side
from moatlab.attacks.losses import cross_entropy, is_wrong, margin
from moatlab.attacks.norms import Eps, Norm, Threat, per_image
from moatlab.attacks.probe import Model, as_probe


def fgsm(model: Model, x: Tensor, y: Tensor, *, eps: Eps, norm: Norm = "linf") -> Tensor:
    """x + eps sign(grad L(x, y)), clipped to [0, 1] (L2: the gradient's unit vector). Goodfellow et al., 2015."""
    threat = Threat.of(eps, norm)
    return pgd(model, x, y, eps=threat.eps, step_size=threat.eps, steps=1, norm=norm)


def pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """The last of `steps` iterates z <- P[z + step_size sign(grad L(z, y))] from `start`, or x. Madry et al., 2018.

    P projects onto the eps-ball around x and onto [0, 1]; the start is projected too.
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    z = x if start is None else threat.project(start, x)
    for _ in range(steps):
        gradient, _ = probe.gradient(z, y)
        z = threat.project(z + step_size * threat.steepest(gradient), x)
    return z


def strong_pgd(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Tensor:
    """PGD that returns the first adversarial iterate, from the start to the last, or x. Broken images are dropped.

    `start` may hold several points per image (the first of all images, then the second of all), tried side by side.
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    found = x.clone()
    rows, x, y = side_by_side(1 if start is None else len(start) // len(x), x, y)
    z = x if start is None else threat.project(start, x)
    for step in range(steps + 1):
        last = step == steps  # needs no gradient
        gradient, logits = (z, probe.logits(z)) if last else probe.gradient(z, y, loss=loss)
        wrong = is_wrong(logits, y)
        if wrong.any():
            left = keep_broken(found, z, wrong, rows)
            rows, x, y, z, gradient = (state[left] for state in (rows, x, y, z, gradient))
        if last or not len(rows):
            break
        z = threat.project(z + step_size * threat.steepest(gradient), x)
    return found


def cw(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """`strong_pgd` on the margin max_{j != y} z_j - z_y of Carlini and Wagner, 2017."""
    return strong_pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, norm=norm, start=start, loss=margin)


def mim(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    momentum: float = 1.0,
) -> Tensor:
    """The last of `steps` iterates along g <- momentum g + grad / mean|grad|, from x. Dong et al., 2018."""
    probe, threat = as_probe(model), Threat.of(eps, norm)
    z, g = x, torch.zeros_like(x)
    for _ in range(steps):
        gradient, _ = probe.gradient(z, y)
        size = per_image(gradient.abs().flatten(1).mean(1)).clamp(min=torch.finfo(x.dtype).tiny)
        g = momentum * g + gradient / size
        z = threat.project(z + step_size * threat.steepest(g), x)
    return z
