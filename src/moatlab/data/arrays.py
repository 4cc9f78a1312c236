"""Data sets from arrays: an `.npz` file, or tensors and arrays in Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moatlab.data.folder import channel_statistics, histogram
from moatlab.data.given import images_and_labels, is_split, split_columns
from moatlab.data.images import Images, checksum
from moatlab.data.sizes import NAMES, opened_arrays
from moatlab.runtime.errors import UserError
from moatlab.runtime.randomness import generator

Source: TypeAlias = Any  # (images, labels), a Dataset, a DataLoader or a split


def read_npz(path: Path) -> Images:
    """Reads `x_train`, `y_train`, `x_test`, `y_test` and, optionally, class names `classes`. Nothing is unpickled."""
    with opened_arrays(path) as archive:
        x_train, y_train, x_test, y_test = (archive[name] for name in NAMES)
        classes = [str(name) for name in archive["classes"]] if "classes" in archive else None
    return as_images((x_train, y_train), (x_test, y_test), classes=classes, name=path.stem)


def as_images(
    train: Source, test: Source | None = None, *, classes: Sequence[str] | None = None, name: str = "arrays"
) -> Images:
    """A data set from (images, labels) as tensors or arrays, a `Dataset`, a `DataLoader` or a split of Hugging Face
    `datasets`, which also names the classes. Bytes are (N, H, W) or (N, H, W, C). Floats are (N, C, H, W) in [0, 1] and
    are rounded to bytes. Without `test`, a fixed random tenth is set apart. Training images are shuffled in a fixed
    order, because the last ones are held out later."""
    if classes is None and is_split(train):
        classes = list(train.features[split_columns(train)[1]].names)
    train_x, train_y = _in_memory(train)
    order = torch.randperm(len(train_y), generator=generator(0, "test images set apart"))
    note = None
    if test is None:
        apart, order = order.tensor_split([max(len(order) // 10, 1)])
        test_x, test_y = train_x[apart], train_y[apart]
        note = f"{len(apart):,} of the given images were set apart for testing"
    else:
        test_x, test_y = _in_memory(test, "test ")
    train_x, train_y = train_x[order], train_y[order]
    if not len(train_y):
        raise UserError("one image is not enough to train and test on; give more images")
    if train_x.shape[1:] != test_x.shape[1:]:
        raise UserError(f"training images are {tuple(train_x.shape[1:])}, test images {tuple(test_x.shape[1:])}")
    lowest, highest = int(min(train_y.min(), test_y.min())), int(max(train_y.max(), test_y.max()))
    if not classes and lowest > 0:
        raise UserError(f"labels range from {lowest} to {highest}; they must begin at 0")
    names = tuple(classes or map(str, range(highest + 1)))
    if len(names) < 2 or lowest < 0 or highest >= len(names):
        raise UserError(f"labels must be integers from 0 to {len(names) - 1}, of at least two classes")
    mean, std = channel_statistics(histogram(train_x.numpy()))
    sha256 = checksum(train_x, train_y, test_x, test_y)
    return Images(name, train_x, train_y, test_x, test_y, names, mean, std, f"arrays {name}", note, sha256)


def _in_memory(given: Source, kind: str = "") -> tuple[Tensor, Tensor]:
    x, y = images_and_labels(tuple(given) if isinstance(given, list) else given, kind=kind, to_bytes=True)
    return x.cpu().contiguous(), y.cpu()
