"""What is evaluated: the model of a run folder, of a weights file, or of a factory; and the images it is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moatlab.attacks.norms import USUAL_EPS, Norm
from moatlab.data import KNOWN_SIZES, Images, load_images
from moatlab.evaluation.checks import check_norm
from moatlab.models import BUILT_IN, build_model
from moatlab.models.weights import hash_of, read_weights, set_weights
from moatlab.runtime.console import warn
from moatlab.runtime.errors import UserError, needs_trust
from moatlab.training.recipe import load_recipe, slug
from moatlab.training.setup import choose_device


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    name: str  # for a person
    source: dict[str, Any]  # where the model came from, and what `load_subject` needs to find it again
    card: Path  # where its card goes
    images: Images
    eps: str  # the radius and norm it was trained for; of a bare model the usual ones
    norm: Norm
    arguments: dict[str, Any]  # of a built-in model
    weights: str | None = None  # the checksum in the model's file

    @property
    def sha256(self) -> str:
        return model_sha256(self.model, self.arguments)


def model_sha256(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Names the exact weights, buffers that are in no file (a normalisation), and the variant of the model."""
    return hash_of(repr(arguments), [*model.named_parameters(), *model.named_buffers()])


def load_subject(
    target: Path | None,
    *,
    model: str | None = None,
    which: str = "last",
    data: str | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    trust_model_code: bool = False,
    read_images: Callable[[str, Path | None], Images] = load_images,
) -> Subject:
    """A run folder, a `.safetensors` or `.pt` file (with `model` where it does not say), or a factory alone."""
    if target is None and model is None:
        raise UserError("name a run folder, a weights file, or --model package.module:factory")
    tensors, description = read_weights(weights_file(target, which)) if target else ({}, {})
    model_name = model or description.get("model")
    if not isinstance(model_name, str):
        raise UserError(f"{target} does not say which model it holds; name it with --model")
    if model is None and model_name not in BUILT_IN and not trust_model_code:
        raise needs_trust(model_name, target, ", or name it yourself with --model")
    if target is None and model_name in BUILT_IN:
        raise UserError(f"--model {model_name} alone has no trained weights; name a run folder or a weights file too")
    own_data = description.get("data")
    if target is not None and (target / "recipe.toml").exists():
        own_data = load_recipe(target / "recipe.toml").data  # of a folder of images the weights know the name only
    if data is None and not isinstance(own_data, str):
        raise UserError(f"{target or model_name} does not say which images it is for; name them with --data")
    if data is None and str(own_data) not in KNOWN_SIZES and not Path(str(own_data)).expanduser().exists():
        raise UserError(
            f"{target} was trained on {own_data}, which is not in {Path.cwd()}; say where its images are with --data"
        )
    images = read_images(data or str(own_data), data_dir)
    if data in (None, own_data) and description.get("data_sha256") not in (None, images.sha256):
        warn(f"{images.name} here is not the {images.name} that this model was trained on")
    classes = description.get("classes") or len(images.classes)
    arguments = description.get("arguments") if model_name == description.get("model") else None
    if not isinstance(arguments, dict):
        arguments = guess_arguments(model_name, tensors, images) if model_name in BUILT_IN else {}
    network = build_model(model_name, classes=classes, arguments=arguments)
    if target is not None:
        set_weights(network, tensors, target)
    network.to(choose_device(device)).eval()
    source = {
        "model": model_name,
        "file": weights_file(target, which).name if target else None,
        "data": data or own_data,
    }
    if target is None:
        card, name = Path(f"{slug(model_name)}.eval.json"), model_name
    elif target.is_dir():
        card, name = card_path(target, which), f"{target} ({which})"
    else:
        card, name = target.with_name(f"{target.name}.eval.json"), str(target)
    eps, norm = str(description.get("eps", USUAL_EPS["linf"])), description.get("norm", "linf")
    check_norm(norm)
    return Subject(network, name, source, card, images, eps, norm, arguments, description.get("sha256"))


def card_path(run: Path, which: str) -> Path:
    return run / ("eval.json" if which == "last" else "eval_best.json")


def weights_file(target: Path, which: str) -> Path:
    if not target.is_dir():
        return target
    path = target / {"last": "model.safetensors", "best": "model_best.safetensors"}[which]
    if not path.exists():
        if (target / "run.json").exists():
            lost = "it was deleted; start the run again with --resume" if which == "last" else (
                "a best epoch is kept only where --holdout images were watched; use --which last"
            )  # fmt: skip
            raise UserError(f"the run {target} has no {path.name}: {lost}")
        inside = sorted(path.parent.glob("*/model.safetensors"))
        hint = f"; did you mean {inside[0].parent}?" if inside else "; name the folder of a run, such as runs/NAME"
        raise UserError(f"{target} holds no {path.name}{hint}")
    return path


def guess_arguments(name: str, tensors: dict[str, Tensor], images: Images) -> dict[str, Any]:
    """Arguments of a built-in model whose file does not tell them, as far as its weights do."""
    tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    first = tensors.get("blocks.0.conv1.weight" if name.startswith("wide") else "conv1.weight")
    width = {} if first is None else {"width": len(first)}
    variant = {} if name == "resnet18" else {"final_norm": "bn.weight" in tensors}
    return {**width, **variant, "mean": list(images.mean), "std": list(images.std)}
