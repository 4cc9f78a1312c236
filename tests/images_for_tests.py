"""Data sets that train in a moment."""

from pathlib import Path

import numpy as np
from PIL import Image

from moatlab.data.known import SPECS


def tiny_images(folder: Path, classes: tuple[str, ...] = ("dark", "bright")) -> Path:
    """Classes of 8x8 images from dark to bright: 40 of each to train on and 10 of each to test."""
    levels = 256 // len(classes)
    draws = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 10)):
        for place, name in enumerate(classes):
            low = levels * place
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.integers(low, low + levels, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def cifar_folder(parent: Path, name: str, count: int) -> Path:
    """A part of CIFAR-10 or CIFAR-100 in its binary layout: `count` random training and as many test images."""
    spec, draws = SPECS[name], np.random.default_rng(0)
    labels = np.zeros((count, spec.label_bytes), np.uint8)
    labels[:, -1] = np.arange(count) % len(spec.classes)
    folder = parent / spec.binary_folder
    folder.mkdir()
    for stem in (spec.train_stems[0], spec.test_stem):
        pixels = draws.integers(0, 256, (count, 3 * spec.side**2), np.uint8)
        (folder / f"{stem}.bin").write_bytes(np.hstack([labels, pixels]).tobytes())
    return folder
