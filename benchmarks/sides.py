"""Shared by the benchmarks: a process per library, taking turns, and the file of results."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import moatlab
from moatlab.runtime.environment import describe_environment

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results" / "speed.json"


def start(work: Callable[..., None], name: str, *arguments: Any) -> Connection:
    """Start a process that runs work(name, *arguments, pipe) and answers requests until it gets None."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    spawn.Process(target=work, args=(name, *arguments, there), daemon=True).start()
    there.close()
    return here


def ask(pipe: Connection, request: Any) -> Any:
    pipe.send(request)
    return pipe.recv()


def installed(package: str) -> bool:
    if importlib.util.find_spec(package):
        return True
    tell(f"{package} is not installed and is skipped; install it with make bench-setup")
    return False


def has_cifar10() -> bool:
    try:
        moatlab.load_images("cifar10")
    except moatlab.UserError as error:
        tell(f"CIFAR-10 is not available; skipping what needs it ({error})")
        return False
    return True


def recorded(part: str) -> Any:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results.get(part, {}).get("measured")


def record(part: str, content: Any) -> None:
    """Write a part of docs/results/speed.json, with the environment it was measured in."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = {"measured": content, "environment": describe_environment()}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":  # add the output of `moat bench`: python benchmarks/sides.py bench.json
    record("bench", json.loads(Path(sys.argv[1]).read_text()))
