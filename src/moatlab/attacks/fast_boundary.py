"""Targeted FAB: the adversarial point nearest to the image. Croce and Hein, 2020."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moatlab.attacks.active import keep_broken, side_by_side
from moatlab.attacks.auto_pgd import classes_of_ranks
from moatlab.attacks.losses import is_wrong, logit_gap
from moatlab.attacks.norms import Eps, Norm, Threat, distance, per_image
from moatlab.attacks.probe import Model, as_probe

ALPHA_MAX, ETA, BETA = 0.1, 1.05, 0.9


def fab(
    model: Model, x: Tensor, y: Tensor, *, eps: Eps, norm: Norm = "linf", ranks: Sequence[int] = (2,), steps: int = 100
) -> Tensor:
    """The first adversarial iterate within eps of x, or x. `ranks` are the target classes by their rank in the logits
    of x (2: the runner-up), tried side by side. Deterministic.

    The boundary with target t is approximated by the hyperplane where the linearised z_t - z_y is zero. With d1 and d2
    the steps that project z and x onto it inside [0, 1], and alpha = min(|d1| / (|d1| + |d2|), 0.1),

        z <- (1 - alpha) (z + 1.05 d1) + alpha (x + 1.05 d2)

    and an adversarial iterate is moved back towards x: z <- x + 0.9 (z - x).
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    target = classes_of_ranks(probe.logits(x), ranks)
    found = x.clone()
    rows, x, y = side_by_side(len(ranks), x, y)
    z = x
    for _ in range(steps):
        w, logits = probe.gradient(z, y, target, loss=logit_gap)
        gap = logit_gap(logits, y, target)
        d1 = onto_hyperplane(z, w, gap, norm)
        d2 = onto_hyperplane(x, w, gap + (w * (x - z)).flatten(1).sum(1), norm)
        a1, a2 = (distance(d, norm).clamp(min=1e-8) for d in (d1, d2))
        alpha = per_image((a1 / (a1 + a2)).clamp(max=ALPHA_MAX))
        z = ((1 - alpha) * (z + ETA * d1) + alpha * (x + ETA * d2)).clamp_(0, 1)

        wrong = is_wrong(probe.logits(z), y)
        hit = wrong & (distance(z - x, norm) <= threat.eps)
        z, crossed = torch.where(per_image(wrong), x + BETA * (z - x), z), z
        if hit.any():
            left = keep_broken(found, crossed, hit, rows)
            rows, x, y, target, z = (state[left] for state in (rows, x, y, target, z))
            if not len(rows):
                break
    return found


def onto_hyperplane(z: Tensor, w: Tensor, gap: Tensor, norm: Norm) -> Tensor:
    """The shortest d with gap + <w, d> = 0 and z + d in [0, 1]; if none exists, the one that comes closest.

    Every pixel moves against the sign of the gap, by min(t v, room) with v = 1 (L-inf) or |w| (L2), so t solves

        sum |w| min(t v, room) = |gap|.

    The left side is concave and piecewise linear in t, so Newton's method from t = 0 never overshoots, passes each
    breakpoint at most once and ends at the exact solution. In L1 the pixels with the largest |w| move first, each as
    far as it has room.
    """
    flat, z = w.flatten(1), z.flatten(1)
    away = flat.sign() * torch.where(gap >= 0, -1, 1)[:, None]
    room = torch.where(away > 0, 1 - z, z)
    size = flat.abs()
    if norm == "l1":
        return (away * moves_of_largest(size, room, gap.abs().nan_to_num(0)[:, None])).view_as(w)
    speed = torch.ones_like(size) if norm == "linf" else size
    gain, limit = size * speed, size * room
    need = gap.abs().nan_to_num(0)[:, None]
    t = torch.zeros_like(need)
    everything = torch.finfo(t.dtype).max
    for _ in range(size.shape[1] + 1):
        moving = t * speed < room
        slope = (gain * moving).sum(1, keepdim=True)
        root = (need - torch.where(moving, 0, limit).sum(1, keepdim=True)) / slope
        # Slope 0 means that no pixel can move further: no room or no gradient.
        new = torch.where(slope > 0, root, everything).nan_to_num(everything, everything).maximum(t)
        if torch.equal(new, t):
            break
        t = new
    return (away * torch.minimum(t * speed, room)).view_as(w)


def moves_of_largest(size: Tensor, room: Tensor, need: Tensor) -> Tensor:
    """The moves of smallest sum, within the room, with sum |w| moves = need; all of the room if that is too little."""
    size, order = size.sort(1, descending=True)
    gains = size * room.gather(1, order)
    gained = (need - (gains.cumsum(1) - gains)).clamp(min=0).minimum(gains)
    moves = torch.where(gained == gains, room.gather(1, order), gained / size)
    return torch.zeros_like(room).scatter(1, order, torch.where(size > 0, moves, 0))
