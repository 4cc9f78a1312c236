"""A budget of training (`30min`, `60passes`, `2PFLOP`), and the epochs that fit into it."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

from moatlab.data.sizes import Sizes
from moatlab.runtime.console import duration
from moatlab.runtime.errors import UserError
from moatlab.training.recipe import TRAIN_SAMPLE, Recipe

Kind = Literal["seconds", "passes", "flops"]
UNITS: dict[str, tuple[Kind, float]] = {
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "pass": ("passes", 1),
    "passes": ("passes", 1),
    "TFLOP": ("flops", 1e12),
    "PFLOP": ("flops", 1e15),
}
LONGEST = 100_000  # epochs
MONITOR = 19  # forwards and input backwards for each watched image


@dataclass(frozen=True)
class Budget:
    kind: Kind
    amount: float

    @classmethod
    def parse(cls, text: str) -> Self:
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)\s*", text, re.ASCII)
        if not found or found[2] not in UNITS or not float(found[1]):
            raise UserError(f"--budget {text}: must be a time, passes or FLOPs, such as 30min, 2h, 60passes or 2PFLOP")
        kind, size = UNITS[found[2]]
        return cls(kind, float(found[1]) * size)

    def __str__(self) -> str:
        return written(self.kind, self.amount)

    def times(self, share: float) -> Self:
        return type(self)(self.kind, share * self.amount)


def written(kind: Kind, amount: float) -> str:
    if kind == "passes":
        return f"{amount:.4g} passes"
    return duration(amount) if kind == "seconds" else f"{amount / 1e12:.4g} TFLOP"


def forwards_of(recipe: Recipe, images: Sizes) -> float:
    """The work of a whole run, measurements included, in forwards of one image. Time is nearly proportional to it: an
    input backward takes as long as a forward, a weight backward twice as long."""
    trained, steps = images.train - recipe.holdout, _steps(recipe, images)
    watched = {"holdout": recipe.holdout, "train": min(TRAIN_SAMPLE, trained), "test": images.test}[recipe.monitor]
    watched = min(watched, recipe.monitor_images or watched) * -(-recipe.epochs // recipe.monitor_every)
    models = 1 if recipe.average == "none" else 2
    work = recipe.planned_work(steps, recipe.batch_size, images.classes)
    return work.flops(1) + MONITOR * models * (watched + images.test)


def price(recipe: Recipe, images: Sizes, kind: Kind, seconds_per_forward: float = 0.0) -> float:
    """The planned cost of a run in the unit of a budget. Times include measurements; passes and FLOPs are of training.
    `seconds_per_forward`: of one image, on this machine."""
    if kind == "seconds":
        return seconds_per_forward * forwards_of(recipe, images)
    if kind == "flops":
        flops = recipe.planned_flops(images)
        if flops is None:
            raise UserError("a budget in FLOPs needs a built-in model; give it as a time or in passes")
        return flops
    steps = _steps(recipe, images)
    return recipe.planned_work(steps, recipe.batch_size, images.classes).passes / (steps * recipe.batch_size)


def _steps(recipe: Recipe, images: Sizes) -> int:
    """Of an epoch."""
    trained = images.train - recipe.holdout
    if trained < recipe.batch_size:
        raise UserError(f"--batch-size {recipe.batch_size} is larger than the {trained} images to train on")
    return trained // recipe.batch_size


def cycle_of(recipe: Recipe) -> int:
    """Epochs after which a run may end: a whole cycle of stages, or all replays of a batch."""
    method = recipe.parsed_method
    return max(len(method.slots), method.replays)


def within(budget: Budget, recipe: Recipe, price_of: Callable[[Recipe], float]) -> Recipe:
    """The recipe with the most epochs, in whole cycles, whose price is within the budget."""
    cycle = cycle_of(recipe)

    def lasting(cycles: int) -> Recipe:
        return recipe.model_copy(update={"epochs": cycles * cycle})

    least = price_of(lasting(1))
    if least > budget.amount:
        short = f"one epoch of {recipe.method}" if cycle == 1 else f"one cycle of {recipe.method} ({cycle} epochs)"
        unit, size = {"seconds": ("s", 1.0), "passes": ("passes", 1.0), "flops": ("TFLOP", 1e12)}[budget.kind]
        enough = f"{math.ceil(10 * least / size) / 10:g}{unit}"
        raise UserError(f"--budget is too small: {short} needs {enough}, and {budget} were given")
    most = LONGEST // cycle
    fits = 1
    while fits < most and price_of(lasting(min(2 * fits, most))) <= budget.amount:
        fits = min(2 * fits, most)
    next_step = fits
    while next_step := next_step // 2:
        if fits + next_step <= most and price_of(lasting(fits + next_step)) <= budget.amount:
            fits += next_step
    return lasting(fits)
