"""A trained model for the tools that others use: safetensors, RobustBench, ONNX; each with a model card."""

from __future__ import annotations

import io
import json
import logging
import shutil
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.data import KNOWN_SIZES
from moatlab.evaluation.target import card_path, model_sha256, weights_file
from moatlab.models import load, users_code
from moatlab.models.preact_resnet import PreActResNet
from moatlab.models.weights import read_weights
from moatlab.runtime.console import warn
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.files import atomic, make_folder, read_json
from moatlab.runtime.randomness import generator
from moatlab.training.recipe import NORM_NAMES, load_recipe, parse_eps

NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime")}
ONNX_NEARNESS = 1e-4  # of logits
PAPER = "https://arxiv.org/abs/2106.15357"
LAYERS = {"preact_resnet18": (2, 2, 2, 2), "preact_resnet34": (3, 4, 6, 3), "preact_resnet50": (3, 4, 6, 3)}


@dataclass(frozen=True)
class Exported:
    """A trained model, what its file says about it, and its evaluation where there is one."""

    model: nn.Module
    description: dict[str, Any]
    card: dict[str, Any] | None

    @property
    def threat(self) -> str:
        return f"{NORM_NAMES[self.description['norm']]}, eps {self.description['eps']}"


def export(
    run: Path, kind: str, out: Path | None = None, *, which: str = "last", trust_model_code: bool = False
) -> list[Path]:
    """Write the model of a run folder, as `kind` says, into `out` (RUN/export-KIND if not given); the files."""
    missing = [name for name in NEEDED.get(kind, ()) if find_spec(name) is None]
    if missing:
        raise UserError(f'--format {kind} needs {", ".join(missing)}: pip install "moatlab[{kind}]"')
    if not (run / "run.json").exists():
        raise UserError(f"{run} is not the folder of a run")
    source = weights_file(run, which)
    description = read_weights(source)[1]
    if (run / "recipe.toml").exists():
        description["method"] = load_recipe(run / "recipe.toml").method  # as it was asked for; the file has its stages
    model = load(source, trust_model_code=trust_model_code)
    it = Exported(model, description, _card(card_path(run, which), model, description))
    out = out or run / f"export-{kind}"
    readme = out / "README.md"
    if readme.exists() and "library_name: moatlab" not in readme.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out {out}: there is a README.md that moatlab did not write; name another folder")
    if kind == "robustbench":
        tensors, block = to_robustbench(model, description)
    make_folder(out)
    if kind == "safetensors":
        files = [out / "model.safetensors"]
        with atomic(files[0]) as file, source.open("rb") as content:
            shutil.copyfileobj(content, file)
    elif kind == "robustbench":
        files = _write_for_robustbench(it, tensors, block, out)
    else:
        files = [_to_onnx(it, out / "model.onnx")]
    with atomic(readme) as file:
        file.write(model_card(it, kind).encode())
    return [*files, readme]


def _card(path: Path, model: nn.Module, description: dict[str, Any]) -> dict[str, Any] | None:
    """The evaluation of this very model on its own test images, under its own threat, in fp32; if there is one."""
    try:
        card = read_json(path)
        settings = card["settings"]
        same = (
            card["subject"]["sha256"] == model_sha256(model, description["arguments"])
            and card["data"]["sha256"] == description["data_sha256"]
            and settings["norm"] == description["norm"]
            and parse_eps(settings["eps"], settings["norm"]) == parse_eps(description["eps"], description["norm"])
            and "precision" not in settings
        )
    except (UserError, KeyError, TypeError):
        return None
    if not same:
        warn(f"{path} is left out: it is of another model, threat or data than the run's")
    return card if same else None


# --- RobustBench


def _write_for_robustbench(it: Exported, tensors: dict[str, Tensor], block: str, out: Path) -> list[Path]:
    """The state dict of its PreActResNet (with `mu` and `sigma`, by which its models normalise), and its model info."""
    description, card = it.description, it.card
    weights, info = out / "model.pt", out / "model_info.json"
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    with atomic(weights) as file:
        file.write(buffer.getvalue())
    fields: dict[str, Any] = {
        "link": PAPER, "name": f"moatlab: {description['method']}", "authors": "", "additional_data": False,
        "number_forward_passes": 1, "dataset": description["data"], "venue": "unpublished",
        "architecture": f"PreActResNet({block}, {list(LAYERS[description['model']])}, "
                        f"bn_before_fc={description['arguments']['final_norm']})",
        "eps": description["eps"], "footnote": "mu and sigma are buffers: (x - mu) / sigma comes first.",
    }  # fmt: skip
    whole = card is not None and card["data"]["images"] == KNOWN_SIZES[description["data"]][1]
    for key, attack in (("clean_acc", "clean"), ("autoattack_acc", "aa"), ("reported", "aa")):
        if card and whole and attack in card["results"]:
            fields[key] = f"{100 * card['results'][attack]['accuracy']:.2f}"
    with atomic(info) as file:
        file.write(json.dumps(fields, indent=2).encode() + b"\n")
    return [weights, info]


def to_robustbench(model: nn.Module, description: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Our tensors under RobustBench's names, and the name of its block."""
    if description["data"] not in ("cifar10", "cifar100"):
        raise UserError(f"RobustBench is of CIFAR-10 and CIFAR-100; this model is of {description['data']}")
    name, arguments = description["model"], description["arguments"]
    if name not in LAYERS or not isinstance(model, PreActResNet):
        raise UserError(f"RobustBench's PreAct ResNet is exported, from {', '.join(LAYERS)}; this model is {name}")
    if arguments["width"] != 64 or list(description["image_shape"]) != [32, 32, 3]:
        raise UserError(
            f"RobustBench's PreAct ResNet has width 64 and takes 32x32 images; this one has width {arguments['width']} "
            f"and takes {description['image_shape'][1]}x{description['image_shape'][0]}"
        )
    activated = arguments["shortcut"] == "activated"
    if name == "preact_resnet50" and not activated:
        raise UserError("RobustBench's PreAct ResNet-50 has activated shortcuts; this model was trained with raw ones")
    block = "PreActBottleneck" if name == "preact_resnet50" else "PreActBlockV2" if activated else "PreActBlock"
    places = [(layer + 1, number) for layer, count in enumerate(LAYERS[name]) for number in range(count)]
    tensors: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        if key.startswith("blocks."):
            _, index, rest = key.split(".", 2)
            layer, number = places[int(index)]
            key = f"layer{layer}.{number}.{rest.replace('shortcut.', 'shortcut.0.')}"
        tensors[key] = tensor.detach().cpu().contiguous().clone()
    for key, values in (("mu", arguments["mean"]), ("sigma", arguments["std"])):
        tensors[key] = torch.tensor(values).view(1, -1, 1, 1)
    return tensors, block


# --- ONNX


def _to_onnx(it: Exported, path: Path) -> Path:
    """The model as a graph of any batch size; compared with the model itself before it is kept."""
    import numpy as np
    import onnxruntime

    height, width, channels = it.description["image_shape"]
    images = torch.rand(4, channels, height, width, generator=generator(0, "images to compare"))
    model = it.model.eval().requires_grad_(False)
    draft = path.with_name(f".{path.name}.tmp")
    try:
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it tells of packages that it does without
        with users_code("the model can't be exported to ONNX", RunFailed), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model, (images,), str(draft), input_names=["images"], output_names=["logits"], verbose=False,
                dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},), external_data=False,
            )  # fmt: skip
        session = onnxruntime.InferenceSession(str(draft), providers=["CPUExecutionProvider"])
        for part in (images, images[:1], images[:3]):
            (answer,) = session.run(["logits"], {"images": part.numpy()})
            with torch.no_grad():
                distance = float(np.abs(answer - model(part).numpy()).max())
            if not distance <= ONNX_NEARNESS * max(1.0, float(np.abs(answer).max())):
                raise RunFailed(f"the ONNX graph answers otherwise than the model, by {distance:.2g}; it is not kept")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return path


# --- the model card


def model_card(it: Exported, kind: str) -> str:
    """README.md with the metadata that model hubs read, the results with their conditions, and how to load it."""
    description, card = it.description, it.card
    data, method = (" ".join(str(description[name]).split()) for name in ("data", "method"))
    lines = [
        "---", "library_name: moatlab", "pipeline_tag: image-classification",
        "tags:", "- adversarial-robustness", "- adversarial-training", "- image-classification", "- pytorch",
        f"datasets:\n- {json.dumps(data)}",
    ]  # fmt: skip
    if card:
        lines += [
            "model-index:", f"- name: {json.dumps(method)}", "  results:", "  - task:",
            "      type: image-classification", "    dataset:",
            f"      name: {json.dumps(data)}", f"      type: {json.dumps(data)}", "      split: test", "    metrics:",
        ]  # fmt: skip
        for name, result in card["results"].items():
            title = "accuracy" if name == "clean" else f"accuracy under {name} ({it.threat})"
            lines += ["    - type: accuracy", f"      name: {json.dumps(title)}",
                      f"      value: {100 * result['accuracy']:.2f}"]  # fmt: skip
    shape = description["image_shape"]
    lines += [
        "---", "", f"# `{method}` on {data}", "",
        f"An image classifier that was trained to be robust ({it.threat}) by `{method}`, with "
        "moatlab. It takes images in [0, 1], "
        f"{shape[1]}x{shape[0]} with {shape[2]} channels, without normalisation, and returns "
        f"{description['classes']} logits, in this order: {', '.join(map(str, description['class_names']))}.", "",
    ]  # fmt: skip
    if card:
        lines += [f"On {card['data']['images']:,} test images ({it.threat}):", "",
                  "| attack | accuracy | 95 % interval |", "|---|---|---|"]  # fmt: skip
        for name, result in card["results"].items():
            low, high = result["interval"]
            lines.append(f"| {name} | {100 * result['accuracy']:.1f} % | {100 * low:.1f} to {100 * high:.1f} % |")
        lines.append("")
        for flag in card["flags"]:
            lines += [f"Red flag `{flag['name']}` ({flag['evidence']}): {flag['meaning']}", ""]
    else:
        lines += ["It has not been evaluated: `moat eval RUN` before this export writes results here.", ""]
    lines += ["## Use", "", *_use(kind, ":" in str(description["model"])), ""]
    return "\n".join(lines)


def _use(kind: str, names_code: bool) -> list[str]:
    if kind == "onnx":
        call = '(logits,) = session.run(["logits"], {"images": images})  # float32, (N, C, H, W) in [0, 1]'
        session = 'session = onnxruntime.InferenceSession("model.onnx")'
        return ["```python", "import onnxruntime", "", session, call, "```"]
    if kind == "robustbench":
        return ["The `.pt` file is a state dict of RobustBench's `PreActResNet` with the buffers `mu` and `sigma`; the "
                "`.json` file is its model info."]  # fmt: skip
    trust = ", trust_model_code=True" if names_code else ""
    code = ["The network itself is code of its author's, which must be importable.", ""] if names_code else []
    return [*code, "```python", "import moatlab", "", f'model = moatlab.load("model.safetensors"{trust})',
            "logits = model(images)  # float32, (N, C, H, W) in [0, 1]", "```"]  # fmt: skip
