"""The memory of a training step: estimated before the first one, and a clear error when it runs out."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from moatlab.data.images import as_floats
from moatlab.runtime import distributed
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.training.setup import Session

TRIED = 2  # images; the tensors of a graph grow with the batch
OVERHEAD = 1.25  # of temporary tensors and of the allocator
SMALLEST_BATCH = 2
SIGNS = ("out of memory", "can't allocate memory", "not enough memory")  # in PyTorch's errors


def step_bytes(session: Session) -> tuple[int, int]:
    """Memory of a training step beside the model: of each image (what autograd saves of the forward pass), and of each
    batch (gradients, optimizer state and a copy of the weights)."""
    model, x = copy.deepcopy(session.trained_model), as_floats(session.watched_x[:1]).expand(TRIED, -1, -1, -1)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}  # address -> bytes
    alive: list[Tensor] = []  # else an address could be used again

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model(x.contiguous(memory_format=torch.channels_last))
    images = sum(saved.values()) / TRIED + 4 * x[0].numel() * x.element_size()  # batch, attack, gradient, start
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return int(OVERHEAD * images), 3 * weights


def free_bytes(device: torch.device) -> int | None:
    """Memory left for this process; None if unknown."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    found = [left for left in (_free_of_machine(), _free_of_cgroup()) if left is not None]
    return min(found) // distributed.on_this_machine() if found and device.type == "cpu" else None


def _free_of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def _free_of_cgroup(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The limit of a container, of either version, less what it uses. Files in its cache can be dropped."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            left = int((root / limit).read_text()) - int((root / used).read_text())
            facts = dict(line.split() for line in (root / stat).read_text().splitlines())
            return max(left + int(facts.get("inactive_file", 0)), 0)
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return None


def check_memory(session: Session) -> None:
    """Refuse a run whose steps do not fit into memory."""
    size, processes = session.recipe.batch_size, distributed.count()
    image, fixed = step_bytes(session)
    found = [free for free in distributed.from_all(free_bytes(session.device)) if free is not None]
    free = min(found, default=None)
    needed = size // processes * image + fixed
    if free is None or needed <= free:
        return
    smaller = size // 2
    while smaller >= SMALLEST_BATCH and smaller // processes * image + fixed > free:
        smaller //= 2
    better = f"--batch-size {smaller}" if smaller >= SMALLEST_BATCH else "a smaller model"
    compared = f"needs about {gigabytes(needed)} and {gigabytes(free)} are free"
    raise UserError(f"{_step(session)} {compared}; use {better}{_or(session)}")


@contextmanager
def running_out(session: Session, where: str) -> Iterator[None]:
    """PyTorch's out-of-memory errors become one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if not isinstance(error, MemoryError) and not any(sign in str(error) for sign in SIGNS):
            raise
        use = f"use a --batch-size below {session.recipe.batch_size}{_or(session)}"
        raise RunFailed(f"{where}: memory ran out; {_step(session)} does not fit; {use}") from error


def _step(session: Session) -> str:
    height, width = session.images.train_x.shape[1:3]
    return f"a step on {session.recipe.batch_size // distributed.count()} images of {width}x{height}"


def _or(session: Session) -> str:
    return " (or a smaller --image-size)" if session.images.image_size else ""


def gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count < 9.95e9 else f"{count / 1e9:.0f} GB"
