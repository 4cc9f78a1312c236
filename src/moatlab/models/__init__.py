"""Models by name, and the way to bring your own: `package.module:factory`.

A model takes images in [0, 1] and returns logits. Normalisation belongs inside it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import pickle
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from moatlab.errors import Interrupted, RunFailed, UserError, needs_trust
from moatlab.files import SCHEMA, read_json
from moatlab.models.preact_resnet import PreActResNet18

BUILT_IN = {"preact_resnet18": PreActResNet18}
METADATA_KEY = "moatlab"
UNREADABLE = (
    RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError,
    struct.error, RecursionError, MemoryError, ArithmeticError,
)  # what torch.load was seen to raise on damaged files  # fmt: skip
PICKLED = (".pt", ".pth", ".ckpt", ".bin", ".tar")


def build_model(name: str, *, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A fresh model. `arguments` are those of a built-in one; a user's factory is given the number of classes only."""
    if name in BUILT_IN:
        return BUILT_IN[name](classes=classes, **arguments)
    return _build_by_factory(name, classes)


def _build_by_factory(name: str, classes: int) -> nn.Module:
    """`factory(num_classes=…)` where it has that, `factory(classes)` where it asks for one number, or `factory()`."""
    module_name, colon, factory_name = name.partition(":")
    if not colon:
        raise UserError(
            f"there is no model '{name}'; give {', '.join(BUILT_IN)}, or your own as package.module:factory"
        )
    if module_name.partition(".")[0] in sys.stdlib_module_names:  # a model's file may name the factory, too
        raise UserError(f"--model {name}: {module_name} is a part of Python, not a module that makes models")
    with users_code(f"--model {name}: the module can't be imported"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if factory is None:
        raise UserError(f"--model {name}: {module_name} has no '{factory_name}'")
    if not callable(factory):
        raise UserError(f"--model {name}: this is a {type(factory).__name__}, not a function that makes a model")
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_name = any(p.name == "num_classes" for p in parameters)
    others = [p for p in required if p.name != "num_classes"]
    if len(others) > (0 if by_name else 1) or any(p.kind is p.KEYWORD_ONLY for p in others):
        raise UserError(f"--model {name}: a factory may ask for the number of classes and nothing else")
    with users_code(f"--model {name}: the factory failed"):
        model = factory(num_classes=classes) if by_name else factory(*[classes][: len(required)])
    if not isinstance(model, nn.Module):
        raise UserError(f"--model {name}: the factory returned a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def users_code(trouble: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """Code of the user's runs inside, which may raise anything; it is told as a sentence (and whole by --debug)."""
    try:
        yield
    except (UserError, RunFailed, Interrupted):
        raise
    except Exception as error:
        raise kind(f"{trouble} ({type(error).__name__}: {first_line(error)})") from error


def read_weights(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a `.safetensors` or `.pt` file (or of a run folder's `model.safetensors`) and what it says about
    itself. Nothing but tensors is ever read: a file that holds code is refused."""
    path = Path(path)
    path = path / "model.safetensors" if path.is_dir() else path
    if path.suffix.lower() in PICKLED:
        return _read_pickled(path), {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            description = json.loads(metadata.get(METADATA_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise UserError(f"there is no trained model at {path}") from None
    except (SafetensorError, OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is not a readable .safetensors file ({first_line(error)})") from None
    if not isinstance(description, dict):
        raise UserError(f"{path} does not describe its model as moatlab does")
    if description.get("schema", SCHEMA) != SCHEMA:
        raise UserError(f"{path} has schema {description['schema']}; this version of moatlab reads {SCHEMA}")
    if METADATA_KEY in metadata and description.get("sha256") != fingerprint(tensors, description):
        raise UserError(f"{path} is damaged, or was changed after it was written: its checksum does not fit")
    check_origin(path, description.get("sha256"))
    return tensors, description


def check_origin(path: Path, digest: str | None) -> None:
    """The model file of a finished run is the one that the run wrote."""
    try:
        record = read_json(path.parent / "run.json")
    except UserError:
        return  # not in a run's folder, or nothing to go by
    if record.get("status") == "finished" and record.get("models", {}).get(path.name, digest) != digest:
        raise UserError(f"{path} is not the model that this run wrote; it was replaced by another")


def fingerprint(tensors: dict[str, torch.Tensor], description: dict[str, Any]) -> str:
    """Names the exact content of a model's file: a flipped bit of a weight, or of the radius it is for, changes it."""
    described = {name: value for name, value in description.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """What an exception says, as part of a sentence."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """A state dict saved by `torch.save`, alone or under the key that public code gives it."""
    if not path.exists():
        raise UserError(f"there is no trained model at {path}")
    try:
        check_archive(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, or is damaged; it was refused unread, because unpickling it could run "
            "code (save model.state_dict() instead)"
        ) from None
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise UserError(f"{path} can't be read; it is truncated or not a PyTorch file ({first_line(error)})") from None
    for name in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise UserError(f"{path} is not a state dict: it holds something besides named tensors")
    return {str(name): tensor for name, tensor in content.items()}


def check_archive(path: Path) -> None:
    """What torch.load does not look at in a zip archive: checksums, and parts that explode when they are unpacked."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise UserError(f"{path} was not written by torch.save: its parts are compressed")
        if damaged := archive.testzip():
            raise UserError(f"{path} is damaged: the checksum of its part {damaged} does not fit")


def set_weights(model: nn.Module, tensors: dict[str, torch.Tensor], source: str | Path) -> None:
    """Refused, with the first mismatch named, unless every name and every shape fits."""
    own = model.state_dict()
    if not own.keys() & tensors.keys():  # DataParallel puts this before every name
        tensors = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
    reason = None
    for name, tensor in own.items():
        if name not in tensors:
            reason = f"it lacks '{name}'"
        elif tensors[name].shape != tensor.shape:
            reason = f"'{name}' is {tuple(tensors[name].shape)} there and {tuple(tensor.shape)} in the model"
        if reason:
            break
    surplus = next((name for name in tensors if name not in own), None)
    if reason is None and surplus is not None:
        reason = f"it has '{surplus}', which the model has not"
    if reason:
        raise UserError(f"the weights in {source} don't fit the model: {reason}")
    model.load_state_dict(tensors)


def load(run: str | Path, *, trust_model_code: bool = False) -> nn.Module:
    """The trained model of a run folder or a `.safetensors` file that a run wrote, on the CPU, in eval mode.

    A file that names a factory (`package.module:factory`) would have that module imported: it is refused, unless you
    say that you trust it.
    """
    tensors, description = read_weights(run)
    name, classes, arguments = (description.get(key) for key in ("model", "classes", "arguments"))
    if not (isinstance(name, str) and isinstance(classes, int) and isinstance(arguments, dict)):
        raise UserError(f"{run} does not say which model it holds; moatlab.load reads files that moatlab wrote")
    if name not in BUILT_IN and not trust_model_code:
        raise needs_trust(name, run)
    model = build_model(name, classes=classes, arguments=arguments)
    set_weights(model, tensors, run)
    return model.eval()
