"""A folder of photos as people have them: mixed sizes, nested folders, odd modes."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bird", "boat", "cat", "dog", "owl", "tree")


def write_photos(folder: Path, count: int, sides: tuple[int, int] = (180, 400)) -> Path:
    """About `count` JPEGs in six classes, each of one colour with noise. `owl` has five; one photo is grey, one is
    CMYK, one has EXIF rotation; half of `cat` is in sub-folders."""
    draws = np.random.default_rng(0)
    each = (count - 5) // 5
    for label, name in enumerate(CLASSES):
        for number in range(5 if name == "owl" else each):
            width, height = (int(side) for side in draws.integers(*sides, 2, endpoint=True))
            small = draws.integers(0, 90, (height // 10 + 1, width // 10 + 1, 3)) + 27 * np.array([label, 5 - label, 3])
            photo = Image.fromarray(small.astype(np.uint8)).resize((width, height))
            place = folder / name / (f"trip {number % 3}" if name == "cat" and number % 2 else "") / f"{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            mode = {("dog", 0): "L", ("dog", 1): "CMYK"}.get((name, number), "RGB")
            exif = Image.Exif()
            if (name, number) == ("dog", 2):
                exif[0x0112] = 6  # rotated by 90 degrees
            photo.convert(mode).save(place, exif=exif)
    return folder
