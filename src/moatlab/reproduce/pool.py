"""Train the runs of a sweep one after another, several at a time, or as tasks of a Ray cluster."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar

from moatlab.runtime import console, distributed
from moatlab.runtime.device import Machine
from moatlab.runtime.environment import keep_freed_memory
from moatlab.runtime.errors import Interrupted, RunFailed, UserError, users_code

Result = TypeVar("Result")
Trouble = UserError | RunFailed
LOOK_SECONDS = 1.0
MOST = 1024


def each(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on: str | None, machine: Machine
) -> Iterator[tuple[int, Result | Trouble]]:
    """Call `work(*job)` for each job; yield the job's number with its result or its error.

    `on`: None (one after another, here), a number (so many processes at a time, here), `ray` (a Ray cluster on this
    machine) or `ray:ADDRESS` (a running one, whose machines share the folders). A task of Ray gets a CPU per thread of
    `machine`, and a GPU if it allows one and there is one.
    """
    if on is None:
        for number, job in enumerate(jobs):
            yield number, _attempt(work, *job)
        return
    if on.isdecimal():
        if not 1 <= int(on) <= MOST:
            raise UserError(f"--on {on}: must be from 1 to {MOST} runs at a time")
        yield from _side_by_side(work, jobs, int(on))
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


def machine_for(machine: Machine, on: str | None) -> Machine:
    """The machine for each of the runs: those at a time on this machine share its cores."""
    if on is None or not on.isdecimal() or machine.threads:
        return machine
    return Machine(machine.device, max(distributed.cores() // max(int(on), 1), 1))


def _side_by_side(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], processes: int
) -> Iterator[tuple[int, Result | Trouble]]:
    """In processes of their own, which stop when this one does."""
    new, parent = get_context("spawn"), os.getpid()
    with ProcessPoolExecutor(processes, mp_context=new, initializer=_stop_with, initargs=(parent,)) as pool:
        pending = {pool.submit(_in_worker, work, *job): number for number, job in enumerate(jobs)}
        try:
            for done in as_completed(pending):
                try:
                    yield pending[done], done.result()
                except BrokenProcessPool:
                    yield pending[done], RunFailed("its process was killed; run again to resume")
        finally:  # if interrupted, no further job is begun
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _connected(on: str) -> Iterator[Any]:
    """A connection to Ray. The environment variables, signal handler and log level that Ray sets are restored."""
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise UserError(f"--on {on}: should be a number, ray or ray:ADDRESS; leave it out to run one after another")
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


def _stop_with(parent: int) -> None:
    """Interrupt this process when its parent is gone, so that its run is saved and can be resumed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _in_worker(work: Callable[..., Result], *job: Any) -> Result | Trouble:
    keep_freed_memory()  # changes the allocator: allowed in a process of our own
    try:
        return _attempt(work, *job)
    except Interrupted as error:
        return RunFailed(str(error))
