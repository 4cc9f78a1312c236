"""The exceptions that end a command. Each carries one sentence."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(Exception):
    """The user's mistake: exit code 2, nothing was started."""


class Damaged(UserError):
    """A file is missing, damaged or was changed."""


class RunFailed(Exception):
    """A run could not continue (NaN, disk): exit code 1, the last checkpoint is kept."""


class NotWritten(RunFailed):
    """A file could not be written, as on a full or read-only disk. Its earlier version is kept."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run: exit code 128 + signal, a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number


def needs_trust(model: str, origin: object, instead: str = "") -> UserError:
    """The error for a file that names code to run, which only the user can allow."""
    how = f"if you trust it, add --trust-model-code (trust_model_code=True in Python){instead}"
    return UserError(f"{origin} names the model {model}, which means importing and running that code; {how}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean fgsm?)` for a misspelt name; empty if no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@contextmanager
def users_code(trouble: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """For a block that runs the user's code: any error of it becomes one sentence."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        raise kind(f"{trouble} ({type(error).__name__}: {first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
