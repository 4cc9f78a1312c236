"""Export the model of a run to safetensors, a model hub, RobustBench or ONNX, with a model card."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.norms import Threat
from moatlab.evaluation.card import Card
from moatlab.evaluation.target import card_path, model_sha256, weights_file
from moatlab.models.registry import load
from moatlab.models.weights import read_weights
from moatlab.runtime.console import warn
from moatlab.runtime.errors import RunFailed, UserError, users_code
from moatlab.runtime.files import RunFile, atomic, make_folder
from moatlab.runtime.randomness import generator
from moatlab.sharing.hub import hub_files
from moatlab.sharing.model_card import card_text
from moatlab.sharing.robustbench import robustbench_files
from moatlab.training.recipe import load_recipe

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def export_run(
    run: Path,
    kind: str,
    out: Path | None = None,
    *,
    which: str = "last",
    repo: str = "USER/NAME",
    trust_model_code: bool = False,
) -> list[Path]:
    """Write the model of a run folder and a model card into `out` (default: RUN/hub or RUN/export-KIND); return the
    files. `kind`: safetensors, hub, robustbench or onnx. `repo`: the name on the hub, for the model card."""
    if kind == "onnx" and (missing := [name for name in ONNX_PACKAGES if find_spec(name) is None]):
        raise UserError(f'--format onnx needs {", ".join(missing)}: pip install "moatlab[onnx]"')
    if not (run / RunFile.RECORD).exists():
        raise UserError(f"{run} is not a run folder")
    source = weights_file(run, which)
    description = read_weights(source)[1]
    if (run / RunFile.RECIPE).exists():
        recipe = load_recipe(run / RunFile.RECIPE)
        description |= {"method": recipe.method, "init": recipe.init}  # as the user wrote them
    model = load(source, trust_model_code=trust_model_code)
    card = _card(card_path(run, which), model, description)
    out = out or run / ("hub" if kind == "hub" else f"export-{kind}")
    readme = out / "README.md"
    if readme.exists() and "library_name: moatlab" not in readme.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out {out} has a README.md that moatlab did not write; name another folder")
    if kind == "safetensors":
        files = {str(RunFile.MODEL): source.read_bytes()}
    elif kind == "hub":
        files = hub_files(source.read_bytes(), description)
    elif kind == "robustbench":
        files = robustbench_files(model, description, card)
    else:
        files = onnx_files(model, description["image_shape"])
    files[readme.name] = card_text(kind, description, card, repo).encode()
    make_folder(out)
    for name, content in files.items():
        with atomic(out / name) as file:
            file.write(content)
    return [out / name for name in files]


def _card(path: Path, model: nn.Module, description: dict[str, Any]) -> Card | None:
    """The card, if it is of this model and its data and threat, in fp32; else None."""
    try:
        card = Card.read(path)
    except UserError:
        return None
    sha256, threat = model_sha256(model, description["arguments"]), Threat.of(description["eps"], description["norm"])
    if reason := card.mismatch(model=sha256, data=description["data_sha256"], threat=threat):
        warn(f"{path} is left out: {reason}")
        return None
    return card


def onnx_files(model: nn.Module, image_shape: Sequence[int]) -> dict[str, bytes]:
    """The model as an ONNX graph for any batch size, whose logits were compared with the model's."""
    height, width, channels = image_shape
    images = torch.rand(4, channels, height, width, generator=generator(0, "images to compare"))
    model = model.eval().requires_grad_(False)
    with torch.no_grad(), _quiet():
        try:
            graph = _onnx_graph(model, images, strict=False)
        except RunFailed as error:
            try:
                graph = _onnx_graph(model, images, strict=True)  # allows len(x), which tracing replaces by a number
            except RunFailed:
                raise error from None
        distance = _distance(graph, model, images)
    if not distance <= 1e-4:
        raise RunFailed(f"the ONNX graph's logits differ from the model's by {distance:.2g}; nothing is written")
    return {"model.onnx": graph}


@users_code("the model can't be exported to ONNX", RunFailed)
def _onnx_graph(model: nn.Module, images: Tensor, *, strict: bool) -> bytes:
    """Export by tracing, or (`strict`) by analysing the bytecode of the model."""
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    exported = torch.export.export(model, (images,), dynamic_shapes=shapes, strict=strict)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    program: Any = torch.onnx.export(exported, (images,), dynamo=True, verbose=False, **names)
    graph: bytes = program.model_proto.SerializeToString()
    return graph


def _distance(graph: bytes, model: nn.Module, images: Tensor) -> float:
    """The largest difference of logits between graph and model, relative to logits above 1."""
    import onnxruntime

    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    distances = []
    for part in (images, images[:1], images[:3]):
        logits = torch.from_numpy(session.run(["logits"], {"images": part.numpy()})[0])
        distances.append((logits - model(part)).abs().max() / logits.abs().max().clamp(min=1))
    return float(torch.stack(distances).max())


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings and its notes about packages that are not installed, and use no fused kernel of
    transformers, for which ONNX has no operator."""
    logger, fused = logging.getLogger("torch.onnx"), torch.backends.mha.get_fastpath_enabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.backends.mha.set_fastpath_enabled(fused)
