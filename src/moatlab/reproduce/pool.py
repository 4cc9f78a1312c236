"""Train the runs of a sweep one after another, or as tasks of a Ray cluster."""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

from moatlab.runtime import console, distributed
from moatlab.runtime.device import Machine
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, RunFailed, UserError, users_code

Result = TypeVar("Result")
Trouble = UserError | RunFailed
LOOK_SECONDS = 1.0


def each(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on: str | None, machine: Machine
) -> Iterator[tuple[int, Result | Trouble]]:
    """Call `work(*job)` for each job; yield the job's number with its result or its error.

    `on`: None (one after another, here), `ray` (a Ray cluster on this machine) or `ray:ADDRESS` (a running one, whose
    machines share the folders). A task gets a CPU per thread of `machine`, and a GPU if it allows one and there is one.
    """
    if on is None:
        for number, job in enumerate(jobs):
            yield number, _attempt(work, *job)
        return
    with _connected(on) as ray, console.Bar(f"on {on}", len(jobs)) as bar:
        resources, threads = ray.cluster_resources(), machine.threads or distributed.threads()
        if resources.get("CPU", 0) < threads:
            few = f"the cluster has {resources.get('CPU', 0):g} CPUs and a run needs {threads}"
            raise UserError(f"--on {on}: {few}; use fewer --threads")
        gpus = int(machine.device != "cpu" and resources.get("GPU", 0) >= 1)
        task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_in_worker)
        pending = {task.remote(work, *job): number for number, job in enumerate(jobs)}
        while pending:
            bar.update(len(jobs) - len(pending), f"{len(jobs) - len(pending)} of {len(jobs)} runs done")
            for done in ray.wait(list(pending), timeout=LOOK_SECONDS)[0]:
                number = pending.pop(done)
                try:
                    yield number, ray.get(done)
                except ray.exceptions.RayError as error:
                    yield number, RunFailed(f"its Ray task was lost ({type(error).__name__}); run again to resume")


@contextmanager
def _connected(on: str) -> Iterator[Any]:
    """A connection to Ray. The environment variables, signal handler and log level that Ray sets are restored."""
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise UserError(f"--on {on}: should be ray or ray:ADDRESS; leave it out to run one after another")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UserError('--on ray needs Ray; install it with: pip install "moatlab[ray]"') from None
    log, environment, handler = logging.getLogger("ray"), dict(os.environ), signal.getsignal(signal.SIGTERM)
    level = log.level
    try:
        with users_code(f"--on {on}: no Ray cluster answers"):
            ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        yield ray
    finally:
        ray.shutdown()
        log.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)


def _attempt(work: Callable[..., Result], *job: Any) -> Result | Trouble:
    try:
        return work(*job)
    except (UserError, RunFailed) as error:  # raised, it would be wrapped in an exception of Ray
        return error.with_traceback(None)


def _in_worker(work: Callable[..., Result], *job: Any) -> Result | Trouble:
    keep_freed_memory()  # changes the allocator: allowed in a process of our own
    try:
        return _attempt(work, *job)
    except Interrupted as error:
        return RunFailed(str(error))
