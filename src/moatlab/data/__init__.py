"""Image data sets as tensors: the embedded `mini`, CIFAR-10, CIFAR-100, folders of images, arrays of the user's own.

Nothing here imports torch before images are really loaded, so that sizes can be asked for at no cost.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moatlab.data import cifar, download
from moatlab.data.cifar import SPECS
from moatlab.data.download import cache_dir
from moatlab.runtime.console import warn
from moatlab.runtime.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch

    from moatlab.data.folder import OnDisk

__all__ = ["KNOWN_SIZES", "Images", "available", "cache_dir", "checksum", "get_images_folder", "load_images"]

# name -> (training images, test images, classes)
KNOWN_SIZES = {name: (spec.train_count, spec.test_count, len(spec.classes)) for name, spec in SPECS.items()}

MINI_FOLDER = Path(__file__).parent / "mini"


@dataclass(frozen=True, eq=False)
class Images:
    """A data set: uint8 images (N, H, W, C) and int64 labels (N,). Training images may be on the disk."""

    name: str
    train_x: torch.Tensor | OnDisk
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # of each channel, with pixels in [0, 1]
    std: tuple[float, ...]
    source: str  # where it was found: "embedded", "cache" or "folder NAME"
    note: str | None  # how it differs from the official set, if it does
    sha256: str  # names the exact images, labels and their order; a run records it


def checksum(*tensors: torch.Tensor) -> str:
    """Training images and labels, test images and labels."""
    digest = hashlib.sha256()
    for tensor in tensors:
        array = tensor.contiguous().numpy()
        digest.update(f"{array.dtype} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def load_images(name: str, data_dir: str | Path | None = None, *, stream: bool | None = None) -> Images:
    """A known data set, the folder of images or the `.npz` file at the path `name`. `stream`: see `read_folder`."""
    path = Path(name).expanduser()
    if name not in SPECS and path.is_dir():
        from moatlab.data.folder import read_folder

        return read_folder(path, stream=stream)
    if path.suffix == ".npz" and path.is_file():
        from moatlab.data.arrays import read_npz

        return read_npz(path)
    folder = get_images_folder(name, data_dir)

    import torch

    spec = SPECS[name]
    train_x, train_y, test_x, test_y = map(torch.from_numpy, cifar.read_arrays(folder, spec))
    note = cifar.shortfall(spec, len(train_x), len(test_x))
    if note:
        warn(f"{name} in {folder} is not the whole set: {note}")
    in_cache = folder.is_relative_to(cache_dir())
    return Images(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=cifar.class_names(folder, spec),
        mean=spec.mean,
        std=spec.std,
        source="embedded" if name == "mini" else "cache" if in_cache else f"folder {folder.resolve().name}",
        note=note,
        sha256=checksum(train_x, train_y, test_x, test_y),
    )


def get_images_folder(name: str, data_dir: str | Path | None = None) -> Path:
    """Makes sure that a known data set is on disk, and says where."""
    if name not in SPECS:
        hint = did_you_mean(name, SPECS)
        raise UserError(f"no data set, folder or .npz file called {name!r}; known are {', '.join(SPECS)}{hint}")
    return MINI_FOLDER if name == "mini" else download.ensure(name, data_dir)


def available(data_dir: str | Path | None = None) -> list[tuple[str, str, str | None]]:
    """Name, description and place of each known data set; the place of what must be fetched first is None."""
    rows: list[tuple[str, str, str | None]] = []
    for name, spec in SPECS.items():
        found = "embedded" if name == "mini" else download.find(name, data_dir)
        rows.append((name, spec.description, str(found) if found else None))
    return rows
