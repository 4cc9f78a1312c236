"""The user's own models, named `package.module:factory`."""

import importlib
import inspect
import sys
from pathlib import Path

import torch
from torch import nn

from moatlab.models.outputs import unwrapped
from moatlab.runtime.errors import UserError, users_code


def build_by_factory(name: str, classes: int) -> nn.Module:
    """Calls `factory(num_classes=…)` if it has that parameter, `factory(…)` if it needs one, otherwise `factory()`."""
    where = f"--model {name}"
    module_name, _, factory_name = name.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:  # the name may come from an untrusted file
        raise UserError(f"{where}: {module_name} is part of Python, not a module of models")
    if module_name.endswith(".py") or "/" in module_name:
        instead = f"{Path(module_name).stem}:{factory_name}"
        raise UserError(f"{where}: name the module, not its file: {instead}, with its folder on PYTHONPATH")
    with users_code(f"{where}: the module can't be imported from the current folder or PYTHONPATH"):
        module = importlib.import_module(module_name)
    factory = getattr(module, factory_name, None)
    if factory is None:
        there = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        raise UserError(f"{where}: {module_name} has no '{factory_name}'; it has {', '.join(there) or 'nothing'}")
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(f"{where}: this is a {type(factory).__name__}, not a function or class that returns a model")
    parameters = inspect.signature(factory).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_name = any(p.name == "num_classes" for p in parameters)
    others = [p for p in required if p.name != "num_classes"]
    if len(others) > (0 if by_name else 1) or any(p.kind is p.KEYWORD_ONLY for p in others):
        raise UserError(f"{where}: a factory may take the number of classes and nothing else")
    with users_code(f"{where}: the factory failed"):
        model = factory(num_classes=classes) if by_name else factory(*[classes][: len(required)])
    if not isinstance(model, nn.Module):
        raise UserError(f"{where}: the factory returned a {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
        model.register_forward_hook(unwrapped)
    return model
