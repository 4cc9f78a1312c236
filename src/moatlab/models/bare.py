"""Weights without a description, for a built-in model: under our names, or under RobustBench's.

For 32x32 images, RobustBench's ResNet, PreActResNet and WideResNet are our networks exactly: only names differ. `mu`
and `sigma` are the normalisation; without them there is none. No file shows whether the shortcuts of a PreAct ResNet
see activations (PreActBlockV2, our default) or not (PreActBlock).
"""

import re
from typing import Any

import torch
from torch import Tensor

from moatlab.models.flops import SHAPES, STEMS

_BLOCK = re.compile(r"(?:layer(\d)|block(\d)\.layer)\.(\d+)\.(.+)")
_UNUSED = "sub_block1."  # WideResNets from TRADES have it and never call it


def read_bare(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors under our names, and the arguments of the built-in model `name` that they show. RobustBench's names
    also give mean and std."""
    tensors = {_without_wrappers(key): tensor for key, tensor in tensors.items()}
    tensors, shown = _from_robustbench(name, tensors) or (tensors, {})
    first = tensors.get("blocks.0.conv1.weight" if name.startswith("wide") else "conv1.weight")
    if first is not None:
        shown["width"] = len(first)
    if name != "resnet18":
        shown["final_norm"] = "bn.weight" in tensors
    kernels = {kernel: stem for stem, (kernel, _, _) in STEMS.items() if stem != "3x3"}
    if (first_kernel := tensors.get("conv1.weight")) is not None and first_kernel.shape[-1] in kernels:
        shown["stem"] = kernels[first_kernel.shape[-1]]
    return tensors, shown


def _from_robustbench(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors under our names, with mean and std; None for names of another layout."""
    if not any(_BLOCK.fullmatch(key) for key in tensors):
        return None
    counts, wide = SHAPES[name][0], name.startswith("wide")
    mean, std = tensors.get("mu", torch.zeros(3)), tensors.get("sigma", torch.ones(3))
    found: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        if key in ("mu", "sigma") or key.startswith(_UNUSED):
            continue
        if block := _BLOCK.fullmatch(key):
            stage, number = int(block[1] or block[2]) - 1, int(block[3])
            rest = block[4].replace("convShortcut.", "shortcut.")
            if name != "resnet18":  # whose shortcut has a BatchNorm
                rest = rest.replace("shortcut.0.", "shortcut.")
            known = stage < len(counts) and number < counts[stage]
            key = f"blocks.{sum(counts[:stage]) + number}.{rest}" if known else key
        elif wide:
            key = re.sub("^bn1\\.", "bn.", re.sub("^fc\\.", "linear.", key))
        found[key] = tensor
    if wide and "linear.weight" in found:  # some have no bias
        found.setdefault("linear.bias", torch.zeros(len(found["linear.weight"])))
    return found, {"mean": mean.flatten().tolist(), "std": std.flatten().tolist()}


def _without_wrappers(key: str) -> str:
    while key.startswith(("module.", "model.")):
        key = key.partition(".")[2]
    return key
