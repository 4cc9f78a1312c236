"""Threat models: perturbations of norm at most eps, in L-inf, L2 or L1, inside the image range [0, 1].

Only tensor methods are used, so that a recipe's threat can be checked without importing torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from moatlab.runtime.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Norm = Literal["linf", "l2", "l1"]
Eps = float | str  # a number, or a text such as 8/255
NORM_NAMES = {"linf": "L-inf", "l2": "L2", "l1": "L1"}
USUAL_EPS = {"linf": "8/255", "l2": "128/255", "l1": "12"}
SPARSE = 0.01  # of the pixels are changed by a step in L1; Tramèr and Boneh, 2019
TINY = 1e-12  # the value in AutoAttack's reference code, for equal iterates


@dataclass(frozen=True)
class Threat:
    """The ball of radius eps around an image. `text` is eps as the caller wrote it, for output and files."""

    norm: Norm
    eps: float
    text: str = field(default="", compare=False)

    @classmethod
    def of(cls, eps: Eps | None = None, norm: str = "linf") -> Threat:
        """`eps` is a number or a text such as 8/255; None means `USUAL_EPS`. In L2 and L1 it may be above 1."""
        if norm not in NORM_NAMES:
            raise UserError(f"the norm must be one of {', '.join(NORM_NAMES)}, not '{norm}'")
        text = USUAL_EPS[norm] if eps is None else str(eps).strip()
        above, slash, below = text.partition("/")
        try:
            value = float(above) / float(below) if slash else float(above)
            value = value if eps is None or isinstance(eps, str) else float(eps)
        except (TypeError, ValueError, ZeroDivisionError):
            value = math.nan
        if not 0 < value < (1 if norm == "linf" else math.inf):
            bounds = f"{'between 0 and 1' if norm == 'linf' else 'above 0'}, such as {USUAL_EPS[norm]}"
            if norm == "linf" and 1 <= value <= 255:
                bounds = f"between 0 and 1; did you mean {text}/255?"
            raise UserError(f"--eps {text}: the radius must be a number {bounds}")
        return cls(norm, value, text if slash else readable(value, text))  # type: ignore[arg-type]  # one of the names

    @classmethod
    def to_train(cls, eps: Eps | None, norm: str) -> Threat:
        """Like `of`, but L1 is refused: stages and the monitor have no steps and noise for it."""
        if norm == "l1":
            raise UserError("training in L1 is not supported, only evaluation; the norm must be linf or l2")
        return cls.of(eps, norm)

    def __str__(self) -> str:
        return f"{NORM_NAMES[self.norm]} eps {self.text or readable(self.eps)}"

    def scaled(self, factor: float) -> Threat:
        """The ball with radius factor * eps; in L-inf below 1, which already reaches every image."""
        radius = factor * self.eps
        return Threat(self.norm, min(radius, 1 - 1e-6) if self.norm == "linf" else radius)

    def project(self, z: Tensor, x: Tensor) -> Tensor:
        """z projected onto the ball around x, then onto [0, 1] (which only moves it closer to x); in L1, onto both."""
        if self.norm == "linf":
            return z.clamp(*box(x, self.eps))
        if self.norm == "l1":
            from moatlab.attacks.l1 import project_l1

            return project_l1(z, x, self.eps)
        delta = z - x
        length = per_image(distance(delta, "l2"))
        return (x + delta / (length + TINY) * length.clamp(max=self.eps)).clamp_(0, 1)

    def clip(self, delta: Tensor) -> Tensor:
        """A perturbation projected onto the ball alone, L-inf or L2."""
        if self.norm == "linf":
            return delta.clamp(-self.eps, self.eps)
        return delta * (self.eps / per_image(distance(delta, "l2")).clamp(min=self.eps))

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of a step, of norm one: the gradient's sign (L-inf), its unit vector (L2), or the sign of its
        largest entries (L1; the very largest alone is steepest, but would change one pixel per step)."""
        if self.norm == "l1":
            from moatlab.attacks.l1 import largest_signs

            return largest_signs(gradient, SPARSE)
        return gradient.sign() if self.norm == "linf" else unit(gradient, "l2")

    def noise(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the ball around 0, L-inf or L2, in the shape and memory format of x."""
        import torch

        empty = torch.empty_like(x)
        if self.norm == "linf":
            return empty.uniform_(-self.eps, self.eps, generator=generator)
        normal = empty.normal_(generator=generator)
        return self.fill(normal, torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype))

    def fill(self, normal: Tensor, fraction: Tensor) -> Tensor:
        """A uniform point in the L2 ball around 0, from Gaussian noise and a number from U(0, 1) per image."""
        return per_image(self.eps * fraction ** (1 / normal[0].numel())) * unit(normal, "l2")


def readable(eps: float, text: str = "") -> str:
    """8/255 for the number 8/255, whose digits are 0.03137254901960784; short numbers as they are."""
    text, fraction = text or repr(eps), f"{round(eps * 255)}/255"
    return fraction if round(eps * 255) / 255 == eps and len(fraction) < len(text) else text


def box(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Lower and upper bounds of the L-inf ball around x inside [0, 1]."""
    return (x - eps).clamp_(0, 1), (x + eps).clamp_(0, 1)


def distance(delta: Tensor, norm: Norm) -> Tensor:
    """The norm of each image's perturbation."""
    flat = delta.flatten(1)
    if norm == "l1":
        return flat.abs().sum(1)
    return flat.abs().amax(1) if norm == "linf" else flat.square().sum(1).sqrt()


def unit(direction: Tensor, norm: Norm) -> Tensor:
    """Each image's direction scaled to norm one; zero stays zero. A tiny one is first divided by its largest entry, so
    that the squares of its entries do not underflow."""
    largest = distance(direction, "linf")
    small = (largest < 1e-8) & (largest > 0)
    direction = direction / per_image(largest.where(small, 1))
    return direction / (per_image(distance(direction, norm)) + TINY)


def per_image(values: Tensor) -> Tensor:
    """(N,) as (N, 1, 1, 1)."""
    return values.view(-1, 1, 1, 1)
