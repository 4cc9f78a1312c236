"""A user's own images of one size, png, jpg, jpeg, bmp or webp: `train/CLASS/IMAGE`, `test/CLASS/IMAGE`, or all in one.

They are read into memory. Training images that would fill too much of it stay on the disk, and are decoded batch by
batch: the same images, in the same order, with the same checksum.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from moatlab.data import Images
from moatlab.data.cifar import Pixels
from moatlab.runtime import distributed
from moatlab.runtime.console import Bar, warn
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import generator, key

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
SMALLEST_STD = 1e-4  # a constant channel must not divide by zero
AT_ONCE = 256  # images decoded by threads before they are handed on


class OnDisk:
    """Images of one size, decoded when they are asked for: (height, width, channels), bytes."""

    def __init__(self, paths: list[Path], mode: str, first: Path) -> None:
        self.paths, self.mode, self.first = paths, mode, first
        self.image_shape = decode(first, mode).shape

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.paths), *self.image_shape)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        image = decode(self.paths[number], self.mode)
        if image.shape != self.image_shape:
            raise UserError(
                f"{self.paths[number]} has {image.shape[1]}x{image.shape[0]} pixels where {self.first} has"
                f" {self.image_shape[1]}x{self.image_shape[0]}; make all images one size"
            )
        return torch.from_numpy(image)

    def part(self, numbers: Iterable[int]) -> OnDisk:
        return OnDisk([self.paths[number] for number in numbers], self.mode, self.first)

    def pieces(self, bar: Bar | None = None) -> Iterator[Tensor]:
        """All of them in order, some at once. Pillow decodes outside the interpreter lock, so threads help."""
        with ThreadPoolExecutor() as pool:
            for begin in range(0, len(self), AT_ONCE):
                numbers = range(begin, min(begin + AT_ONCE, len(self)))
                yield torch.stack(list(pool.map(self.__getitem__, numbers)))
                if bar and numbers.stop % 1024 == 0:
                    bar.update(numbers.stop, f"{numbers.stop:,} of {len(self):,}")

    def in_memory(self) -> Tensor:
        return torch.cat(list(self.pieces()))


def read_folder(folder: Path, *, stream: bool | None = None) -> Images:
    """The folder as a data set, with channel statistics of its own training images: FOLDER/train/CLASS/IMAGE and
    FOLDER/test/CLASS/IMAGE, or FOLDER/CLASS/IMAGE, of which about a tenth is set apart for testing. Which ones, their
    names decide, so that images that come or go later turn no image that was trained on into a test image.

    Images come in a fixed shuffled order, because on disk they are sorted by class: the last ones for training will be
    held out, and the first ones for testing are what `--n` takes. With `stream` those for training stay on the disk; if
    that is not said, where they would fill a quarter of the memory.
    """
    split = (folder / "train").is_dir() or (folder / "test").is_dir()
    top = folder / "train" if split else folder
    classes = _class_folders(top)
    if len(classes) < 2:
        raise UserError(f"{top} has one class only ({classes[0]}); a classifier needs at least two")
    listed = _shuffled(_list_images(top, classes), "folder order")
    note = None
    if split:
        if strangers := [name for name in _class_folders(folder / "test") if name not in classes]:
            raise UserError(f"{folder / 'test'} has a class {strangers[0]!r} that {top} does not have")
        tested = _shuffled(_list_images(folder / "test", classes), "folder test order")
    else:
        tested = [image for image in listed if _draw(image[0]) < 0.1] or [min(listed, key=lambda one: _draw(one[0]))]
        apart = set(tested)
        listed = [image for image in listed if image not in apart]
        note = f"{len(tested):,} of its images are set apart for testing"
    for part, images in (("training", listed), ("test", tested)):
        shown = {label for _, label in images}
        if missing := [name for label, name in enumerate(classes) if label not in shown]:
            warn(f"{folder}: no {part} image is of the class {missing[0]!r}")
    first = min(path for path, _ in listed)
    mode = _common_mode([path for path, _ in sorted(listed) + sorted(tested)])
    train = OnDisk([path for path, _ in listed], mode, first)
    train_y, test_y = (torch.tensor([label for _, label in images]) for images in (listed, tested))
    if stream is None:
        stream = math.prod(train.shape) * distributed.on_this_machine() > _memory() / 4  # each process holds them all
    train_x: Tensor | OnDisk = train
    counts = np.zeros((len(mode), 256), np.int64)
    digest = hashlib.sha256()
    with Bar("read images", len(train)) as bar:
        if not stream:
            train_x = torch.empty(train.shape, dtype=torch.uint8)
        digest.update(f"uint8 {train.shape}\n".encode())  # as `checksum` does it
        done = 0
        for piece in train.pieces(bar):
            counts += histogram(piece.numpy())
            digest.update(piece.numpy().data)
            if isinstance(train_x, Tensor):
                train_x[done : done + len(piece)] = piece
            done += len(piece)
    test_x = OnDisk([path for path, _ in tested], mode, first).in_memory()
    for tensor in (train_y, test_x, test_y):
        digest.update(f"{tensor.numpy().dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().data)
    mean, std = channel_statistics(counts)
    return Images(
        name=folder.resolve().name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=tuple(classes),
        mean=mean,
        std=std,
        source=f"folder {folder.resolve().name}",
        note=note,
        sha256=digest.hexdigest(),
    )


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; a folder of images needs train/CLASS/IMAGE and test/CLASS/IMAGE")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        state = "is empty" if next(folder.iterdir(), None) is None else "has no folders in it"
        raise UserError(f"{folder} {state}; give it one folder of images for each class")
    return names


def _draw(path: Path) -> float:
    """From 0 to 1, by the names of the class and of the file."""
    return key(0, f"test image {path.parent.name}/{path.name}") / 2**64


def _shuffled(images: list[tuple[Path, int]], purpose: str) -> list[tuple[Path, int]]:
    order = torch.randperm(len(images), generator=generator(0, purpose))
    return [images[number] for number in order.tolist()]


def _list_images(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """Paths and labels."""
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():  # the test set need not show every class
            inside = sorted((folder / name).iterdir())
            images = [path for path in inside if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
            if not images:
                raise UserError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}); add some or remove it")
            found += [(path, label) for path in images]
    return found


def _common_mode(paths: list[Path]) -> str:
    """One channel where all images are grey, three where one is not. The beginning of a file tells."""

    def is_grey(path: Path) -> bool:
        with _opened(path) as image:
            return image.mode in ("1", "L")

    return "L" if all(map(is_grey, paths)) else "RGB"


def decode(path: Path, mode: str) -> Pixels:
    with _opened(path) as image:
        if image.mode[0] in "IF":  # Pillow would clip these to 255 without a word
            raise UserError(f"{path} has more than 8 bits per channel; convert it to an 8-bit image")
        pixels = np.array(image.convert(mode))
    return pixels.reshape(*pixels.shape[:2], len(mode))


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; replace it or take it out") from error


def histogram(x: Pixels) -> npt.NDArray[np.int64]:
    """How often each channel has each of the 256 values."""
    return np.stack([np.bincount(x[..., channel].ravel(), minlength=256) for channel in range(x.shape[-1])])


def channel_statistics(counts: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], exactly, from counts of the 256 values."""
    values = np.arange(256) / 255
    means, stds = [], []
    for count in counts:
        weights = count / count.sum()
        mean = float(weights @ values)
        means.append(round(mean, 4))
        stds.append(max(round(float(np.sqrt(weights @ (values - mean) ** 2)), 4), SMALLEST_STD))
    return tuple(means), tuple(stds)


def _memory() -> int:
    """Bytes of this machine's memory; 8 GiB where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
