"""The two ways a command ends badly, and the one way it ends early. Each carries one sentence for a person."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """The user's mistake: exit code 2, nothing was started."""


class Damaged(UserError):
    """A file is missing, or is not what was written."""


class RunFailed(Exception):
    """A run that was started could not go on (NaN, disk): exit code 1, the last checkpoint is kept."""


class NotWritten(RunFailed):
    """A file could not be written: the disk is full, or read-only. What was there before is still there."""


class Interrupted(Exception):
    """A signal asked the run to stop: exit code 128 + signal, a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def needs_trust(model: str, origin: object, instead: str = "") -> UserError:
    """The answer to a file that names code to run: only the user can say that it may."""
    return UserError(
        f"{origin} names the model {model}, which means importing and running that code; if you trust it, "
        f"add --trust-model-code (trust_model_code=True in Python){instead}"
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean fgsm?)` for a misspelt name, to stand at the end of a sentence; nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
