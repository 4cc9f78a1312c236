"""CIFAR-10, CIFAR-100 (A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009) and the embedded
`mini`, and readers for their two file layouts.

Binary (preferred, nothing is unpickled): records of one label byte (CIFAR-100: coarse, then fine) and the pixels
channel by channel. Pickled: the Python 2 pickles that torchvision downloads.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from moatlab.data.known import CIFAR10_CLASSES, Spec
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import check_pickle

Pixels: TypeAlias = npt.NDArray[np.uint8]  # (N, H, W, 3)
Labels: TypeAlias = npt.NDArray[np.int64]  # (N,)

SUMS_FILE = "SHA256SUMS"  # in the format of sha256sum


def suffix_in(folder: Path, spec: Spec) -> str | None:
    """`.bin` if the folder has the binary layout, empty for the pickled one, None for neither."""
    layouts = (suffix for suffix in (".bin", "") if any((folder / (stem + suffix)).is_file() for stem in spec.stems))
    return next(layouts, None)


def read_arrays(folder: Path, spec: Spec) -> tuple[Pixels, Labels, Pixels, Labels]:
    """Training images and labels, test images and labels. Missing training batches are skipped."""
    suffix = suffix_in(folder, spec)
    read = read_records if suffix else read_pickle
    test_path = folder / f"{spec.test_stem}{suffix}"
    train_paths = [folder / f"{stem}{suffix}" for stem in spec.train_stems]
    found = [path for path in train_paths if path.is_file()]
    if not found or not test_path.is_file():
        missing = test_path if found else train_paths[0]
        raise UserError(f"{folder} has no {missing.name}; add it, or remove the folder to download it again")
    batches = [read(path, spec) for path in found]
    train_x, train_y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return train_x, train_y, *read(test_path, spec)


def shortfall(spec: Spec, train_count: int, test_count: int) -> str | None:
    """A note on how the counts differ from the official ones, or None."""
    counts = (("training", train_count, spec.train_count), ("test", test_count, spec.test_count))
    notes = [f"{found:,} instead of {wanted:,} {kind} images" for kind, found, wanted in counts if found != wanted]
    return " and ".join(notes) or None


def class_names(folder: Path, spec: Spec) -> tuple[str, ...]:
    """CIFAR-10's names are built in. CIFAR-100's are read from its files; without them, classes are numbered."""
    path = folder / spec.names_file
    if spec.classes == CIFAR10_CLASSES or not path.is_file():
        return spec.classes
    names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    return names if len(names) == len(spec.classes) else spec.classes


def to_records(x: Pixels, y: Labels) -> Pixels:
    """Images and labels as rows of CIFAR-10's binary layout: label, then red, green and blue planes."""
    planes = x.transpose(0, 3, 1, 2).reshape(len(x), -1)
    return np.concatenate([y[:, None].astype(np.uint8), planes], axis=1)


def read_records(path: Path, spec: Spec) -> tuple[Pixels, Labels]:
    """One file of the binary layout."""
    raw = np.frombuffer(_read_bytes(path), np.uint8)
    size = spec.label_bytes + 3 * spec.side**2
    if raw.size == 0 or raw.size % size:
        raise UserError(f"{path} is damaged: its {raw.size:,} bytes are not records of {size:,} bytes each; replace it")
    records = raw.reshape(-1, size)
    return _checked(path, spec, records[:, spec.label_bytes :], records[:, spec.label_bytes - 1])


UNREADABLE_PICKLE = (pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError)


class _Standin:
    """The state of a pickled numpy array or dtype, stored only. numpy's own classes trust it: one changed flag of a
    dtype makes numpy follow pixels as pointers. Here an array is built from its shape and bytes alone."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def pixels(self) -> Pixels:
        _, shape, dtype, by_column, raw = self.state
        if dtype.arguments[0] not in ("u1", b"u1"):
            raise ValueError("not an array of bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if by_column else "C")


class _ArraysOnly(pickle.Unpickler):
    """Unpickles plain values and byte arrays; refuses a pickle that names any other class or function."""

    admitted: ClassVar[dict[tuple[str, str], Any]] = {
        ("numpy.core.multiarray", "_reconstruct"): _Standin,
        ("numpy._core.multiarray", "_reconstruct"): _Standin,
        ("numpy", "ndarray"): _Standin,
        ("numpy", "dtype"): _Standin,
        ("_codecs", "encode"): lambda text, _encoding: text.encode("latin1"),  # bytes in protocol 2
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.admitted:
            raise UserError(f"its pickle imports {module}.{name}, which images never need; do not trust it")
        return self.admitted[module, name]


def read_pickle(path: Path, spec: Spec) -> tuple[Pixels, Labels]:
    """One file of the pickled layout: a dict with `data`, (N, 3072) bytes, and a list of labels."""
    file = io.BytesIO(_read_bytes(path))
    try:
        check_pickle(file)
        file.seek(0)
        content = _ArraysOnly(file, encoding="bytes").load()
        fields = {key if isinstance(key, str) else key.decode(): value for key, value in content.items()}
        planes, labels = fields["data"].pixels(), fields[spec.labels_key]
        if not labels or planes.shape != (len(labels), 3 * spec.side**2) or {*map(type, labels)} != {int}:
            raise ValueError("images and labels do not match")
    except UserError as error:
        raise UserError(f"{path} was refused: {error}") from None
    except (*UNREADABLE_PICKLE, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or not CIFAR with 'data' and '{spec.labels_key}'; replace it") from error
    return _checked(path, spec, planes, np.array(labels))


def _checked(path: Path, spec: Spec, planes: Pixels, labels: npt.NDArray[Any]) -> tuple[Pixels, Labels]:
    """Channels-last images from channel planes, and int64 labels, checked to be in range."""
    if (wrong := np.flatnonzero((labels < 0) | (labels >= len(spec.classes)))).size:
        label = f"label {labels[wrong[0]]}, but there are {len(spec.classes)} classes"
        raise UserError(f"{path} is damaged: record {wrong[0]:,} has {label}; replace it")
    images = planes.reshape(-1, 3, spec.side, spec.side).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), labels.astype(np.int64)


def _read_bytes(path: Path) -> bytes:
    """The file's content, checked against SHA256SUMS in its folder (the package and the cache have one)."""
    try:
        content = path.read_bytes()
        sums_file = path.parent / SUMS_FILE
        lines = sums_file.read_text(encoding="utf-8", errors="replace").splitlines() if sums_file.is_file() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    sums = {name.strip(" *"): digest for digest, _, name in (line.partition(" ") for line in lines)}
    if path.name in sums and hashlib.sha256(content).hexdigest() != sums[path.name]:
        raise UserError(f"{path} is damaged: its checksum does not match {SUMS_FILE}; replace it")
    return content
