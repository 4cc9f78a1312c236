"""Files that hold a whole model: TorchScript (.pt, .ts), which is a program, and ONNX, which has no gradients."""

import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.models.weights import UNREADABLE
from moatlab.runtime.errors import UserError, first_line, users_code
from moatlab.runtime.files import read_whole

ONNX, TORCHSCRIPT = "onnx", "torchscript"
SCRIPTS = (".pt", ".pth", ".ts", ".torchscript", ".jit")


def is_torchscript(path: Path) -> bool:
    """Whether a file is an archive with TorchScript code; nothing of it is loaded."""
    if path.suffix.lower() not in SCRIPTS or not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/constants.pkl") or "/code/" in name for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


class Script(nn.Module):
    """A ScriptModule inside a module that takes hooks. One that was frozen lacks `training`, which is added."""

    def __init__(self, script: torch.jit.ScriptModule) -> None:
        super().__init__()
        for module in script.modules():
            if not hasattr(module, "training"):
                module.training = False
        self.script, self.training = script, script.training

    def forward(self, x: Tensor) -> Any:
        return self.script(x)


def load_script(path: Path, device: torch.device, *, trusted: bool) -> nn.Module:
    if not trusted:  # TorchScript can read and write files
        allow = "if you trust it, add --trust-model-code"
        raise UserError(f"{path} is a TorchScript file, which means running the program in it; {allow}")
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise ValueError(f"the checksum of its part {damaged} does not match")
        script = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call]
    except UNREADABLE as error:
        raise UserError(f"{path} can't be read as TorchScript ({first_line(error)})") from None
    return Script(script)


class Onnx(nn.Module):
    """An ONNX graph in onnxruntime, on the CPU. A graph for a fixed number of images is called as often as needed."""

    has_gradients = False

    def __init__(self, graph: bytes, path: Path) -> None:
        super().__init__()
        self.session, self.training = _session(graph, path), False
        inputs = self.session.get_inputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
            found = ", ".join(f"{one.name}: {one.type} {one.shape}" for one in inputs)
            raise UserError(f"{path} must take one batch of float images (N, C, H, W); it takes {found or 'nothing'}")
        self.input, self.at_once = inputs[0].name, inputs[0].shape[0]

    def forward(self, x: Tensor) -> Tensor:
        images = x.detach().float().cpu().contiguous()
        if not isinstance(self.at_once, int):
            return self._run(images).to(x)
        spare = -len(images) % self.at_once
        images = torch.cat([images, images[:1].expand(spare, -1, -1, -1)])
        parts = torch.split(images, self.at_once)
        return torch.cat([self._run(part) for part in parts])[: len(x)].to(x)

    def _run(self, images: Tensor) -> Tensor:
        logits: Tensor = torch.from_numpy(self.session.run(None, {self.input: images.numpy()})[0])
        return logits


def _session(graph: bytes, path: Path) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        reason = f"which can't be imported ({first_line(error)})"
        raise UserError(f'{path} needs the package onnxruntime, {reason}: pip install "moatlab[onnx]"') from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 4
    with tempfile.TemporaryDirectory() as nothing, users_code(f"{path} can't be read as an ONNX graph"):
        # Weights in other files would not be part of the card's checksum: they are not found in an empty folder.
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", nothing)
        return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def load_onnx(path: Path) -> nn.Module:
    try:
        return Onnx(read_whole(path), path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({first_line(error)})") from None


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_gradients(model: nn.Module) -> bool:
    """Whether gradients of this kind of model exist at all. A module that hides its own still counts as having some."""
    return not isinstance(model, nn.Module) or all(getattr(module, "has_gradients", True) for module in model.modules())
