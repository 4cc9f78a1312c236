"""Data sets from folders, one folder for each class. Images are read into memory. Training images too large for it stay
on disk and are decoded batch by batch, with the same pixels, order and checksum."""

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moatlab.data.cifar import Pixels
from moatlab.data.images import Images, OnDisk, checksum
from moatlab.data.listing import list_folder, shape_of
from moatlab.runtime import distributed
from moatlab.runtime.console import Bar

SMALLEST_STD = 1e-4  # a constant channel has no deviation to divide by


def read_folder(folder: Path, *, stream: bool | None = None, image_size: int | None = None) -> Images:
    """Reads the images that `list_folder` finds, in its order: the last training images are held out later, and `--n`
    takes the first test images. `mean` and `std` are those of the training images.

    `image_size`: see `shape_of`. With `stream`, training images stay on disk; by default, if they would fill a quarter
    of the memory.
    """
    listing = list_folder(folder)
    shape = shape_of(listing, image_size)
    on_disk, tested = (OnDisk([path for path, _ in images], shape) for images in (listing.train, listing.test))
    train_y, test_y = (torch.tensor([label for _, label in images]) for images in (listing.train, listing.test))
    if stream is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33
        stream = math.prod(on_disk.shape) * distributed.on_this_machine() > memory / 4  # each process holds them all
    kept = None if stream else torch.empty(on_disk.shape, dtype=torch.uint8)
    counts = np.zeros((len(shape.mode), 256), np.int64)
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
    name, classes = folder.resolve().name, listing.classes
    note = "; ".join(filter(None, (listing.note, shape.transform and f"images resized ({shape.transform})"))) or None
    sha256 = checksum(train_y, test_x, test_y, digest=digest)
    made = shape.image_size, shape.transform, listing.warning
    return Images(name, train_x, train_y, test_x, test_y, classes, mean, std, f"folder {name}", note, sha256, *made)


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
