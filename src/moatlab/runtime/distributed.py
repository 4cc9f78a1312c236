"""Several processes that train or evaluate as one: torchrun starts them, torch.distributed connects them.

`torchrun --nproc-per-node 2 -m moatlab train moat:2` starts two, and each learns its number from its environment. A
process that torchrun did not start is alone: it is number 0 of 1, and nothing here costs it anything.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from moatlab.runtime.errors import RunFailed, UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

Result = TypeVar("Result")
PATIENCE = timedelta(hours=24)  # one process may evaluate far longer than another; one that dies is noticed at once


def launched() -> int:
    """How many processes torchrun has started."""
    return _told("WORLD_SIZE", 1)


def number() -> int:
    return _told("RANK", 0)


def is_first() -> bool:
    """The first process writes files and talks to the user."""
    return number() == 0


def on_this_machine() -> int:
    return _told("LOCAL_WORLD_SIZE", 1)


def number_on_this_machine() -> int:
    return _told("LOCAL_RANK", 0)


def cores() -> int:
    """The CPU cores for this process, where those of one machine share them."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // on_this_machine(), 1)


def threads() -> int:
    """With how many threads this process computes by default: OMP_NUM_THREADS, or one on each core.
    torchrun sets that variable to 1 by itself, so there it says nothing."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) > 0 and launched() == 1 else cores()


def restarts() -> int:
    """How many times torchrun has restarted all of them, because one had failed."""
    return _told("TORCHELASTIC_RESTART_COUNT", 0)


def _told(name: str, otherwise: int) -> int:
    return int(os.environ.get(name, otherwise)) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise


def _dist() -> Any:
    """torch.distributed, imported when it is needed."""
    import torch.distributed

    return torch.distributed


def count() -> int:
    """How many processes are connected, this one among them."""
    dist = _dist()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def connect() -> None:
    """Connect what torchrun has started, until this process ends: by nccl for tensors on GPUs, by gloo for others."""
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() != launched() or "gloo" not in str(dist.get_backend_config()):
            raise UserError(
                "the processes are connected already, in a way that moatlab can't use; start them by torchrun, and "
                'connect them by torch.distributed.init_process_group("cpu:gloo,cuda:nccl") or not at all'
            )
        return
    if launched() == 1:
        return
    if number_on_this_machine() < torch.cuda.device_count():
        torch.cuda.set_device(number_on_this_machine())
    with together():
        store, rank, size = next(iter(rendezvous("env://")))
        # After a restart PyTorch's store still holds the addresses of processes that are gone: these get new names.
        store = dist.PrefixStore(f"moatlab {restarts()}", store)  # type: ignore[attr-defined]
        kind = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(kind, timeout=PATIENCE, store=store, rank=rank, world_size=size)


def disconnect() -> None:
    """At a good end. After a failure nccl would wait for processes that are gone."""
    if launched() > 1 and count() > 1:
        _dist().destroy_process_group()


def agree(what: str, value: Any) -> None:
    """Refuse to continue where the processes were given different things."""
    values = from_all(value)
    if any(other != values[0] for other in values):
        raise UserError(
            f"the processes were given different {what}; start all by the same command, with the same files"
        )


@contextmanager
def together() -> Iterator[None]:
    """For a block that needs the other processes: one that is gone is reported in a sentence."""
    dist = _dist()
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error).lower():
            raise RunFailed("another process of this run has ended, or can't be reached") from error
        raise


def share(total: int) -> slice:
    """This process's part of `total` items in a row; the first processes may have one item more than the last."""
    return slice(*(-(-total * rank // count()) for rank in (_rank(), _rank() + 1)))


def _rank() -> int:
    dist = _dist()
    return dist.get_rank() if count() > 1 else 0


def mean(value: Tensor) -> Tensor:
    """The mean over the processes."""
    return summed(value) / count() if count() > 1 else value


def summed(value: Tensor) -> Tensor:
    if count() == 1:
        return value
    dist = _dist()
    result = value.clone()
    with together():
        dist.all_reduce(result)
    return result


def highest(*values: int) -> list[int]:
    """The highest of the processes' numbers, place by place, which all of them then know: one message."""
    if count() == 1:
        return [*values]
    import torch

    dist = _dist()
    result = torch.tensor(values)
    with together():
        dist.all_reduce(result, dist.ReduceOp.MAX)
    return [int(value) for value in result]


def gathered(part: Tensor) -> Tensor:
    """The parts of all processes, which are of one shape, one after another; in the memory format of this part."""
    if count() == 1:
        return part
    import torch

    dist = _dist()
    layout = torch.channels_last if part.dim() == 4 and not part.is_contiguous() else torch.contiguous_format
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(count())]
    with together():
        dist.all_gather(parts, part.contiguous())
    return torch.cat(parts).contiguous(memory_format=layout)


def from_all(value: Result) -> list[Result]:
    """What each process has, in all of them."""
    if count() == 1:
        return [value]
    dist = _dist()
    values: list[Any] = [None] * count()
    with together():
        dist.all_gather_object(values, value)
    return values


def from_first(action: Callable[[], Result]) -> Result:
    """What the first process gets from `action`, or the error that it meets there, in all of them."""
    if count() == 1:
        return action()
    dist = _dist()
    box: list[Any] = [None, None]
    if _rank() == 0:
        try:
            box[0] = action()
        except (UserError, RunFailed) as error:
            box[1] = error
    with together():
        dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]  # type: ignore[no-any-return]


def copy_from_first(tensors: Iterable[Tensor]) -> None:
    """The first process's values into the tensors of all: one message for each type and device."""
    if count() == 1:
        return
    import torch

    dist = _dist()
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for group in alike.values():
        message = torch.cat([tensor.flatten() for tensor in group])
        with together():
            dist.broadcast(message, 0)
        if _rank() != 0:
            for tensor, values in zip(group, torch.split(message, [one.numel() for one in group]), strict=True):
                tensor.copy_(values.view(tensor.shape))


def sharing_gradients(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with gradients that are averaged over the processes whenever its loss is differentiated.

    Calls of the model itself, as attacks make them, are nobody else's concern. Buffers are copied once a step, by
    `copy_from_first`, and not at each call.
    """
    if count() == 1:
        return model
    from torch.nn.parallel import DistributedDataParallel

    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # of PyTorch 2.13, or before
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    with together():
        return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)


def may_speak() -> bool:
    """Whether this process reports its error: the first that has one does; those that follow from it are silent."""
    if launched() == 1:
        return True
    dist = _dist()
    try:
        store: Any = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=10)
        )
        return bool(store.add(f"moatlab has spoken {restarts()}", 1) == 1)
    except RuntimeError:
        return is_first()
