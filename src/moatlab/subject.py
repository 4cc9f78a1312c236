"""What is evaluated: the model of a run folder, of a weights file, or of a factory; and the images it is tried on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.geometry import Norm
from moatlab.data import Images, load_images
from moatlab.display import warn
from moatlab.errors import UserError
from moatlab.models import BUILT_IN, build_model, read_weights, set_weights
from moatlab.preparation import choose_device
from moatlab.recipe import slug


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    name: str  # for a person
    source: dict[str, Any]  # where the model came from, and what `load_subject` needs to find it again
    card: Path  # where its card goes
    images: Images
    eps: str  # the radius and norm it was trained for; of a bare model the usual ones
    norm: Norm

    @property
    def sha256(self) -> str:
        """Names the exact weights."""
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def load_subject(
    target: Path | None,
    *,
    model: str | None = None,
    which: str = "last",
    data: str | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
) -> Subject:
    """A run folder, a `.safetensors` or `.pt` file (with `model` where it does not say), or a factory alone."""
    if target is None and model is None:
        raise UserError("name a run folder, a weights file, or --model package.module:factory")
    tensors, description = read_weights(weights_file(target, which)) if target else ({}, {})
    model_name = model or description.get("model")
    if not isinstance(model_name, str):
        raise UserError(f"{target} does not say which model it holds; name it with --model")
    if target is None and model_name in BUILT_IN:
        raise UserError(f"--model {model_name} alone has no trained weights; name a run folder or a weights file too")
    data = data or description.get("data")
    if not isinstance(data, str):
        raise UserError(f"{target or model_name} does not say which images it is for; name them with --data")
    images = load_images(data, data_dir)
    if description.get("data") == data and description.get("data_sha256") not in (None, images.sha256):
        warn(f"{data} here is not the same as the {data} that this model was trained on")
    classes = description.get("classes") or len(images.classes)
    arguments = description.get("arguments") if model_name == description.get("model") else None
    if arguments is None:
        arguments = guess_arguments(tensors, images) if model_name in BUILT_IN else {}
    network = build_model(model_name, classes=classes, arguments=arguments)
    if target is not None:
        set_weights(network, tensors, target)
    network.to(choose_device(device)).eval()
    source = {"model": model_name, "file": weights_file(target, which).name if target else None, "data": data}
    if target is None:
        card, name = Path(f"{slug(model_name)}.eval.json"), model_name
    elif target.is_dir():
        card, name = target / ("eval.json" if which == "last" else "eval_best.json"), f"{target} ({which})"
    else:
        card, name = target.with_name(f"{target.name}.eval.json"), str(target)
    return Subject(
        network, name, source, card, images, description.get("eps", "8/255"), description.get("norm", "linf")
    )


def weights_file(target: Path, which: str) -> Path:
    if not target.is_dir():
        return target
    path = target / {"last": "model.safetensors", "best": "model_best.safetensors"}[which]
    if not path.exists():
        inside = sorted(path.parent.glob("*/model.safetensors"))
        hint = f"; did you mean {inside[0].parent}?" if inside else ""
        raise UserError(f"{target} holds no {path.name}{hint}")
    return path


def guess_arguments(tensors: dict[str, Tensor], images: Images) -> dict[str, Any]:
    """Arguments of a built-in model whose file does not tell them, as far as its weights do."""
    first = tensors.get("conv1.weight")
    width = {} if first is None else {"width": len(first)}
    return {**width, "final_norm": "bn.weight" in tensors, "mean": list(images.mean), "std": list(images.std)}
