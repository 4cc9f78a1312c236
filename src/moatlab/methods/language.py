"""The method language: `imoat:2,5,8` is a cycle of stages, one stage per epoch, with an exact cost.

    method := slot ("|" slot)*                   epoch t runs slot t modulo their number
    slot   := stage (">" (stage | value))*       `pgd:2>5>8`: one stage for each of n equal parts of the run
    stage  := name [":" value ("," name "=" value)*]           a bare value repeats the stage before it
    moat:K         is   mixup | fast | pgd:K            (Wang et al. 2021, algorithm 1)
    imoat:K1,K2,K3 is   mixup | fast | pgd:K1>K2>K3     (algorithm 2)

A method is data: parsing it needs no torch, and the trainer knows no method by name.
"""

import keyword
import math
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from moatlab.attacks.norms import Threat
from moatlab.methods.cost import Cost, whole_if_whole
from moatlab.methods.entry import STEPS, Argument, StageEntry
from moatlab.methods.stages import STAGES
from moatlab.runtime.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Stage:
    """One stage: a name, its value (None if it takes none), and the arguments that were given by name."""

    name: str
    value: Any = None
    named: tuple[tuple[str, float | str], ...] = ()

    def __str__(self) -> str:
        given = [] if self.value is None else [_written(self.value)]
        given += [f"{name}={_written(value)}" for name, value in self.named]
        return self.name + (":" + ",".join(given) if given else "")

    @property
    def entry(self) -> StageEntry:
        return STAGES[self.name]

    def arguments(self, threat: Threat) -> dict[str, Any]:
        """Named arguments for the stage's code: as given, or their defaults; `lambda` is passed as `lambda_`."""
        found: dict[str, Any] = {}
        for name, argument in self.entry.named.items():
            default = argument.default
            if argument.at_eps and threat.norm == "linf":
                default = argument.at_eps(threat.eps)
            found[f"{name}_" if keyword.iskeyword(name) else name] = dict(self.named).get(name, default)
        return found

    @property
    def step_cost(self) -> Cost:
        """In batches, without what an entry's `extra` adds."""
        return self.entry.cost(self.value)

    def work(self, position: int, batch: int, classes: int, awp: bool = False) -> Cost:
        """The cost in images of the step at this position of an epoch."""
        cost = self.step_cost.again() if awp else self.step_cost
        return cost * batch + (self.entry.extra(position, classes) if self.entry.extra else Cost())


Slot = tuple[Stage, ...]  # the stages of equal parts of the run


@dataclass(frozen=True)
class Method:
    """A cycle of slots. `spec` is the user's text, `str(method)` the cycle written out."""

    spec: str
    slots: tuple[Slot, ...]

    def __str__(self) -> str:
        return " | ".join(map(_write_slot, self.slots))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, in their order."""
        return tuple(stage for slot in self.slots for stage in slot)

    @property
    def replays(self) -> int:
        """How often in a row a batch is trained on: M for `free:M`, else 1."""
        first = self.stages[0]
        return int(first.value or 1) if first.entry.kind == "replay" else 1

    def stage_at(self, epoch: int, epochs: int) -> Stage:
        """The stage of epoch t of T: in its slot that of part i, where i T <= t n < (i+1) T."""
        slot = self.slots[epoch % len(self.slots)]
        return slot[min(epoch * len(slot) // epochs, len(slot) - 1)]  # beyond the run: the last, to time steps

    def ends_cycle(self, epoch: int) -> bool:
        """Whether this epoch is the last of its cycle. Accuracies of different stages are not comparable."""
        return (epoch + 1) % len(self.slots) == 0

    def epochs_to_end_of_cycle(self, epochs: int) -> int:
        """The nearest number of epochs that ends at the last slot (the larger one in a tie)."""
        length = len(self.slots)
        return max(length, (2 * epochs + length) // (2 * length) * length)

    def cost(self, epochs: int) -> Cost:
        """The cost of a run in passes over the training set, without what an entry's `extra` adds."""
        return sum((self.stage_at(t, epochs).step_cost for t in range(epochs)), Cost())

    def work(self, epochs: int, steps: int, batch: int, classes: int, awp: bool = False) -> Cost:
        """The whole cost of a run in images, for `steps` steps per epoch of batches of `batch` images."""
        total = Cost()
        for stage in (self.stage_at(epoch, epochs) for epoch in range(epochs)):
            if stage.entry.extra:
                total += sum((stage.work(position, batch, classes, awp) for position in range(steps)), Cost())
            else:
                total += stage.work(0, batch, classes, awp) * steps
        return total


def parse_method(spec: str) -> Method:
    """The method of a text such as `moat:2`; a UserError if it is malformed."""
    text = spec.strip()
    if not text:
        raise UserError("the method is empty; try moat:2, fgsm or 'mixup | fast | pgd:2>5>8'")
    slots: list[Slot] = []
    for part in text.split("|"):
        if not part.strip():
            raise UserError(f"'{spec}' has an empty stage; write one on each side of |, as in 'mixup | fast | pgd:2'")
        slots += _parse_slot(part.strip())
    method = Method(text, tuple(slots))
    if len(method.stages) > 1:
        for stage in method.stages:
            if stage.entry.kind == "replay":
                raise UserError(f"'{spec}': {stage} trains on each batch several times and must be the only stage")
    return method


def with_defaults_at(eps: float, spec: str) -> str:
    """The spec with the values after colons whose default depends on the L-inf radius filled in."""
    for stage, entry in STAGES.items():
        if entry.argument and entry.argument.at_eps:
            spec = re.sub(rf"\b{stage}\b(?!\s*:)", f"{stage}:{entry.argument.at_eps(eps)}", spec)
    return spec


def _write_slot(slot: Slot) -> str:
    text = str(slot[0])
    for before, stage in pairwise(slot):
        same = stage.value is not None and replace(stage, value=before.value) == before
        text += f">{_written(stage.value)}" if same else f" > {stage}"
    return text


def _written(value: float | str) -> str:
    return value if isinstance(value, str) else str(whole_if_whole(value))


def _parse_slot(text: str) -> list[Slot]:
    """The slot of a text between two |, or the three of moat and imoat."""
    name, _, rest = (piece.strip() for piece in text.partition(":"))
    if name in ("moat", "imoat"):
        needs, example = ("one number", "moat:2") if name == "moat" else ("three numbers", "imoat:2,5,8")
        numbers = rest.split(",")
        if not rest or len(numbers) != len(example.split(",")):
            raise UserError(f"'{text}': {name} needs {needs} of steps, as in {example}")
        values = [_parse_value(STEPS, number, text, example) for number in numbers]
        return [(Stage("mixup"),), (Stage("fast"),), tuple(Stage("pgd", value) for value in values)]
    slot: Slot = ()
    for part in text.split(">"):
        before = slot[-1] if slot else None
        if before and (entry := before.entry).argument and re.match(r"\s*([-+.\d]|$)", part):
            value = _parse_value(entry.argument, part, text, f"{before.name}:{entry.argument.default or 2}")
            slot += (replace(before, value=value),)
        else:
            slot += (_parse_stage(part.strip(), text),)
    return [slot]


def _parse_stage(part: str, slot: str) -> Stage:
    name, colon, rest = (piece.strip() for piece in part.partition(":"))
    if not name:
        raise UserError(f"'{slot}' has an empty stage; write one on each side of >, as in 'fast > pgd:2'")
    if name not in STAGES:
        if name in ("moat", "imoat"):
            raise UserError(f"'{slot}': {name} is a cycle of three stages and can't stand between >; write them out")
        known = [*STAGES, "moat", "imoat"]
        hint = did_you_mean(name, known) or f"; known are {', '.join(known)}"
        raise UserError(f"there is no method or stage '{name}'{hint}")
    entry = STAGES[name]
    argument, given = entry.argument, rest.split(",") if colon else []
    example = f"{name}:{argument.default or 2}" if argument else name
    value = argument.default if argument else None
    if given and "=" not in given[0] and (argument or not entry.named):
        if argument is None:
            raise UserError(f"'{slot}': {name} takes no number")
        value = _parse_value(argument, given.pop(0), slot, example)
    if argument and value is None:
        raise UserError(f"'{slot}': {argument.symbol} must be {argument}, as in {example}")
    return Stage(name, value, tuple(_parse_named(entry, name, one, slot, given) for one in given))


def _parse_named(entry: StageEntry, stage: str, text: str, slot: str, given: list[str]) -> tuple[str, float | str]:
    name, equals, value = (piece.strip() for piece in text.partition("="))
    if not entry.named:
        raise UserError(f"'{slot}': {stage} takes {'one number' if entry.argument else 'no number'}")
    if not equals or name not in entry.named:
        hint = did_you_mean(f"{name}=", [f"{one}=" for one in entry.named])
        raise UserError(f"'{slot}': {stage} has no argument '{text.strip()}'{hint}; it has {', '.join(entry.named)}")
    if sum(one.partition("=")[0].strip() == name for one in given) > 1:
        raise UserError(f"'{slot}': {name} is given twice")
    argument = entry.named[name]
    if argument.choices and value not in argument.choices:
        raise UserError(f"'{slot}': {name} must be {argument}{did_you_mean(value, argument.choices)}")
    value_of = "2," if entry.argument and entry.argument.default is None else ""
    example = f"{stage}:{value_of}{name}={argument.default or 1}"
    return name, value if argument.choices else _parse_value(argument, value, slot, example, name)


def _parse_value(argument: Argument, text: str, part: str, example: str, name: str = "") -> float:
    try:
        value: float = int(text) if argument.whole else float(text)
    except ValueError:
        value = math.nan
    plain = re.fullmatch(r"[-+.0-9a-zA-Z ]+", text)  # int() and float() also accept 1_0 and non-ASCII digits
    if not plain or not argument.low <= value <= argument.high or math.isinf(value):
        raise UserError(f"'{part}': {name or argument.symbol} must be {argument}, as in {example}")
    return value
