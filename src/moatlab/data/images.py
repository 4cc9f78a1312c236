"""Data sets: images as bytes in memory or on disk, and as floats for models."""

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from moatlab.data.decoding import decode
from moatlab.data.listing import Shape
from moatlab.data.sizes import Sizes
from moatlab.runtime.console import Bar
from moatlab.runtime.errors import UserError

AT_ONCE = 256  # images decoded in one piece


class OnDisk:
    """Images decoded when used, as bytes (height, width, channels)."""

    def __init__(self, paths: list[Path], to: Shape) -> None:
        self.paths, self.to = paths, to
        self.shape = (len(paths), to.height, to.width, len(to.mode))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        path = self.paths[number]
        image = decode(path, self.to.mode, self.to.image_size)
        if image.shape != self.shape[1:]:
            size, wanted = (f"{width}x{height}" for height, width in (image.shape[:2], self.shape[1:3]))
            raise UserError(f"{path} has {size} pixels, the others {wanted}; use --image-size {min(self.shape[1:3])}")
        return torch.from_numpy(image)

    def part(self, numbers: Iterable[int]) -> Self:
        return type(self)([self.paths[number] for number in numbers], self.to)

    def pieces(self, bar: Bar | None = None) -> Iterator[Tensor]:
        """All images in order, in pieces. Threads speed it up: Pillow releases the interpreter lock while decoding."""
        with ThreadPoolExecutor() as pool:
            for begin in range(0, len(self), AT_ONCE):
                numbers = range(begin, min(begin + AT_ONCE, len(self)))
                yield torch.stack(list(pool.map(self.__getitem__, numbers)))
                if bar and numbers.stop % 1024 == 0:
                    bar.update(numbers.stop, f"{numbers.stop:,} of {len(self):,}")

    def in_memory(self) -> Tensor:
        return torch.cat(list(self.pieces()))


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: uint8 images (N, H, W, C) and int64 labels (N,). Training images may be on disk."""

    name: str
    train_x: Tensor | OnDisk
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, with pixels in [0, 1]
    std: tuple[float, ...]
    source: str  # "embedded", "cache", "folder NAME" or "arrays NAME"
    note: str | None  # how it differs from the official set, or how many test images were set apart
    sha256: str  # of the images and labels, in order; a run records it
    image_size: int | None = None  # the side that the images of a folder were resized to
    transform: str | None = None  # how
    warning: str | None = None  # classes with few images

    @property
    def sizes(self) -> Sizes:
        height, width, channels = self.train_x.shape[1:]
        counts = len(self.train_y), len(self.test_y), len(self.classes)
        return Sizes(*counts, height, width, channels, self.image_size)


def checksum(*tensors: Tensor, digest: "hashlib._Hash | None" = None) -> str:
    """SHA-256 of training images and labels, test images and labels; `digest` may have the first of them already."""
    digest = digest or hashlib.sha256()
    for tensor in tensors:
        array = tensor.contiguous().numpy()
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def as_floats(images: Tensor) -> Tensor:
    """(B, H, W, C) bytes as (B, C, H, W) floats in [0, 1], channels last in memory; floats are returned as they are."""
    return images if images.is_floating_point() else images.permute(0, 3, 1, 2).float().div_(255)
