"""Files of trained weights. A file that is damaged, or holds more than tensors, is refused."""

import hashlib
import json
import pickle
import struct
import zipfile
from collections.abc import Collection, Iterable
from contextlib import suppress
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from moatlab.runtime.errors import UserError, first_line
from moatlab.runtime.files import SCHEMA, UNREADABLE_ARRAYS, RunFile, atomic, check_pickle, read_json

_METADATA_KEY = "moatlab"
# Raised by torch.load on damaged files.
UNREADABLE = (*UNREADABLE_ARRAYS, ArithmeticError, AssertionError, AttributeError, IndexError, struct.error)
PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".tar")


def read_weights(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a `.safetensors` or `.pt` file or of a run folder, and the description of the model."""
    path = Path(path)
    path = path / RunFile.MODEL if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{path} is not a file" if path.exists() else f"there is no trained model at {path}")
    if path.suffix.lower() in PICKLED:
        return _read_pickled(path), {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            description = json.loads(metadata.get(_METADATA_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a readable .safetensors file ({first_line(error)})") from None
    if not isinstance(description, dict):
        raise UserError(f"{path} has an unreadable description of its model")
    if description.get("schema", SCHEMA) != SCHEMA:
        raise UserError(f"{path} has schema {description['schema']}; this version of moatlab reads {SCHEMA}")
    if _METADATA_KEY in metadata and description.get("sha256") != fingerprint(tensors, description):
        raise UserError(f"{path} is damaged or was changed after it was written: its checksum does not match")
    _check_origin(path, description.get("sha256"))
    return tensors, description


def is_described(path: Path) -> bool:
    """Whether a `.safetensors` file was written by moatlab; False for one that can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return _METADATA_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _check_origin(path: Path, digest: str | None) -> None:
    """The model in the folder of a finished run must be the one that the run wrote."""
    try:
        record = read_json(path.parent / RunFile.RECORD)
    except UserError:
        return  # not in a run folder
    finished = path.name == RunFile.MODEL and record.get("status") == "finished"
    if finished and record.get("model") not in (None, digest):
        raise UserError(f"{path} is not the model of this run; it was replaced")


def fingerprint(tensors: dict[str, torch.Tensor], description: dict[str, Any]) -> str:
    """A hash of all weights and of the description of a model."""
    described = {name: value for name, value in description.items() if name != "sha256"}
    return hash_of(json.dumps(described, sort_keys=True), sorted(tensors.items()))


def hash_of(text: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 of a text and of the names, types, shapes and bytes of tensors."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """A state dict from `torch.save`, alone or under one of the usual keys."""
    try:
        check_archive(BytesIO(path.read_bytes()))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        trouble = "is damaged, or holds more than tensors and could run code"
        raise UserError(f"{path} {trouble}; save model.state_dict() instead") from None
    except UNREADABLE as error:
        raise UserError(f"{path} can't be read: it is truncated or not a PyTorch file ({first_line(error)})") from None
    for name in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{path} is not a state dict: it holds more than named tensors")
    return {str(name): tensor for name, tensor in content.items()}


def check_archive(file: BytesIO) -> None:
    """Check what torch.load does not: checksums, and parts or pickles that would exhaust the memory. Raises a
    ValueError or an OverflowError."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        if file.read(4) == b"PK\3\4":
            raise ValueError("a broken zip archive")
        file.seek(0)
        with suppress(ValueError):  # PyTorch's old format: pickles, then raw numbers
            while True:
                check_pickle(file)
        return
    with zipfile.ZipFile(file) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise ValueError("its parts are compressed, which torch.save never does")
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of its part {damaged} does not match")
        for name in archive.namelist():
            if name.endswith("data.pkl"):
                check_pickle(BytesIO(archive.read(name)))


def set_weights(model: nn.Module, tensors: dict[str, torch.Tensor], source: str | Path) -> None:
    """Load weights into a model; a UserError names the first mismatch of names or shapes."""
    tensors = named_alike(model, tensors)
    for reason in mismatches(model, tensors).values():
        raise UserError(f"the weights in {source} don't fit the model: {reason}")
    model.load_state_dict(tensors)


def named_alike(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the model's names, if they differ in a common prefix only, such as DataParallel's `module.`"""
    own = model.state_dict().keys()
    if own & tensors.keys():
        return tensors
    theirs, ours = common_prefix(tensors), common_prefix(own)
    return {ours + name.removeprefix(theirs): tensor for name, tensor in tensors.items()}


def common_prefix(names: Collection[str]) -> str:
    """The modules that all names begin with: `model.` of `model.conv.weight` and `model.head.bias`."""
    letters = zip(min(names, default=""), max(names, default=""), strict=False)  # what these two share, all share
    shared = "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], letters))
    return shared[: shared.rfind(".") + 1]


def mismatches(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The tensors whose names or shapes differ from the model's, and how."""
    own, reasons = model.state_dict(), {}
    for name, tensor in own.items():
        if name not in tensors:
            reasons[name] = f"it lacks '{name}'"
        elif (there := tensors[name].shape) != tensor.shape:
            reasons[name] = f"'{name}' is {tuple(there)} there, but {tuple(tensor.shape)} in the model"
    return reasons | {name: f"it has '{name}', which the model lacks" for name in tensors if name not in own}


def write_weights(path: Path, model: nn.Module, description: dict[str, Any]) -> str:
    """Write the weights and the description that rebuilds the model; returns the checksum in the file. There is one
    metadata key, because the format does not keep the order of several."""
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    description = {"schema": SCHEMA, **description}
    digest = fingerprint(tensors, description)
    text = json.dumps({**description, "sha256": digest}, sort_keys=True)
    with atomic(path) as file:
        file.write(save(tensors, metadata={_METADATA_KEY: text}))
    return digest
