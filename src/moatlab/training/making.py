"""Makes a recipe in layers: a preset, then a file, then explicit options; later layers win."""

from pathlib import Path
from typing import Any

from moatlab.attacks.norms import Threat
from moatlab.data.known import SPECS
from moatlab.data.sizes import Sizes, find_sizes
from moatlab.methods.language import parse_method, with_defaults_at
from moatlab.runtime.errors import UserError, needs_trust
from moatlab.runtime.trust import is_trusted
from moatlab.training.front import BEST
from moatlab.training.presets import KIM_STD, PRESETS, default_preset, for_images, paper_epochs
from moatlab.training.recipe import NEEDED, Recipe, read_recipe_file, slug, validated
from moatlab.training.schedules import can_cycle

ADAMW_LR = 1e-3
MANY = 1000  # epochs


def make_recipe(
    method: str | None = None,
    *,
    preset: str | None = None,
    file: str | Path | None = None,
    trust_model_code: bool = False,
    images: Sizes | None = None,
    **options: Any,
) -> Recipe:
    """A recipe from a preset, a recipe file and explicit options; later ones win. The preset `own`, for folders and
    arrays, depends on the sizes of the images, which are read from file headers, or given as `images`.

    A file that names a user's own model (`package.module:factory`) makes training import that code. It is refused
    unless the model is also given as an option, `trust_model_code` is true, or it was named on the command line before.

    >>> make_recipe("moat:2", epochs=3).eps
    '16/255'
    """
    layers = read_recipe_file(Path(file)) if file else {}
    complete = layers.keys() >= NEEDED  # a run's own file: what it leaves out has its default, not the preset's value
    named = str(layers.get("model", ""))
    if ":" in named and options.get("model") is None and not (trust_model_code or is_trusted(named)):
        raise needs_trust(named, f"the recipe {file}")
    given = {name: value for name, value in options.items() if value is not None}
    if "eps" in given:
        norm = given.get("norm") or layers.get("norm") or "linf"
        given["eps"] = str(given["eps"]) if isinstance(given["eps"], str) else Threat.of(given["eps"], norm).text
    if given.get("norm", layers.get("norm", "linf")) != layers.get("norm", "linf"):
        layers.pop("eps", None)  # a radius has no meaning in another norm
    if given.get("optimizer", layers.get("optimizer", "sgd")) != layers.get("optimizer", "sgd"):
        layers.pop("lr", None)  # nor has a learning rate of another optimizer
    layers |= given
    if method is not None:
        layers["method"] = method
    if "method" not in layers:
        raise UserError("name a method, for example moat:2")
    preset = preset or default_preset(layers.get("data"))
    if preset not in PRESETS:
        raise UserError(f"there is no preset '{preset}'; known are {', '.join(PRESETS)}")
    start = PRESETS[preset] | (
        {"std": KIM_STD} if preset == "paper" and layers.get("data", "cifar10") == "cifar10" else {}
    )
    fields = {name: value for name, value in start.items() if name in NEEDED or not complete}
    fields |= {"eps": "128/255"} if layers.get("norm") == "l2" else {}
    fields |= ({"lr": ADAMW_LR} if layers.get("optimizer") == "adamw" else {}) | layers
    if "cycle_momentum" not in layers:
        fields["cycle_momentum"] = bool(fields.get("cycle_momentum")) and can_cycle(
            fields["schedule"], fields.get("optimizer", "sgd"), fields["momentum"]
        )
    for name in ("method", "then"):
        if isinstance(fields.get(name), str) and fields.get("norm", "linf") == "linf":
            fields[name] = with_defaults_at(Threat.of(fields["eps"]).eps, fields[name])
    if str(fields["model"]).startswith("wide_resnet") and "width" not in layers:
        fields["width"] = int(fields["width"]) * 5 // 2  # 160 = 10 * 16 channels, against 64 of the others
    fields.setdefault("epochs", paper_epochs(str(fields["method"]), str(fields["schedule"])))
    _fill_in(fields, images)
    recipe = validated(fields)
    if recipe.monitor == "holdout" and recipe.holdout == 0:
        raise UserError("--monitor holdout needs held-out images; use --holdout 1000 or --monitor=train")
    if recipe.monitor == "test" and recipe.on_collapse != "warn":
        raise UserError(f"--on-collapse {recipe.on_collapse} must not use test images; add --monitor=holdout or train")
    if recipe.check_every and (recipe.on_collapse != "heal" or recipe.monitor == "test"):
        raise UserError("--check-every is for --on-collapse heal with held-out or training images")
    if recipe.check_every and len(recipe.parsed_method.slots) > 1:  # robustness drops at each benign stage of a cycle
        raise UserError(f"--check-every is for methods of one stage, not for the cycle {recipe.parsed_method}")
    if recipe.on_collapse == "heal" and {stage.name for stage in parse_method(recipe.then).stages} != {"pgd"}:
        raise UserError(f"--then {recipe.then}: healing needs multi-step stages, such as pgd:2")
    return recipe


def draft_recipe(method: str | None, **options: Any) -> Recipe:
    """A recipe whose number of epochs, and for `best` its method, a budget will decide."""
    method = "standard" if method == BEST else method
    if method is not None:
        options["epochs"] = MANY * parse_method(method).replays
    return make_recipe(method, **options)


def _fill_in(fields: dict[str, Any], images: Sizes | None) -> None:
    """Add what depends on the images, after all other fields were checked."""
    draft = validated({"batch_size": 1, "holdout": 0, "monitor": "train"} | fields)
    is_folder = draft.data not in SPECS and Path(draft.data).expanduser().is_dir()
    if images is None and (is_folder or draft.image_size or not {"batch_size", "holdout"} <= fields.keys()):
        images = find_sizes(draft.data, draft.image_size)
    if images:
        if images.image_size != draft.image_size is not None:
            raise UserError(f"--image-size {draft.image_size} is for folders of images; these are in memory already")
        fields["image_size"] = images.image_size
        for name, value in for_images(images, draft.holdout if "holdout" in fields else None).items():
            fields.setdefault(name, value)
    fields.setdefault("monitor", "holdout" if str(fields["holdout"]) != "0" else "train")


def default_name(recipe: Recipe, preset: str | None, methods: str | None = None) -> str:
    """Method, data (or the preset of mini) and seed: `moat-2_mini_s0`."""
    where = preset or "mini" if recipe.data == "mini" else Path(recipe.data).name
    return f"{slug(methods or recipe.method)}_{slug(where)}_s{recipe.seed}"
