"""Square: random search that sees only logits. Andriushchenko, Croce, Flammarion and Hein, 2020."""

import math
from functools import lru_cache

import torch
from torch import Tensor, nn

from moatlab.attacks.draws import Draws
from moatlab.attacks.losses import is_wrong, margin
from moatlab.attacks.norms import TINY, Norm, Threat, box, distance, per_image, unit
from moatlab.attacks.probe import Probe, as_probe

QUERIES = 5000
# The share of the image that a square covers is halved after these queries.
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)


def square(
    model: Probe | nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    eps: float | str,
    norm: Norm = "linf",
    queries: range = range(QUERIES),
    start: Tensor | None = None,
    draws: Draws | None = None,
) -> Tensor:
    """The first point that fools the model, or the best one met. A square of the image is changed at random, at the
    same place for all examples, and the change kept where it lowers the margin z_y - max_{j != y} z_j.

    To continue an earlier call, give its result as `start` and the `queries` that follow.
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
        candidate = propose(best, x, threat.eps, query, draws)
        logits = probe.logits(candidate)
        new_loss, wrong = margin(logits, y), is_wrong(logits, y)
        better = (new_loss > loss) | wrong
        best = torch.where(per_image(better), candidate, best)
        loss = torch.where(better, new_loss, loss)
    found[rows] = best
    return found


def _share(query: int) -> float:
    return math.ldexp(0.8, -sum(query > halving for halving in HALVINGS))


def _corner(number: float, image: int, side: int) -> int:
    """The authors' code draws from 0 to image - side - 1: a square never touches the last row or column."""
    return int((image - side) * number)


def _first_point(x: Tensor, threat: Threat, draws: Draws) -> Tensor:
    """Vertical stripes of +-eps (L-inf), or the whole image tiled with small humps of norm eps in all (L2)."""
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
            place += (_hump(side, turned > 0.5).to(x) * signs)[:, :, : place.shape[2], : place.shape[3]]
    return (x + threat.eps * unit(delta, "l2")).clamp_(0, 1)


def _recolour(best: Tensor, x: Tensor, eps: float, query: int, draws: Draws) -> Tensor:
    """One square, each channel of it pushed by 2 eps up or down (which ends at the edge of the ball)."""
    _, channels, height, width = x.shape
    side = min(max(round(math.sqrt(_share(query) * height * width)), 1), height, width)
    down, right, *colours = draws.shared("square", 2 + channels, query)
    top, left = _corner(down, height, side), _corner(right, width, side)
    place = (slice(None), slice(None), slice(top, top + side), slice(left, left + side))
    push = 2 * eps * _signs(torch.tensor(colours)).to(x).view(-1, 1, 1)
    candidate = best.clone()
    candidate[place] = torch.clamp(best[place] + push, *box(x[place], eps))
    return candidate


def _move_mass(best: Tensor, x: Tensor, eps: float, query: int, draws: Draws) -> Tensor:
    """One square's perturbation is wiped out, and its mass (with what the eps-ball leaves unused) given to another
    square, which keeps its old direction and takes a hump of random sign."""
    _, channels, height, width = x.shape
    side = max(round(math.sqrt(_share(query) * height * width)), 3)
    side = min(side + (side + 1) % 2, height, width)
    *corners, turned = draws.shared("square", 5, query)
    top, left, top_from, left_from = (_corner(n, s, side) for n, s in zip(corners, (height, width) * 2, strict=True))
    to = (slice(None), slice(None), slice(top, top + side), slice(left, left + side))
    source = (slice(None), slice(None), slice(top_from, top_from + side), slice(left_from, left_from + side))
    signs = _signs(draws.each("square signs", (channels, 1, 1), query)).to(x)

    delta = best - x
    unused = (eps**2 - per_image(distance(delta, "l2")) ** 2).clamp(min=0)
    both = torch.zeros_like(x[:1])
    both[to] = both[source] = 1
    mass = _norms(delta * both) ** 2
    old = delta[to] / (TINY + _norms(delta[to]))
    new = old + _hump(side, turned > 0.5).to(x) * signs
    new = new / (TINY + _norms(new)) * (unused / channels + mass).sqrt()
    delta[source] = 0
    delta[to] = new
    return (x + eps * unit(delta, "l2")).clamp_(0, 1)


def _norms(delta: Tensor) -> Tensor:
    """The L2 norm of each image's channels."""
    return delta.square().sum((2, 3), keepdim=True).sqrt()


def _signs(numbers: Tensor) -> Tensor:
    return torch.sign(2 * numbers - 1)


@lru_cache(maxsize=64)
def _hump(side: int, turned: bool) -> Tensor:
    """A square of norm one whose upper half is a positive hump and whose lower half a negative one; or turned."""
    upper = side // 2
    hump = torch.cat([_half_hump(upper, side), -_half_hump(side - upper, side)])
    hump = hump / hump.square().sum().sqrt()
    return hump.T if turned else hump


def _half_hump(height: int, width: int) -> Tensor:
    """At distance r (of the larger coordinate) from the middle: 1/(r+1)^2 + 1/(r+2)^2 + ... up to the border."""
    if not height:
        return torch.zeros(0, width, dtype=torch.float64)
    reach = max(height, width) // 2 + 1
    falling = 1 / torch.arange(1, reach + 1, dtype=torch.float64) ** 2
    heights = torch.stack([falling[r:].cumsum(0)[-1] for r in range(reach)])
    vertical = (torch.arange(height) - height // 2).abs()
    horizontal = (torch.arange(width) - width // 2).abs()
    hump = heights[torch.maximum(vertical[:, None], horizontal[None, :])]
    return hump / hump.square().sum().sqrt()
