"""Training batches. The batch of step s is a pure function of (seed, s), for images in memory and on disk."""

import atexit
import itertools
import signal
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moatlab.data.images import OnDisk, as_floats
from moatlab.runtime import distributed
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.runtime.randomness import generator

PADDING = 4
MOST_WORKERS = 8  # decoding processes for each training process


class Ahead:
    """Prefetched batches of images on disk, from a given step on, decoded by PyTorch's DataLoader workers."""

    def __init__(self, images: OnDisk, numbers: Iterable[list[int]], step: int, pin: bool) -> None:
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(
            images,  # type: ignore[arg-type]
            batch_sampler=numbers,
            num_workers=min(distributed.cores(), MOST_WORKERS),
            worker_init_fn=_leave_signals_to_the_run,
            pin_memory=pin,
            generator=torch.Generator(),  # not the global one
        )
        self.batches, self.next_step = iter(loader), step
        atexit.register(_end_workers, weakref.ref(self.batches))

    def take(self) -> Tensor:
        try:
            batch: Tensor = next(self.batches)
        except UserError as error:  # its text is the worker's traceback
            raise RunFailed(str(error).strip().splitlines()[-1].rpartition("UserError: ")[2]) from None
        except RuntimeError as error:
            raise RunFailed(f"a process that decodes images stopped ({error})") from error
        self.next_step += 1
        return batch


def _end_workers(batches: "weakref.ref[Any]") -> None:
    """At exit Python would send SIGTERM to the workers, which ignore it, and wait for them forever."""
    if (iterator := batches()) is not None:
        iterator._shutdown_workers()


def _leave_signals_to_the_run(_worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class Batches:
    """The training images of a run and their order in each epoch."""

    x: Tensor | OnDisk  # uint8, (N, H, W, C), on any device or on disk
    y: Tensor  # on the device used for training
    batch_size: int
    augment: bool
    seed: int
    ahead: list[Ahead] = field(default_factory=list)  # at most one, for images on disk

    @property
    def steps_per_epoch(self) -> int:
        return len(self.y) // self.batch_size  # a last partial batch is dropped

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's part of the batch of a step: images as `as_floats` makes them, and labels."""
        part = distributed.share(self.batch_size)
        images = self.x[self.numbers(step, self.x.device)[part]] if isinstance(self.x, Tensor) else self._decoded(step)
        images = images.to(self.y.device, non_blocking=self.y.device.type == "cuda")  # others may free the source early
        if self.augment:
            draws = generator(self.seed, "augment", step, device=self.y.device)
            images = crop_and_flip(images, *(whole[part] for whole in shifts(self.batch_size, draws)))
        return as_floats(images), self.y[self.numbers(step, self.y.device)[part]]

    def numbers(self, step: int, device: torch.device | str = "cpu") -> Tensor:
        """Indices of the training images in the batch of a step."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.y), self.seed, epoch, device)
        return order[position * self.batch_size : (position + 1) * self.batch_size]

    def close(self) -> None:
        """Stop the decoding workers, if any."""
        self.ahead.clear()

    def _decoded(self, step: int) -> Tensor:
        if not self.ahead or self.ahead[0].next_step != step:
            assert isinstance(self.x, OnDisk)
            part = distributed.share(self.batch_size)
            # Of a copy: in a cycle of references, workers would not end with the last use of these batches.
            order = replace(self, ahead=[])
            numbers = (order.numbers(at)[part].tolist() for at in itertools.count(step))
            self.ahead[:] = [Ahead(self.x, numbers, step, pin=self.y.device.type == "cuda")]
        return self.ahead[0].take()


@lru_cache(maxsize=4)  # this epoch and the next, on the device and on the CPU
def epoch_order(count: int, seed: int, epoch: int, device: torch.device | str) -> Tensor:
    return torch.randperm(count, generator=generator(seed, "order", epoch)).to(device)


def shifts(count: int, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Top and left of each crop of the padded image, and whether it is flipped; each (count, 1)."""
    top, left = torch.randint(2 * PADDING + 1, (2, count, 1), generator=draws, device=draws.device)
    return top, left, torch.randint(2, (count, 1), generator=draws, device=draws.device).bool()


def crop_and_flip(images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor) -> Tensor:
    """Random crops of (B, H, W, C) images padded with 4 black pixels, and horizontal flips, as one gather for the whole
    batch: the column indices of a flipped image are reversed."""
    padded = torch.nn.functional.pad(images, (0, 0, PADDING, PADDING, PADDING, PADDING))
    which, rows, columns = (torch.arange(length, device=images.device) for length in images.shape[:3])
    rows, columns = top + rows, left + torch.where(mirrored, columns.flip(0), columns)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]]
