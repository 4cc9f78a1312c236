"""Where an evaluation stands, on the disk, so that it goes on after any ending; and the examples it has found."""

from __future__ import annotations

import hashlib
import io
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import UNREADABLE_ARRAYS, atomic, locked, read_json, write_json

SAVE_SECONDS = 2.0  # between two writes; what was done since the last one is done again after a kill


class Partial:
    """A folder with `state.json`, the adversarial examples found so far and, within Square, the points it is at.

    Without a folder everything is kept in memory.
    """

    def __init__(self, folder: Path | None, identity: dict[str, Any], *, keep_examples: bool) -> None:
        self.folder, self.identity, self.keep_examples = folder, identity, keep_examples
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._unsaved: tuple[dict[str, Any], Tensor | None] | None = None
        self._saved_at = 0.0

    def load(self) -> tuple[dict[str, Any], Tensor | None] | None:
        """The state that was saved last and its points, or None. One of another evaluation is refused."""
        if self.folder is None:
            return None
        if not (self.folder / "state.json").exists():
            for leftover in self.folder.glob("found-*.npz"):  # of an evaluation that was killed while it cleared up
                leftover.unlink()
            return None
        content = read_json(self.folder / "state.json")
        before = content.pop("identity", {})
        for name, value in self.identity.items():
            if before.get(name) != value:
                raise UserError(
                    f"{self.folder} holds an unfinished evaluation with another {name.replace('_', ' ')} "
                    f"({_short(before.get(name))}, not {_short(value)}); finish it as it was started, or delete it"
                )
        name, expected = content.pop("points"), content.pop("points_sha256")
        if name is None:
            return content, None
        try:
            raw = (self.folder / Path(name).name).read_bytes()
        except OSError:
            raw = b""
        if hashlib.sha256(raw).hexdigest() != expected:
            raise Damaged(f"{self.folder / name} is missing or damaged; delete {self.folder} to evaluate anew")
        return content, torch.from_numpy(np.load(io.BytesIO(raw)))

    def save(self, state: dict[str, Any], points: Tensor | None) -> None:
        """Called after every part; writes now and then."""
        self._unsaved = state, points
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self.folder is None or self._unsaved is None:
            return
        state, points = self._unsaved
        self.folder.mkdir(parents=True, exist_ok=True)
        name = digest = None
        if points is not None:
            name = f"points-{state['step']}.npy"
            buffer = io.BytesIO()
            np.save(buffer, points.cpu().contiguous().numpy())
            digest = hashlib.sha256(buffer.getbuffer()).hexdigest()
            with atomic(self.folder / name) as file:
                file.write(buffer.getbuffer())
        fields = {"identity": self.identity, **state, "points": name, "points_sha256": digest}
        write_json(self.folder / "state.json", fields)
        for old in self.folder.glob("points-*.npy"):
            if old.name != name:
                old.unlink()
        self._unsaved, self._saved_at = None, time.monotonic()

    def keep(self, attack: str, place: str, rows: Tensor, points: Tensor) -> None:
        """Adversarial examples of the images `rows`. On the disk before the state that counts them."""
        if not self.keep_examples:
            return
        if self.folder is None:
            self.found.setdefault(attack, []).append((rows.cpu(), points.cpu()))
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, rows=rows.cpu().numpy(), points=points.cpu().contiguous().numpy())
        with atomic(self.folder / f"found-{attack}-{place}.npz") as file:
            file.write(buffer.getbuffer())


def pieces(folder: Path, attack: str, array: str) -> Iterator[Any]:
    """What was kept for an attack, in order: its `rows` or its `points`, one file in memory at a time."""
    for path in sorted(folder.glob(f"found-{attack}-[0-9]*.npz")):
        try:
            with np.load(path) as piece:
                values = piece[array]
        except UNREADABLE_ARRAYS:
            raise Damaged(f"{path} is damaged; delete {folder} to evaluate anew") from None
        yield values


@contextmanager
def for_one_process(folder: Path) -> Iterator[None]:
    """The folder of an evaluation, while no other process may work in it; it goes where nothing was kept in it."""
    with locked(folder):
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()  # only an empty one can be


def discard(folder: Path) -> None:
    """The result is on the disk: what was kept to continue is not needed any more."""
    (folder / "state.json").unlink(missing_ok=True)  # first: what is left is of no evaluation
    shutil.rmtree(folder, ignore_errors=True)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}…"
