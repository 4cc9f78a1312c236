"""Auto-PGD in L1: sparse steps in balls that shrink to the radius. Croce and Hein, 2021 ("Mind the box")."""

from collections.abc import Callable

import torch
from torch import Tensor

from moatlab.attacks.active import keep_broken
from moatlab.attacks.l1 import largest_signs
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Threat, per_image
from moatlab.attacks.probe import Probe

WIDEST = 3  # the radius of the first ball, in eps
FEWER, SHORTER, SHORTEST = 1.5, 1.5, 10


def apgd_l1(
    probe: Probe,
    x: Tensor,
    labels: tuple[Tensor, ...],
    z: Tensor,
    found: Tensor,
    rows: Tensor,
    threat: Threat,
    *,
    loss: Callable[..., Tensor],
    steps: int,
    average: int,
) -> Tensor:
    """`found` with the adversarial points of its images `rows`: 3/10 of the steps in the ball of radius 3 eps, 3/10 in
    that of 2 eps, each from the best point of the one before, and the rest, which alone are judged, in that of eps."""
    wide = 3 * steps // 10
    for factor, count in ((WIDEST, wide), (2, wide), (1, steps - 2 * wide)):
        judged = (found, rows) if factor == 1 else None
        z = _climb(probe, x, labels, z, threat.scaled(factor), judged, loss=loss, steps=count, average=average)
    return found


def _climb(
    probe: Probe,
    x: Tensor,
    labels: tuple[Tensor, ...],
    z: Tensor,
    ball: Threat,
    judged: tuple[Tensor, Tensor] | None,
    *,
    loss: Callable[..., Tensor],
    steps: int,
    average: int,
) -> Tensor:
    """The point with the highest loss of z <- P[z + a s], s the sign of the largest gradients, of L1 norm one, and
    a = eps at first. With `judged`, adversarial points are written to `found`, and their images dropped.

    At each check, s gets 2/3 of the pixels that the best point changes. Where these are under 95 % of those at the
    check before, a is set to eps and z to the best point; else a is divided by 1.5, down to eps/10.
    """
    found, rows = judged or (None, x)
    z = ball.project(z, x)
    gradient, logits = probe.gradient(z, *labels, loss=loss, average=average)
    best, best_gradient, best_loss = z, gradient, loss(logits, *labels)
    changed = changed_pixels(z, x)
    share, size = changed / x[0].numel() / FEWER, torch.full_like(best_loss, ball.eps)
    every = max(int(0.04 * steps), 1)

    for step in range(1, steps + 2):
        wrong = is_wrong(logits, labels[0])
        if found is not None and average > 1:
            found[rows[wrong]] = z[wrong]
        elif found is not None and wrong.any():
            left = keep_broken(found, z, wrong, rows)
            labels = tuple(label[left] for label in labels)
            rows, x, z, gradient, best, best_gradient = (
                state[left] for state in (rows, x, z, gradient, best, best_gradient)
            )
            best_loss, changed, share, size = (state[left] for state in (best_loss, changed, share, size))
        if step > steps or not len(rows):
            break

        if step > 1 and (step - 1) % every == 0:
            before, changed = changed, changed_pixels(best, x)
            sparser = changed / before < 0.95
            share = changed / x[0].numel() / FEWER
            size = torch.where(sparser, ball.eps, size / SHORTER).clamp(min=ball.eps / SHORTEST)
            z = torch.where(per_image(sparser), best, z)
            gradient = torch.where(per_image(sparser), best_gradient, gradient)

        z = ball.project(z + per_image(size) * largest_signs(gradient, share), x)
        if step == steps:  # the last iterate needs no gradient
            logits = probe.logits(z)
        else:
            gradient, logits = probe.gradient(z, *labels, loss=loss, average=average)
        new_loss = loss(logits, *labels)
        better = new_loss > best_loss
        best = torch.where(per_image(better), z, best)
        best_gradient = torch.where(per_image(better), gradient, best_gradient)
        best_loss = torch.where(better, new_loss, best_loss)
    return best


def changed_pixels(z: Tensor, x: Tensor) -> Tensor:
    """For each image, as a float."""
    return (z != x).flatten(1).sum(1).to(x.dtype)
