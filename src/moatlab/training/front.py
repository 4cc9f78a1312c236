"""The most robust method for a budget, from what was measured: `front.json`, made by scripts/make_front.py."""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from moatlab.training.recipe import Recipe

BEST = "best"  # in the place of a method
Prefer = Literal["robust", "clean"]
SLACK = 1.02  # `imoat:1,2,3` costs 61 passes where `moat:2` costs 60
NEARLY = 0.8  # of the highest robust accuracy: what `prefer clean` gives up at most


class Interval(NamedTuple):
    low: float
    high: float


class Point(BaseModel):
    """A method and what was measured with it, as means over seeds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    options: dict[str, Any]  # of the recipe, besides those of the preset
    epochs: int
    passes: float
    flops: float
    clean: float
    robust: float  # under AutoAttack
    interval: Interval  # 95 %, of `robust`
    images: int  # of AutoAttack
    seeds: int
    source: str  # a file in docs/results


class Front(BaseModel):
    """All points of one setting."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: str
    data: str
    model: str
    width: int
    eps: str
    setting: str
    points: list[Point]

    def differs_from(self, recipe: Recipe) -> list[str]:
        """In what a recipe is unlike the measured runs, as words."""
        asked = {"data": recipe.data, "model": recipe.model, "width": recipe.width, "eps": recipe.threat.text}
        return [name for name, value in asked.items() if value != getattr(self, name)]


def load_fronts() -> dict[str, Front]:
    """By preset."""
    fields = json.loads((Path(__file__).parent / "front.json").read_text(encoding="utf-8"))
    return {one["preset"]: Front(**one) for one in fields["fronts"]}


def front_for(data: str) -> Front:
    """The front measured on this data set; for others that of the largest one."""
    return load_fronts()["mini" if data == "mini" else "laptop"]


def best_point(points: list[Point], costs: list[float], budget: float, prefer: Prefer = "robust") -> Point:
    """The most robust of the points that cost at most this; if none does, of the cheapest ones. `clean`: the highest
    clean accuracy among those with at least 80 % of that robust accuracy."""
    limit = max(budget, min(costs)) * SLACK
    within = [point for point, cost in zip(points, costs, strict=True) if cost <= limit]
    highest = max(point.robust for point in within)
    if prefer == "robust":
        return max(within, key=lambda point: (point.robust, -point.passes))
    return max((point for point in within if point.robust >= NEARLY * highest), key=lambda point: point.clean)
