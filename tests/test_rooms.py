"""The rooms of the package, and the one rule between them: a room imports from rooms to its left only."""

import ast
from pathlib import Path

import moatlab

ROOT = Path(moatlab.__file__).parent
TIERS = ["runtime", "attacks data models", "methods", "training", "evaluation", "report", "reproduce sharing", "cli"]
HEIGHT = {room: height for height, tier in enumerate(TIERS) for room in tier.split()}


def modules():
    """dotted name -> path, of every file in a room"""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if len(parts) > 1:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path, known):
    """The modules of ours that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "moatlab":
            base = (node.module or "").removeprefix("moatlab").lstrip(".")
            names = [".".join(filter(None, (base, alias.name))) for alias in node.names]
            names = [name if name in known else base for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name.removeprefix("moatlab.") for alias in node.names if alias.name.startswith("moatlab.")]
        yield from (name for name in names if name)


def test_a_room_imports_from_rooms_to_its_left_only():
    known = modules()
    for name, path in known.items():
        room = name.split(".")[0]
        for other in imports_of(path, known):
            there = other.split(".")[0]
            if there in HEIGHT:
                assert there == room or HEIGHT[there] < HEIGHT[room], f"{name} imports {other}"


def test_every_public_name_can_be_used():
    for name in moatlab.__all__:
        assert getattr(moatlab, name) is not None
    assert moatlab.__version__
