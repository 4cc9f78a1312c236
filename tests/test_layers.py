"""The layers in docs/architecture.md are those of the code."""

import ast
import re
from pathlib import Path

import moatlab

ROOT = Path(moatlab.__file__).parent
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"


def layers():
    """name of a module or package -> its height, read from the block that people read."""
    block = re.search(r"```layers\n(.*?)```", DOCUMENT.read_text(), re.DOTALL).group(1)
    rows = [re.split(r"[,\s]+", line.strip()) for line in block.strip().splitlines()]
    return {name: -number for number, row in enumerate(rows) for name in row}


def imports_of(path):
    """The first name below moatlab of everything that a file imports from moatlab, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "moatlab":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moatlab."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("moatlab."))


def test_a_module_imports_only_from_layers_below_its_own():
    height = layers()
    seen = set()
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if name in ("__init__", "__main__"):
            continue
        seen.add(name)
        for other in imports_of(path):
            assert other == name or height[other] < height[name], f"{path.name} imports {other}"
    assert seen == height.keys()


def test_no_public_function_shares_its_modules_name():
    modules = {path.stem for path in ROOT.rglob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not modules & set(moatlab.__all__)


def test_every_public_name_can_be_used():
    for name in moatlab.__all__:
        assert getattr(moatlab, name) is not None
    assert moatlab.__version__
