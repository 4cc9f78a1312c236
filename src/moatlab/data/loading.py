"""Data sets by name or path. torch is imported only when images are loaded: plans need only their sizes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moatlab.data import cifar, download
from moatlab.data.known import SPECS
from moatlab.data.sizes import only_folders, unknown
from moatlab.runtime.console import warn
from moatlab.runtime.environment import cache_dir

if TYPE_CHECKING:
    from moatlab.data.images import Images

# name -> (training images, test images, classes)
KNOWN_SIZES = {name: (spec.train_count, spec.test_count, len(spec.classes)) for name, spec in SPECS.items()}
MINI_FOLDER = Path(__file__).parent / "mini"


def load_images(
    name: str, data_dir: str | Path | None = None, *, stream: bool | None = None, image_size: int | None = None
) -> Images:
    """Load a known data set, or the folder of images or `.npz` file at path `name`. `stream` and `image_size`, for
    folders: see `read_folder`."""
    path = Path(name).expanduser()
    if name not in SPECS and path.is_dir():
        from moatlab.data.folder import read_folder

        return read_folder(path, stream=stream, image_size=image_size)
    only_folders(name, image_size)
    if path.suffix == ".npz" and path.is_file():
        from moatlab.data.arrays import read_npz

        return read_npz(path)
    folder, spec = get_images_folder(name, data_dir), SPECS[name]
    import torch

    from moatlab.data.images import Images, checksum

    train_x, train_y, test_x, test_y = map(torch.from_numpy, cifar.read_arrays(folder, spec))
    if note := cifar.shortfall(spec, len(train_y), len(test_y)):
        warn(f"{name} in {folder} is not the official set: {note}")
    in_cache = folder.is_relative_to(cache_dir())
    source = "embedded" if name == "mini" else "cache" if in_cache else f"folder {folder.resolve().name}"
    classes = cifar.class_names(folder, spec)
    sha256 = checksum(train_x, train_y, test_x, test_y)
    return Images(name, train_x, train_y, test_x, test_y, classes, spec.mean, spec.std, source, note, sha256)


def get_images_folder(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder of a known data set, downloaded if it is not on this machine."""
    if name not in SPECS:
        raise unknown(name)
    return MINI_FOLDER if name == "mini" else download.ensure(name, data_dir)


def available(data_dir: str | Path | None = None) -> list[tuple[str, str, str | None]]:
    """Name, description and place of each known data set; None as place if it must be downloaded first."""
    places = {name: "embedded" if name == "mini" else download.find(name, data_dir) for name in SPECS}
    return [(name, SPECS[name].description, str(place) if place else None) for name, place in places.items()]
