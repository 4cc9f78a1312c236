"""Export a PreAct ResNet as a state dict of RobustBench's PreActResNet, with its model info and a claim."""

import io
import json
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.norms import Threat
from moatlab.data.loading import KNOWN_SIZES
from moatlab.evaluation.card import Card
from moatlab.models.preact_resnet import PreActResNet
from moatlab.runtime.errors import UserError
from moatlab.sharing.claim import issue_text, zoo_entry

PAPER = "https://arxiv.org/abs/2106.15357"
LAYERS = {"preact_resnet18": (2, 2, 2, 2), "preact_resnet34": (3, 4, 6, 3), "preact_resnet50": (3, 4, 6, 3)}


def robustbench_files(model: nn.Module, description: dict[str, Any], card: Card | None) -> dict[str, bytes]:
    tensors, block = to_robustbench(model, description)
    weights = io.BytesIO()
    torch.save(tensors, weights)
    layers, final_norm = list(LAYERS[description["model"]]), description["arguments"]["final_norm"]
    architecture = f"PreActResNet({block}, {layers}, bn_before_fc={final_norm})"
    info: dict[str, Any] = {
        "link": PAPER,
        "name": f"moatlab: {description['method']}",
        "authors": "",
        "additional_data": None if description.get("init") else False,
        "number_forward_passes": 1,
        "dataset": description["data"],
        "venue": "unpublished",
        "architecture": architecture,
        "eps": Threat.of(description["eps"], description["norm"]).text,
        "footnote": "mu and sigma are buffers: (x - mu) / sigma comes first.",
    }
    if card and card.data.images == KNOWN_SIZES[description["data"]][1]:  # RobustBench uses all test images
        for key, attack in (("clean_acc", "clean"), ("autoattack_acc", "aa"), ("reported", "aa")):
            if attack in card.results:
                info[key] = f"{100 * card.results[attack].accuracy:.2f}"
    return {
        "model.pt": weights.getvalue(),
        "model_info.json": json.dumps(info, indent=2).encode() + b"\n",
        "zoo_entry.py": zoo_entry(description, block, layers).encode(),
        "issue.md": issue_text(description, card, architecture).encode(),
    }


def to_robustbench(model: nn.Module, description: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The tensors under RobustBench's names, with its buffers `mu` and `sigma`; and the name of its block."""
    if description["data"] not in ("cifar10", "cifar100"):
        raise UserError(f"RobustBench has CIFAR-10 and CIFAR-100 only; this model was trained on {description['data']}")
    name, arguments = description["model"], description["arguments"]
    if name not in LAYERS or not isinstance(model, PreActResNet):
        raise UserError(f"only {', '.join(LAYERS)} can be exported to RobustBench; this model is {name}")
    height, width, channels = description["image_shape"]
    if arguments["width"] != 64 or (height, width, channels) != (32, 32, 3):
        own = f"width {arguments['width']} and takes {width}x{height}"
        raise UserError(f"RobustBench's PreAct ResNet has width 64 and takes 32x32 images; this one has {own}")
    if (stem := arguments.get("stem", "3x3")) != "3x3":
        raise UserError(f"RobustBench's PreAct ResNet begins with a 3x3 convolution; this one has the stem {stem}")
    if (activation := arguments.get("activation", "relu")) != "relu":
        raise UserError(f"RobustBench's PreAct ResNet has ReLUs; this one has {activation}")
    activated = arguments["shortcut"] == "activated"
    if name == "preact_resnet50" and not activated:
        raise UserError("RobustBench's PreAct ResNet-50 has activated shortcuts; this model was trained with raw ones")
    block = "PreActBottleneck" if name == "preact_resnet50" else "PreActBlockV2" if activated else "PreActBlock"
    places = [f"layer{layer}.{number}" for layer, count in enumerate(LAYERS[name], 1) for number in range(count)]
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key.startswith("blocks."):
            _, index, rest = key.split(".", 2)
            key = f"{places[int(index)]}.{rest.replace('shortcut.', 'shortcut.0.')}"
        tensors[key] = tensor.detach().cpu().contiguous().clone()
    for key, values in (("mu", arguments["mean"]), ("sigma", arguments["std"])):
        tensors[key] = torch.tensor(values).view(1, -1, 1, 1)
    return tensors, block
