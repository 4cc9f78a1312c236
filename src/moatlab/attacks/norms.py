"""The ball around an image, in L-inf and L2, and the image range [0, 1]."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Norm = Literal["linf", "l2"]
NORMS: tuple[Norm, ...] = ("linf", "l2")
USUAL_EPS: dict[Norm, str] = {"linf": "8/255", "l2": "128/255"}
TINY = 1e-12  # as in the reference code of AutoAttack, whose iterates ours equal


def ball(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest values that the L-inf ball around x has inside [0, 1]."""
    return (x - eps).clamp_(0, 1), (x + eps).clamp_(0, 1)


def project(z: Tensor, x: Tensor, eps: float, norm: Norm) -> Tensor:
    """z pulled back into the eps-ball around x, then into [0, 1] (which brings it only closer to x)."""
    if norm == "linf":
        return torch.clamp(z, *ball(x, eps))
    delta = z - x
    length = per_image(distance(delta, norm))
    return (x + delta / (length + TINY) * length.clamp(max=eps)).clamp_(0, 1)


def distance(delta: Tensor, norm: Norm) -> Tensor:
    """The norm of each image's perturbation."""
    flat = delta.flatten(1)
    return flat.abs().amax(1) if norm == "linf" else flat.square().sum(1).sqrt()


def steepest(gradient: Tensor, norm: Norm) -> Tensor:
    """The step of length one along which a linear loss grows most: the sign (L-inf) or the unit vector (L2)."""
    return gradient.sign() if norm == "linf" else unit(gradient, norm)


def unit(direction: Tensor, norm: Norm) -> Tensor:
    """Each image's direction scaled to norm one; zero stays zero. A very small one is first divided by its largest
    entry, or the squares of its entries would vanish."""
    largest = distance(direction, "linf")
    small = (largest < 1e-8) & (largest > 0)
    direction = direction / per_image(torch.where(small, largest, 1))
    return direction / (per_image(distance(direction, norm)) + TINY)


def per_image(values: Tensor) -> Tensor:
    """(N,) as (N, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)
