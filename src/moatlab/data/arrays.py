"""Images that are arrays already: an `.npz` file, or tensors from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moatlab.data import Images, checksum
from moatlab.data.folder import channel_statistics, histogram
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import UNREADABLE_ARRAYS
from moatlab.runtime.randomness import generator

NAMES = ("x_train", "y_train", "x_test", "y_test")
LARGEST_ROUNDING = 0.255  # of a step of 1/255: what was a byte, and is float16 now, is off by half of that at most


def read_npz(path: Path) -> Images:
    """`x_train`, `y_train`, `x_test`, `y_test`, and if you like `classes`, their names. Nothing is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in NAMES if name not in archive]
            if missing:
                raise UserError(f"{path} has no array '{missing[0]}'; it needs {', '.join(NAMES)}")
            arrays = [archive[name] for name in NAMES]
            classes = [str(name) for name in archive["classes"]] if "classes" in archive else None
    except UNREADABLE_ARRAYS as error:
        raise UserError(f"{path} can't be read as arrays ({type(error).__name__}); write it with numpy.savez") from None
    return as_images((arrays[0], arrays[1]), (arrays[2], arrays[3]), classes=classes, name=path.stem)


def as_images(
    train: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    classes: Sequence[str] | None = None,
    name: str = "arrays",
) -> Images:
    """Images and labels, as tensors or arrays. Bytes are (N, H, W) or (N, H, W, C); floats are (N, C, H, W) in [0, 1],
    and are stored as the bytes that they were. Without `test`, a tenth is set apart by a fixed draw. Those for training
    come in a fixed shuffled order, because the last ones will be held out."""
    train_x, train_y = _pixels(train[0], "training"), _labels(train[1], "training")
    _check_counts(train_x, train_y, "training")
    note, count = None, 0
    order = torch.randperm(len(train_y), generator=generator(0, "test images set apart"))
    if test is None:
        count = max(len(train_y) // 10, 1)
        test_x, test_y = train_x[order[:count]], train_y[order[:count]]
        note = f"{count:,} of the images given were set apart for testing"
    else:
        test_x, test_y = _pixels(test[0], "test"), _labels(test[1], "test")
        _check_counts(test_x, test_y, "test")
    train_x, train_y = train_x[order[count:]], train_y[order[count:]]
    if not len(train_y):
        raise UserError("one image is too few to train and to test on")
    if train_x.shape[1:] != test_x.shape[1:]:
        raise UserError(f"training images are {tuple(train_x.shape[1:])}, test images {tuple(test_x.shape[1:])}")
    highest = int(max(train_y.max(), test_y.max()))
    if not classes and int(min(train_y.min(), test_y.min())) > 0:
        raise UserError(f"labels reach from {int(min(train_y.min(), test_y.min()))} to {highest}; they must begin at 0")
    classes = tuple(classes) if classes else tuple(str(number) for number in range(highest + 1))
    if len(classes) < 2 or highest >= len(classes) or int(min(train_y.min(), test_y.min())) < 0:
        raise UserError(f"labels must be whole numbers from 0 to {len(classes) - 1}, of at least two classes")
    mean, std = channel_statistics(histogram(train_x.numpy()))
    return Images(
        name=name,
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        classes=tuple(classes),
        mean=mean,
        std=std,
        source=f"arrays {name}",
        note=note,
        sha256=checksum(train_x, train_y, test_x, test_y),
    )


def _check_counts(x: Tensor, y: Tensor, kind: str) -> None:
    if len(x) != len(y) or not len(y):
        raise UserError(f"there are {len(x)} {kind} images and {len(y)} {kind} labels; there must be as many")


def _tensor(array: Any, kind: str) -> Tensor:
    try:
        return torch.as_tensor(np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{kind} are of a type that is no tensor's; numbers are needed") from None


def _pixels(array: Any, kind: str) -> Tensor:
    """(N, H, W, C) bytes."""
    x = _tensor(array, f"{kind} images")
    if x.is_floating_point() and x.dim() == 4 and x.shape[1] <= 4 and x.numel():
        scaled = x.double() * 255
        whole = scaled.round()
        if not (x.amin() >= 0 and x.amax() <= 1) or (scaled - whole).abs().amax() > LARGEST_ROUNDING:
            reach = f"these reach from {float(x.amin()):.3g} to {float(x.amax()):.3g}"
            raise UserError(f"{kind} images as floats must be bytes divided by 255, without normalisation; {reach}")
        return whole.to(torch.uint8).permute(0, 2, 3, 1).contiguous()
    if x.dtype != torch.uint8 or x.dim() not in (3, 4) or (x.dim() == 4 and x.shape[3] > 4):
        raise UserError(
            f"{kind} images are {x.dtype} of shape {tuple(x.shape)}; they must be bytes, (N, H, W) or (N, H, W, C), "
            "or floats, (N, C, H, W)"
        )
    return (x if x.dim() == 4 else x.unsqueeze(3)).contiguous()


def _labels(array: Any, kind: str) -> Tensor:
    y = _tensor(array, f"{kind} labels")
    if y.dim() == 2 and y.shape[1] == 1:  # as Keras keeps CIFAR's
        y = y.squeeze(1)
    if y.dim() != 1 or y.is_floating_point() or y.dtype == torch.bool:
        raise UserError(f"{kind} labels are {y.dtype} of shape {tuple(y.shape)}; they must be whole numbers, (N,)")
    return y.long()
