"""The device, its threads, precision and deterministic kernels."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from moatlab.runtime import distributed
from moatlab.runtime.environment import is_device
from moatlab.runtime.errors import UserError

Switches: TypeAlias = list[tuple[Any, str, Any]]  # object, attribute, value
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# GradScaler starts at 65536, or 512 per example of a batch of 128, and backs off on overflow. An attack can't retry, so
# it uses half of that.
ATTACK_SCALE = 256.0


@dataclass(frozen=True)
class Machine:
    """Where a run is computed; `threads` None: OMP_NUM_THREADS, or all cores."""

    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UserError(f"--threads {self.threads}: must be from 1 to 1024")

    @contextmanager
    def in_use(self) -> Iterator[torch.device]:
        """The device; threads, current GPU and global random state are restored afterwards."""
        device = choose_device(self.device)
        with left_as_found(device, self.threads or distributed.threads()):
            yield device


def choose_device(name: str) -> torch.device:
    if not is_device(name):
        raise UserError(f"--device {name}: must be auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and distributed.launched() > 1:
        if name != "cuda":
            raise UserError(f"--device {name}: each process uses its own GPU; use --device=cuda")
        name = f"cuda:{distributed.number_on_this_machine()}"
    device = torch.device(name)
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts[device.type]:
        raise UserError(f"--device {name}: this machine or build of PyTorch has no such device; use --device=cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_of(model: nn.Module, otherwise: Tensor) -> torch.device:
    if not isinstance(model, nn.Module):
        raise UserError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    return next((tensor.device for tensor in [*model.parameters(), *model.buffers()]), otherwise.device)


def choose_precision(name: str, device: torch.device) -> str:
    if name == "fp16" and device.type == "mps":
        raise UserError("--precision fp16 needs gradient scaling, which mps does not support; use bf16 or fp32")
    if name != "auto":
        return name
    return "bf16" if has_fast_bf16(device) else "fp32"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device has instructions for bfloat16; others emulate it, slowly."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    has = torch.cpu.get_capabilities() if device.type == "cpu" else {}
    return bool(has.get("avx512_bf16") or has.get("amx_bf16"))


class Autocast(nn.Module):
    """A model that computes in bfloat16 or float16 and returns logits in the type of its images.

    float16 rounds numbers below 6e-8 to zero, and attacks need the sign of small gradients: where only the input is
    differentiated, gradients are scaled up inside the model. Weight gradients are scaled by PyTorch's GradScaler
    (Micikevicius et al., 2018, "Mixed precision training").
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        super().__init__()
        self.model, self.dtype = model, DTYPES[precision]
        self.training = model.training

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.dtype == torch.float16 and x.requires_grad
        scaled = scaled and not any(parameter.requires_grad for parameter in self.model.parameters())
        inside = _ScaleGradient.apply(x, 1 / ATTACK_SCALE) if scaled else x  # type: ignore[no-untyped-call]
        with torch.autocast(x.device.type, self.dtype):
            logits = self.model(inside)
        logits = logits.to(x.dtype)
        return _ScaleGradient.apply(logits, ATTACK_SCALE) if scaled else logits  # type: ignore[no-any-return, no-untyped-call]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@contextmanager
def full_precision() -> Iterator[None]:
    """Plain float32 inside: no autocast, TF32 or bfloat16 multiplications."""
    with _switched(_precision_switches()), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def _switched(switches: Switches) -> Iterator[None]:
    """Set attributes, and restore them in the same order."""
    before = [(place, name, getattr(place, name)) for place, name, _ in switches]
    for place, name, value in switches:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            setattr(place, name, value)


def _precision_switches() -> Switches:
    """PyTorch 2.9 has new settings. Reading an old one (as `torch.backends.cudnn.flags` does) is an error where the two
    differ, so the old one is set first, if it can be read."""
    backends: Any = torch.backends
    old = [(backends.cudnn, "allow_tf32", False)]
    if not hasattr(backends.cuda.matmul, "fp32_precision"):
        return [(backends.cuda.matmul, "allow_tf32", False), *old]
    try:
        _ = backends.cudnn.allow_tf32
    except RuntimeError:
        old = []
    cuda = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    cpu = [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    return [*old, *((place, "fp32_precision", "ieee") for place in cuda + cpu)]


@contextmanager
def left_as_found(device: torch.device, threads: int | None = None) -> Iterator[None]:
    """Use `threads` threads and, if `device` is a GPU, make it the current one. Afterwards both are restored, and the
    global random state of the CPU and of all GPUs (which `torch.manual_seed` sets)."""
    before = torch.get_num_threads()
    in_use = device.type == "cuda" or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    torch.set_num_threads(threads or before)
    try:
        chosen = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if in_use else []), chosen:
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def same_bits(*, strict: bool) -> Iterator[None]:
    """PyTorch's deterministic kernels inside. `strict`: an operation without one is an error, not a warning.

    On a CPU this only affects a few operations that a user's own model may have.
    """
    filling = (torch.utils.deterministic, "fill_uninitialized_memory", False)  # ours is written before it is read
    before = torch.get_deterministic_debug_mode()
    # use_deterministic_algorithms would also import the compiler.
    torch.set_deterministic_debug_mode("error" if strict else "warn")
    try:
        with _switched([filling, (torch.backends.cudnn, "benchmark", False)]):
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
