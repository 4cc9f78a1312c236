"""What the documentation site needs beyond mkdocs: formulas as MathML, which browsers draw without a script, and the
pages and sources that lie outside docs/."""

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE_OR_FORMULA = re.compile(r"(`[^`\n]+`)|\$([^$\n]+(?:\n[^$\n]+)?)\$")


def on_files(files, config):
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for example in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"sources/{example.name}", abs_src_path=str(example)))
    return files


def on_page_markdown(markdown, page, **_others):
    up = "../" * page.file.src_uri.count("/")
    for source, target in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{source}", f"]({up}{target}", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*examples/(\w+\.py)", rf"]({up}sources/\1", markdown)
    markdown = re.sub(r"\]\((?:\.\./)*README\.md", f"]({up}index.md", markdown)
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](")
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [inline(markdown[end : fence.start()]), block(fence.group())]
        end = fence.end()
    return "".join([*parts, inline(markdown[end:])])


def block(fence):
    if not fence.startswith("```math"):
        return fence
    return mathml(fence.removeprefix("```math").removesuffix("```"), "block")


def inline(text):
    return CODE_OR_FORMULA.sub(lambda match: match[1] or mathml(match[2], "inline"), text)


def mathml(formula, display):
    return convert(formula.strip().replace("\\ \\%", "\\,\\%"), display=display).replace("\n", " ")
