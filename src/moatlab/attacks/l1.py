"""The geometry of the L1 ball inside [0, 1]."""

import torch
from torch import Tensor

AT_ONCE = 2**21  # values that are sorted together, to limit the memory


def project_l1(z: Tensor, x: Tensor, eps: float) -> Tensor:
    """The point nearest to z (in L2) of those in [0, 1] with L1 distance at most eps from x. Croce and Hein, 2021.

    Each pixel's change is reduced by the same amount a, but not below 0, and at least to [0, 1]:

        |z' - x| = clamp(|z - x| - a, 0, room),   a >= 0 the smallest with sum |z' - x| <= eps.

    The sum is piecewise linear in a, so a is found exactly from its sorted breakpoints, in float64. Pixels are rounded
    towards x: rounding errors, which often have the same sign in all pixels, would add up to a point outside the ball.
    """
    parts = x.numel() // AT_ONCE + 1
    pairs = zip(z.tensor_split(parts), x.tensor_split(parts), strict=True)
    return torch.cat([_projected(*pair, eps) for pair in pairs])


def _projected(z: Tensor, x: Tensor, eps: float) -> Tensor:
    centre, end = x.double().flatten(1), z.double().flatten(1)
    change = end - centre
    size, outside = change.abs(), torch.maximum(end - 1, -end).clamp_(min=0)
    breaks, order = torch.cat([outside, size], 1).sort(1)
    shrinking = torch.where(order < size.shape[1], 1, -1).cumsum(1)[:, :-1]  # pixels, from each breakpoint to the next
    first = (size - outside).sum(1, keepdim=True)
    totals = torch.cat([first, first - (shrinking * breaks.diff(dim=1)).cumsum(1)], 1)
    last = ((totals > eps).sum(1, keepdim=True) - 1).clamp(0, shrinking.shape[1] - 1)
    amount = breaks.gather(1, last) + (totals.gather(1, last) - eps) / shrinking.gather(1, last).clamp(min=1)
    amount = torch.where(first > eps, amount, 0)
    left = (size - outside.maximum(amount)).clamp_(min=0)
    moved = (centre + change.sign() * left).to(x.dtype)
    moved = torch.where((moved.double() - centre).abs() > left, torch.nextafter(moved, x.flatten(1)), moved)
    return moved.clamp_(0, 1).view_as(x)


def largest_signs(gradient: Tensor, share: Tensor | float) -> Tensor:
    """The sign of the largest entries, this share of each image's pixels, and 0 elsewhere, scaled to L1 norm one."""
    flat = gradient.flatten(1)
    pixels = flat.shape[1]
    index = ((1 - torch.as_tensor(share, device=flat.device).expand(len(flat))) * pixels).clamp(0, pixels - 1).long()
    size = flat.abs()
    smallest = size.sort(1).values.gather(1, index[:, None])
    signs = torch.where(size >= smallest, flat.sign(), 0)
    return (signs / (signs.abs().sum(1, keepdim=True) + 1e-10)).view_as(gradient)
