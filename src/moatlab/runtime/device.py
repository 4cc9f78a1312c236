"""What computes, and how: the device, its threads, plain float32 or fewer bits, deterministic kernels."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.runtime import distributed
from moatlab.runtime.environment import is_device
from moatlab.runtime.errors import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# GradScaler starts at 65536, which is 512 for an example in a batch of 128, and goes down where that overflows. An
# attack can't try again, so it takes half of that.
ATTACK_SCALE = 256.0


@dataclass(frozen=True)
class Machine:
    """What a run is computed with, beside its recipe; `threads` None: OMP_NUM_THREADS, or all cores."""

    device: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and not 1 <= self.threads <= 1024:
            raise UserError(f"--threads {self.threads}: should be from 1 to 1024")

    @contextmanager
    def in_use(self) -> Iterator[torch.device]:
        """The device; threads, current GPU and global random numbers are afterwards as they were."""
        device = choose_device(self.device)
        with left_as_found(device, self.threads or distributed.threads()):
            yield device


def choose_device(name: str) -> torch.device:
    if not is_device(name):
        raise UserError(f"--device {name}: should be auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and distributed.launched() > 1:
        if name != "cuda":
            raise UserError(f"--device {name}: several processes take a GPU each; use --device cuda")
        name = f"cuda:{distributed.number_on_this_machine()}"
    device = torch.device(name)
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= counts[device.type]:
        raise UserError(
            f"--device {name}: this machine, or this build of PyTorch, has no such device; use --device cpu"
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def choose_precision(name: str, device: torch.device) -> str:
    if name == "fp16" and device.type == "mps":
        raise UserError("--precision fp16 needs gradients to be scaled, which --device mps can't do; use bf16 or fp32")
    if name != "auto":
        return name
    # Not torch.cuda.is_bf16_supported(), which says yes to GPUs that only imitate it.
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"


class Autocast(nn.Module):
    """A model that computes in bfloat16 or float16 and answers in the precision of its images.

    float16 loses numbers below 6e-8 to zero, and an attack lives on the sign of small gradients: where the input alone
    is differentiated, gradients are made larger while they are inside the model. Those of weights are scaled by
    PyTorch's GradScaler (Micikevicius et al., 2018, "Mixed precision training").
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
            answer = self.model(inside)
        answer = answer.to(x.dtype)
        return _ScaleGradient.apply(answer, ATTACK_SCALE) if scaled else answer  # type: ignore[no-any-return, no-untyped-call]


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
    """Plain float32 inside: no autocast, and none of the shortened multiplications (TF32, bfloat16) on offer."""
    switches = precision_switches()
    before = [getattr(place, name) for place, name, _ in switches]
    for place, name, value in switches:
        setattr(place, name, value)
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        for (place, name, _), value in zip(switches, before, strict=True):
            setattr(place, name, value)


def precision_switches() -> list[tuple[Any, str, Any]]:
    """What to set, where and in this order, for plain float32; and back in the same order.

    From PyTorch 2.9 on there is a new way, and whoever asks in the old one where the two differ meets an error:
    `torch.backends.cudnn.flags`, say, inside a user's model. So the old one is set first, where it can be read.
    """
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
    """`threads` threads inside, and `device`, if it is a GPU, the current one; afterwards both, and PyTorch's global
    random numbers, are as they were, those of all GPUs (which `torch.manual_seed` sets) included."""
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
    """PyTorch's deterministic kernels inside. `strict`: an operation that has none is an error, not a warning.

    They are what the CPU uses anyway, but for a few operations that a user's own model may have.
    """
    settings: Any = torch.utils.deterministic
    mode, filling, search = (
        torch.get_deterministic_debug_mode(),
        settings.fill_uninitialized_memory,
        torch.backends.cudnn.benchmark,
    )
    # Not use_deterministic_algorithms, which does this and imports the compiler.
    torch.set_deterministic_debug_mode("error" if strict else "warn")
    settings.fill_uninitialized_memory = False  # all of ours is written before it is read
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = filling
        torch.backends.cudnn.benchmark = search
