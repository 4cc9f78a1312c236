"""The images of a folder: classes, training and test images in a stratified order, and their size. Reads file headers
only, and needs no torch."""

import os
import statistics
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from moatlab.data.decoding import read_header
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import key

Listed: TypeAlias = list[tuple[Path, int]]  # images with their labels
ByClass: TypeAlias = dict[str, list[Path]]

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
SIDES = (32, 64, 96, 128, 224)  # of resized images, unless one is given
FEW = 10  # images of a class
NAMED = 3  # classes in a warning


@dataclass(frozen=True)
class Listing:
    folder: Path
    classes: tuple[str, ...]
    train: Listed
    test: Listed
    note: str | None  # how test images were chosen
    warning: str | None  # classes with few images


@dataclass(frozen=True)
class Shape:
    """The size of all images after reading, their mode, and the side they are resized to (None: they are not)."""

    height: int
    width: int
    mode: str
    image_size: int | None

    @property
    def transform(self) -> str | None:
        side = self.image_size
        return f"shorter side {side}, centre crop {side}x{side}" if side else None


def list_folder(folder: Path) -> Listing:
    """FOLDER/train/CLASS and FOLDER/test/CLASS (or val), or FOLDER/CLASS, of which a tenth of each class is set apart
    for testing by a hash of the file names. All images below CLASS are read."""
    parts = [name for name in ("train", "test", "val") if (folder / name).is_dir()]
    top = folder / "train" if parts else folder
    found = _images_by_class(top)
    classes = [name for name, images in found.items() if images]
    if not classes:
        raise UserError(f"the class folders in {top} have no images ({', '.join(sorted(SUFFIXES))})")
    if len(classes) < 2:
        raise UserError(f"{top} has images of only one class ({classes[0]}); a classifier needs at least two")
    train, apart, note = {name: found[name] for name in classes}, top, None
    if parts:
        apart = folder / ("val" if "test" not in parts and "val" in parts else "test")
        test = _images_by_class(apart)
        if unknown := [name for name, images in test.items() if images and name not in classes]:
            raise UserError(f"{apart} has a class {unknown[0]!r} that {top} does not have")
        if not any(test.values()):
            raise UserError(f"{apart} has no images; add some, or remove it and {top}")
        note = "test is used and val is ignored" if {"test", "val"} <= {*parts} else None
    else:
        test = {name: _set_apart(name, top, images) for name, images in train.items()}
        tested = {path for images in test.values() for path in images}
        train = {name: [path for path in images if path not in tested] for name, images in train.items()}
        note = f"{sum(map(len, test.values())):,} of its images are set apart for testing"
    few = [f"{name!r} ({len(found[name])})" for name in classes if len(found[name]) < FEW]
    troubles = {
        f"fewer than {FEW} images of": few,
        "no test images of": [repr(name) for name in classes if not test.get(name)],
        "no images in, so left out:": [repr(name) for name, images in found.items() if not images],
    }
    warning = "; ".join(f"{trouble} {_some(names)}" for trouble, names in troubles.items() if names) or None
    ordered = _stratified(train, classes, top), _stratified(test, classes, apart)
    return Listing(folder, tuple(classes), *ordered, note, warning)


def shape_of(listing: Listing, image_size: int | None) -> Shape:
    """Images of one size, of sides up to 224, stay as they are. Others are resized: to `image_size`, or to the largest
    of SIDES that is not above the median shorter side."""
    paths = sorted(path for path, _ in listing.train + listing.test)
    if image_size:
        return Shape(image_size, image_size, _mode(read_header(path)[2] for path in paths), image_size)
    with ThreadPoolExecutor() as pool:
        headers = list(pool.map(read_header, paths))
    mode = _mode(is_grey for _, _, is_grey in headers)
    width, height, _ = headers[0]
    if max(width, height) <= SIDES[-1] and all(header[:2] == (width, height) for header in headers):
        return Shape(height, width, mode, None)
    median = statistics.median_low(min(header[:2]) for header in headers)
    side = max((side for side in SIDES if side <= median), default=median)
    return Shape(side, side, mode, side)


def _mode(greys: Iterable[bool]) -> str:
    return "L" if all(greys) else "RGB"


def _images_by_class(folder: Path) -> ByClass:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; a folder of images needs train/CLASS/IMAGE and test/CLASS/IMAGE")
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        state = "is empty" if next(folder.iterdir(), None) is None else "has no folders in it"
        raise UserError(f"{folder} {state}; add one folder of images for each class")
    return {name: _images_below(folder / name) for name in names}


def _images_below(folder: Path) -> list[Path]:
    """Hidden files and folders are left out."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        found += [Path(place, name) for name in files if name[0] != "." and Path(name).suffix.lower() in SUFFIXES]
    return sorted(found)


def _set_apart(name: str, top: Path, images: list[Path]) -> list[Path]:
    """A tenth of a class, at least one image, but not its only one."""
    count = max(1, (len(images) + 5) // 10) if len(images) > 1 else 0
    return sorted(images, key=lambda path: _draw(f"test image {name}", top / name, path))[:count]


def _draw(purpose: str, folder: Path, path: Path) -> int:
    return key(0, f"{purpose}/{path.relative_to(folder).as_posix()}")


def _stratified(images: ByClass, classes: list[str], top: Path) -> Listed:
    """All images in a fixed random order in which the first and the last ones have all classes in proportion: image r
    of n of a class is at (r + u) / n, where u is a random offset of the class."""
    places = []
    for label, name in enumerate(classes):
        paths = sorted(images.get(name, ()), key=lambda path: _draw(f"order {name}", top / name, path))
        offset = key(0, f"offset {name}") / 2**64
        places += [((rank + offset) / len(paths), path, label) for rank, path in enumerate(paths)]
    return [(path, label) for _, path, label in sorted(places)]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more classes" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
