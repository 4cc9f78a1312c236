"""The two ways a command ends badly, and the one way it ends early. Each carries one sentence for a person."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """The user's mistake: exit code 2, nothing was started."""


class Damaged(UserError):
    """A file is missing, or is not what was written."""


class RunFailed(Exception):
    """A run that was started could not continue (NaN, disk): exit code 1, the last checkpoint is kept."""


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
    """` (did you mean fgsm?)` for a misspelt name, at the end of a sentence; nothing where none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def users_code(trouble: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """For a block that runs the user's code, which may raise anything: its error becomes one sentence."""
    try:
        yield
    except (UserError, RunFailed, Interrupted):
        raise
    except Exception as error:
        raise kind(f"{trouble} ({type(error).__name__}: {first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """An exception's message, short enough for the middle of a sentence."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
