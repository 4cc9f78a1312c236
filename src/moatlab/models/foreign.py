"""Whole models from elsewhere: model hubs and their folders, timm, torchvision, TorchScript and ONNX files."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from moatlab.models import hub
from moatlab.models.graphs import ONNX, TORCHSCRIPT, file_sha256, is_torchscript, load_onnx, load_script
from moatlab.models.preprocessing import Preprocessed
from moatlab.models.weights import is_described
from moatlab.runtime.errors import UserError, did_you_mean
from moatlab.runtime.files import RunFile

HUB, TIMM, TORCHVISION = "hf_hub", "timm", "torchvision"
PREFIXES = (HUB, TIMM, TORCHVISION)
FOLDER = "hub-folder"
KINDS = (FOLDER, ONNX, TORCHSCRIPT)
AS_GIVEN = "not changed: the file names no preprocessing, so the model must take images in [0, 1]"


@dataclass(frozen=True)
class Foreign:
    model: nn.Module
    kind: str  # hf_hub:…, timm:…, torchvision:…, or one of KINDS
    preprocessing: str  # what happens to images
    identity: dict[str, str]  # what distinguishes the model besides its weights
    image_size: int | None = None  # at which to read photos
    classes: tuple[str, ...] = ()  # their names, if known


def is_named(source: object) -> bool:
    """Whether a text such as `timm:resnet18` names a model elsewhere."""
    return str(source).partition(":")[0] in PREFIXES and ":" in str(source)


def is_foreign(kind: str) -> bool:
    """Whether a card's `model` is one of these, and no code of the user's."""
    return kind in KINDS or is_named(kind)


def resolve(source: str | Path) -> Path:
    """The path of a source. A model `hf_hub:USER/NAME` is downloaded; an unknown prefix is an error."""
    prefix, colon, name = str(source).partition(":")
    if colon and prefix == HUB:
        return hub.download(name)
    if colon and not is_named(source) and prefix.isidentifier() and len(prefix) > 1 and not Path(source).exists():
        known = ", ".join(f"{one}:NAME" for one in PREFIXES)
        hint = did_you_mean(prefix, PREFIXES)
        raise UserError(f"{source} is no path, and '{prefix}:'{hint} is not one of {known}; a factory needs --model")
    return Path(source).expanduser()


def load_foreign(
    source: str | Path, path: Path, *, device: torch.device | None = None, trust_model_code: bool = False
) -> Foreign | None:
    """Load a whole model in eval mode; `path` is `resolve(source)`. None for a run, an export of moatlab or a file of
    weights."""
    text = str(source)
    kind = text if is_named(source) else FOLDER
    if text.startswith((f"{TIMM}:", f"{TORCHVISION}:")):
        name = text.partition(":")[2]
        found = (hub.load_timm(name), ()) if text.startswith(TIMM) else hub.load_torchvision(name)
    elif path.is_dir() and (path / hub.CONFIG).exists() and not is_described(path / RunFile.MODEL):
        found = hub.load_folder(path)
    elif path.suffix.lower() == ".onnx":
        return _graph(load_onnx(path), ONNX, path)
    elif is_torchscript(path) or path.suffix.lower() in (".ts", ".torchscript", ".jit"):
        where = device or torch.device("cpu")
        return _graph(load_script(path, where, trusted=trust_model_code), TORCHSCRIPT, path)
    elif is_named(source) and not is_described(path / RunFile.MODEL):
        raise UserError(f"{source} has no {hub.CONFIG}")
    else:
        return None
    return _prepared(*found, kind)


def _prepared(model: Preprocessed, classes: tuple[str, ...], kind: str) -> Foreign:
    steps = str(model.steps)
    identity = {"kind": FOLDER if kind.startswith(HUB) else kind, "preprocessing": steps}
    return Foreign(model.eval(), kind, steps, identity, model.steps.image_size, classes)


def _graph(model: nn.Module, kind: str, path: Path) -> Foreign:
    return Foreign(model.eval(), kind, AS_GIVEN, {"kind": kind, "sha256": file_sha256(path)})
