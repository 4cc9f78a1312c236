"""Models (`package.module:factory`) that the user has named on the command line, with the hashes of their files.

They are kept in the user's cache, never in a run folder, which may come from elsewhere. A run that names such a model
is loaded without --trust-model-code, as long as the same files are found on the import path, unchanged.
"""

import hashlib
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from moatlab.runtime.environment import cache_dir
from moatlab.runtime.errors import NotWritten, UserError
from moatlab.runtime.files import make_folder, read_json, write_json

FILE = "trusted.json"


def remember(model: str) -> None:
    """Trust the files of `model` as they are now. Without a cache that can be written, nothing is remembered."""
    if files := files_of(model):
        known = _known()
        others = [one for one in known.get(model, []) if one.keys() != files.keys()]
        with suppress(NotWritten):
            make_folder(cache_dir())
            write_json(cache_dir() / FILE, {"models": known | {model: [*others, files]}})


def is_trusted(model: str) -> bool:
    files = files_of(model)
    return bool(files) and files in _known().get(model, [])


def files_of(model: str) -> dict[str, str]:
    """The SHA-256 of each file that importing the model's module runs: of its packages, then its own. They are searched
    on the import path, and nothing is imported. Empty if the module is not found."""
    found: dict[str, str] = {}
    name, places = "", None
    for part in model.partition(":")[0].split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, places)
        if spec is None:
            return {}
        if spec.has_location and spec.origin:
            with suppress(OSError):
                path = Path(spec.origin).resolve()
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        places = spec.submodule_search_locations or []
    return found


def is_root(folder: Path) -> bool:
    """Whether a remembered module is imported from this folder."""
    for model, versions in _known().items():
        for files in versions:
            last = Path([*files][-1])
            depth = model.partition(":")[0].count(".") + (last.name == "__init__.py")
            if last.parents[depth] == folder.resolve():
                return True
    return False


def _known() -> dict[str, list[dict[str, str]]]:
    try:
        known: Any = read_json(cache_dir() / FILE)["models"]
        return {str(model): [dict(files) for files in versions if files] for model, versions in known.items()}
    except (UserError, KeyError, TypeError, ValueError, AttributeError):  # missing or damaged
        return {}
