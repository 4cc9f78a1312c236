"""The method language: `imoat:2,5,8` is a cycle of stages, one stage per epoch, with an exact cost.

    method := stage ("|" stage)*              epoch t runs stage t modulo their number
    stage  := name [":" value (">" value)*]   `pgd:2>5>8`: one value for each of n equal parts of the run
    moat:K         is   mixup | fast | pgd:K            (Wang et al. 2021, algorithm 1)
    imoat:K1,K2,K3 is   mixup | fast | pgd:K1>K2>K3     (algorithm 2)

A method is data: parsing it needs no torch, and the trainer knows no method by name.
"""

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Self

from moatlab.methods.cost import Cost, whole_if_whole
from moatlab.methods.entry import STEPS, Argument
from moatlab.methods.stages import STAGES
from moatlab.runtime.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Stage:
    """One stage of a cycle: a name, and the value of its argument in each part of the run."""

    name: str
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.name + (":" + ">".join(str(whole_if_whole(value)) for value in self.values) if self.values else "")

    def at(self, epoch: int, epochs: int) -> Self:
        """The stage with its one value at `epoch` t of T: that of part i, where i T <= t n < (i+1) T."""
        parts = len(self.values)
        return replace(self, values=(self.values[epoch * parts // epochs],)) if parts else self

    @property
    def value(self) -> Any:
        """The argument of a stage with one value: an int, a float, or None if it takes none."""
        return self.values[0] if self.values else None

    @property
    def step_cost(self) -> Cost:
        return STAGES[self.name].cost(self.value)


@dataclass(frozen=True)
class Method:
    """A cycle of stages. `spec` is the user's text, `str(method)` the cycle written out."""

    spec: str
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages))

    def stage_at(self, epoch: int, epochs: int) -> Stage:
        return self.stages[epoch % len(self.stages)].at(epoch, epochs)

    def ends_cycle(self, epoch: int) -> bool:
        """Whether this epoch is the last of its cycle. Accuracies of different stages are not comparable."""
        return (epoch + 1) % len(self.stages) == 0

    def epochs_to_end_of_cycle(self, epochs: int) -> int:
        """The nearest number of epochs that ends at the last stage (the larger one in a tie)."""
        length = len(self.stages)
        return max(length, (2 * epochs + length) // (2 * length) * length)

    def cost(self, epochs: int) -> Cost:
        """The cost of a run in passes over the training set: the sum over its epochs of one step's cost."""
        return sum((self.stage_at(t, epochs).step_cost for t in range(epochs)), Cost())


def parse_method(spec: str) -> Method:
    """The method of a text such as `moat:2`; a UserError if it is malformed."""
    text = spec.strip()
    if not text:
        raise UserError("the method is empty; try moat:2, fgsm or 'mixup | fast | pgd:2>5>8'")
    stages: list[Stage] = []
    for part in text.split("|"):
        if not part.strip():
            raise UserError(f"'{spec}' has an empty stage; write one on each side of |, as in 'mixup | fast | pgd:2'")
        stages += _parse_part(part.strip())
    return Method(text, tuple(stages))


def with_defaults_at(eps: float, spec: str) -> str:
    """The spec with the arguments whose default depends on the L-inf radius filled in."""
    for stage, entry in STAGES.items():
        if entry.argument and entry.argument.at_eps:
            spec = re.sub(rf"\b{stage}\b(?!\s*:)", f"{stage}:{entry.argument.at_eps(eps)}", spec)
    return spec


def _parse_part(part: str) -> list[Stage]:
    name, colon, rest = (piece.strip() for piece in part.partition(":"))
    if name in ("moat", "imoat"):
        needs, example = ("one number", "moat:2") if name == "moat" else ("three numbers", "imoat:2,5,8")
        numbers = rest.split(",")
        if not rest or len(numbers) != len(example.split(",")):
            raise UserError(f"'{part}': {name} needs {needs} of steps, as in {example}")
        values = tuple(_parse_value(STEPS, number, part, example) for number in numbers)
        return [Stage("mixup"), Stage("fast"), Stage("pgd", values)]
    if name not in STAGES:
        known = [*STAGES, "moat", "imoat"]
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise UserError(f"there is no method or stage '{name}'{hint}")
    argument = STAGES[name].argument
    if argument is None:
        if colon:
            raise UserError(f"'{part}': {name} takes no number")
        return [Stage(name)]
    if not colon and argument.default is not None:
        return [Stage(name, (argument.default,))]
    example = f"{name}:{argument.default or 2}"
    return [Stage(name, tuple(_parse_value(argument, number, part, example) for number in rest.split(">")))]


def _parse_value(argument: Argument, text: str, part: str, example: str) -> float:
    try:
        value: float = int(text) if argument.whole else float(text)
    except ValueError:
        value = math.nan
    plain = re.fullmatch(r"[-+.0-9a-zA-Z ]+", text)  # int() and float() also accept 1_0 and non-ASCII digits
    if not plain or not argument.low <= value <= argument.high or math.isinf(value):
        raise UserError(f"'{part}': {argument.symbol} must be {argument}, as in {example}")
    return value
