"""A folder for a model hub loads with and without moatlab, and is pushed only where it should be."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import moatlab
from images_for_tests import tiny_images
from moatlab.models.registry import BUILT_IN, build_model, load
from moatlab.models.weights import write_weights
from moatlab.sharing.hub import hub_files

FILES = {"README.md", "config.json", "model.safetensors", "modeling_moatlab.py"}
WITHOUT_MOATLAB = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "moatlab":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageClassification

images = load_file("images.safetensors")["images"]
answers = {}
for folder in sys.argv[1:]:
    model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
    assert not model.training
    answers[folder] = model(images).logits.detach()
    print(folder, model.config.id2label[1], model.config.method)
save_file(answers, "answers.safetensors")
assert "moatlab" not in sys.modules
"""


def without_moatlab(folder, *models):
    """The logits of the models in these folders, in a process that can't import moatlab; and what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "hf"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_MOATLAB, *map(str, models)]
    ended = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    from safetensors.torch import load_file

    return load_file(folder / "answers.safetensors"), ended.stdout


@pytest.fixture
def run(moat, alone):
    data = tiny_images(alone / "data")
    ending = moat("train", "fast", "--data", data, "--width", 16, "--epochs", 1, "--batch-size", 16, "--out", "run")
    assert ending.code == 0, ending.err
    return alone / "run"


VARIANTS = [
    *((name, {"width": 4}) for name in BUILT_IN),
    ("preact_resnet18", {"width": 4, "shortcut": "raw", "final_norm": False, "activation": "silu", "stem": "4x4s2"}),
    ("resnet18", {"width": 4, "activation": "silu", "stem": "7x7s4"}),
]


def folder_of(model, folder, name, arguments):
    """A hub folder of a network that was not trained."""
    folder.mkdir()
    description = {"model": name, "arguments": arguments, "classes": 3, "class_names": ["a", "b", "c"]}
    description |= {"image_shape": [12, 10, 3], "method": "fast", "data": "mine", "norm": "linf", "eps": "8/255"}
    write_weights(folder / "model.safetensors", model, description)
    for file, content in hub_files((folder / "model.safetensors").read_bytes(), description).items():
        (folder / file).write_bytes(content)


def test_hub_folders_load_with_and_without_moatlab_to_the_same_logits(run, moat, alone):
    """That of a run, bit for bit; and those of all built-in networks and their variants."""
    pytest.importorskip("transformers")
    ending = moat("export", run, "--format", "hub")
    assert ending.code == 0, ending.err
    assert {Path(line).name for line in ending.out.split()} == FILES == {path.name for path in (run / "hub").iterdir()}
    images, wanted = torch.rand(2, 3, 12, 10), {}
    save_file({"images": images}, alone / "images.safetensors")
    with torch.no_grad():
        wanted[str(run / "hub")] = load(run)(images)
        for number, (name, variant) in enumerate(VARIANTS):
            torch.manual_seed(number)
            arguments = {**variant, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25]}
            model = build_model(name, classes=3, arguments=arguments)
            for _ in range(3):
                model(torch.rand(4, 3, 12, 10))  # running statistics that are not the first ones
            folder = alone / f"{name}-{number}"
            folder_of(model, folder, name, arguments)
            wanted[str(folder)] = model.eval()(images)
        answers, printed = without_moatlab(alone, *wanted)
        for folder, logits in wanted.items():
            assert logits.std() > 0.01
            assert torch.equal(moatlab.load(folder)(images), logits)
            torch.testing.assert_close(answers[folder], logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(answers[str(run / "hub")], wanted[str(run / "hub")])
    assert printed.splitlines()[0] == f"{run / 'hub'} {moatlab.load_images(alone / 'data').classes[1]} fast"


def test_the_model_card_shows_how_to_load_the_model_both_ways(run, moat):
    assert moat("export", run, "--format", "hub").code == 0
    card = (run / "hub" / "README.md").read_text()
    assert 'moatlab.load("hf_hub:USER/NAME")' in card
    assert 'from_pretrained("USER/NAME", trust_remote_code=True)' in card


def test_a_model_of_the_users_own_is_shared_as_weights_and_description(moat, alone):
    code = "from torch import nn\ndef build(n):\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, n))\n"
    (alone / "own.py").write_text(code)
    data = tiny_images(alone / "data")
    options = ("--data", data, "--model", "own:build", "--batch-size", 16, "--epochs", 1, "--out", "run")
    assert moat("train", "fast", *options).code == 0
    ending = moat("export", "run", "--format", "hub")
    assert ending.code == 0
    expected = "the code of own:build is not included: the folder has its weights and description only\n"
    assert ending.err == expected
    assert {path.name for path in (alone / "run/hub").iterdir()} == FILES - {"modeling_moatlab.py"}
    assert "auto_map" not in json.loads((alone / "run/hub/config.json").read_text())
    readme = (alone / "run/hub/README.md").read_text()
    assert "The code of the model is not included" in readme
    assert "transformers" not in readme


class Hub(BaseHTTPRequestHandler):
    """The requests of `create_repo` and `upload_folder`, answered as the hub does; all files are regular ones."""

    def do_POST(self):
        body, server = self.rfile.read(int(self.headers["Content-Length"])), self.server
        server.requests.append(self.path)
        if self.headers["Authorization"] != "Bearer secret":
            return self.answer(401, {"error": "Invalid credentials"})
        if self.path == "/api/validate-yaml":
            _, metadata, _ = json.loads(body)["content"].split("---\n", 2)
            server.metadata = yaml.safe_load(metadata)
            return self.answer(200, {"errors": [], "warnings": []})
        if not self.path.startswith(("/api/repos/create", "/api/models/me/")):
            return self.answer(403, {"error": f"You may not write to {self.path}"})
        if self.path == "/api/repos/create":
            fields = json.loads(body)
            if fields["organization"] != "me":
                return self.answer(403, {"error": "You don't have the rights to create a model under that namespace"})
            return self.answer(200, {"url": f"{server.address}/me/{fields['name']}"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self.answer(200, {"files": modes})
        header, *operations = map(json.loads, body.splitlines())
        server.commits.append(header["value"]["summary"])
        server.files |= {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in operations}
        return self.answer(200, {"commitUrl": f"{server.address}/me/it/commit/1", "commitOid": "1"})

    def answer(self, status, fields):
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status >= 400:
            self.send_header("X-Error-Message", fields["error"])
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch, alone):
    pytest.importorskip("huggingface_hub")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests, server.commits, server.files = [], [], {}
    server.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)  # HF_ENDPOINT, which is read at import
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(alone / "token"))
    monkeypatch.setenv("HF_TOKEN", "secret")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_uploads_the_folder_in_one_commit_and_prints_its_address(run, moat, hub):
    (run / "hub").mkdir()
    (run / "hub" / "notes.txt").write_text("private")
    ending = moat("export", run, "--format", "hub", "--push", "me/it", "--json")
    assert (ending.code, ending.err) == (0, "")
    assert json.loads(ending.out)["url"] == f"{hub.address}/me/it"
    assert hub.commits == ["Upload a model"]
    assert hub.metadata["pipeline_tag"] == "image-classification"
    assert hub.files == {name: (run / "hub" / name).read_bytes() for name in FILES}
    assert 'moatlab.load("hf_hub:me/it")' in hub.files["README.md"].decode()
    assert moat("export", run, "--format", "hub", "--push", "me/it").out.splitlines()[-1] == f"{hub.address}/me/it"


def test_nothing_is_sent_without_being_asked(run, moat, hub):
    assert moat("export", run, "--format", "hub").code == 0
    assert moat("export", run, "--format", "safetensors").code == 0
    assert hub.requests == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--format", "onnx", "--push", "me/it"), "--push needs --format hub"),
        (("--format", "hub", "--push", "it"), "--push it must be USER/NAME, such as me/moat-2"),
        (("--format", "hub", "--push", "me/a/b"), "--push me/a/b must be USER/NAME, such as me/moat-2"),
    ],
)
def test_a_push_that_makes_no_sense_is_refused_before_anything_is_written(run, moat, hub, options, says):
    ending = moat("export", run, *options)
    assert (ending.code, ending.err) == (2, f"moat: {says}\n")
    assert hub.requests == []
    assert not (run / "hub").exists()


def test_a_push_without_a_token_is_refused_in_a_sentence(run, moat, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    ending = moat("export", run, "--format", "hub", "--push", "me/it")
    expected = "moat: --push needs a token of the hub: run `hf auth login`, or set HF_TOKEN\n"
    assert (ending.code, ending.err) == (2, expected)
    assert hub.requests == []


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("trouble", ["wrong token", "another user's", "no network"])
def test_a_push_that_fails_is_explained_in_a_sentence_and_the_files_are_kept(run, moat, monkeypatch, trouble):
    repo, says = "me/it", "401"
    if trouble == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "wrong")
    elif trouble == "another user's":
        repo, says = "you/it", "You don't have the rights"
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        says = "Connect"
    ending = moat("export", run, "--format", "hub", "--push", repo)
    assert ending.code == 1
    assert ending.out == ""
    assert ending.err.startswith(f"moat: the files are in {run / 'hub'}, but can't be pushed to {repo} (")
    assert says in ending.err
    assert ending.err.count("\n") == 1
    assert {path.name for path in (run / "hub").iterdir()} == FILES
