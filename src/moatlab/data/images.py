"""Data sets: images as bytes in memory or on disk, and as floats for models."""

import hashlib
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from moatlab.data.cifar import Pixels
from moatlab.runtime.console import Bar
from moatlab.runtime.errors import UserError

AT_ONCE = 256  # images decoded in one piece


class OnDisk:
    """Images of one size, decoded when used, as bytes (height, width, channels)."""

    def __init__(self, paths: list[Path], mode: str, first: Path) -> None:
        self.paths, self.mode, self.first = paths, mode, first
        self.shape: tuple[int, ...] = (len(paths), *decode(first, mode).shape)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        path = self.paths[number]
        image = decode(path, self.mode)
        if image.shape != self.shape[1:]:
            size, wanted = (f"{width}x{height}" for height, width in (image.shape[:2], self.shape[1:3]))
            raise UserError(f"{path} has {size} pixels, but {self.first} has {wanted}; resize all images to one size")
        return torch.from_numpy(image)

    def part(self, numbers: Iterable[int]) -> Self:
        return type(self)([self.paths[number] for number in numbers], self.mode, self.first)

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


def decode(path: Path, mode: str) -> Pixels:
    with opened(path) as image:
        if image.mode[0] in "IF":  # Pillow would clip these to 255 silently
            raise UserError(f"{path} has more than 8 bits per channel; convert it to an 8-bit image")
        pixels = np.array(image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], len(mode))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; replace or remove it") from error
