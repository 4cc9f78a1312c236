"""Hooks of the documentation site: formulas as MathML, doctests, tables of fields, unbroken options, the 404 page, and
the pages and sources outside docs/."""

import re
from pathlib import Path

import griffe
from latex2mathml.converter import convert
from markdown import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"SECURITY.md": "security.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
CODE = re.compile(r"`[^`\n]+`")
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
TAG = re.compile(r"(<pre\b.*?</pre>|<[^>]*>)", re.DOTALL)
FIELDS = re.compile(r"^\{fields of ([\w.]+)(?:, as in ([\w.]+))?\}$", re.MULTILINE)
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
WORD = re.compile(r"(?<!\S)(?=\S*-)[\w.:-]{1,30}(?!\S)")
NOT_FOUND = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Page not found - moatlab</title>
<style>
  :root { color-scheme: light dark; font: 1rem/1.6 system-ui, sans-serif; }
  body { max-width: 36rem; margin: 15vh auto; padding: 0 1.5rem; }
</style>
<main>
  <h1>Page not found</h1>
  <p>There is no such page in the documentation of moatlab. <a id="start" href="/index.html">Quick start</a></p>
</main>
<script>if (location.protocol === "file:") document.getElementById("start").href = "index.html"</script>
</html>
"""


def on_config(config):
    config.markdown_extensions.append(SiteMarkdown())
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append(
        {"name": "math", "class": "math", "format": lambda source, *_others, **_more: mathml(source, "block")}
    )
    return config


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
    markdown = FIELDS.sub(lambda match: fields(*match.groups()), markdown)
    return TABLE_ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def fields(path, page):
    """The fields and properties of a class as a table: name, type and meaning, which is the docstring or comment of the
    field, or its row in the tables of another page."""
    described = griffe.load(path, search_paths=[ROOT / "src"])
    lines = described.filepath.read_text(encoding="utf-8").splitlines()
    text = (ROOT / "docs" / page).read_text(encoding="utf-8") if page else ""
    rows = []
    for name, field in described.members.items():
        if field.is_attribute and not name.startswith("_"):
            comment = field.docstring.value if field.docstring else lines[field.lineno - 1].partition("  # ")[2]
            row = re.search(rf"^\| `{name}` \| (.*) \|$", text, re.MULTILINE)
            rows.append([f"`{name}`", f"`{field.annotation}`", row[1] if row else comment])
    columns = 3 if any(row[2] for row in rows) else 2
    table = [["field", "type", "meaning"], ["---"] * 3, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row[:columns]) + " |" for row in table)


def on_page_content(html, **_others):
    """Browsers break lines after hyphens; options, and words of code with hyphens, are kept in one piece."""
    pieces = TAG.split(html)  # text and tags (or whole code blocks) in turn
    for i in range(0, len(pieces), 2):
        whole = WORD if i and pieces[i - 1] == "<code>" else OPTION
        pieces[i] = whole.sub(r'<span class="whole">\g<0></span>', pieces[i])
    return "".join(pieces)


def on_post_template(output, template_name, **_others):
    """The theme's own 404 page finds its styles at the root of a server only."""
    return NOT_FOUND if template_name == "404.html" else output


class SiteMarkdown(Extension):
    def extendMarkdown(self, md):  # noqa: N802
        md.inlinePatterns.register(Formula(r"(?<!\\)\$([^$]+)\$", md), "formula", 185)  # after code, before escapes
        md.preprocessors.register(Doctest(md), "doctest", 30)  # before fences are read


class Formula(InlineProcessor):
    """`$...$` as MathML, stashed: left in the text, Markdown would take it for a block and end the paragraph."""

    def handleMatch(self, match, _data):  # noqa: N802
        return self.md.htmlStash.store(mathml(match[1], "inline")), match.start(0), match.end(0)


class Doctest(Preprocessor):
    """An example with `>>>`, which ends at an empty line, is code and no quotation."""

    def run(self, lines):
        result, inside = [], False
        for line in [*lines, ""]:
            if line.startswith(">>> ") and not inside:
                result.append("```pycon")
            elif inside and not line.strip():
                result.append("```")
            inside = line.startswith(">>> ") or (inside and bool(line.strip()))
            result.append(line)
        return result


def display_formula(source, *_others, **_more):
    return mathml(source, "block")


def mathml(formula, display):
    """latex2mathml leaves the backslash on sized braces, and knows no space before a percent sign."""
    drawn = convert(formula.strip().replace("\\ \\%", "\\,\\%"), display=display)
    return drawn.replace("\\{", "{").replace("\\}", "}").replace("\n", " ")
