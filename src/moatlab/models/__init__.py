"""Models by name, and the way to bring your own: `package.module:factory`.

A model takes images in [0, 1] and returns logits. Normalisation belongs inside it.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from moatlab.models.preact_resnet import PreActResNet18, PreActResNet34, PreActResNet50, WideResNet28, WideResNet34
from moatlab.models.resnet import ResNet18
from moatlab.models.weights import first_line, read_weights, set_weights
from moatlab.runtime.errors import Interrupted, RunFailed, UserError, needs_trust

BUILT_IN: dict[str, Callable[..., nn.Module]] = {
    "preact_resnet18": PreActResNet18,
    "preact_resnet34": PreActResNet34,
    "preact_resnet50": PreActResNet50,
    "resnet18": ResNet18,
    "wide_resnet28_10": WideResNet28,
    "wide_resnet34_10": WideResNet34,
}
ARGUMENTS = ("width", "shortcut", "final_norm", "mean", "std")  # of a built-in model; a ResNet has no variants
LARGEST = 2000  # width, and classes: more would not fit into any machine, and a file may say anything


def build_model(name: str, *, classes: int, arguments: dict[str, Any]) -> nn.Module:
    """A fresh model. `arguments` are those of a built-in one; a user's factory is given the number of classes only."""
    if name not in BUILT_IN:
        return _build_by_factory(name, classes)
    if unknown := arguments.keys() - set(ARGUMENTS):
        raise UserError(f"{name} can't be built with {min(unknown)}; its arguments are {', '.join(ARGUMENTS)}")
    sizes = {"classes": classes, "width": arguments.get("width", 64)}
    if not all(isinstance(size, int) and 1 <= size <= LARGEST for size in sizes.values()):
        raise UserError(f"{name} can't be built with {sizes}")
    try:
        return BUILT_IN[name](classes=classes, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:  # arguments from a file that somebody wrote
        raise UserError(f"{name} can't be built with {arguments} ({first_line(error)})") from None


def _build_by_factory(name: str, classes: int) -> nn.Module:
    """`factory(num_classes=…)` where it has that, `factory(classes)` where it asks for one number, or `factory()`."""
    module_name, colon, factory_name = name.partition(":")
    if not colon:
        raise UserError(
            f"there is no model '{name}'; give {', '.join(BUILT_IN)}, or your own as package.module:factory"
        )
    if module_name.partition(".")[0] in sys.stdlib_module_names:  # a model's file may name the factory, too
        raise UserError(f"--model {name}: {module_name} is a part of Python, not a module that makes models")
    if module_name.endswith(".py") or "/" in module_name:
        wanted = f"{Path(module_name).stem}:{factory_name}"
        raise UserError(f"--model {name}: name the module, not its file: {wanted}, with its folder on PYTHONPATH")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # only now: until a module of the user's is wanted, none in the current folder is
    with users_code(f"--model {name}: the module can't be imported from the current folder or PYTHONPATH"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if factory is None:
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise UserError(
            f"--model {name}: {module_name} has no '{factory_name}'; it has {', '.join(there) or 'nothing'}"
        )
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(
            f"--model {name}: this is a {type(factory).__name__}, not a function or class that makes a model"
        )
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
