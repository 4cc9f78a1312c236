"""Load what is evaluated: a run folder, a weights file, a factory or a model from elsewhere, with its test images."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from moatlab.attacks.norms import Threat
from moatlab.data.images import Images, as_floats
from moatlab.data.listing import list_folder, shape_of
from moatlab.data.loading import KNOWN_SIZES, load_images
from moatlab.models.bare import read_bare
from moatlab.models.foreign import Foreign, is_foreign, is_named, load_foreign, resolve
from moatlab.models.registry import BUILT_IN, build_bare, build_model
from moatlab.models.weights import hash_of, read_weights, set_weights
from moatlab.runtime.console import warn
from moatlab.runtime.device import choose_device
from moatlab.runtime.errors import UserError, adding_to_errors, needs_trust, users_code
from moatlab.runtime.files import RunFile
from moatlab.runtime.trust import is_trusted
from moatlab.training.recipe import load_recipe, slug
from moatlab.training.run_folder import RunFolder

ASKED = 200  # test images, to choose between two networks with the same weights


class Subject(BaseModel, extra="forbid", strict=True):
    """The origin of a model, in its card; `load_target` can load it again from this."""

    name: str  # shown to users
    model: str  # a built-in model, package.module:factory, or the `kind` of a model from elsewhere
    file: str | None  # beside the card; "." is the folder of the card
    data: str
    sha256: str  # see `model_sha256`
    weights: str | None  # the checksum in its file
    unfinished: str | None = None  # progress of its run, in the file only if that is not finished
    preprocessing: str | None = None  # what was assumed about images, in the file only if something was
    chosen_on_test: bool = False  # the epoch, by test accuracy; in the file only if so


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
    """Load a run folder, a `.safetensors` or `.pt` file (with `model` if it names none), a factory alone, or a model
    from elsewhere (see `load_foreign`)."""
    if path is None and model is None:
        raise UserError("name a run folder, a weights file, a model from a hub, or --model package.module:factory")
    if path is None and is_named(model):
        path, model = Path(str(model)), None
    source, path = path, resolve(path) if path else None
    if source and path and (model is None or is_foreign(model)):
        where, trusted = choose_device(device), trust_model_code
        if foreign := load_foreign(source, path, device=where, trust_model_code=trusted):
            return _foreign_target(source, foreign, where, data, partial(read_images, data_dir=data_dir))
    file = weights_file(path, which) if path else None
    tensors, description = read_weights(file) if file else ({}, {})
    model_name = model or description.get("model")
    if not isinstance(model_name, str):
        raise UserError(f"{source} does not name its model; name it with --model")
    instead = "" if model or model_name in BUILT_IN else "; or name a function that builds the model with --model"
    if instead and not (trust_model_code or is_trusted(model_name)):
        raise needs_trust(model_name, source, instead)
    if path is None and model_name in BUILT_IN:
        raise UserError(f"--model {model_name} alone has no trained weights; name a run folder or a weights file too")
    own_data = description.get("data")
    if path is not None and (path / RunFile.RECIPE).exists():
        own_data = load_recipe(path / RunFile.RECIPE).data  # weights have only the name of a folder
    wanted = data or own_data
    if not isinstance(wanted, str):
        raise UserError(f"{source or model_name} does not name its images; name them with --data")
    if data is None and wanted not in KNOWN_SIZES and not Path(wanted).expanduser().exists():
        raise UserError(f"{source} was trained on {own_data}, which is not in {Path.cwd()}; give its path with --data")
    images = read_images(wanted, data_dir, image_size=image_size_for(wanted, own_data, description))
    if wanted == own_data and description.get("data_sha256") not in (None, images.sha256):
        warn(f"the images of {images.name} differ from those that this model was trained on")
    classes = description.get("classes") or len(images.classes)
    arguments = description.get("arguments") if model_name == description.get("model") else None
    assumed = None
    if not isinstance(arguments, dict):
        arguments = {}
        if model_name in BUILT_IN:
            tensors, arguments, assumed = assume(model_name, tensors, images, source)
    with adding_to_errors(instead):
        network = build_model(model_name, classes=classes, arguments=arguments)
        if source is not None:
            set_weights(network, tensors, source)
    network.to(choose_device(device)).eval()
    if source is None or path is None:
        card, name = Path(f"{slug(model_name)}.eval.json"), model_name
    elif is_named(source):
        card, name, model_name, file = Path(f"{slug(str(source))}.eval.json"), str(source), str(source), None
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
        preprocessing=assumed,
        chosen_on_test=path is not None and wanted == own_data and is_chosen_on_test(path, which),
    )
    threat = Threat.of(description.get("eps"), str(description.get("norm", "linf")))
    return Target(network, subject, card, images, threat)


def _foreign_target(
    source: Path, found: Foreign, device: torch.device, data: str | None, read: Callable[..., Images]
) -> Target:
    if data is None:
        raise UserError(f"{source} does not name its images; name them with --data")
    folder = Path(data).expanduser()
    photos = data not in KNOWN_SIZES and folder.is_dir() and shape_of(list_folder(folder), None).image_size
    images = read(data, image_size=found.image_size if photos else None)  # images of one size stay as they are
    theirs, ours = ([name.lower() for name in names] for names in (found.classes, images.classes))
    if theirs and theirs != ours:
        few = [", ".join(names[:3]) for names in (theirs, ours)]
        warn(f"the classes of {source} ({few[0]}, ...) are not those of {images.name} ({few[1]}, ...), or not in order")
    model = found.model.to(device)
    named, in_folder = is_named(source), source.is_dir()
    card = Path(f"{slug(str(source))}.eval.json") if named else source.with_name(f"{source.name}.eval.json")
    subject = Subject(
        name=str(source),
        model=found.kind,
        file=None if named else "." if in_folder else source.name,
        data=data,
        sha256=model_sha256(model, found.identity),
        weights=None,
        preprocessing=found.preprocessing,
    )
    return Target(model, subject, source / RunFile.CARD if in_folder else card, images, Threat.of(None, "linf"))


def assume(
    name: str, tensors: dict[str, Tensor], images: Images, source: Path | None
) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """What weights without a description leave open, for a built-in model: the tensors under our names, its arguments,
    and a sentence about them. Of the two kinds of shortcut, which have the same weights, the one that classifies more
    test images correctly is chosen: the other is close to guessing."""
    tensors, shown = read_bare(name, tensors)
    arguments = {"mean": list(images.mean), "std": list(images.std), **shown}
    assumed = f"normalised with mean and std of {images.name}"
    if "mean" in shown:
        assumed = "normalised with the file's mu and sigma" if any(shown["mean"]) else "not normalised"
    if name in ("preact_resnet18", "preact_resnet34"):
        right, x, y = {}, as_floats(images.test_x[:ASKED]), images.test_y[:ASKED]
        for kind in ("activated", "raw"):
            model = build_bare(name, tensors, str(source), **arguments, shortcut=kind).eval()
            with torch.inference_mode(), users_code("the model can't be run on these images"):
                right[kind] = int((model(x).argmax(1) == y).sum())
        chosen, other = sorted(right, key=lambda kind: -right[kind])
        arguments["shortcut"] = chosen
        counts = f"{right[chosen]} of {len(y)} images are classified correctly, with {other} ones {right[other]}"
        assumed += f"; {chosen} shortcuts ({counts})"
    return tensors, arguments, assumed


def progress_of(run: Path) -> str | None:
    """Such as `interrupted after step 120 of 819`; None if the run is finished or has no record."""
    try:
        record = RunFolder(run).read_current_record()
    except UserError:
        return None
    return None if record.status == "finished" else record.progress


def is_chosen_on_test(run: Path, which: str) -> bool:
    """Whether recipe or record of the run show that the epoch of these weights was chosen on test images.

    `moat train` chooses the best epoch, or the one of a rollback, without test images; other programs may not.
    """
    chosen, watched = which == "best", set[str | None]()
    with suppress(UserError):
        watched.add(load_recipe(run / RunFile.RECIPE).monitor)
    with suppress(UserError):
        record = RunFolder(run).read_record()
        watched.add(record.data.get("monitor"))
        chosen = chosen or record.kept_epoch is not None
    return chosen and "test" in watched


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
