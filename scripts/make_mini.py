"""Make the embedded `mini` data set from CIFAR-10: its first images, averaged 2x2 down to 16x16.

`python scripts/make_mini.py` writes the two files; with `--check` it only compares them.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import numpy as np
import numpy.typing as npt

from moatlab.data.cifar import Labels, Pixels, to_records
from moatlab.data.loading import KNOWN_SIZES, MINI_FOLDER, load_images


def shrink(x: Pixels) -> Pixels:
    """The mean of each 2x2 block, rounded half to even."""
    n, height, width, channels = x.shape
    blocks = x.reshape(n, height // 2, 2, width // 2, 2, channels)
    means: npt.NDArray[np.float64] = blocks.mean(axis=(2, 4))
    return np.rint(means).astype(np.uint8)


def make(x: Pixels, y: Labels, count: int) -> bytes:
    return to_records(shrink(x[:count]), y[:count]).tobytes()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", help="folder of CIFAR-10  [default: download it]")
    parser.add_argument("--check", action="store_true", help="only compare with the files in the package")
    options = parser.parse_args()

    cifar10 = load_images("cifar10", options.data_dir)
    train_count, test_count, _ = KNOWN_SIZES["mini"]
    files = {
        "train.bin": make(cifar10.train_x.numpy(), cifar10.train_y.numpy(), train_count),
        "test.bin": make(cifar10.test_x.numpy(), cifar10.test_y.numpy(), test_count),
    }
    same = True
    for name, content in files.items():
        print(f"{hashlib.sha256(content).hexdigest()}  {name}")
        if options.check:
            same &= content == (MINI_FOLDER / name).read_bytes()
        else:
            (MINI_FOLDER / name).write_bytes(content)
    if not same:
        print("the files in the package differ", file=sys.stderr)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
