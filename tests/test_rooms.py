"""The rooms of the package, and the one rule between them: a room imports from rooms to its left only."""

import ast
import re
from graphlib import TopologicalSorter
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
    """The modules of ours that a file imports, in functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "moatlab":
            base = (node.module or "").removeprefix("moatlab").lstrip(".")
            names = [".".join(filter(None, (base, alias.name))) for alias in node.names]
            names = [name if name in known else base for name in names]
        elif isinstance(node, ast.Import):
            names = [alias.name.removeprefix("moatlab.") for alias in node.names if alias.name.startswith("moatlab.")]
        yield from (name for name in names if name)


def test_the_package_has_eleven_rooms_and_nothing_beside_them():
    entries = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert entries == {*HEIGHT, "__init__.py", "__main__.py", "py.typed"}
    assert all((ROOT / room / "__init__.py").is_file() for room in HEIGHT)


def test_a_room_imports_from_rooms_to_its_left_only():
    known = modules()
    for name, path in known.items():
        room = name.split(".")[0]
        for other in imports_of(path, known):
            there = other.split(".")[0]
            assert there == room or HEIGHT[there] < HEIGHT[room], f"{name} imports {other}"


def test_there_are_no_cycles_between_the_files_of_a_room():
    known = modules()
    # Not an __init__, which names what is inside its package.
    graph = {
        name: {other for other in imports_of(path, known) if known[other].name != "__init__.py"}
        for name, path in known.items()
        if path.name != "__init__.py"
    }
    assert list(TopologicalSorter(graph).static_order())


def test_no_file_shares_its_name_with_a_public_function_of_its_room():
    for name, path in modules().items():
        room = name.split(".")[0]
        functions = {
            node.name
            for other in (ROOT / room).rglob("*.py")
            for node in ast.parse(other.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        }
        assert path.stem not in functions, f"{name} is also a function or class of {room}"
    assert not {path.stem for path in ROOT.rglob("*.py")} & set(moatlab.__all__)


def test_no_file_is_too_long_to_be_read_in_one_go():
    long = {path.name: count for path in ROOT.rglob("*.py") if (count := len(path.read_text().splitlines())) > 330}
    assert not long


def test_a_newcomer_finds_the_optimizers_step_in_the_trainer():
    steps = [path for path in (ROOT / "training").glob("*.py") if re.search(r"optimizer\.step\(\)", path.read_text())]
    assert steps == [ROOT / "training" / "trainer.py"]


def test_every_public_name_can_be_used():
    for name in moatlab.__all__:
        assert getattr(moatlab, name) is not None
    assert moatlab.__version__
