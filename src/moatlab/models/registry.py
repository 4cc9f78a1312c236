"""Models by name: the built-in ones, and the user's own as `package.module:factory`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moatlab.models.preact_resnet import PreActResNet, PreActResNet18
from moatlab.models.resnet import ResNet18
from moatlab.models.weights import read_weights, set_weights
from moatlab.models.yours import build_by_factory
from moatlab.runtime.errors import UserError, adding_to_errors, first_line, needs_trust
from moatlab.runtime.trust import is_trusted

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "preact_resnet18": PreActResNet18,
    "preact_resnet34": partial(PreActResNet, (3, 4, 6, 3)),
    "preact_resnet50": partial(PreActResNet, (3, 4, 6, 3), bottleneck=True),
    "resnet18": ResNet18,
    "wide_resnet28_10": partial(PreActResNet, (4, 4, 4), first=16, width=160),
    "wide_resnet34_10": partial(PreActResNet, (5, 5, 5), first=16, width=160),
}
ARGUMENTS = (
    "width",
    "stem",
    "shortcut",
    "final_norm",
    "activation",
    "mean",
    "std",
)  # of a built-in model; a ResNet has no variants
LARGEST = 2000  # width and classes: a file may name any number, and more would not fit into memory


def build_model(name: str, *, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A new model. `arguments` are for built-in ones; a user's factory gets only the number of classes."""
    if name not in BUILT_IN:
        if ":" in name:
            return build_by_factory(name, classes)
        raise UserError(f"there is no model '{name}'; use {', '.join(BUILT_IN)}, or package.module:factory")
    if unknown := arguments.keys() - set(ARGUMENTS):
        raise UserError(f"{name} can't be built with {min(unknown)}; its arguments are {', '.join(ARGUMENTS)}")
    sizes = {"classes": classes, "width": arguments.get("width", 64)}
    if not all(isinstance(size, int) and 1 <= size <= LARGEST for size in sizes.values()):
        raise UserError(f"{name} can't be built with {sizes}")
    try:
        return BUILT_IN[name](classes=classes, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:  # arguments from an untrusted file
        raise UserError(f"{name} can't be built with {arguments} ({first_line(error)})") from None


def load(run: str | Path, *, model: nn.Module | None = None, trust_model_code: bool = False) -> nn.Module:
    """The trained model of a run folder or of a run's `.safetensors` file, in eval mode. With `model`, the weights are
    put into this module: the way to load a run that was trained from a Python object. Otherwise the model is built on
    the CPU; a file that names a factory (`package.module:factory`) needs `trust_model_code`, because its module is
    imported, unless you named it on the command line before."""
    tensors, description = read_weights(run)
    if model is not None:
        set_weights(model, tensors, run)
        return model.eval()
    name, classes, arguments = (description.get(key) for key in ("model", "classes", "arguments"))
    if not (isinstance(name, str) and isinstance(classes, int) and isinstance(arguments, dict)):
        raise UserError(f"{run} does not name its model; moatlab.load reads files that moatlab wrote")
    instead = "; or pass a module for the weights: moatlab.load(run, model=my_module)"
    if name not in BUILT_IN and not (trust_model_code or is_trusted(name)):
        raise needs_trust(name, run, instead)
    with adding_to_errors("" if name in BUILT_IN else instead):
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then replaced
            model = build_model(name, classes=classes, arguments=arguments)
        set_weights(model, tensors, run)
    return model.eval()
