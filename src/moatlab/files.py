"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from moatlab.errors import UserError

SCHEMA = 1


@contextmanager
def atomic(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes the name `path` only when all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, fields: dict[str, Any]) -> None:
    with atomic(path) as file:
        file.write(json.dumps({"schema": SCHEMA, **fields}, indent=1).encode() + b"\n")


def read_json(path: Path) -> dict[str, Any]:
    """The fields of a file that `write_json` wrote, or a UserError for one that is damaged or of a newer schema."""
    try:
        fields = json.loads(path.read_text())
        schema = fields.pop("schema")
    except (OSError, ValueError, KeyError, AttributeError):
        raise UserError(f"{path} can't be read: it is missing, damaged, or not a file of moatlab") from None
    if schema != SCHEMA:
        raise UserError(f"{path} has schema {schema}; this version of moatlab reads {SCHEMA}")
    return dict(fields)
