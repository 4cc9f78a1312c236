"""A user's own images of one size: `train/CLASS/*.png`, `test/CLASS/*.png` (or jpg, jpeg, bmp, webp)."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from moatlab.data import Images
from moatlab.data.cifar import Labels, Pixels
from moatlab.display import Bar
from moatlab.errors import UserError
from moatlab.randomness import generator

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
SMALLEST_STD = 1e-4  # a constant channel must not divide by zero


def read_folder(folder: Path) -> Images:
    """The folder as a data set, with channel statistics of its own training images.

    Training images come in a fixed shuffled order: the last ones will be held out, and on disk they
    are sorted by class.
    """
    import torch

    classes = _class_folders(folder / "train")
    if len(classes) < 2:
        raise UserError(f"{folder / 'train'} has one class only ({classes[0]}); a classifier needs at least two")
    strangers = [name for name in _class_folders(folder / "test") if name not in classes]
    if strangers:
        raise UserError(f"{folder / 'test'} has a class {strangers[0]!r} that {folder / 'train'} does not have")
    train_paths, train_y = _list_images(folder / "train", classes)
    test_paths, test_y = _list_images(folder / "test", classes)

    pixels = _decode_all(train_paths + test_paths)
    train_x, test_x = pixels[: len(train_paths)], pixels[len(train_paths) :]
    mean, std = _channel_statistics(train_x)
    order = torch.randperm(len(train_x), generator=generator(0, "folder order"))
    return Images(
        name=folder.resolve().name,
        train_x=torch.from_numpy(train_x)[order],
        train_y=torch.from_numpy(train_y)[order],
        test_x=torch.from_numpy(test_x),
        test_y=torch.from_numpy(test_y),
        classes=tuple(classes),
        mean=mean,
        std=std,
        source=f"folder {folder.resolve().name}",
        note=None,
    )


def _class_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; a folder of images needs train/CLASS/*.png and test/CLASS/*.png")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise UserError(f"{folder} is empty; give it one folder of images for each class")
    return names


def _list_images(folder: Path, classes: list[str]) -> tuple[list[Path], Labels]:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():  # the test set need not show every class
            inside = sorted((folder / name).iterdir())
            images = [path for path in inside if path.suffix.lower() in SUFFIXES and path.name[0] != "."]
            if not images:
                raise UserError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))}); add some or remove it")
            paths += images
            labels += [label] * len(images)
    return paths, np.array(labels, np.int64)


def _decode_all(paths: list[Path]) -> Pixels:
    """All images in one array; Pillow decodes outside the interpreter lock, so threads help."""
    first = _decode(paths[0])
    pixels = np.empty((len(paths), *first.shape), np.uint8)

    def place(index: int) -> None:
        image = _decode(paths[index])
        if image.shape != first.shape:
            raise UserError(
                f"{paths[index]} has {image.shape[1]}x{image.shape[0]} pixels where {paths[0]} has"
                f" {first.shape[1]}x{first.shape[0]}; make all images one size"
            )
        pixels[index] = image

    with Bar("read images", len(paths)) as bar, ThreadPoolExecutor() as pool:
        for done, _ in enumerate(pool.map(place, range(len(paths))), start=1):
            if done % 1000 == 0:
                bar.update(done, f"{done:,} of {len(paths):,}")
    return pixels


def _decode(path: Path) -> Pixels:
    try:
        with Image.open(path) as image:
            if image.mode[0] in "IF":  # Pillow would clip these to 255 without a word
                raise UserError(f"{path} has more than 8 bits per channel; convert it to an 8-bit image")
            return np.asarray(image.convert("RGB"))
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as an image; replace it or take it out") from error


def _channel_statistics(x: Pixels) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], exactly, from counts of the 256 values."""
    values = np.arange(256) / 255
    means, stds = [], []
    for channel in range(3):
        weights = np.bincount(x[..., channel].ravel(), minlength=256) / x[..., channel].size
        mean = float(weights @ values)
        means.append(round(mean, 4))
        stds.append(max(round(float(np.sqrt(weights @ (values - mean) ** 2)), 4), SMALLEST_STD))
    return tuple(means), tuple(stds)
