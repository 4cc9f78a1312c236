"""Atomic writes, JSON files with checksums, and locks on folders."""

import errno
import hashlib
import json
import os
import pickletools
import shutil
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from moatlab.runtime.console import warn
from moatlab.runtime.errors import Damaged, NotWritten, UserError

SCHEMA = 1
CHECKSUM = "checksum"
# Raised by numpy on damaged files.
_BUILT_IN = (OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, MemoryError, SyntaxError)
UNREADABLE_ARRAYS = (*_BUILT_IN, zipfile.BadZipFile, zlib.error, tokenize.TokenError)
LARGEST_MEMO, MOST_TUPLES = 10**6, 40_000  # in a pickle; normal ones have a few for each tensor or image


class RunFile(StrEnum):
    """The names of the files of a run folder."""

    RECIPE = "recipe.toml"
    RECORD = "run.json"
    METRICS = "metrics.jsonl"
    EVENTS = "events.jsonl"
    CHECKPOINT = "checkpoint.pt"
    PREVIOUS_CHECKPOINT = "checkpoint_previous.pt"
    MODEL = "model.safetensors"
    BEST_MODEL = "model_best.safetensors"
    AVERAGE_MODEL = "model_average.safetensors"
    CARD = "eval.json"
    BEST_CARD = "eval_best.json"
    AVERAGE_CARD = "eval_average.json"
    AA_CARD = "eval_aa.json"
    OUTCOME = "outcome.json"
    PORTRAIT = "portrait.json"
    REPORT = "report.html"


@contextmanager
def atomic(path: Path, *, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """A file that gets the name `path` only when all of it is on the disk. An older one is replaced, or renamed to
    `previous`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            path.replace(previous)
        temporary.replace(path)
        with suppress(OSError):  # not supported by every file system
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)  # a rename is on the disk only when its folder is
            finally:
                os.close(handle)
    except OSError as error:
        raise NotWritten(not_written(path, error)) from error
    finally:
        with suppress(OSError):  # the folder may be gone or read-only
            temporary.unlink(missing_ok=True)


def not_written(path: Path, error: OSError) -> str:
    """The error message for a file, with its disk and the free space on it."""
    place = path.absolute()
    while not place.is_mount():
        place = place.parent
    room = ""
    with suppress(OSError):
        room = f", {shutil.disk_usage(place).free / 2**20:.1f} MiB free"
    return f"{path} can't be written to the disk at {place} ({error.strerror or error}{room})"


def remove_leftovers(path: Path) -> None:
    """Delete temporary files of `path` that a killed process left behind."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """Append a line of JSON, all of it or nothing; it is on the disk when this returns."""
    refuse_link(path)
    length = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(as_line(fields))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, length)
        raise NotWritten(not_written(path, error)) from error


def as_line(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}).encode() + b"\n"


def restore_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Make a file hold exactly these lines: truncate it after them, or rewrite it."""
    refuse_link(path)
    wanted = b"".join(map(as_line, lines))
    found = path.read_bytes() if path.is_file() else None
    if found is not None and found.startswith(wanted):
        if len(found) > len(wanted):
            os.truncate(path, len(wanted))
        return
    if lines:
        warn(f"{path} is damaged or missing; its {len(lines)} lines are restored from the checkpoint")
    with atomic(path) as file:
        file.write(wanted)


def refuse_link(path: Path) -> None:
    """A file that is truncated in place must not be a link out of its folder."""
    if path.is_symlink():
        raise UserError(f"{path} is a symbolic link, which moatlab never creates; remove it")


def read_whole(path: Path) -> bytes:
    """A file's content; an OSError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def check_pickle(file: IO[bytes]) -> None:
    """Raise an OverflowError for a pickle that would exhaust memory or stack; a ValueError for what is no pickle."""
    tuples = 0
    for opcode, argument, _ in pickletools.genops(file):
        tuples += "TUPLE" in opcode.name
        if tuples > MOST_TUPLES or ("PUT" in opcode.name and argument is not None and int(argument) > LARGEST_MEMO):
            raise OverflowError("its pickle would exhaust the memory")


def checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def with_checksum(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of a JSON file: schema, fields, and a checksum of both."""
    fields = {"schema": SCHEMA, **fields}
    return {**fields, CHECKSUM: checksum(fields)}


def write_json(path: Path, fields: dict[str, Any]) -> None:
    with atomic(path) as file:
        file.write(json.dumps(with_checksum(fields), indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a file; a UserError if it is damaged, was changed, or has another schema."""
    fields, unchanged = read_json_and_check(path)
    if not unchanged:
        raise Damaged(f"{path} is damaged or was changed after it was written: its checksum does not match")
    return fields


def read_json_and_check(path: Path) -> tuple[dict[str, Any], bool]:
    """The fields, and whether the checksum matches."""
    try:
        fields = json.loads(read_whole(path))
        expected = fields.pop(CHECKSUM, None)
        found = checksum(fields)
        schema = fields.pop("schema")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path} can't be read: it is missing, damaged or not from moatlab") from None
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}; this version of moatlab reads {SCHEMA}")
    return dict(fields), found == expected


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotWritten(not_written(folder, error)) from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create `folder` if needed and lock it: a second process is refused. The lock ends with its process."""
    refuse_link(folder)
    make_folder(folder)
    if sys.platform == "win32":
        yield  # no lock
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    HELD.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process uses {folder}; wait for it, or choose another folder") from None
        except OSError as error:
            warn(f"{folder} can't be locked ({error.strerror}); do not use it from a second process")
        yield
    finally:
        HELD.discard(handle)
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of `folder`; True where that can't be known."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


HELD: set[int] = set()  # handles of locks, which a forked child (to decode images) must not keep


def _let_go() -> None:
    for handle in HELD:
        os.close(handle)
    HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
