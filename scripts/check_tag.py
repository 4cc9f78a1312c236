"""Check that a tag is the version in pyproject.toml and CITATION.cff, with a dated entry in the changelog:

python scripts/check_tag.py v0.1.0
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def problem(tag: str) -> str | None:
    """What is wrong with this tag; None if it can be released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if tag != f"v{version}":
        return f"the tag is {tag}, but the version in pyproject.toml is {version}; it needs the tag v{version}"
    for name, needed in (
        ("CHANGELOG.md", rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"),
        ("CITATION.cff", rf"^version: {re.escape(version)}$"),
    ):
        if not re.search(needed, (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE):
            return f"{name} has no {'dated entry for ' if name.endswith('md') else ''}version {version}"
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    if trouble := problem(sys.argv[1]):
        sys.exit(trouble)
