"""The method language: `imoat:2,5,8` is a cycle of stages, one stage per epoch, with an exact cost.

    method := stage ("|" stage)*          the epochs go round the cycle, one stage each
    stage  := name [":" value (">" value)*]   `pgd:2>5>8`: the value grows over n equal parts of the run
    moat:K         is   mixup | fast | pgd:K            (Wang et al. 2021, algorithm 1)
    imoat:K1,K2,K3 is   mixup | fast | pgd:K1>K2>K3     (algorithm 2)

A method is data: nothing here needs torch, and the trainer knows no method by name.
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
    """One stage of a cycle: a name and the values that its argument takes over the parts of the run."""

    name: str
    values: tuple[float, ...] = ()

    def __str__(self) -> str:
        return self.name + (":" + ">".join(str(whole_if_whole(value)) for value in self.values) if self.values else "")

    def at(self, epoch: int, epochs: int) -> Self:
        """The stage with the one value it has at `epoch`: part i holds the epochs with i T <= t n < (i+1) T."""
        parts = len(self.values)
        return replace(self, values=(self.values[epoch * parts // epochs],)) if parts else self

    @property
    def value(self) -> Any:
        """The argument of a stage that `at` has settled: an int, a float, or None where there is none."""
        return self.values[0] if self.values else None

    @property
    def step_cost(self) -> Cost:
        return STAGES[self.name].cost(self.value)


@dataclass(frozen=True)
class Method:
    """A cycle of stages. `spec` is what the user typed, `str(method)` the cycle written out."""

    spec: str
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        return " | ".join(map(str, self.stages))

    def stage_at(self, epoch: int, epochs: int) -> Stage:
        return self.stages[epoch % len(self.stages)].at(epoch, epochs)

    def ends_cycle(self, epoch: int) -> bool:
        """Is this epoch the last of its cycle? Only there are a cycle's accuracies comparable."""
        return (epoch + 1) % len(self.stages) == 0

    def epochs_to_end_of_cycle(self, epochs: int) -> int:
        """The number of epochs nearest to `epochs` that ends at the last stage (the larger one in a tie)."""
        length = len(self.stages)
        return max(length, (2 * epochs + length) // (2 * length) * length)

    def cost(self, epochs: int) -> Cost:
        """The cost of a run in passes over the training set: the sum over its epochs of one step's cost."""
        return sum((self.stage_at(t, epochs).step_cost for t in range(epochs)), Cost())


def parse_method(spec: str) -> Method:
    """The method that a spec names, or a UserError that says what is wrong with it."""
    text = spec.strip()
    if not text:
        raise UserError("the method is empty; try moat:2, or fgsm, or 'mixup | fast | pgd:2>5>8'")
    stages: list[Stage] = []
    for part in text.split("|"):
        if not part.strip():
            raise UserError(f"'{spec}' has an empty stage; write one between each two |, as in 'mixup | fast | pgd:2'")
        stages += _parse_part(part.strip())
    return Method(text, tuple(stages))


def _parse_part(part: str) -> list[Stage]:
    name, colon, rest = (piece.strip() for piece in part.partition(":"))
    if name == "moat":
        if not rest or "," in rest or ">" in rest:
            raise UserError(f"'{part}': moat needs one number of steps, as in moat:2")
        return [Stage("mixup"), Stage("fast"), Stage("pgd", (_parse_value(STEPS, rest, part, "moat:2"),))]
    if name == "imoat":
        numbers = rest.split(",")
        if len(numbers) != 3:
            raise UserError(f"'{part}': imoat needs three numbers of steps, as in imoat:2,5,8")
        values = tuple(_parse_value(STEPS, number, part, "imoat:2,5,8") for number in numbers)
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
    plain = re.fullmatch(r"[-+.0-9a-zA-Z ]+", text)  # int() and float() also take 1_0 and the digits of any script
    if not plain or not argument.low <= value <= argument.high or math.isinf(value):
        raise UserError(f"'{part}': {argument.symbol} must be {argument}, as in {example}")
    return value
