"""Several processes that train and evaluate as one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import together
from images_for_tests import tiny_images
from moatlab.models.weights import read_weights
from moatlab.training.run_folder import RunFolder

HERE = Path(__file__).parents[1]


def torchrun(here, *arguments, options=()):
    """Two processes by torchrun, each on any core."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    paths = [str(HERE), str(here), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", *map(str, arguments)], cwd=here, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def said(err):
    """The sentences of moat, among all that torchrun tells."""
    return [line for line in err.splitlines() if line.startswith("moat: ")]


def weights(folder):
    return read_weights(folder)[0]


def test_two_processes_train_and_evaluate_as_one_does(tmp_path, moat):
    """One test, because what it compares takes long to make."""
    data = tiny_images(tmp_path / "data")
    code, _, err = ended(torchrun(tmp_path, "together", tmp_path / "two", data))
    assert code == 0, err
    together.everything(tmp_path / "one", data)

    def sides(name):
        return [tmp_path / side / name for side in ("one", "two")]

    for kind, nearness, agreement in (("in_double", 1e-12, 1.0), ("in_single", 1e-4, 0.995)):
        for number, method in enumerate(together.STAGES):
            for file in ("model", "model_average"):
                one, two = map(weights, sides(f"{kind}-{number}/{file}.safetensors"))
                assert max(float((one[name] - two[name]).abs().max()) for name in one) < nearness, (kind, method)
            first, second = (RunFolder(side).read_record() for side in sides(f"{kind}-{number}"))
            assert second.counted == second.planned
            assert first.counted == second.counted or "liet" in method  # each process has its own class-wise start
            assert first.monitoring["forwards"] == second.monitoring["forwards"]
            assert [record.environment["processes"] for record in (first, second)] == [1, 2]
            if kind == "in_double":
                assert first.final["pgd7"] == second.final["pgd7"]
        cards = [json.loads((side / "eval.json").read_text()) for side in sides(f"{kind}-0")]
        for name, verdicts in cards[0]["broken_by"].items():
            same = [one == two for one, two in zip(verdicts, cards[1]["broken_by"][name], strict=True)]
            assert sum(same) >= agreement * len(same), name
        assert cards[0]["flags"] == cards[1]["flags"]
        assert not list((tmp_path / "two" / f"{kind}-0").glob("*.partial"))
    ending = moat("verify", tmp_path / "two" / "in_double-0" / "eval.json", "--trust-model-code")
    assert ending.code == 0
    assert "examples verified" in ending.out


def options(data, out="run", model="counted"):
    return ["moatlab", "train", "moat:2", "--data", data, "--model", f"models_for_tests:{model}", "--epochs", "6",
            "--batch-size", "16", "--out", out, "--threads", "1"]  # fmt: skip


@pytest.fixture
def data(tmp_path):
    return tiny_images(tmp_path / "data")


def test_a_killed_process_is_started_anew_by_torchrun_and_the_run_ends_with_the_same_bits(tmp_path, data):
    code, _, err = ended(torchrun(tmp_path, *options(data, "undisturbed")))
    assert code == 0, err
    process = torchrun(tmp_path, *options(data, "killed", "slow"), options=["--max-restarts", "1"])
    metrics = tmp_path / "killed" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 2):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.kill(worker(process.pid, 1), signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 0, err
    assert "resuming killed" in err
    one, two = weights(tmp_path / "undisturbed"), weights(tmp_path / "killed")
    assert all(torch.equal(one[name], two[name]) for name in one)


def worker(torchrun_pid, rank):
    """The process of that rank."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == torchrun_pid and f"RANK={rank}".encode() in environment:
            return int(folder.name)
    raise AssertionError("no such process")


def test_the_failure_of_one_process_ends_all_with_one_sentence_and_a_usable_checkpoint(tmp_path, data):
    code, out, err = ended(torchrun(tmp_path, *options(data, model="fails_in_the_second")))
    assert (code, out) == (1, "")
    (sentence,) = said(err)
    assert "stage" in sentence
    assert "out of luck" in sentence
    assert RunFolder(tmp_path / "run").checkpoints
    code, _, err = ended(torchrun(tmp_path, *options(data, model="fails_in_the_second"), "--resume"))
    assert "resuming run at step 4 of 24" in err


def test_a_signal_to_torchrun_leaves_a_checkpoint_to_go_on_from(tmp_path, data):
    process = torchrun(tmp_path, "--", *options(data, model="slow"), "--monitor", "train")  # torchrun has --monitor-...
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert code != 0
    (sentence,) = said(err)
    assert "interrupted by SIGTERM" in sentence
    assert RunFolder(tmp_path / "run").read_record().status == "interrupted"


REFUSED = [
    (["--recipe", "recipe.toml"], "the processes were given different recipes"),
    (["--model", "idle:Net"], "its output does not depend on head.weight"),
    (["--data", "data"], "the processes were given different data"),
    (["env"], "torchrun is for moat train and moat eval; start moat env by itself"),
]
IDLE = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(192, num_classes))
        self.head = nn.Linear(2, 2)
    def forward(self, x): return self[1](self[0](x))
"""


def test_what_two_processes_cannot_do_is_refused_in_one_sentence(tmp_path, data):
    code, out, err = ended(torchrun(tmp_path, *options(data), "--batch-size", "15"))
    assert (code, out) == (1, "")  # torchrun's own; that of each process is 2
    (sentence,) = said(err)
    assert "--batch-size 15 can't be split over 2 processes; use a multiple of 2" in sentence
    assert "exitcode  : 2" in err
    assert not (tmp_path / "run").exists()


def test_both_processes_refuse_what_differs_between_them(tmp_path, data):
    """In one start of two processes, each in a folder of its own, as on machines that hold different copies."""
    shutil.copytree(data, tmp_path / "other" / "data")
    image = tmp_path / "other" / "data" / "train" / "dark" / "0.png"
    image.write_bytes((image.parent / "1.png").read_bytes())
    for folder, rate in ((tmp_path, 0.1), (tmp_path / "other", 0.2)):
        (folder / "idle.py").write_text(IDLE)
        (folder / "recipe.toml").write_text(f"lr = {rate}\n")
    cases = [changed if changed == ["env"] else [*options(data)[1:], *changed] for changed, _ in REFUSED]
    (tmp_path / "cases.json").write_text(json.dumps(cases, default=str))
    code, out, err = ended(torchrun(tmp_path, "together", "refusals", tmp_path / "cases.json"))
    assert code == 0, err
    found = [json.loads(line) for line in out.splitlines()]
    for case, (_, says) in enumerate(REFUSED):
        sentences = {rank: sentence for rank, number, sentence in found if number == case}
        assert sorted(sentences) == [0, 1]
        assert all(says in sentence for sentence in sentences.values()), sentences
    assert not list(tmp_path.rglob("run"))
