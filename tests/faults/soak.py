"""`make soak`: the faults of tests/faults in great numbers. Writes docs/results/reliability.json; about an hour."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import fuzz, kills
from faults.corruption import Corruption
from faults.fulldisk import FullDisk, can_mount
from images_for_tests import tiny_images

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "reliability.json"


def small_disks(folder: Path, tiny: Path, count: int) -> dict[str, Any]:
    if not can_mount(folder / "disk"):
        return {"left out": "this user may not mount a file system"}
    return FullDisk(folder, tiny).on_small_disks(count)


PARTS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "kills of moat train": lambda folder, _: kills.train(folder, 13),
    "kills of moat eval --attacks aa": lambda folder, _: kills.evaluate(folder, chains=4, kills=6),
    "corrupted files": lambda folder, tiny: Corruption(folder / "files", tiny).many(1000),
    "command lines in this process": lambda *_: fuzz.in_process(20_000),
    "command lines as processes": lambda folder, _: fuzz.as_processes(folder, 200),
    "full disks": lambda folder, tiny: small_disks(folder, tiny, 30),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)}")
    chosen = parser.parse_args().parts or list(PARTS)
    os.environ.pop("MOAT_DATA", None)
    for name in chosen:
        with tempfile.TemporaryDirectory() as temporary:
            folder, begun = Path(temporary), time.monotonic()
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            os.chdir(folder)
            print(f"{name} ...", flush=True)
            (folder / "work").mkdir()
            found = PARTS[name](folder / "work", tiny_images(folder / "tiny"))
            os.chdir("/")
        figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        figures[name] = {**found, "seconds": round(time.monotonic() - begun)}
        print(f"{name}: {figures[name]}", flush=True)
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
