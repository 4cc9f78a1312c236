"""The two ways a command ends badly, and the one way it ends early. Each carries one sentence for a person."""


class UserError(Exception):
    """The user's mistake: exit code 2, nothing was started."""


class RunFailed(Exception):
    """A run that was started could not go on (NaN, disk): exit code 1, the last checkpoint is kept."""


class Interrupted(Exception):
    """A signal asked the run to stop: exit code 128 + signal, a checkpoint was written."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
