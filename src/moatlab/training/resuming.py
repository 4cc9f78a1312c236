"""The recipe of a run that is resumed: its own. Options given again are compared with it."""

from pathlib import Path
from typing import Any

from moatlab.training.making import make_recipe
from moatlab.training.presets import PRESETS
from moatlab.training.recipe import Recipe, load_recipe, read_recipe_file
from moatlab.training.run_folder import RunFolder


def resumed_recipe(
    folder: RunFolder,
    method: str | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    trust_model_code: bool = False,
    budget: bool = False,
    **options: Any,
) -> Recipe:
    """The recipe of the run in `folder`, with more epochs if given.

    A field that was not given, by option, preset or file, keeps its value. One that was given with another value is
    refused, as `RunFolder.check` does; whether a run can have more epochs is decided when it is loaded. `budget`: the
    epochs of the run were chosen for one, and those of a preset or file do not count.
    """
    before = load_recipe(folder.recipe)
    given = {name for name, value in options.items() if value is not None} | ({"method"} if method else set())
    if file or preset:
        given |= (read_recipe_file(Path(file)).keys() if file else set()) | PRESETS.get(preset or "", {}).keys()
        wanted = make_recipe(
            method or before.method, preset=preset, file=file, trust_model_code=trust_model_code, **options
        )
    else:
        wanted = make_recipe(method, file=folder.recipe, trust_model_code=trust_model_code, **options)
    given -= {"epochs"} if budget else set()
    recipe = before.model_copy(update={name: getattr(wanted, name) for name in given if name in Recipe.model_fields})
    folder.check(recipe, resume=True)
    return recipe
