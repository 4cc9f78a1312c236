"""Attacks that follow the sign of the gradient inside the L-inf ball and the image range [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moatlab.attacks.probe import Probe, as_probe


def fgsm(model: Probe | nn.Module, x: Tensor, y: Tensor, *, eps: float) -> Tensor:
    """x + eps sign(grad L(x, y)), clipped to [0, 1]. Goodfellow, Shlens and Szegedy, 2015."""
    return pgd(model, x, y, eps=eps, step_size=eps, steps=1)


def pgd(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float,
    step_size: float,
    steps: int,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The last of `steps` iterates x <- P[x + step_size sign(grad L(x, y))]. Madry et al., 2018.

    P projects onto the eps-ball around x and onto [0, 1]. With a generator the start is x + U(-eps, eps),
    projected; without one it is x.
    """
    probe = as_probe(model)
    low, high = ball(x, eps)
    adversarial = x if generator is None else torch.clamp(x + uniform(x, eps, generator), low, high)
    for _ in range(steps):
        gradient, _ = probe.gradient(adversarial, y)
        adversarial = torch.clamp(adversarial + step_size * gradient.sign(), low, high)
    return adversarial


def ball(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The lowest and highest values that the L-inf ball around x has inside [0, 1]."""
    return (x - eps).clamp_(0, 1), (x + eps).clamp_(0, 1)


def uniform(x: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    """U(-radius, radius) in the shape and memory format of x."""
    return torch.empty_like(x).uniform_(-radius, radius, generator=generator)
