"""The cost of training, counted in four kinds of calls of the model.

A weight backward counts for each forward that weight gradients flow back through (with or without input gradients), an
input backward if they flow to the input only, a double backward where a gradient's own graph is differentiated.
"""

from dataclasses import astuple, dataclass, fields
from typing import Self

# FLOPs of a double backward per forward: 4.09 to 4.11, counted on PreAct ResNet-18 at three sizes (tests/methods).
DOUBLE = 4.1


@dataclass(frozen=True)
class Cost:
    """In batches (a stage's step), or in images (a run). `passes` is half their sum: a forward and a backward."""

    forwards: int = 0
    input_backwards: int = 0
    weight_backwards: int = 0
    double_backwards: int = 0

    @property
    def kinds(self) -> tuple[int, ...]:
        return astuple(self)

    @property
    def passes(self) -> float:
        return sum(self.kinds) / 2

    def again(self) -> Self:
        """The trained forwards and their backwards once more, as adversarial weight perturbation needs."""
        return self + type(self)(self.weight_backwards, 0, self.weight_backwards)

    def flops(self, forward: float) -> float:
        """Floating-point operations if a forward takes `forward` of them. An input backward takes as many, a weight
        backward, which also passes through all layers, twice as many."""
        forwards, inputs, weights, doubles = self.kinds
        return forward * (forwards + inputs + 2 * weights + DOUBLE * doubles)

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(sum, zip(self.kinds, other.kinds, strict=True)))

    def __mul__(self, times: int) -> Self:
        return type(self)(*(times * kind for kind in self.kinds))

    def as_dict(self, images: int = 1) -> dict[str, float]:
        """In passes over a training set of `images`, as in files and `--json`; whole numbers as integers."""
        values = {"passes": self.passes, **vars(self)}
        return {name: whole_if_whole(value / images) for name, value in values.items()}


KINDS = tuple(field.name for field in fields(Cost))


def whole_if_whole(number: float) -> float:
    return int(number) if number == int(number) else number
