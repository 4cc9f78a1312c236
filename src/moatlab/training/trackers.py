"""Trackers: places outside the run's folder that get its numbers, such as TensorBoard, or the user's own.

A tracker never stops or changes a run. It is called in a thread of its own and gets copies. If it raises an error, or
does not answer within PATIENCE, it is left out for the rest of the run, with one warning.
"""

import contextvars
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeAlias

from moatlab.runtime.errors import first_line
from moatlab.training.recipe import Recipe
from moatlab.training.run_folder import RunRecord

if TYPE_CHECKING:
    from torch import Tensor

Line: TypeAlias = dict[str, Any]  # of metrics.jsonl or events.jsonl
PATIENCE = 120.0  # seconds for one call; Weights & Biases itself waits 90 for its server
NAMES = ("tensorboard", "wandb", "mlflow")


class Tracker:
    """The base of all trackers; override what you need."""

    def start(self, folder: Path, recipe: Recipe, history: list[Line]) -> None:
        """A run starts, or resumes after the epochs in `history`."""

    def epoch(self, line: Line, images: "dict[str, Tensor]") -> None:
        """After each epoch: its line of metrics.jsonl. `images`, if the epoch was monitored: a few `plain` ones and
        their `pgd7` examples, (N, C, H, W) in [0, 1]."""

    def event(self, line: Line) -> None:
        """A line of events.jsonl, such as an alarm."""

    def end(self, record: RunRecord) -> None:
        """The run has ended: `record.status` is finished, stopped, interrupted or failed."""


def numbers(line: Line) -> dict[str, float]:
    """The metrics of an epoch; those that were not measured are left out."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float) and name != "epoch"}


class Trackers:
    """All trackers of a run. `report` gets the warning about one that is left out."""

    def __init__(self, trackers: Sequence[Tracker], report: Callable[[str], None]) -> None:
        self.followed = [_Followed(tracker) for tracker in trackers]
        self.report = report

    def call(self, method: str, *arguments: Any) -> None:
        import torch

        # Restored below: a randomised model must not notice what a tracker draws.
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        for one in [*self.followed]:
            if one not in self.followed:
                continue  # it failed at the event about another one
            with torch.random.fork_rng(devices):
                problem = one.call(method, *copy.deepcopy(arguments))
            if problem:
                self.followed.remove(one)
                self.report(f"the tracker {type(one.tracker).__name__} is left out from here on: {problem}")

    def close(self) -> None:
        for one in self.followed:
            one.close()
        self.followed = []


class _Followed:
    """A tracker and its thread, which is abandoned if a call does not return."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.calls: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        self.answers: SimpleQueue[str] = SimpleQueue()
        context = contextvars.copy_context()  # which has the verbosity
        self.thread = Thread(target=context.run, args=(self._serve,), name="moatlab tracker", daemon=True)

    def call(self, method: str, *arguments: Any) -> str:
        """The reason of a failure; empty if all is well."""
        if self.thread.ident is None:
            self.thread.start()
        self.calls.put((method, arguments))
        try:
            problem = self.answers.get(timeout=PATIENCE)
        except Empty:
            return f"{method} did not return within {PATIENCE:g} s"
        if problem:
            self.close()
        return problem

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None:
            method, arguments = call
            try:
                getattr(self.tracker, method)(*arguments)
                self.answers.put("")
            except BaseException as error:  # SystemExit too
                self.answers.put(f"{method} failed ({type(error).__name__}: {first_line(error)})")

    def close(self) -> None:
        if self.thread.ident is not None:
            self.calls.put(None)
            self.thread.join(PATIENCE)
