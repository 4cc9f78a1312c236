"""Files from a stranger. Each would leave a canary if any of its code ran; none does."""

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch

import moatlab
from faults.commands import moat
from moatlab.data.known import SPECS
from moatlab.models.weights import read_weights, write_weights
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import read_json_and_check, write_json
from moatlab.training.checkpoint import seal


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """A file that is there only if something ran. A module `evil` that makes it is within reach of every import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "canary"
    (tmp_path / "evil.py").write_text(
        f"open({str(path)!r}, 'w')\nimport torch\ndef net(): return torch.nn.Linear(1, 1)\n"
    )
    yield path
    assert not path.exists(), "code from the file ran"


class Exploit:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return open, (str(self.canary), "w")


OPTIONS = ("--width", 8, "--batch-size", 16, "--threads", 1, "--epochs", 2)


def refused(says, *arguments):
    ended = moat(*arguments)
    assert ended.code == 2, ended
    assert ended.last_line.startswith("moat: ")
    assert says in ended.err, ended.err


def test_the_canary_would_be_seen(canary):
    pickle.loads(pickle.dumps(Exploit(canary))).close()
    assert canary.exists()
    canary.unlink()


@pytest.mark.parametrize("form", ["plain pickle", "torch.save", "torch.save with a right checksum"])
def test_a_checkpoint_that_holds_code_is_refused(canary, tiny, form):
    command = ("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run", "--resume")
    assert moat(*command, "--max-steps", 1).code == 0
    buffer = io.BytesIO()
    if form == "plain pickle":
        pickle.dump(Exploit(canary), buffer)
        content = buffer.getvalue()
    else:
        torch.save({"schema": 1, "identity": Exploit(canary)}, buffer)
        content = buffer.getvalue() if form == "torch.save" else seal(buffer.getvalue())
    for path in canary.parent.glob("run/checkpoint*.pt"):
        path.write_bytes(content)
    refused("checkpoint.pt can't be read", *command)


@pytest.mark.parametrize("name", ["weights.pt", "weights.pth", "weights.bin"])
def test_weights_that_hold_code_are_refused(canary, name):
    torch.save({"state_dict": Exploit(canary)}, canary.parent / name)
    refused("more than tensors", "eval", name, "--model", "preact_resnet18", "--data", "mini", "--attacks", "clean")
    with (canary.parent / name).open("wb") as file:
        pickle.dump(Exploit(canary), file)
    refused(name, "eval", name, "--model", "preact_resnet18", "--data", "mini", "--attacks", "clean")
    refused(name, "train", "fgsm", "--init", name, "--out", "new")


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_cifar_batch_that_holds_code_is_refused(canary, protocol):
    folder = canary.parent / "cifar-10-batches-py"
    folder.mkdir()
    for stem in SPECS["cifar10"].stems:
        content = pickle.dumps({b"data": Exploit(canary), b"labels": [1]}, protocol=protocol)
        (folder / stem).write_bytes(content)
    refused("do not trust it", "train", "fgsm", "--data", "cifar10", "--data-dir", folder, "--out", "new")


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "numpy.load", "torch.load", "codecs.encode"])
def test_no_global_but_those_of_arrays_is_looked_up(canary, name):
    module, _, attribute = name.rpartition(".")
    folder = canary.parent / "cifar-10-batches-py"
    folder.mkdir()
    for stem in SPECS["cifar10"].stems:
        (folder / stem).write_bytes(f"c{module}\n{attribute}\n(S'{canary}'\ntR.".encode())
    refused(name, "train", "fgsm", "--data", "cifar10", "--data-dir", folder, "--out", "new")


@pytest.mark.parametrize("kind", ["../", "absolute", "symlink", "hardlink", "device"])
def test_an_archive_writes_nowhere_but_into_its_folder(canary, monkeypatch, kind):
    """Even one whose checksum is taken for right."""
    from dataclasses import replace
    from hashlib import md5

    outside = canary.parent / "outside"
    outside.mkdir()
    (outside / "data_batch_1.bin").write_bytes(b"before")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        names = {"../": "../../outside/data_batch_1.bin", "absolute": str(outside / "data_batch_1.bin")}
        member = tarfile.TarInfo(names.get(kind, "cifar-10-batches-bin/data_batch_1.bin"))
        member.linkname = str(outside / "data_batch_1.bin")
        types = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}
        member.type = types.get(kind, tarfile.REGTYPE)
        member.size = 5 if member.type == tarfile.REGTYPE else 0
        tar.addfile(member, io.BytesIO(b"after"))
        if "link" in kind:  # then through the link
            again = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin/canary")
            again.size = 1
            tar.addfile(again, io.BytesIO(b"x"))
    archive = canary.parent / "cifar-10-binary.tar.gz"
    archive.write_bytes(file.getvalue())
    monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], md5=md5(file.getvalue()).hexdigest()))
    assert moat("train", "fgsm", "--data", "cifar10", "--data-dir", canary.parent, "--out", "new").code == 2
    assert (outside / "data_batch_1.bin").read_bytes() == b"before"
    assert list(outside.iterdir()) == [outside / "data_batch_1.bin"]
    assert not list(canary.parent.rglob("canary"))


HEADERS = {
    "2^60 bytes of header": struct.pack("<Q", 2**60) + b"{}",
    "all the bytes there are": struct.pack("<Q", 2**64 - 1) + b"{}",
    "a header that ends nowhere": struct.pack("<Q", 10) + b'{"a":',
    "a tensor beyond the end": None,
    "a shape of 2^62": None,
}


@pytest.mark.parametrize("kind", HEADERS)
def test_a_safetensors_header_that_lies_is_refused(canary, kind):
    content = HEADERS[kind]
    if content is None:
        shape, end = ([2**62], 8) if "shape" in kind else ([2**20], 2**22)
        header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, end]}}).encode()
        content = struct.pack("<Q", len(header)) + header + bytes(8)
    (canary.parent / "w.safetensors").write_bytes(content)
    refused("w.safetensors", "eval", "w.safetensors", "--attacks", "clean")
    refused("w.safetensors", "train", "fgsm", "--init", "w.safetensors", "--out", "new")


def a_file_that_names_a_module(path):
    model = torch.nn.Linear(1, 1)
    write_weights(path, model, {"model": "evil:net", "arguments": {}, "classes": 10, "data": "mini"})
    return path


def test_weights_that_name_a_module_are_not_imported_unasked(canary):
    path = a_file_that_names_a_module(canary.parent / "w.safetensors")
    refused("--trust-model-code", "eval", path, "--attacks", "clean")
    with pytest.raises(UserError, match="trust_model_code"):
        moatlab.load(path)


def test_a_recipe_that_names_a_module_is_not_imported_unasked(canary):
    (canary.parent / "recipe.toml").write_text('method = "fgsm"\nmodel = "evil:net"\n')
    refused("--trust-model-code", "train", "--recipe", "recipe.toml", "--out", "new")
    refused("--trust-model-code", "compare", "fgsm", "--recipe", "recipe.toml", "--out", "new")
    assert moat("plan", "--recipe", "recipe.toml").code == 0  # imports nothing


def test_a_card_that_names_a_module_is_not_imported_unasked(canary, tiny):
    assert moat("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run").code == 0
    assert moat("eval", "run", "--attacks", "fgsm", "--save-adversarial").code == 0
    card, _ = read_json_and_check(canary.parent / "run" / "eval.json")
    card["subject"]["model"] = "evil:net"
    write_json(canary.parent / "run" / "eval.json", card)
    refused("--trust-model-code", "verify", canary.parent / "run" / "eval.json")


def test_what_the_user_trusts_or_names_himself_is_imported(canary):
    path = a_file_that_names_a_module(canary.parent / "w.safetensors")
    for more in (("--trust-model-code",), ("--model", "evil:net")):
        moat("eval", path, "--attacks", "clean", *more)
        sys.modules.pop("evil")
        assert canary.exists()
        canary.unlink()


def test_nothing_else_of_a_recipe_can_name_a_module(canary):
    for line in (
        'data = "evil:net"',
        'schedule = "evil:net"',
        'init = "evil:net"',
        'then = "evil:net"',
    ):
        (canary.parent / "recipe.toml").write_text(f'method = "fgsm"\n{line}\n')
        refused("evil", "train", "--recipe", "recipe.toml", "--out", "new")


@pytest.mark.parametrize("depth", [100_000])
def test_a_file_nested_beyond_all_bounds_is_refused(canary, depth):
    (canary.parent / "recipe.toml").write_text("a = " + "[" * depth)
    refused("recipe.toml", "plan", "--recipe", "recipe.toml")
    (canary.parent / "card.json").write_text("[" * depth)
    refused("card.json", "verify", "card.json")


EXPLOSIVE = {
    "memory": b"\x80\x02" + b"K\x01r" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of 2^32 places
    "the stack": b"\x80\x02})" + b"\x85" * 10**6 + b"K\x01s.",  # a key of a million tuples, one in the other
}


@pytest.mark.parametrize("what", EXPLOSIVE)
def test_a_pickle_that_would_exhaust_the_machine_is_refused(canary, what):
    folder = canary.parent / "cifar-10-batches-py"
    folder.mkdir()
    for stem in SPECS["cifar10"].stems:
        (folder / stem).write_bytes(EXPLOSIVE[what])
    refused("data_batch_1", "train", "fgsm", "--data", "cifar10", "--data-dir", folder, "--out", "new")
    with zipfile.ZipFile(canary.parent / "w.pt", "w") as archive:
        archive.writestr("archive/data.pkl", EXPLOSIVE[what])
        archive.writestr("archive/version", "3")
    refused("w.pt", "eval", "w.pt", "--model", "preact_resnet18", "--data", "mini", "--attacks", "clean")
    (canary.parent / "old.pt").write_bytes(EXPLOSIVE[what])
    refused("old.pt", "eval", "old.pt", "--model", "preact_resnet18", "--data", "mini", "--attacks", "clean")


def test_a_file_in_the_current_folder_is_not_taken_for_a_library(canary):
    """PyTorch looks for many; only a model that the user names is looked for here."""
    for name in ("dill", "pynvml", "cuda", "opt_einsum", "tensorboard", "numexpr", "torchvision"):
        (canary.parent / f"{name}.py").write_text(f"open({str(canary)!r}, 'w')\n")
    description = {"model": "preact_resnet18", "arguments": {}, "classes": 10, "data": "mini"}
    write_weights(canary.parent / "w.safetensors", torch.nn.Linear(1, 1), description)
    for command in (["-m", "moatlab"], ["-P", "-c", "from moatlab.cli.main import run; run()"]):
        command = [sys.executable, *command, "eval", "w.safetensors"]
        ended = subprocess.run(command, cwd=canary.parent, capture_output=True, text=True, check=False)
        assert ended.returncode == 2, ended.stderr


def test_links_out_of_a_folder_are_not_written_through(canary, tiny):
    command = ("train", "fgsm", "--data", tiny, *OPTIONS, "--out", "run", "--resume")
    assert moat(*command, "--max-steps", 1).code == 0
    victim = canary.parent / "victim"
    victim.write_text("precious")
    for name in ("metrics.jsonl", "events.jsonl"):
        path = canary.parent / "run" / name
        content = path.read_bytes()
        path.unlink()
        path.symlink_to(victim)
        refused("is a symbolic link", *command)
        path.unlink()
        path.write_bytes(content)
    assert moat(*command).code == 0
    (canary.parent / "elsewhere").mkdir()
    (canary.parent / "elsewhere" / ".draft.tmp").write_text("precious")
    (canary.parent / "run" / "eval.partial").symlink_to(canary.parent / "elsewhere")
    refused("is a symbolic link", "eval", "run", "--attacks", "fgsm")
    assert victim.read_text() == (canary.parent / "elsewhere" / ".draft.tmp").read_text() == "precious"


def test_a_pipe_is_not_waited_for(canary):
    for name in ("recipe.toml", "w.safetensors", "w.pt", "run.json"):
        os.mkfifo(canary.parent / name)
    refused("recipe.toml", "plan", "--recipe", "recipe.toml")
    refused("w.safetensors", "eval", "w.safetensors")
    refused("w.pt", "eval", "w.pt", "--model", "preact_resnet18", "--data", "mini")
    write_weights(canary.parent / "other.safetensors", torch.nn.Linear(1, 1), {"model": "preact_resnet18"})
    refused("other.safetensors", "eval", "other.safetensors")  # with a run.json beside it


@pytest.mark.parametrize(
    "odd",
    [
        {"arguments": {"nonsense": 1}}, {"arguments": {"width": "x"}}, {"arguments": {"width": -3}},
        {"arguments": {"width": 10**9}}, {"arguments": []}, {"arguments": {"mean": ["a"]}}, {"classes": -1},
        {"classes": "ten"}, {"classes": 10**12}, {"eps": 0.03}, {"eps": "x"}, {"norm": "l7"}, {"norm": []}, {"data": 7},
        {"model": 7},
    ],
    ids=str,
)  # fmt: skip
def test_a_model_file_that_describes_itself_oddly_is_refused(canary, odd):
    description = {"model": "preact_resnet18", "arguments": {"width": 8}, "classes": 10, "data": "mini"}
    write_weights(canary.parent / "w.safetensors", torch.nn.Linear(1, 1), description | odd)
    refused("", "eval", "w.safetensors", "--attacks", "clean")


def test_a_zip_that_explodes_is_not_unpacked_into_memory(canary):
    """Some kilobytes that are 50 MB when unpacked: torch.save does not compress, so nobody honest does."""
    path = canary.parent / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(50_000_000))
    with pytest.raises(UserError, match=r"bomb\.pt.*compressed"):
        read_weights(path)
    path.write_bytes(path.read_bytes() + b"PK\5\6")  # what Python then takes for no archive, and PyTorch for one
    with pytest.raises(UserError, match=r"bomb\.pt"):
        read_weights(path)


OWN = """
import torch
def net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
def bad(): open("canary", "w")
"""


@pytest.fixture
def own(canary, tiny):
    """A run of a model in own.py, named on the command line."""
    (canary.parent / "own.py").write_text(OWN)
    options = ("--data", tiny, "--batch-size", 16, "--epochs", 1, "--out", "run")
    assert moat("train", "fgsm", *options, "--model", "own:net").code == 0
    assert "own:net" in (canary.parent / "cache" / "moatlab" / "trusted.json").read_text()
    yield canary.parent
    sys.modules.pop("own", None)


def test_a_model_that_was_named_once_is_trusted_while_its_file_is_unchanged(own):
    for command in (("eval", "run", "--attacks", "clean"), ("train", "--resume", "--out", "run")):
        ended = moat(*command)
        assert ended.code == 0, ended.err
    (own / "own.py").write_text(OWN + "# changed\n")
    refused("--trust-model-code", "eval", "run", "--attacks", "clean")
    refused("--trust-model-code", "train", "--resume", "--out", "run")


def test_a_trusted_file_is_not_trusted_elsewhere_nor_for_another_factory(own, monkeypatch):
    path = own / "w.safetensors"
    write_weights(path, torch.nn.Linear(1, 1), {"model": "own:bad", "arguments": {}, "classes": 2, "data": "mini"})
    refused("--trust-model-code", "eval", path, "--attacks", "clean")
    elsewhere = own / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "own.py").write_text(OWN)  # the same bytes, from a stranger
    (own / "run").rename(elsewhere / "run")
    monkeypatch.chdir(elsewhere)
    refused("--trust-model-code", "eval", "run", "--attacks", "clean")


def test_a_run_from_elsewhere_that_brings_its_own_list_is_not_trusted(canary):
    a_file_that_names_a_module(canary.parent / "model.safetensors")
    for folder in (canary.parent, canary.parent / "moatlab"):
        folder.mkdir(exist_ok=True)
        write_json(folder / "trusted.json", {"models": {"evil:net": [{str(canary.parent / "evil.py"): "0"}]}})
    refused("--trust-model-code", "eval", "model.safetensors", "--attacks", "clean")


def test_a_plan_and_a_trusted_file_are_not_remembered(canary):
    assert moat("plan", "fgsm", "--model", "evil:net").code == 0
    path = a_file_that_names_a_module(canary.parent / "w.safetensors")
    moat("eval", path, "--attacks", "clean", "--trust-model-code")
    sys.modules.pop("evil")
    canary.unlink()
    refused("--trust-model-code", "eval", path, "--attacks", "clean")
    assert not (canary.parent / "cache" / "moatlab" / "trusted.json").exists()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"models": 5}', b'{"models": {"evil:net": [[], {}, 3]}}'])
def test_a_damaged_list_of_trusted_models_trusts_nothing(canary, content):
    (canary.parent / "cache" / "moatlab").mkdir(parents=True)
    (canary.parent / "cache" / "moatlab" / "trusted.json").write_bytes(content)
    path = a_file_that_names_a_module(canary.parent / "w.safetensors")
    refused("--trust-model-code", "eval", path, "--attacks", "clean")
