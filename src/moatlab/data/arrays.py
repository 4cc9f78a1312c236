"""Data sets from arrays: an `.npz` file, or tensors and arrays in Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from moatlab.data.folder import channel_statistics, histogram
from moatlab.data.images import Images, checksum
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import UNREADABLE_ARRAYS
from moatlab.runtime.randomness import generator

Pair: TypeAlias = tuple[Any, Any]  # images and labels

NAMES = ("x_train", "y_train", "x_test", "y_test")
LARGEST_ROUNDING = 0.255  # in steps of 1/255: the error of a byte stored as float16 is at most half of that


def read_npz(path: Path) -> Images:
    """Reads `x_train`, `y_train`, `x_test`, `y_test` and, optionally, class names `classes`. Nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            if missing := [name for name in NAMES if name not in archive]:
                raise UserError(f"{path} has no array '{missing[0]}'; it needs {', '.join(NAMES)}")
            x_train, y_train, x_test, y_test = (archive[name] for name in NAMES)
            classes = [str(name) for name in archive["classes"]] if "classes" in archive else None
    except UNREADABLE_ARRAYS as error:
        raise UserError(f"{path} cannot be read as arrays ({type(error).__name__}); save it with np.savez") from None
    return as_images((x_train, y_train), (x_test, y_test), classes=classes, name=path.stem)


def as_images(
    train: Pair, test: Pair | None = None, *, classes: Sequence[str] | None = None, name: str = "arrays"
) -> Images:
    """A data set from (images, labels), as tensors or arrays. Bytes are (N, H, W) or (N, H, W, C). Floats are
    (N, C, H, W), bytes divided by 255, and are stored as bytes. Without `test`, a fixed random tenth is set apart.
    Training images are shuffled in a fixed order, because the last ones are held out later."""
    train_x, train_y = _pair(train, "training")
    order = torch.randperm(len(train_y), generator=generator(0, "test images set apart"))
    note = None
    if test is None:
        apart, order = order.tensor_split([max(len(order) // 10, 1)])
        test_x, test_y = train_x[apart], train_y[apart]
        note = f"{len(apart):,} of the given images were set apart for testing"
    else:
        test_x, test_y = _pair(test, "test")
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


def as_tensor(given: Any, kind: str) -> Tensor:
    """Converts arrays and sequences of numbers; float64, the type of NumPy bytes / 255, becomes float32."""
    try:
        if isinstance(given, np.ndarray):
            given = np.ascontiguousarray(given, np.float32 if given.dtype == np.float64 else None)
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{kind} cannot be converted to a tensor; they must be numbers") from None


def _pair(given: Pair, kind: str) -> tuple[Tensor, Tensor]:
    x, y = _pixels(given[0], kind), _labels(given[1], kind)
    if len(x) != len(y) or not len(y):
        raise UserError(f"there are {len(x)} {kind} images and {len(y)} {kind} labels; give one label per image")
    return x, y


def _pixels(array: Any, kind: str) -> Tensor:
    """(N, H, W, C) bytes."""
    x = as_tensor(array, f"{kind} images").detach().cpu()
    if x.is_floating_point() and x.dim() == 4 and x.shape[1] <= 4 and x.numel():
        scaled = x.double() * 255
        whole = scaled.round()
        if not (x.amin() >= 0 and x.amax() <= 1) or (scaled - whole).abs().amax() > LARGEST_ROUNDING:
            found = f"these range from {float(x.amin()):.3g} to {float(x.amax()):.3g}"
            raise UserError(f"{kind} images as floats must be bytes divided by 255, not normalised; {found}")
        return whole.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    if x.dtype != torch.uint8 or x.dim() not in (3, 4) or (x.dim() == 4 and x.shape[3] > 4):
        needed = "bytes (N, H, W) or (N, H, W, C), or floats (N, C, H, W)"
        raise UserError(f"{kind} images are {x.dtype} of shape {tuple(x.shape)}; they must be {needed}")
    return (x if x.dim() == 4 else x.unsqueeze(3)).contiguous()


def _labels(array: Any, kind: str) -> Tensor:
    y = as_tensor(array, f"{kind} labels").detach().cpu()
    if y.dim() == 2 and y.shape[1] == 1:  # as Keras loads CIFAR
        y = y.squeeze(1)
    if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise UserError(f"{kind} labels are {y.dtype} of shape {tuple(y.shape)}; they must be integers (N,)")
    return y.long()
