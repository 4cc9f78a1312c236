"""The documents, the help of every command and the docstrings use plain technical English.

`DIALECT` has phrases of earlier texts, each with what to write instead. Code is not looked at.
"""

import ast
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from moatlab.cli.main import cli

ROOT = Path(__file__).parents[1]
DIALECT = {
    r"(?:stands?|stood|standing)": "is robust, is, remains",
    r"(?:falls?|fell|fallen)": "is broken, is misclassified, drops",
    r"(?:holds?|held) against": "is robust to",
    r"(?:goes|go|going|went) on": "resumes, continues",
    r"anew": "again",
    r"(?:take|takes|taken|took) up": "loaded, resumed",
    r"(?:says|said|tells?|told)": "prints, shows, is reported",
    r"mend(?:s|ed|ing)?": "fix",
    r"what a review found": "name the thing that was fixed",
    r"by (?:a|an|one|the same) (?:recipe|process)": "with, using",
    r"not to be believed": "may overestimate robustness",
    r"(?:is|are) not well": "did not train",
    r"can't be had": "is not available",
    r"at rest": "reset to zero",
    r"would have it": "sets",
    r"for a person": "leave it out",
}
MEANT = [
    "accuracy falls",  # a number
    "fgsm fell with pgd7",
    "locked by one process",
    "named by a recipe",
]


def oddities(text):
    """The phrases of DIALECT in a text, code aside, with some words around them."""
    text = re.sub(r"^ *```.*?^ *```$|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.MULTILINE | re.DOTALL)
    text = " ".join(text.split())
    for phrase in MEANT:
        text = re.sub(re.escape(phrase), " ", text, flags=re.IGNORECASE)
    found = (match for phrase in DIALECT for match in re.finditer(rf"(?i)\b{phrase}\b", text))
    return [text[max(0, match.start() - 30) : match.end() + 30] for match in found]


DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "mkdocs.yml")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_document_uses_plain_words(document):
    assert oddities(document.read_text(encoding="utf-8")) == []


def commands(group, *path):
    """The words of each command after `moat`, groups included."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *path, name)


@pytest.mark.parametrize("words", list(commands(cli)), ids=lambda words: " ".join(words) or "moat")
def test_the_help_of_a_command_uses_plain_words(words, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = CliRunner().invoke(cli, [*words, "--help"])
    assert shown.exit_code == 0
    assert oddities(shown.output) == []


@pytest.mark.parametrize("room", sorted(path.name for path in (ROOT / "src" / "moatlab").iterdir() if path.is_dir()))
def test_the_docstrings_of_a_room_use_plain_words(room):
    found = {}
    for path in sorted((ROOT / "src" / "moatlab" / room).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                odd = oddities(ast.get_docstring(node) or "")
                if odd:
                    found[path.name, getattr(node, "name", "")] = odd
    assert found == {}
