import json
import subprocess
import sys

import pytest
import torch

from moatlab.data.loading import load_images
from moatlab.runtime.errors import RunFailed, UserError
from moatlab.training import memory
from moatlab.training.making import make_recipe
from moatlab.training.setup import Session


@pytest.fixture
def session(tiny):
    recipe = make_recipe("fgsm", data=str(tiny), width=8, batch_size=16, precision="fp32")
    return Session(recipe, torch.device("cpu"), load_images(str(tiny)))


def test_the_memory_of_a_step_grows_with_the_image_and_not_with_the_graph_s_shared_tensors(session, tiny):
    image, fixed = memory.step_bytes(session)
    weights = sum(4 * parameter.numel() for parameter in session.model.parameters())
    assert fixed == 3 * weights
    larger = make_recipe("fgsm", data=str(tiny), width=8, batch_size=16, image_size=16, stem="3x3", precision="fp32")
    double = Session(larger, torch.device("cpu"), load_images(str(tiny), image_size=16))
    assert 3 < memory.step_bytes(double)[0] / image < 4.5


def test_a_step_that_does_not_fit_is_refused_with_a_batch_size_that_does(session, monkeypatch):
    image, fixed = memory.step_bytes(session)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 5 * image + fixed)
    with pytest.raises(UserError, match=r"a step on 16 images of 8x8 needs about .* are free; use batch_size=4$"):
        memory.check_memory(session)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 16 * image + fixed)
    memory.check_memory(session)
    monkeypatch.setattr(memory, "free_bytes", lambda _device: None)
    memory.check_memory(session)


def test_the_memory_left_is_known_here_and_a_container_has_a_limit_of_its_own(tmp_path):
    assert memory.free_bytes(torch.device("cpu")) > 2**20
    assert memory._free_of_cgroup(tmp_path) is None
    for name, content in (("max", "1000"), ("current", "700"), ("stat", "anon 5\ninactive_file 200")):
        (tmp_path / f"memory.{name}").write_text(content + "\n")
    assert memory._free_of_cgroup(tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._free_of_cgroup(tmp_path) is None


def test_other_errors_than_of_memory_are_left_alone(session):
    with pytest.raises(RuntimeError, match="shapes"), memory.running_out(session, "step 1"):
        raise RuntimeError("shapes do not match")
    says = r"step 1: memory ran out; .*use a batch_size below 16$"
    with pytest.raises(RunFailed, match=says), memory.running_out(session, "step 1"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_run_that_runs_out_of_memory_ends_with_one_sentence_and_is_marked_as_failed(alone, tiny):
    """A real allocation fails: the model asks for a petabyte in its fourth step."""
    (alone / "mine.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n"
        "        super().__init__()\n"
        "        self.layer, self.calls = torch.nn.Linear(192, num_classes), 0\n"
        "    def forward(self, x):\n"
        "        self.calls += len(x) == 16\n"
        "        if self.calls > 3: torch.empty(2**50)\n"
        "        return self.layer(x.flatten(1))\n"
    )
    options = ["--data", tiny, "--model", "mine:Net", "--batch-size", 16, "--checkpoint-every", 0, "--threads", 1]
    command = [sys.executable, "-m", "moatlab", "train", "standard", *map(str, options), "--out", "run"]
    ended = subprocess.run(command, cwd=alone, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert "memory ran out; a step on 16 images of 8x8 does not fit; use a --batch-size below 16" in last
    assert json.loads((alone / "run" / "run.json").read_text())["status"] == "failed"
