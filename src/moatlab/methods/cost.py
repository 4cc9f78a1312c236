"""Cost is counted, not guessed: calls of the model, in four kinds."""

from dataclasses import dataclass
from typing import Self

KINDS = ("forwards", "input_backwards", "weight_backwards", "double_backwards")


@dataclass(frozen=True)
class Cost:
    """How often the model is called, in four kinds; `passes` = all of them / 2 (one pass: forward and backward)."""

    forwards: int = 0
    input_backwards: int = 0
    weight_backwards: int = 0
    double_backwards: int = 0

    @property
    def passes(self) -> float:
        return (self.forwards + self.input_backwards + self.weight_backwards + self.double_backwards) / 2

    def __add__(self, other: Self) -> Self:
        return type(self)(*(a + b for a, b in zip(self.kinds, other.kinds, strict=True)))

    def __mul__(self, times: int) -> Self:
        return type(self)(*(times * kind for kind in self.kinds))

    @property
    def kinds(self) -> tuple[int, int, int, int]:
        return self.forwards, self.input_backwards, self.weight_backwards, self.double_backwards

    def as_dict(self, steps_per_epoch: int = 1) -> dict[str, float]:
        """As files and `--json` show it: in passes over the training set, whole numbers written as such."""
        values = {"passes": self.passes, **dict(zip(KINDS, self.kinds, strict=True))}
        return {name: whole_if_whole(value / steps_per_epoch) for name, value in values.items()}


def whole_if_whole(number: float) -> float:
    return int(number) if number == int(number) else number
