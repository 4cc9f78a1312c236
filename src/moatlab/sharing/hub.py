"""Folders for a model hub: weights, `config.json`, and the network's code for transformers; and pushing them."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moatlab.models.registry import BUILT_IN
from moatlab.runtime.console import note
from moatlab.runtime.errors import RunFailed, UserError, users_code
from moatlab.runtime.files import RunFile

CODE = "modeling_moatlab.py"
CLASSES = {"AutoConfig": "MoatlabConfig", "AutoModelForImageClassification": "MoatlabForImageClassification"}


def hub_files(weights: bytes, description: dict[str, Any]) -> dict[str, bytes]:
    """`weights`: the run's file, whose description `moatlab.load` reads. A built-in network comes with its code, which
    `AutoModelForImageClassification.from_pretrained` runs without moatlab; the code of a user's own does not."""
    names = list(map(str, description["class_names"]))
    config: dict[str, Any] = {
        "model_type": "moatlab",
        "network": description["model"],
        **description["arguments"],
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        **{key: description[key] for key in ("image_shape", "method", "data", "norm", "eps")},
    }
    files = {str(RunFile.MODEL): with_format(weights)}
    if description["model"] in BUILT_IN:
        config["architectures"] = [CLASSES["AutoModelForImageClassification"]]
        config["auto_map"] = {auto: f"{Path(CODE).stem}.{name}" for auto, name in CLASSES.items()}
        files[CODE] = Path(__file__).with_name(CODE).read_bytes()
    else:
        note(f"the code of {description['model']} is not included: the folder has its weights and description only")
    return {**files, "config.json": json.dumps(config, indent=2).encode() + b"\n"}


def with_format(weights: bytes) -> bytes:
    """A .safetensors file with `format` in its metadata, which transformers 4 asks for."""
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    header["__metadata__"]["format"] = "pt"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + weights[8 + length :]


def check_push(repo: str) -> None:
    """Refuse, before anything is written, what could not be pushed."""
    if find_spec("huggingface_hub") is None:
        raise UserError('--push needs huggingface_hub: pip install "moatlab[hub]"')
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"--push {repo} must be USER/NAME, such as me/moat-2")
    if get_token() is None:
        raise UserError("--push needs a token of the hub: run `hf auth login`, or set HF_TOKEN")


def push(files: list[Path], repo: str) -> str:
    """Upload the files of an export to the hub in one commit, and return the address. A new repository is public or
    private as the account's settings have it."""
    from huggingface_hub import HfApi

    folder, names = files[0].parent, [path.name for path in files]
    with users_code(f"the files are in {folder}, but can't be pushed to {repo}", RunFailed):
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, allow_patterns=names, commit_message="Upload a model")
    return str(address)
