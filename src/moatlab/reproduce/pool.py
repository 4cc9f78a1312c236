"""The runs of a sweep: one after another, or each as a task of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from moatlab.runtime import console
from moatlab.runtime.errors import Interrupted, RunFailed, UserError

Result = TypeVar("Result")
Trouble = UserError | RunFailed
LOOK_SECONDS = 1.0


def each(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on: str | None = None, *, threads: int = 1,
    gpus: bool = False,
) -> Iterator[tuple[int, Result | Trouble]]:  # fmt: skip
    """`work(*job)` of every job: the job's number, and what came of it, its error included.

    `on` is None for one after another in this process, `ray` for a Ray cluster of this machine, or `ray:ADDRESS` for
    one that runs already, whose machines must see the same folders. A task there has `threads` CPUs, and a GPU if it
    may use one and the cluster has some.
    """
    if on is None:
        for number, job in enumerate(jobs):
            try:
                yield number, work(*job)
            except (UserError, RunFailed) as error:
                yield number, error
    else:
        yield from _on_ray(work, jobs, on, threads, gpus)


def _on_ray(
    work: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], on: str, threads: int, gpus: bool
) -> Iterator[tuple[int, Result | Trouble]]:
    kind, _, address = on.partition(":")
    if kind != "ray":
        raise UserError(f"--on {on}: runs are given to ray, or to ray:ADDRESS; without --on they run one after another")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise UserError('--on ray needs Ray; install it with: pip install "moatlab[ray]"') from None
    try:
        ray.init(address=address or "local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"--on {on}: there is no Ray cluster that answers ({type(error).__name__})") from None
    try:
        resources = ray.cluster_resources()
        if resources.get("CPU", 0) < threads:
            raise UserError(
                f"--on {on}: the cluster has {resources.get('CPU', 0):g} CPUs, and a run asks for {threads}"
            )
        task = ray.remote(num_cpus=threads, num_gpus=int(gpus and resources.get("GPU", 0) >= 1), max_retries=0)(
            _guarded
        )
        pending = {task.remote(work, *job): number for number, job in enumerate(jobs)}
        with console.Bar(f"on {on}", len(jobs)) as bar:
            while pending:
                bar.update(len(jobs) - len(pending), f"{len(jobs) - len(pending)} of {len(jobs)} runs done")
                for done in ray.wait(list(pending), timeout=LOOK_SECONDS)[0]:
                    number = pending.pop(done)
                    try:
                        yield number, ray.get(done)
                    except ray.exceptions.RayError as error:
                        yield number, RunFailed(f"its task was lost ({type(error).__name__}); start again to go on")
    finally:
        ray.shutdown()


def _guarded(work: Callable[..., Result], *job: Any) -> Result | Trouble:
    """Errors of ours as results: as exceptions they would come wrapped in Ray's."""
    try:
        return work(*job)
    except (UserError, RunFailed) as error:
        return error.with_traceback(None)
    except Interrupted as error:
        return RunFailed(str(error))
