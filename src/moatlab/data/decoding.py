"""Image files: their size from the header, and their pixels, upright and in one mode. Needs no torch."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from moatlab.data.cifar import Pixels
from moatlab.runtime.errors import UserError

ORIENTATION = 0x0112  # the tag in EXIF; 1 is upright, 5 to 8 swap width and height
BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError)


@contextmanager
def opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except BROKEN as error:
        raise UserError(f"{path} cannot be read as an image; replace or remove it") from error


def read_header(path: Path) -> tuple[int, int, bool]:
    """Width and height of the upright image, and whether it is grey."""
    with opened(path) as image:
        width, height = image.size
        # Pillow would decode a whole PNG to look for EXIF behind its pixels.
        known = image.format != "PNG" or "exif" in image.info
        if known and _orientation(image) >= 5:
            width, height = height, width
        return width, height, image.mode in ("1", "L")


def decode(path: Path, mode: str, image_size: int | None = None) -> Pixels:
    """(height, width, channels) bytes; with `image_size`, a square of that side."""
    with opened(path) as image:
        if image.mode[0] in "IF":  # Pillow would clip these to 255 silently
            raise UserError(f"{path} has more than 8 bits per channel; convert it to an 8-bit image")
        image.load()
        upright = ImageOps.exif_transpose(image) if _orientation(image) > 1 else image
        converted = upright.convert(mode)
        pixels = np.array(square(converted, image_size) if image_size else converted)
    return pixels.reshape(*pixels.shape[:2], len(mode))


def square(image: Image.Image, side: int) -> Image.Image:
    """The shorter side resized to `side` (bilinear, antialiased), then the central square, as torchvision's `Resize`
    and `CenterCrop` make them."""
    shorter = min(image.size)
    width, height = (side * length // shorter for length in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - side) / 2), round((height - side) / 2)
    return image.crop((left, top, left + side, top + side))


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except (*BROKEN, TypeError, KeyError):  # damaged EXIF; the pixels may be whole
        return 1
