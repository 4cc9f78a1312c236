"""Write src/moatlab/training/front.json, from which `moat train best` chooses, out of kept results.

.venv/bin/python scripts/make_front.py
"""

import json
from pathlib import Path
from typing import Any

from moatlab.runtime.files import read_json

ROOT = Path(__file__).parent.parent
RESULTS, FRONT = ROOT / "docs" / "results", ROOT / "src" / "moatlab" / "training" / "front.json"
SOURCES = {"mini": ["table2a-mini.json"], "laptop": ["table2a-laptop.json"]}


def make_front() -> dict[str, Any]:
    fronts = []
    for preset, names in SOURCES.items():
        results = {name: read_json(RESULTS / name) for name in names if (RESULTS / name).exists()}
        recipe = next(iter(results.values()))["runs"][0]["recipe"]
        about = {name: recipe[name] for name in ("data", "model", "width", "eps")}
        setting = next(iter(results.values()))["setting"]
        points = [point(row, name) for name, result in results.items() for row in result["rows"] if is_robust(row)]
        fronts.append({"preset": preset, **about, "setting": setting, "points": points})
    return {"fronts": fronts}


def is_robust(row: dict[str, Any]) -> bool:
    """At all seeds: a method that collapses at some is no advice."""
    return set(row["outcomes"]) == {"robust"}


def point(row: dict[str, Any], source: str) -> dict[str, Any]:
    columns, cost = row["columns"], row["cost"]
    aa = columns["aa"]
    return {
        "method": row["method"],
        "options": {},
        "epochs": row["epochs"][0],
        "passes": cost["passes"],
        "flops": cost["flops"],
        "clean": round(columns["clean"]["mean"], 4),
        "robust": round(aa["mean"], 4),
        "interval": [round(bound, 4) for bound in aa["interval"]],
        "images": read_json(RESULTS / source)["images"]["aa"],
        "seeds": len(row["seeds"]),
        "source": source,
    }


def as_text(front: dict[str, Any]) -> str:
    return json.dumps(front, indent=1) + "\n"


if __name__ == "__main__":
    FRONT.write_text(as_text(make_front()), encoding="utf-8")
