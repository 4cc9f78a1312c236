"""Files that are whole or absent, with checksums that show changes; and folders for one process at a time."""

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
UNREADABLE_ARRAYS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    zipfile.BadZipFile,
    zlib.error,
    tokenize.TokenError,
)  # what numpy was seen to raise on damaged files


class RunFile(StrEnum):
    """The files of a run folder, by name."""

    RECIPE = "recipe.toml"
    RECORD = "run.json"
    METRICS = "metrics.jsonl"
    EVENTS = "events.jsonl"
    CHECKPOINT = "checkpoint.pt"
    PREVIOUS_CHECKPOINT = "checkpoint_previous.pt"
    MODEL = "model.safetensors"
    BEST_MODEL = "model_best.safetensors"
    CARD = "eval.json"
    BEST_CARD = "eval_best.json"
    AA_CARD = "eval_aa.json"
    OUTCOME = "outcome.json"
    PORTRAIT = "portrait.json"
    REPORT = "report.html"


LARGEST_MEMO, MOST_TUPLES = 10**6, 40_000  # in a pickle; honest ones have a few for each tensor, or image


@contextmanager
def atomic(path: Path, *, previous: Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write to that takes the name `path` only when all of it is on the disk.

    What had that name until then is replaced, or becomes `previous`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            path.replace(previous)
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise NotWritten(not_written(path, error)) from error
    finally:
        with suppress(OSError):  # of a folder that is gone, or may not be written to
            temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on the disk only when its folder is."""
    with suppress(OSError):  # not every file system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def not_written(path: Path, error: OSError) -> str:
    """The sentence for a file that could not be written; it names the disk, and the room there is on it."""
    place = path.absolute()
    while not place.is_mount():
        place = place.parent
    room = ""
    with suppress(OSError):
        room = f", {shutil.disk_usage(place).free / 2**20:.1f} MiB free"
    return f"{path} can't be written to the disk at {place} ({error.strerror or error}{room})"


def remove_leftovers(path: Path) -> None:
    """Delete what a killed process left of `path` under its temporary names."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


def append_line(path: Path, fields: dict[str, Any]) -> None:
    """One more line of JSON, on the disk when this returns. Where there is no room for it, none of it stays."""
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
    """Make a file of lines hold these and no others: cut off what came after, or write all of it again."""
    refuse_link(path)
    wanted = b"".join(map(as_line, lines))
    found = path.read_bytes() if path.is_file() else None
    if found is not None and found.startswith(wanted):
        if len(found) > len(wanted):
            os.truncate(path, len(wanted))
        return
    if lines:
        warn(f"{path} is damaged or gone; its {len(lines)} lines are written again from the checkpoint")
    with atomic(path) as file:
        file.write(wanted)


def refuse_link(path: Path) -> None:
    """What is cut or emptied in place must be where it seems to be; a foreign folder may hold links out of it."""
    if path.is_symlink():
        raise UserError(f"{path} is a link to somewhere else, which moatlab never makes; remove it")


def read_whole(path: Path) -> bytes:
    """A file's content; not of a pipe, which may never end, or a device."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def check_pickle(file: IO[bytes]) -> None:
    """Raise an OverflowError for a pickle that would take all memory, or all of the stack, before it can be refused;
    a ValueError for what is none."""
    tuples = 0
    for opcode, argument, _ in pickletools.genops(file):
        tuples += "TUPLE" in opcode.name
        if tuples > MOST_TUPLES or ("PUT" in opcode.name and argument is not None and int(argument) > LARGEST_MEMO):
            raise OverflowError("its pickle is built to exhaust this machine")


def checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def with_checksum(fields: dict[str, Any]) -> dict[str, Any]:
    """The content of a JSON file: its schema, the fields, and a checksum of both."""
    fields = {"schema": SCHEMA, **fields}
    return {**fields, CHECKSUM: checksum(fields)}


def write_json(path: Path, fields: dict[str, Any]) -> None:
    with atomic(path) as file:
        file.write(json.dumps(with_checksum(fields), indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a file of moatlab, or a UserError for one that is damaged, was changed, or has a newer schema."""
    fields, unchanged = read_json_and_check(path)
    if not unchanged:
        raise Damaged(f"{path} is damaged, or was changed after it was written: its checksum does not fit")
    return fields


def read_json_and_check(path: Path) -> tuple[dict[str, Any], bool]:
    """The fields, and whether they are what was written."""
    try:
        fields = json.loads(read_whole(path))
        expected = fields.pop(CHECKSUM, None)
        found = checksum(fields)
        schema = fields.pop("schema")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{path} can't be read: it is missing, damaged, or not a file of moatlab") from None
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
    """This process alone works in `folder`, which is made if need be: a second one is refused. However a process ends,
    its lock ends with it."""
    refuse_link(folder)
    make_folder(folder)
    if sys.platform == "win32":
        yield  # without
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    HELD.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work in {folder}; wait for it, or name another folder") from None
        except OSError as error:
            warn(f"{folder} can't be locked ({error.strerror}); let no second process work in it")
        yield
    finally:
        HELD.discard(handle)
        os.close(handle)


HELD: set[int] = set()  # handles of locks: a child that is forked off (to decode images) must not keep them


def _let_go() -> None:
    for handle in HELD:
        os.close(handle)
    HELD.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
