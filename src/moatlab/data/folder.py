"""Data sets from folders: one folder per class, all images of one size. Images are read into memory. Training images
too large for it stay on disk and are decoded batch by batch, with the same pixels, order and checksum."""

import hashlib
import math
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from moatlab.data.cifar import Pixels
from moatlab.data.images import Images, OnDisk, checksum, opened
from moatlab.runtime import distributed
from moatlab.runtime.console import Bar, warn
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import generator, key

Listed: TypeAlias = list[tuple[Path, int]]  # images with their labels

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
SMALLEST_STD = 1e-4  # a constant channel has no deviation to divide by


def read_folder(folder: Path, *, stream: bool | None = None) -> Images:
    """Reads FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE, or FOLDER/CLASS/IMAGE, of which about a tenth is set
    apart for testing. `mean` and `std` are those of the training images.

    Images are shuffled in a fixed order: the last training images are held out later, and `--n` takes the first test
    images. With `stream`, training images stay on disk; by default, if they would fill a quarter of the memory.
    """
    classes, train, test, note = _train_and_test(folder)
    for part, images in (("training", train), ("test", test)):
        if missing := set(range(len(classes))) - {label for _, label in images}:
            warn(f"{folder} has no {part} image of class {classes[min(missing)]!r}")
    mode = "L" if all(_is_grey(path) for path, _ in sorted(train) + sorted(test)) else "RGB"
    first = min(path for path, _ in train)
    on_disk, tested = (OnDisk([path for path, _ in images], mode, first) for images in (train, test))
    train_y, test_y = (torch.tensor([label for _, label in images]) for images in (train, test))
    if stream is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
        stream = math.prod(on_disk.shape) * distributed.on_this_machine() > memory / 4  # each process holds them all
    kept = None if stream else torch.empty(on_disk.shape, dtype=torch.uint8)
    counts = np.zeros((len(mode), 256), np.int64)
    digest = hashlib.sha256(f"uint8 {on_disk.shape}\n".encode())  # as `checksum` begins
    done = 0
    with Bar("read images", len(on_disk)) as bar:
        for piece in on_disk.pieces(bar):
            counts += histogram(piece.numpy())
            digest.update(piece.numpy().data)
            if kept is not None:
                kept[done : done + len(piece)] = piece
            done += len(piece)
    train_x, test_x = on_disk if kept is None else kept, tested.in_memory()
    mean, std = channel_statistics(counts)
    name = folder.resolve().name
    sha256 = checksum(train_y, test_x, test_y, digest=digest)
    return Images(name, train_x, train_y, test_x, test_y, tuple(classes), mean, std, f"folder {name}", note, sha256)


def _train_and_test(folder: Path) -> tuple[list[str], Listed, Listed, str | None]:
    """Class names, training images, test images and a note. Test images are set apart by a hash of their names, so
    that adding or removing files never turns a training image into a test image."""
    split = (folder / "train").is_dir() or (folder / "test").is_dir()
    top = folder / "train" if split else folder
    classes = _class_folders(top)
    if len(classes) < 2:
        raise UserError(f"{top} has only one class ({classes[0]}); a classifier needs at least two")
    listed = _list_images(top, classes, "folder order")
    if split:
        if unknown := [name for name in _class_folders(folder / "test") if name not in classes]:
            raise UserError(f"{folder / 'test'} has a class {unknown[0]!r} that {top} does not have")
        return classes, listed, _list_images(folder / "test", classes, "folder test order"), None
    test = [image for image in listed if _draw(image[0]) < 0.1] or [min(listed, key=lambda image: _draw(image[0]))]
    apart = set(test)
    train = [image for image in listed if image not in apart]
    return classes, train, test, f"{len(test):,} of its images are set apart for testing"


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; a folder of images needs train/CLASS/IMAGE and test/CLASS/IMAGE")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        state = "is empty" if next(folder.iterdir(), None) is None else "has no folders in it"
        raise UserError(f"{folder} {state}; add one folder of images for each class")
    return names


def _draw(path: Path) -> float:
    """A number in [0, 1), a hash of the names of the class and the file."""
    return key(0, f"test image {path.parent.name}/{path.name}") / 2**64


def _list_images(folder: Path, classes: list[str], order: str) -> Listed:
    """All images of these classes, shuffled by a generator that `order` seeds."""
    found: Listed = []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():  # the test set may lack a class
            inside = sorted((folder / name).iterdir())
            images = [path for path in inside if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
            if not images:
                raise UserError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}); add some or remove it")
            found += [(path, label) for path in images]
    return [found[number] for number in torch.randperm(len(found), generator=generator(0, order)).tolist()]


def _is_grey(path: Path) -> bool:
    with opened(path) as image:  # reads only the header
        return image.mode in ("1", "L")


def histogram(x: Pixels) -> npt.NDArray[np.int64]:
    """Counts of the 256 values in each channel."""
    return np.stack([np.bincount(x[..., channel].ravel(), minlength=256) for channel in range(x.shape[-1])])


def channel_statistics(counts: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Exact mean and standard deviation of each channel, in [0, 1], from its histogram."""
    values = np.arange(256) / 255
    means, stds = [], []
    for count in counts:
        weights = count / count.sum()
        mean = float(weights @ values)
        means.append(round(mean, 4))
        stds.append(max(round(float(np.sqrt(weights @ (values - mean) ** 2)), 4), SMALLEST_STD))
    return tuple(means), tuple(stds)
