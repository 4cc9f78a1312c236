"""The saved state of an evaluation, from which it resumes, and the adversarial examples found so far."""

import hashlib
import io
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from moatlab.evaluation.red_flags import Measured, Verdicts, WithoutGradients
from moatlab.evaluation.result import Cost
from moatlab.runtime.errors import Damaged, UserError
from moatlab.runtime.files import UNREADABLE_ARRAYS, atomic, locked, read_json, write_json

SAVE_SECONDS = 2.0  # between writes; a killed evaluation repeats what came after the last one


class State(BaseModel, extra="forbid", arbitrary_types_allowed=True):
    """`state.json`: what is evaluated, and the verdicts after `step` steps."""

    identity: dict[str, Any]
    answers: list[list[float]]  # logits of a few images
    broken_by: Verdicts
    cost: dict[str, Cost]
    measured: Measured | WithoutGradients | None = None
    step: int = 0
    points: Annotated[Tensor | None, Field(exclude=True)] = None  # of Square, for robust images
    points_sha256: str | None = None  # of their file


class Partial:
    """A folder with `state.json`, the adversarial examples found so far and the points of Square; or all in memory."""

    def __init__(self, folder: Path | None, identity: dict[str, Any], *, keep_examples: bool) -> None:
        self.folder, self.identity, self.keep_examples = folder, identity, keep_examples
        self.found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._unsaved: State | None = None
        self._saved_at = 0.0

    def load(self, new: State) -> State | None:
        """The last saved state, or None; an error if it is of another evaluation than `new`."""
        if self.folder is None:
            return None
        path = self.folder / "state.json"
        if not path.exists():
            for leftover in self.folder.glob("found-*.npz"):  # of an evaluation killed in `discard`
                leftover.unlink()
            return None
        try:
            saved = State(**read_json(path))
            self._check(saved, new)
            if saved.points_sha256 is not None:
                raw = (self.folder / f"points-{saved.step}.npy").read_bytes()
                if hashlib.sha256(raw).hexdigest() != saved.points_sha256:
                    raise OSError
                saved.points = torch.from_numpy(np.load(io.BytesIO(raw)))
        except UNREADABLE_ARRAYS:
            raise Damaged(f"a file in {self.folder} is missing or damaged; delete the folder to start again") from None
        return saved

    def _check(self, saved: State, new: State) -> None:
        found = f"{self.folder} holds an unfinished evaluation"
        for name, value in new.identity.items():
            if (before := saved.identity.get(name)) != value:
                other = f"{name.replace('_', ' ')} ({before!s:.40}, not {value!s:.40})"
                raise UserError(f"{found} with another {other}; finish it with the same command, or delete it")
        before, now = torch.tensor(saved.answers), torch.tensor(new.answers)
        same = before.shape == now.shape and (before - now).abs().max() <= 1e-4 * now.abs().max()
        if not same and not (saved.measured and saved.measured.randomised):
            raise UserError(f"{found} of a model with the same weights but other outputs; delete it to start again")

    def save(self, state: State) -> None:
        """Called after every step; writes every few seconds."""
        self._unsaved = state
        if time.monotonic() - self._saved_at >= SAVE_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write the state after the last finished step, if it is not written yet."""
        state = self._unsaved
        if self.folder is None or state is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        name, state.points_sha256 = f"points-{state.step}.npy", None
        if state.points is not None:
            state.points_sha256 = _write(self.folder / name, np.save, state.points.cpu().contiguous().numpy())
        write_json(self.folder / "state.json", state.model_dump())
        for old in self.folder.glob("points-*.npy"):
            if old.name != name or state.points is None:
                old.unlink()
        self._unsaved, self._saved_at = None, time.monotonic()

    def keep(self, attack: str, place: str, rows: Tensor, points: Tensor) -> None:
        """Keep adversarial examples of the images `rows`; they are written before the state that counts them."""
        if self.keep_examples and self.folder is None:
            self.found.setdefault(attack, []).append((rows.cpu(), points.cpu()))
        elif self.keep_examples and self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"found-{attack}-{place}.npz"
            _write(path, np.savez, rows=rows.cpu().numpy(), points=points.cpu().contiguous().numpy())


def _write(path: Path, save: Callable[..., None], *arrays: Any, **named: Any) -> str:
    """Write arrays in NumPy's format and return the file's checksum."""
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    with atomic(path) as file:
        file.write(buffer.getbuffer())
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def pieces(folder: Path, attack: str, array: str) -> Iterator[Any]:
    """The `rows` or the `points` kept for an attack, in order, one file in memory at a time."""
    for path in sorted(folder.glob(f"found-{attack}-[0-9]*.npz")):
        try:
            with np.load(path) as piece:
                values = piece[array]
        except UNREADABLE_ARRAYS:
            raise Damaged(f"{path} is damaged; delete {folder} to start again") from None
        yield values


@contextmanager
def for_one_process(folder: Path) -> Iterator[None]:
    """Lock the folder of an evaluation; afterwards it is removed if it is empty."""
    with locked(folder):
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()


def discard(folder: Path) -> None:
    """Delete the state once the result is written."""
    (folder / "state.json").unlink(missing_ok=True)  # first: without it, leftovers are ignored
    shutil.rmtree(folder, ignore_errors=True)
