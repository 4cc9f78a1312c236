"""Write the pages of kept results again from their numbers: docs/results/NAME-PRESET*.json to .md. Nothing is trained.

.venv/bin/python scripts/render_results.py
"""

from pathlib import Path

from moatlab.reproduce.paper import EXPERIMENTS
from moatlab.reproduce.tables import as_text
from moatlab.runtime.files import read_json

FOLDER = Path(__file__).parent.parent / "docs" / "results"
RESULTS = sorted(path for name in EXPERIMENTS for path in FOLDER.glob(f"{name}-*.json"))


def page_of(result: Path) -> str:
    return as_text(read_json(result), "md", picture=f"{result.stem}.png")


if __name__ == "__main__":
    for result in RESULTS:
        result.with_suffix(".md").write_text(page_of(result), encoding="utf-8")
