"""The recipe for a budget: of a given method, or of the best one that was measured (`moat train best`)."""

from contextlib import suppress
from typing import Any

from torch import nn

from moatlab.data.sizes import Sizes, find_sizes
from moatlab.runtime import console
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import UserError
from moatlab.training.budget import Budget, price, within, written
from moatlab.training.estimate import measured_seconds
from moatlab.training.front import BEST, Front, Point, Prefer, best_point, front_for
from moatlab.training.making import draft_recipe, make_recipe
from moatlab.training.recipe import Recipe, validated


def recipe_within(
    budget: str,
    method: str | None,
    *,
    prefer: Prefer | None = None,
    machine: Machine | None = None,
    images: Sizes | None = None,
    own: nn.Module | None = None,
    **options: Any,
) -> Recipe:
    """The recipe with the most epochs that the budget allows. `method="best"`: that of the most robust run measured
    within such a budget, or with `prefer="clean"` of one with higher clean accuracy. Prints what it chose and why.
    `own`: the user's model, of which a copy is timed."""
    limit = Budget.parse(budget)
    given = {name: value for name, value in options.items() if value is not None}
    if "epochs" in given:
        raise UserError("--budget decides on the number of epochs; leave --epochs out")
    if prefer and method != BEST:
        raise UserError(f"--prefer {prefer} is for moat train best")
    if method == BEST and given.get("monitor") != "test":
        given.setdefault("on_collapse", "heal")  # what was robust where it was measured may collapse elsewhere
    first = draft_recipe(method, images=images, **given)
    sizes = images or find_sizes(first.data, first.image_size)
    second = measured_seconds(first, machine or Machine(), sizes, own) if limit.kind == "seconds" else 0.0

    def price_of(recipe: Recipe) -> float:
        return price(recipe, sizes, limit.kind, second)

    chosen = None
    if method == BEST:
        front = front_for(first.data)
        costs = {}
        for point in front.points:
            with suppress(UserError):  # a method that the user's options exclude
                fields = point.options | given | {"epochs": point.epochs}
                costs[point.method] = price_of(make_recipe(point.method, images=images, **fields))
        points = [point for point in front.points if point.method in costs]
        if not points:
            raise UserError("no method that was measured fits these options; name a method instead of best")
        chosen = best_point(points, [costs[point.method] for point in points], limit.amount, prefer or "robust")
        first = draft_recipe(chosen.method, images=images, **chosen.options | given)
    recipe = validated(within(limit, first, price_of).model_dump())
    epochs, passes = console.counted(recipe.epochs, "epoch"), f"{price(recipe, sizes, 'passes'):.4g} passes"
    cost = passes if limit.kind == "passes" else f"{passes}, about {written(limit.kind, price_of(recipe))}"
    console.note(f"within {limit}: {recipe.method}, {epochs}, {cost}")
    if chosen:
        _explain(chosen, front, recipe)
    return recipe


def _explain(point: Point, front: Front, recipe: Recipe) -> None:
    """Print what was measured, and how the recipe differs from it."""
    low, high = (100 * bound for bound in point.interval)
    console.note(
        f"measured with {console.counted(point.epochs, 'epoch')} ({point.passes:g} passes, "
        f"{console.counted(point.seeds, 'seed')}): clean {100 * point.clean:.1f} %, AutoAttack "
        f"{100 * point.robust:.1f} % ({low:.1f}-{high:.1f}, {point.images:,} images) at preset {front.preset}"
    )
    if different := front.differs_from(recipe):
        console.warn(f"not measured for your {', '.join(different)}; moat tune searches for a recipe of your own")
