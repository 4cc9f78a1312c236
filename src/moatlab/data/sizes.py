"""How many images a data set has, and of which size, without reading them. Needs no torch; NumPy only for arrays."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moatlab.data.known import SPECS
from moatlab.runtime.errors import UserError, did_you_mean
from moatlab.runtime.files import UNREADABLE_ARRAYS

NAMES = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Sizes:
    train: int
    test: int
    classes: int
    height: int
    width: int
    channels: int = 3
    image_size: int | None = None  # the side that the images of a folder are resized to
    warning: str | None = None


def find_sizes(name: str, image_size: int | None = None) -> Sizes:
    """Of a known data set, a folder of images, or an `.npz` file."""
    path = Path(name).expanduser()
    if name not in SPECS and path.is_dir():
        from moatlab.data.listing import list_folder, shape_of

        listing = list_folder(path)
        shape = shape_of(listing, image_size)
        counts = len(listing.train), len(listing.test), len(listing.classes)
        return Sizes(*counts, shape.height, shape.width, len(shape.mode), shape.image_size, listing.warning)
    only_folders(name, image_size)
    if path.suffix == ".npz" and path.is_file():
        with opened_arrays(path) as archive:
            count, height, width, channels = _shape_in(archive, "x_train")
            if height <= 4 < channels:  # floats, (N, C, H, W)
                height, width, channels = width, channels, height
            labels = archive["y_train"]
            classes = len(archive["classes"]) if "classes" in archive else int(labels.max(initial=0)) + 1
            return Sizes(count, len(archive["y_test"]), classes, height, width, channels)
    if name not in SPECS:
        raise unknown(name)
    spec = SPECS[name]
    return Sizes(spec.train_count, spec.test_count, len(spec.classes), spec.side, spec.side)


def unknown(name: str) -> UserError:
    hint = did_you_mean(name, SPECS)
    return UserError(f"no data set, folder or .npz file named {name!r}; known data sets: {', '.join(SPECS)}{hint}")


def only_folders(name: str, image_size: int | None) -> None:
    if image_size:
        raise UserError(f"--image-size {image_size} is for folders of images; {name} is not a folder")


@contextmanager
def opened_arrays(path: Path) -> Iterator[Any]:
    """The arrays of an `.npz` file, read when used. Nothing is unpickled."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as archive:
            if missing := [name for name in NAMES if name not in archive]:
                raise UserError(f"{path} has no array '{missing[0]}'; it needs {', '.join(NAMES)}")
            yield archive
    except UNREADABLE_ARRAYS as error:
        raise UserError(f"{path} cannot be read as arrays ({type(error).__name__}); save it with np.savez") from None


def _shape_in(archive: Any, name: str) -> tuple[int, int, int, int]:
    """The shape of an array of images, from its header."""
    import numpy as np

    with archive.zip.open(f"{name}.npy") as file:
        first = np.lib.format.read_magic(file) == (1, 0)
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        count, height, width, channels = (*read(file)[0], 1, 1, 1, 1)[:4]
        return count, height, width, channels
