"""Several processes that train or evaluate together: torchrun starts them, torch.distributed connects them.

`torchrun --nproc-per-node 2 -m moatlab train moat:2` starts two. A process that torchrun did not start is number 0 of
1, and nothing here costs it anything.
"""

from __future__ import annotations

import atexit
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from moatlab.runtime.errors import RunFailed, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Result = TypeVar("Result")
PATIENCE = timedelta(hours=24)  # one process may evaluate far longer than another; a dead one is noticed at once


def launched() -> int:
    """The number of processes that torchrun started."""
    return _from_torchrun("WORLD_SIZE", 1)


def number() -> int:
    return _from_torchrun("RANK", 0)


def is_first() -> bool:
    """Whether this is the process that writes files and prints."""
    return number() == 0


def on_this_machine() -> int:
    return _from_torchrun("LOCAL_WORLD_SIZE", 1)


def number_on_this_machine() -> int:
    return _from_torchrun("LOCAL_RANK", 0)


def cores() -> int:
    """The CPU cores for each process of this machine."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // on_this_machine(), 1)


def threads() -> int:
    """The default number of threads: OMP_NUM_THREADS (which torchrun always sets to 1, so not there), or all cores."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 and launched() == 1 else cores()


def restarts() -> int:
    """How often torchrun has restarted all processes after a failure."""
    return _from_torchrun("TORCHELASTIC_RESTART_COUNT", 0)


def _from_torchrun(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise)) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise


def _dist() -> Any:
    """torch.distributed, imported on first use."""
    import torch.distributed

    return torch.distributed


def count() -> int:
    """The number of connected processes, this one included."""
    dist = _dist()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def connect() -> None:
    """Connect the processes that torchrun started: nccl for tensors on GPUs, gloo for others."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() != launched() or "gloo" not in str(dist.get_backend_config()):
            how = 'start them with torchrun, and call init_process_group("cpu:gloo,cuda:nccl") or not at all'
            raise UserError(f"the processes are already connected in a way that moatlab can't use; {how}")
        return
    if launched() == 1:
        return
    if number_on_this_machine() < torch.cuda.device_count():
        torch.cuda.set_device(number_on_this_machine())
    with together():
        store, rank, size = next(iter(rendezvous("env://")))
        # After a restart the store still holds addresses of ended processes, so each start has its own prefix.
        store = dist.PrefixStore(f"moatlab {restarts()}", store)  # type: ignore[attr-defined]
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(kind, timeout=PATIENCE, store=store, rank=rank, world_size=size)
    # A thread of gloo may still drop a tensor. Where Python is finalizing it can't get the GIL, and aborts the process.
    atexit.register(time.sleep, 0.1)


def disconnect() -> None:
    """Only after success: after a failure nccl would wait for processes that have ended."""
    if launched() > 1 and count() > 1:
        _dist().destroy_process_group()


def agree(what: str, value: Any) -> None:
    """Raise a UserError unless all processes were given the same value."""
    values = from_all(value)
    if any(other != values[0] for other in values):
        raise UserError(f"the processes were given different {what}; start all with the same command and files")


@contextmanager
def together() -> Iterator[None]:
    """For a block that needs the other processes: raises RunFailed if one has ended."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, _dist().DistError) or "gloo" in str(error).lower():
            raise RunFailed("another process of this run has ended, or can't be reached") from error
        raise


def share(total: int) -> slice:
    """This process's part of `total` items; the first processes may have one item more than the last."""
    return slice(*(-(-total * rank // count()) for rank in (_rank(), _rank() + 1)))


def _rank() -> int:
    return _dist().get_rank() if count() > 1 else 0


def mean(value: Tensor) -> Tensor:
    return summed(value) / count() if count() > 1 else value


def summed(value: Tensor) -> Tensor:
    if count() == 1:
        return value
    result = value.clone()
    with together():
        _dist().all_reduce(result)
    return result


def highest(*values: int) -> list[int]:
    """The elementwise maximum over the processes, in one message."""
    if count() == 1:
        return [*values]
    import torch

    dist = _dist()
    result = torch.tensor(values)
    with together():
        dist.all_reduce(result, dist.ReduceOp.MAX)
    return [int(value) for value in result]


def gathered(part: Tensor) -> Tensor:
    """The parts of all processes, of one shape, concatenated; in the memory format of this part."""
    if count() == 1:
        return part
    import torch

    layout = torch.channels_last if part.dim() == 4 and not part.is_contiguous() else torch.contiguous_format
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count())]
    with together():
        _dist().all_gather(parts, part.contiguous())
    return torch.cat(parts).contiguous(memory_format=layout)


def from_all(value: Result) -> list[Result]:
    """The values of all processes, in each of them."""
    if count() == 1:
        return [value]
    values: list[Any] = [None] * count()
    with together():
        _dist().all_gather_object(values, value)
    return values


def from_first(action: Callable[[], Result]) -> Result:
    """Run `action` in the first process; its result, or its error, in all of them."""
    if count() == 1:
        return action()
    box: list[Any] = [None, None]
    if _rank() == 0:
        try:
            box[0] = action()
        except (UserError, RunFailed) as error:
            box[1] = error
    with together():
        _dist().broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """Copy the first process's values into the tensors of all, in one message for each type and device."""
    if count() == 1:
        return
    import torch

    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in alike.values():
        message = torch.cat([tensor.flatten() for tensor in group])
        with together():
            _dist().broadcast(message, 0)
        if _rank() != 0:
            for tensor, values in zip(group, torch.split(message, [one.numel() for one in group]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def sharing_gradients(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with gradients averaged over the processes.

    Attacks call the model itself, which sends nothing. Buffers are copied once a step, with `copy_from_first`.
    """
    if count() == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # PyTorch 2.13
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    with together():
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)


def may_speak() -> bool:
    """Whether this process prints its error: only the first that has one does."""
    if launched() == 1:
        return True
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = _dist().TCPStore(host, port, timeout=timedelta(seconds=10))
        return bool(store.add(f"moatlab has spoken {restarts()}", 1) == 1)
    except RuntimeError:
        return is_first()
