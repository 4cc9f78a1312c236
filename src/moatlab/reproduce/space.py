"""What `moat tune` searches: choices and ranges, read from a TOML file."""

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from moatlab.methods.language import parse_method
from moatlab.runtime.errors import UserError, did_you_mean
from moatlab.training.recipe import Recipe

DEFAULT = Path(__file__).parent / "space.toml"
DECIDED = ("epochs", "seed", "data", "holdout", "monitor", "eps", "norm")  # by the budget, the search or the user
SHARES = ("warmup", "eps_warmup")  # of the epochs
PLACEHOLDER = re.compile(r"{(\w+)}")


class Range(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    low: int | float  # whole numbers are drawn between whole bounds
    high: int | float
    log: bool = False


Choice = list[Any] | Range
Suggest = Callable[[str, Choice], Any]  # a name and its choices -> one of them


@dataclass(frozen=True)
class Space:
    choices: dict[str, Choice]
    text: str  # of its file

    def draw(self, suggest: Suggest) -> dict[str, Any]:
        """Fields of a recipe. Placeholders are drawn only if the method has them."""
        drawn = {name: suggest(name, self.choices[name]) for name in self.choices if name in Recipe.model_fields}
        used = dict.fromkeys(PLACEHOLDER.findall(drawn["method"]))
        drawn["method"] = _filled(drawn["method"], {name: suggest(name, self.choices[name]) for name in used})
        return drawn


def read_space(path: Path | None = None) -> Space:
    """The space of a file, or the default one."""
    path = path or DEFAULT
    try:
        text = path.read_text(encoding="utf-8")
        fields = tomllib.loads(text)
    except OSError as error:
        raise UserError(f"--space {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--space {path} is not valid TOML: {error}") from None
    choices = {name: _choice(path, name, value) for name, value in fields.items()}
    if "method" not in choices:
        raise UserError(f"--space {path} needs a line method = [...]")
    methods = choices["method"]
    if isinstance(methods, Range) or not all(isinstance(one, str) for one in methods):
        raise UserError(f"--space {path}: method must be a list of methods")
    used = {name for method in methods for name in PLACEHOLDER.findall(method)}
    for name in choices.keys() - used:
        if name not in Recipe.model_fields:
            hint = did_you_mean(name, Recipe.model_fields)
            raise UserError(f"--space {path}: '{name}' is no field of a recipe, and no method has {{{name}}}{hint}")
        if name in DECIDED:
            raise UserError(f"--space {path}: '{name}' can't be searched; give it as an option, or leave it out")
    if missing := sorted(used - choices.keys()):
        raise UserError(f"--space {path}: a method has {{{missing[0]}}}, and there is no line '{missing[0]} = ...'")
    for method in methods:
        first = {name: _first(choices[name]) for name in PLACEHOLDER.findall(method)}
        parse_method(_filled(method, first))
    return Space(choices, text)


def _choice(path: Path, name: str, value: Any) -> Choice:
    if isinstance(value, list) and value:
        return value
    try:
        found = Range(**value)
    except (TypeError, ValidationError):
        raise UserError(f"--space {path}: {name} must be a list or {{ low = ..., high = ... }}") from None
    if not found.low <= found.high < math.inf or (found.log and found.low <= 0):
        raise UserError(f"--space {path}: {name} needs low <= high, and low > 0 with log = true")
    return found


def _first(choice: Choice) -> Any:
    return choice.low if isinstance(choice, Range) else choice[0]


def _filled(method: str, values: dict[str, Any]) -> str:
    def write(found: re.Match[str]) -> str:
        value = values[found[1]]
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return PLACEHOLDER.sub(write, method)
