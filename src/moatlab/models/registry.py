"""Models by name: the built-in ones, and the user's own as `package.module:factory`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.models.bare import read_bare
from moatlab.models.foreign import load_foreign, resolve
from moatlab.models.preact_resnet import PreActResNet, PreActResNet18
from moatlab.models.resnet import ResNet18
from moatlab.models.weights import read_weights, set_weights
from moatlab.models.yours import build_by_factory
from moatlab.runtime.console import note
from moatlab.runtime.errors import UserError, adding_to_errors, did_you_mean, first_line, needs_trust
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


def load(
    source: str | Path,
    *,
    model: nn.Module | str | None = None,
    arguments: dict[str, Any] | None = None,
    trust_model_code: bool = False,
) -> nn.Module:
    """A trained model in eval mode, on the CPU: of a run folder or its `.safetensors` file; or one from elsewhere, of
    `hf_hub:USER/NAME`, a folder in a hub's layout, `timm:NAME`, `torchvision:NAME`, a TorchScript or an ONNX file.

    With `model`, a module, the weights are put into it: the way to load a run that was trained from a Python object.
    With the name of a built-in model, a state dict under our names or RobustBench's is loaded; `arguments` are those
    that it does not show, such as {"shortcut": "raw"}. A file that names a factory (`package.module:factory`), or is a
    TorchScript program, needs `trust_model_code`, unless you named the factory on the command line before."""
    path = resolve(source)
    if model is None and (foreign := load_foreign(source, path, trust_model_code=trust_model_code)):
        note(f"{source}: images are {foreign.preprocessing}")
        return foreign.model
    tensors, description = read_weights(path)
    if isinstance(model, nn.Module):
        set_weights(model, tensors, source)
        return model.eval()
    if model is not None:
        return build_bare(model, tensors, source, **(arguments or {})).eval()
    name, classes, made_with = (description.get(key) for key in ("model", "classes", "arguments"))
    if not (isinstance(name, str) and isinstance(classes, int) and isinstance(made_with, dict)):
        built_in = "for a state dict, name a built-in model: --model preact_resnet18"
        raise UserError(f"{source} does not name its model; {built_in}, or pass a module")
    instead = "; or pass a module for the weights: moatlab.load(run, model=my_module)"
    if name not in BUILT_IN and not (trust_model_code or is_trusted(name)):
        raise needs_trust(name, source, instead)
    with adding_to_errors("" if name in BUILT_IN else instead):
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then replaced
            network = build_model(name, classes=classes, arguments=made_with)
        set_weights(network, tensors, source)
    return network.eval()


def build_bare(name: str, tensors: dict[str, Tensor], source: str | Path, **arguments: Any) -> nn.Module:
    """A built-in model with weights that have no description."""
    if name not in BUILT_IN:
        raise UserError(f"there is no built-in model '{name}'{did_you_mean(name, BUILT_IN)}; use {', '.join(BUILT_IN)}")
    tensors, shown = read_bare(name, tensors)
    classes = len(tensors["linear.weight"]) if "linear.weight" in tensors else 2  # refused below without it
    with torch.random.fork_rng(devices=[]):
        network = build_model(name, classes=classes, arguments={**shown, **arguments})
    set_weights(network, tensors, source)
    return network
