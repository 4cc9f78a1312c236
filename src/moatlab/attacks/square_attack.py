"""Square: random search that uses logits only. Andriushchenko, Croce, Flammarion and Hein, 2020."""

import math
from functools import lru_cache
from types import EllipsisType

import torch
from torch import Tensor

from moatlab.attacks.draws import Draws
from moatlab.attacks.losses import is_wrong, margin
from moatlab.attacks.norms import TINY, Eps, Norm, Threat, box, distance, per_image, unit
from moatlab.attacks.probe import Model, as_probe

QUERIES = 5000
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)  # queries after which the area of a square is halved


def square(
    model: Model,
    x: Tensor,
    y: Tensor,
    *,
    eps: Eps,
    norm: Norm = "linf",
    queries: range = range(QUERIES),
    start: Tensor | None = None,
    draws: Draws | None = None,
) -> Tensor:
    """The first adversarial point, or the best one found. Each query changes a random square, at the same place in all
    images, and keeps the change where it lowers the margin z_y - max_{j != y} z_j.

    To continue an earlier call, pass its result as `start` and the next `queries`.
    """
    probe, threat = as_probe(model), Threat.of(eps, norm)
    draws = draws or Draws.numbered(0, len(x))
    propose = _recolour if norm == "linf" else _move_mass
    best = _first_point(x, threat, draws) if start is None else start
    found = best.clone()
    rows = torch.arange(len(x), device=x.device)
    logits = probe.logits(best)
    loss, wrong = margin(logits, y), is_wrong(logits, y)
    for query in queries:
        if wrong.any():
            found[rows[wrong]] = best[wrong]
            left = ~wrong
            draws = draws.of(left)
            rows, x, y, best, loss = (state[left] for state in (rows, x, y, best, loss))
        if not len(rows):
            return found
        candidate = propose(best, x, threat, query, draws)
        logits = probe.logits(candidate)
        new_loss, wrong = margin(logits, y), is_wrong(logits, y)
        better = (new_loss > loss) | wrong
        best = torch.where(per_image(better), candidate, best)
        loss = torch.where(better, new_loss, loss)
    found[rows] = best
    return found


def _share(query: int) -> float:
    return math.ldexp(0.8, -sum(query > halving for halving in HALVINGS))


def _place(x: Tensor, side: int, down: float, right: float) -> tuple[EllipsisType, slice, slice]:
    """The index of a square. As in the authors' code, it never touches the last row or column (unless it fills all)."""
    top, left = int((x.shape[2] - side) * down), int((x.shape[3] - side) * right)
    return ..., slice(top, top + side), slice(left, left + side)


def _first_point(x: Tensor, threat: Threat, draws: Draws) -> Tensor:
    """Vertical stripes of +-eps (L-inf), or a tiling with small humps, scaled to norm eps (L2) or projected (L1)."""
    _, channels, height, width = x.shape
    if threat.norm == "linf":
        stripes = _signs(draws.each("square stripes", (channels, 1, width)))
        return (x + threat.eps * stripes.to(x)).clamp_(0, 1)
    side = max(height // 5, 1)
    border = (height - 5 * side) // 2
    delta = torch.zeros_like(x)
    for row in range(height // side):
        for column in range(width // side):
            (turned,) = draws.shared("square tiles", 1, row, column)
            signs = _signs(draws.each("square tile signs", (channels, 1, 1), row, column)).to(x)
            top, left = border + row * side, border + column * side
            place = delta[:, :, top : top + side, left : left + side]
            place += (_hump(side, turned > 0.5, threat.norm).to(x) * signs)[:, :, : place.shape[2], : place.shape[3]]
    return _in_ball(x, delta, threat)


def _in_ball(x: Tensor, delta: Tensor, threat: Threat) -> Tensor:
    if threat.norm == "l1":
        return threat.scaled(1 - 1e-6).project(x + delta, x)  # smaller, as in the authors' code
    return (x + threat.eps * unit(delta, "l2")).clamp_(0, 1)


def _recolour(best: Tensor, x: Tensor, threat: Threat, query: int, draws: Draws) -> Tensor:
    """Each channel of one square is moved up or down by 2 eps, that is, to the boundary of the ball."""
    _, channels, height, width = x.shape
    side = min(max(round(math.sqrt(_share(query) * height * width)), 1), height, width)
    down, right, *colours = draws.shared("square", 2 + channels, query)
    place = _place(x, side, down, right)
    push = 2 * threat.eps * _signs(torch.tensor(colours)).to(x).view(-1, 1, 1)
    candidate = best.clone()
    candidate[place] = torch.clamp(best[place] + push, *box(x[place], threat.eps))
    return candidate


def _move_mass(best: Tensor, x: Tensor, threat: Threat, query: int, draws: Draws) -> Tensor:
    """The perturbation in one square is removed. Its mass, and what the eps-ball has unused, goes to another square, as
    that square's old direction plus a hump of random sign."""
    _, channels, height, width = x.shape
    side = max(round(math.sqrt(_share(query) * height * width)), 3)
    side = min(side + (side + 1) % 2, height, width)
    *corners, turned = draws.shared("square", 5, query)
    to, source = _place(x, side, *corners[:2]), _place(x, side, *corners[2:])
    signs = _signs(draws.each("square signs", (channels, 1, 1), query)).to(x)

    delta = best - x
    norm, power = threat.norm, 1 if threat.norm == "l1" else 2
    unused = (threat.eps**power - per_image(distance(delta, norm)) ** power).clamp(min=0)
    both = torch.zeros_like(x[:1])
    both[to] = both[source] = 1
    mass = unused / channels + _norms(delta * both, norm) ** power
    old = delta[to] / (TINY + _norms(delta[to], norm))
    new = old + _hump(side, turned > 0.5, norm).to(x) * signs
    new = new / (TINY + _norms(new, norm)) * (channels * mass if norm == "l1" else mass.sqrt())
    delta[source] = 0
    delta[to] = new
    return _in_ball(x, delta, threat)


def _norms(delta: Tensor, norm: Norm) -> Tensor:
    """The norm over the last two dimensions: of each image's channels."""
    if norm == "l1":
        return delta.abs().sum((-2, -1), keepdim=True)
    return delta.square().sum((-2, -1), keepdim=True).sqrt()


def _signs(numbers: Tensor) -> Tensor:
    return torch.sign(2 * numbers - 1)


@lru_cache(maxsize=64)
def _hump(side: int, turned: bool, norm: Norm) -> Tensor:
    """A square of norm one, its upper half a positive hump, its lower half a negative one; or transposed."""
    upper = side // 2
    hump = torch.cat([_half_hump(upper, side, norm), -_half_hump(side - upper, side, norm)])
    hump = hump / _norms(hump, norm)
    return hump.T if turned else hump


def _half_hump(height: int, width: int, norm: Norm) -> Tensor:
    """At L-inf distance r from the centre: 1/(r+1)^p + 1/(r+2)^p + ... up to the border, p = 2 (L2) or 4 (L1)."""
    if not height:
        return torch.zeros(0, width, dtype=torch.float64)
    reach = max(height, width) // 2 + 1
    falling = 1 / torch.arange(1, reach + 1, dtype=torch.float64) ** (4 if norm == "l1" else 2)
    heights = torch.stack([falling[r:].cumsum(0)[-1] for r in range(reach)])
    vertical = (torch.arange(height) - height // 2).abs()
    horizontal = (torch.arange(width) - width // 2).abs()
    hump = heights[torch.maximum(vertical[:, None], horizontal[None, :])]
    return hump / _norms(hump, norm)
