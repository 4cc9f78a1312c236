"""A run's model in the formats of other tools (safetensors, RobustBench, ONNX), with a model card."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from moatlab.attacks.norms import Threat
from moatlab.evaluation.card import Card
from moatlab.evaluation.target import card_path, model_sha256, weights_file
from moatlab.models.registry import load
from moatlab.models.weights import read_weights
from moatlab.runtime.console import warn
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile, atomic, make_folder
from moatlab.sharing.model_card import card_text
from moatlab.sharing.onnx_graph import onnx_files
from moatlab.sharing.robustbench import robustbench_files
from moatlab.training.recipe import load_recipe

NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime")}


def export_run(
    run: Path, kind: str, out: Path | None = None, *, which: str = "last", trust_model_code: bool = False
) -> list[Path]:
    """Writes the model of a run folder, and a model card, into `out` (RUN/export-KIND by default); returns the files.
    `kind` is safetensors, robustbench or onnx."""
    if missing := [name for name in NEEDED.get(kind, ()) if find_spec(name) is None]:
        raise UserError(f'--format {kind} needs {", ".join(missing)}: pip install "moatlab[{kind}]"')
    if not (run / RunFile.RECORD).exists():
        raise UserError(f"{run} is not the folder of a run")
    source = weights_file(run, which)
    description = read_weights(source)[1]
    if (run / RunFile.RECIPE).exists():
        description["method"] = load_recipe(run / RunFile.RECIPE).method  # as the user wrote it, not its stages
    model = load(source, trust_model_code=trust_model_code)
    card = _card(card_path(run, which), model, description)
    out = out or run / f"export-{kind}"
    readme = out / "README.md"
    if readme.exists() and "library_name: moatlab" not in readme.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"--out {out}: there is a README.md that moatlab did not write; name another folder")
    if kind == "safetensors":
        files = {str(RunFile.MODEL): source.read_bytes()}
    elif kind == "robustbench":
        files = robustbench_files(model, description, card)
    else:
        files = onnx_files(model, description["image_shape"])
    files[readme.name] = card_text(kind, description, card).encode()
    make_folder(out)
    for name, content in files.items():
        with atomic(out / name) as file:
            file.write(content)
    return [out / name for name in files]


def _card(path: Path, model: nn.Module, description: dict[str, Any]) -> Card | None:
    """The evaluation of this very model on its own test images, under its own threat, in fp32; None without one."""
    try:
        card = Card.read(path)
    except UserError:
        return None
    sha256, threat = model_sha256(model, description["arguments"]), Threat.of(description["eps"], description["norm"])
    if reason := card.mismatch(model=sha256, data=description["data_sha256"], threat=threat):
        warn(f"{path} is left out: {reason}")
    return None if reason else card
