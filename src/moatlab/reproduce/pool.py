"""The runs of a sweep: one after another, or each as a task of a Ray cluster."""

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
from moatlab.runtime.errors import Interrupted, RunFailed, UserError

Result = TypeVar("Result")
Trouble = UserError | RunFailed
LOOK_SECONDS = 1.0


def each(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on: str | None, machine: Machine
) -> Iterator[tuple[int, Result | Trouble]]:
    """`work(*job)` of every job: the job's number, and what came of it, its error included.

    `on` is None for one after another in this process, `ray` for a Ray cluster of this machine, or `ray:ADDRESS` for
    one that runs already, whose machines must see the same folders. A task there has as many CPUs as `machine` has
    threads, and a GPU if it may use one and the cluster has some.
    """
    if on is None:
        for number, job in enumerate(jobs):
            yield number, _attempt(work, *job)
        return
    with _connected(on) as ray, console.Bar(f"on {on}", len(jobs)) as bar:
        resources, threads = ray.cluster_resources(), machine.threads or distributed.threads()
        if resources.get("CPU", 0) < threads:
            few = f"the cluster has {resources.get('CPU', 0):g} CPUs, and a run asks for {threads}"
            raise UserError(f"--on {on}: {few}; give it fewer with --threads")
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
                    yield number, RunFailed(f"its task was lost ({type(error).__name__}); start again to resume")


@contextmanager
def _connected(on: str) -> Iterator[Any]:
    """Ray, until the end. It sets variables of the environment, a signal handler and its log's level: all put back."""
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise UserError(f"--on {on}: runs are given to ray, or to ray:ADDRESS; without --on they run one after another")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UserError('--on ray needs Ray; install it with: pip install "moatlab[ray]"') from None
    log, environment, handler = logging.getLogger("ray"), dict(os.environ), signal.getsignal(signal.SIGTERM)
    level = log.level
    try:
        try:
            ray.init(address or "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"--on {on}: there is no Ray cluster that answers ({type(error).__name__})") from None
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
    except (UserError, RunFailed) as error:  # as exceptions they would come wrapped in Ray's
        return error.with_traceback(None)


def _in_worker(work: Callable[..., Result], *job: Any) -> Result | Trouble:
    keep_freed_memory()  # the process is ours
    try:
        return _attempt(work, *job)
    except Interrupted as error:
        return RunFailed(str(error))
