"""Images and labels as callers pass them: tensors, arrays, lists, a Dataset, a DataLoader or a split of Hugging Face
`datasets`, all checked alike."""

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from moatlab.runtime.console import Bar, note
from moatlab.runtime.errors import UserError

LARGEST_ROUNDING = 0.255  # in steps of 1/255: the error of a byte stored as float16 is at most half of that
NEEDED = "bytes (N, H, W) or (N, H, W, C), or floats (N, C, H, W) in [0, 1]"
ITEMS, SHOWN_EVERY = 256, 1024  # of a Dataset: stacked at a time; between two updates of the bar


def images_and_labels(x: Any, y: Any = None, *, kind: str = "", to_bytes: bool = False) -> tuple[Tensor, Tensor]:
    """Bytes (N, H, W, C) or floats (N, C, H, W) in [0, 1], and labels (N,) as int64.

    `x`, `y`: tensors, arrays or nested lists; or, without `y`, a pair of these, a `Dataset` of (image, label), a
    `DataLoader` of (images, labels) or a split of Hugging Face `datasets`, which are read once. `to_bytes` rounds
    floats to multiples of 1/255. `kind` goes before "images" and "labels" in messages, as in "test ".
    """
    all_x, all_y, rounded = [], [], False
    for some_x, some_y in [(x, y)] if y is not None else _pieces(x, kind):
        images, labels = checked_images(some_x, kind, half=to_bytes), checked_labels(some_y, kind)
        if len(images) != len(labels):
            raise UserError(_counts(len(images), len(labels), kind))
        if to_bytes and images.is_floating_point():
            images, changed = as_bytes(images)
            rounded |= changed
        all_x.append(images)
        all_y.append(labels)
    if not sum(map(len, all_y)):
        raise UserError(_counts(0, 0, kind))
    one_size(all_x, 1, kind)
    if rounded:
        note(f"{kind}images are rounded to multiples of 1/255")
    images, labels = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (all_x, all_y))
    return images, labels


def _counts(images: int, labels: int, kind: str) -> str:
    return f"there are {images} {kind}images and {labels} {kind}labels; give one label per image"


def _pieces(source: Any, kind: str) -> Iterator[tuple[Any, Any]]:
    """Images and labels of a source, some at a time."""
    if isinstance(source, tuple) and len(source) == 2:
        yield source
        return
    if is_split(source):
        source = _Rows(source, *split_columns(source))
    if not isinstance(source, Dataset | DataLoader):
        raise UserError(f"{kind}labels are missing; pass images and labels, or a Dataset or DataLoader of both")
    parts = _batches(source) if isinstance(source, DataLoader) else _items(source, kind)
    total = length_hint(source.dataset if isinstance(source, DataLoader) else source, 0)
    done, shown = 0, 0
    with Bar(f"read {kind}images", total or math.inf) as bar:
        for images, labels in parts:
            yield images, labels
            done += len(labels)
            if done >= shown + SHOWN_EVERY:
                shown = done
                bar.update(done, f"{done:,} images")


class _Rows(IterableDataset[tuple[Any, Any]]):
    """The rows of a split as (image, label)."""

    def __init__(self, split: Any, image: str, label: str) -> None:
        self.split, self.image, self.label = split, image, label

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return ((row[self.image], row[self.label]) for row in self.split)

    def __length_hint__(self) -> int:
        return length_hint(self.split, 0)


def is_split(source: Any) -> bool:
    """Whether this is a split of Hugging Face `datasets`, which need not be installed: rows under named features."""
    return isinstance(getattr(source, "features", None), Mapping) and hasattr(source, "__iter__")


def split_columns(split: Any) -> tuple[str, str]:
    """The columns of images and of labels, by their kind; of several label columns, the one called `label`."""
    found = []
    for noun, kind in (("images", "Image"), ("labels", "ClassLabel")):
        columns = [name for name, feature in split.features.items() if type(feature).__name__ == kind]
        columns = ["label"] if "label" in columns else columns
        if len(columns) != 1:
            shown = ", ".join(columns or split.features) or "no columns"
            several = "several columns" if columns else "no column"
            raise UserError(
                f"the split has {several} of {noun} ({shown}); keep one, with select_columns or cast_column"
            )
        found += columns
    return found[0], found[1]


def _batches(loader: DataLoader[Any]) -> Iterator[tuple[Any, Any]]:
    for batch in loader:
        yield _two(batch, "a batch of the DataLoader", "(images, labels)")


def _items(dataset: Dataset[Any], kind: str) -> Iterator[tuple[Any, Any]]:
    size: Any = dataset  # a Dataset that is not iterable has a length
    items = iter(dataset if isinstance(dataset, IterableDataset) else (dataset[number] for number in range(len(size))))
    while some := [_two(item, "an item of the Dataset", "(image, label)") for item in islice(items, ITEMS)]:
        images = [_tensor(image, f"{kind}images") for image, _ in some]
        one_size(images, 0, kind)
        yield torch.stack(images), torch.stack([_tensor(label, f"{kind}labels") for _, label in some])


def _two(given: Any, what: str, needed: str) -> tuple[Any, Any]:
    if not isinstance(given, tuple | list) or len(given) < 2:
        raise UserError(f"{what} is a {type(given).__name__}; it must be {needed}")
    return given[0], given[1]


def one_size(images: list[Tensor], first: int, kind: str) -> None:
    """`first`: the first dimension of a size."""
    if len(sizes := list(dict.fromkeys((*one.shape[first:],) for one in images))) > 1:
        raise UserError(f"{kind}images have the shapes {sizes[0]} and {sizes[1]}; resize all to one size")
    if len(kinds := list(dict.fromkeys(one.dtype for one in images))) > 1:
        raise UserError(f"{kind}images are partly {kinds[0]}, partly {kinds[1]}; convert all to one type")


def _tensor(given: Any, name: str) -> Tensor:
    """float64, the type of NumPy bytes / 255, becomes float32; lists of whole numbers up to 255 become bytes."""
    try:
        if isinstance(given, Image.Image):
            given = _pixels(given)
        elif isinstance(given, list | tuple) and given and isinstance(given[0], Tensor):
            given = torch.stack(list(given))
        elif not isinstance(given, Tensor | np.ndarray):
            given = np.asarray(given)
            if given.ndim > 2 and given.dtype.kind == "i" and given.size and 0 <= given.min() <= given.max() <= 255:
                given = given.astype(np.uint8)
        if isinstance(given, np.ndarray):
            given = np.ascontiguousarray(given, np.float32 if given.dtype == np.float64 else None).reshape(given.shape)
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{name} cannot be converted to a tensor; they must be numbers") from None
    return tensor.clone() if tensor.is_inference() else tensor.detach()


def _pixels(image: Image.Image) -> Any:
    if image.mode[0] in "IF":
        raise UserError("images have more than 8 bits per channel; convert them to 8 bits")
    pixels = np.array(image.convert("L" if image.mode in ("1", "L") else "RGB"))
    return pixels.reshape(*pixels.shape[:2], -1)


def checked_images(given: Any, kind: str, *, half: bool) -> Tensor:
    """`half`: whether float16 and bfloat16 are accepted."""
    x = _tensor(given, f"{kind}images")
    floats, shape = x.is_floating_point(), tuple(x.shape)
    if not (floats and x.dim() == 4) and not (x.dtype == torch.uint8 and x.dim() in (3, 4)):
        raise UserError(f"{kind}images are {x.dtype} of shape {shape}; they must be {NEEDED}")
    if x.dtype in (torch.float16, torch.bfloat16) and not half:
        raise UserError(f"{kind}images are {x.dtype}, where small steps vanish; use x.float()")
    channels, others, order = (1, 3, "(0, 3, 1, 2)") if floats else (3, 1, "(0, 2, 3, 1)")
    if x.dim() == 4 and shape[channels] > 4 >= shape[others]:
        move = "x.transpose" if isinstance(given, np.ndarray) else "x.permute"
        raise UserError(f"{kind}images have shape {shape}, with the channels in the wrong place; use {move}{order}")
    if floats and x.numel() and not (x.amin() >= 0 and x.amax() <= 1):
        low, high = float(x.amin()), float(x.amax())
        remedy = "divide them by 255" if low >= 0 and 2 < high <= 255 else "normalise inside the model instead"
        raise UserError(f"{kind}images range from {low:.3g} to {high:.3g}, not in [0, 1]; {remedy}")
    return x if x.dim() == 4 else x.unsqueeze(3)


def checked_labels(given: Any, kind: str) -> Tensor:
    y = _tensor(given, f"{kind}labels")
    if y.dim() == 2 and y.shape[1] == 1:  # as Keras loads CIFAR
        y = y.squeeze(1)
    if y.dim() != 1 or y.is_floating_point() or y.is_complex():
        raise UserError(f"{kind}labels are {y.dtype} of shape {tuple(y.shape)}; they must be integers (N,)")
    y = y.long()
    if len(y) and int(y.min()) < 0:
        raise UserError(f"{kind}labels range from {int(y.min())} to {int(y.max())}; they must begin at 0")
    return y


def as_bytes(x: Tensor) -> tuple[Tensor, bool]:
    """(N, C, H, W) floats as (N, H, W, C) bytes, and whether some were no multiples of 1/255."""
    scaled = x.double() * 255
    whole = scaled.round()
    changed = bool(x.numel() and (scaled - whole).abs().amax() > LARGEST_ROUNDING)
    return whole.to(torch.uint8).permute(0, 2, 3, 1).contiguous(), changed
