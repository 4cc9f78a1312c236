"""Self-contained HTML pages. Templates escape all text, and a page's security policy allows only its own script."""

import base64
import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from moatlab.runtime.errors import UserError
from moatlab.runtime.files import atomic, make_folder, remove_leftovers

HERE = Path(__file__).parent


def fill(name: str, **fields: Any) -> str:
    """The page of NAME.html, with page.css and page.js, and with NAME.css and NAME.js if it is another one."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    names = dict.fromkeys(("page", name))
    style, script = ("".join(_read(f"{one}.{kind}") for one in names) for kind in ("css", "js"))
    return environment.from_string(_read(f"{name}.html")).render(
        style=Markup(style),  # contains no text of a run
        script=Markup(script),
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
        version=version("moatlab"),
        **fields,
    )


def _read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def refuse_folder(out: Path, name: str) -> None:
    if out.is_dir():
        raise UserError(f"{out} is a folder; give a file, such as {out / name}")


def write_text(out: Path, text: str) -> None:
    make_folder(out.parent)
    remove_leftovers(out)
    with atomic(out) as file:
        file.write(text.encode(errors="replace"))  # file names may be invalid Unicode
