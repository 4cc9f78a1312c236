"""Load what is evaluated: a run folder, a weights file or a factory, with its test images."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import Tensor, nn

from moatlab.attacks.norms import Threat
from moatlab.data.images import Images
from moatlab.data.loading import KNOWN_SIZES, load_images
from moatlab.models.flops import STEMS
from moatlab.models.registry import BUILT_IN, build_model
from moatlab.models.weights import hash_of, read_weights, set_weights
from moatlab.runtime.console import warn
from moatlab.runtime.device import choose_device
from moatlab.runtime.errors import UserError, adding_to_errors, needs_trust
from moatlab.runtime.files import RunFile
from moatlab.runtime.trust import is_trusted
from moatlab.training.recipe import load_recipe, slug
from moatlab.training.run_folder import RunFolder


class Subject(BaseModel, extra="forbid", strict=True):
    """The origin of a model, in its card; `load_target` can load it again from this."""

    name: str  # shown to users
    model: str  # a built-in model, or package.module:factory
    file: str | None
    data: str
    sha256: str  # see `model_sha256`
    weights: str | None  # the checksum in its file
    unfinished: str | None = None  # progress of its run, in the file only if that is not finished


@dataclass(frozen=True)
class Target:
    model: nn.Module
    subject: Subject
    card: Path  # path of its evaluation card
    images: Images
    threat: Threat  # of its training, or the default one

    @property
    def sha256(self) -> str:
        return self.subject.sha256


def model_sha256(model: nn.Module, arguments: dict[str, Any]) -> str:
    """Of weights, arguments and all buffers, also those in no file (normalisation)."""
    return hash_of(repr(arguments), [*model.named_parameters(), *model.named_buffers()])


def load_target(
    path: Path | None,
    *,
    model: str | None = None,
    which: str = "last",
    data: str | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    trust_model_code: bool = False,
    read_images: Callable[..., Images] = load_images,
) -> Target:
    """Load a run folder, a `.safetensors` or `.pt` file (with `model` if it names none), or a factory alone."""
    if path is None and model is None:
        raise UserError("name a run folder, a weights file, or --model package.module:factory")
    file = weights_file(path, which) if path else None
    tensors, description = read_weights(file) if file else ({}, {})
    model_name = model or description.get("model")
    if not isinstance(model_name, str):
        raise UserError(f"{path} does not name its model; name it with --model")
    instead = "" if model or model_name in BUILT_IN else "; or name a function that builds the model with --model"
    if instead and not (trust_model_code or is_trusted(model_name)):
        raise needs_trust(model_name, path, instead)
    if path is None and model_name in BUILT_IN:
        raise UserError(f"--model {model_name} alone has no trained weights; name a run folder or a weights file too")
    own_data = description.get("data")
    if path is not None and (path / RunFile.RECIPE).exists():
        own_data = load_recipe(path / RunFile.RECIPE).data  # weights have only the name of a folder
    wanted = data or own_data
    if not isinstance(wanted, str):
        raise UserError(f"{path or model_name} does not name its images; name them with --data")
    if data is None and wanted not in KNOWN_SIZES and not Path(wanted).expanduser().exists():
        raise UserError(f"{path} was trained on {own_data}, which is not in {Path.cwd()}; give its path with --data")
    images = read_images(wanted, data_dir, image_size=image_size_for(wanted, own_data, description))
    if wanted == own_data and description.get("data_sha256") not in (None, images.sha256):
        warn(f"the images of {images.name} differ from those that this model was trained on")
    classes = description.get("classes") or len(images.classes)
    arguments = description.get("arguments") if model_name == description.get("model") else None
    if not isinstance(arguments, dict):
        arguments = guess_arguments(model_name, tensors, images) if model_name in BUILT_IN else {}
    with adding_to_errors(instead):
        network = build_model(model_name, classes=classes, arguments=arguments)
        if path is not None:
            set_weights(network, tensors, path)
    network.to(choose_device(device)).eval()
    if path is None:
        card, name = Path(f"{slug(model_name)}.eval.json"), model_name
    elif path.is_dir():
        card, name = card_path(path, which), f"{path} ({which})"
    else:
        card, name = path.with_name(f"{path.name}.eval.json"), str(path)
    subject = Subject(
        name=name,
        model=model_name,
        file=file.name if file else None,
        data=wanted,
        sha256=model_sha256(network, arguments),
        weights=description.get("sha256"),
        unfinished=progress_of(path) if path is not None and path.is_dir() else None,
    )
    threat = Threat.of(description.get("eps"), str(description.get("norm", "linf")))
    return Target(network, subject, card, images, threat)


def progress_of(run: Path) -> str | None:
    """Such as `interrupted after step 120 of 819`; None if the run is finished or has no record."""
    try:
        record = RunFolder(run).read_current_record()
    except UserError:
        return None
    return None if record.status == "finished" else record.progress


def image_size_for(data: str, own_data: Any, description: dict[str, Any]) -> int | None:
    """The side that a folder's images are resized to: that of the training images, also for another folder."""
    if data in KNOWN_SIZES or not Path(data).expanduser().is_dir():
        return None
    image_size, shape = description.get("image_size"), description.get("image_shape")
    if image_size is None and data != own_data and isinstance(shape, list) and shape[0] == shape[1]:
        image_size = shape[0]
    return image_size if isinstance(image_size, int) and image_size > 0 else None


def card_path(run: Path, which: str) -> Path:
    return run / {"last": RunFile.CARD, "best": RunFile.BEST_CARD, "average": RunFile.AVERAGE_CARD}[which]


def weights_file(target: Path, which: str) -> Path:
    if not target.is_dir():
        return target
    path = target / {"last": RunFile.MODEL, "best": RunFile.BEST_MODEL, "average": RunFile.AVERAGE_MODEL}[which]
    if path.exists():
        return path
    if (target / RunFile.RECORD).exists():
        reason = {
            "last": "it was deleted; start the run again with --resume",
            "best": "a best epoch is kept only with --holdout images; use --which last",
            "average": "weights are averaged only with --average; use --which last",
        }[which]
        raise UserError(f"the run {target} has no {path.name}: {reason}")
    inside = sorted(target.glob(f"*/{RunFile.MODEL}"))
    hint = f"; did you mean {inside[0].parent}?" if inside else "; name the folder of a run, such as runs/NAME"
    raise UserError(f"{target} has no {path.name}{hint}")


def guess_arguments(name: str, tensors: dict[str, Tensor], images: Images) -> dict[str, Any]:
    """Arguments of a built-in model, from its weights, where the file does not have them."""
    tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    first = tensors.get("blocks.0.conv1.weight" if name.startswith("wide") else "conv1.weight")
    width = {} if first is None else {"width": len(first)}
    variant: dict[str, Any] = {} if name == "resnet18" else {"final_norm": "bn.weight" in tensors}
    kernels = {kernel: stem for stem, (kernel, _, _) in STEMS.items() if stem != "3x3"}
    if (first_kernel := tensors.get("conv1.weight")) is not None and first_kernel.shape[-1] in kernels:
        variant["stem"] = kernels[first_kernel.shape[-1]]
    return {**width, **variant, "mean": list(images.mean), "std": list(images.std)}
