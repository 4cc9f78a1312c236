"""Attacks that follow the gradient inside the eps-ball and the image range [0, 1]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from moatlab.attacks.active import fallen, side_by_side
from moatlab.attacks.losses import cross_entropy, is_wrong, margin
from moatlab.attacks.norms import Norm, per_image, project, steepest, unit
from moatlab.attacks.probe import Probe, as_probe


def fgsm(model: Probe | nn.Module, x: Tensor, y: Tensor, *, eps: float, norm: Norm = "linf") -> Tensor:
    """x + eps sign(grad L(x, y)), clipped to [0, 1] (L2: the gradient's unit vector). Goodfellow et al., 2015."""
    return pgd(model, x, y, eps=eps, step_size=eps, steps=1, norm=norm)


def pgd(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """The last of `steps` iterates z <- P[z + step_size sign(grad L(z, y))] from `start`, or x. Madry et al., 2018.

    P projects onto the eps-ball around x and onto [0, 1], the start included.
    """
    probe = as_probe(model)
    z = x if start is None else project(start, x, eps, norm)
    for _ in range(steps):
        gradient, _ = probe.gradient(z, y)
        z = project(z + step_size * steepest(gradient, norm), x, eps, norm)
    return z


def strong_pgd(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Tensor:
    """PGD that keeps the first iterate that fools the model, start and last included; x itself where none does.

    An example is left alone from then on, so the work goes to those still standing. `start` may hold several points for
    each image (the first of all images, then the second of all): they are tried side by side, in fuller batches.
    """
    probe = as_probe(model)
    found = x.clone()
    rows, x, y = side_by_side(1 if start is None else len(start) // len(x), x, y)
    z = x if start is None else project(start, x, eps, norm)
    for step in range(steps + 1):
        last = step == steps  # nothing follows it: logits are enough
        gradient, logits = (z, probe.logits(z)) if last else probe.gradient(z, y, loss=loss)
        wrong = is_wrong(logits, y)
        if wrong.any():
            hits, standing = fallen(wrong, rows, len(found))
            found[rows[hits]] = z[hits]
            rows, x, y, z, gradient = (state[standing] for state in (rows, x, y, z, gradient))
        if last or not len(rows):
            break
        z = project(z + step_size * steepest(gradient, norm), x, eps, norm)
    return found


def cw(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    start: Tensor | None = None,
) -> Tensor:
    """`strong_pgd` on the margin max_{j != y} z_j - z_y of Carlini and Wagner, 2017."""
    return strong_pgd(model, x, y, eps=eps, step_size=step_size, steps=steps, norm=norm, start=start, loss=margin)


def mim(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    norm: Norm = "linf",
    momentum: float = 1.0,
) -> Tensor:
    """The last of `steps` iterates along g <- momentum g + grad / mean|grad|, from x. Dong et al., 2018."""
    probe = as_probe(model)
    z, g = x, torch.zeros_like(x)
    for _ in range(steps):
        gradient, _ = probe.gradient(z, y)
        size = per_image(gradient.abs().flatten(1).mean(1)).clamp(min=torch.finfo(x.dtype).tiny)
        g = momentum * g + gradient / size
        z = project(z + step_size * steepest(g, norm), x, eps, norm)
    return z


def uniform_in_ball(x: Tensor, radius: float, norm: Norm, generator: torch.Generator) -> Tensor:
    """Uniform in the ball around 0 of that radius, in the shape and memory format of x."""
    if norm == "linf":
        return torch.empty_like(x).uniform_(-radius, radius, generator=generator)
    direction = unit(torch.empty_like(x).normal_(generator=generator), norm)
    fraction = torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype) ** (1 / x[0].numel())
    return per_image(radius * fraction) * direction
