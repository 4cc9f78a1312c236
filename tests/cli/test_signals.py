"""Signals are answered at once and acted on within a batch."""

import json
import signal
import time

import numpy as np
import torch


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not condition():
        time.sleep(0.02)
    assert condition(), process.communicate()[1]


NETWORK = """
from pathlib import Path
from moatlab.models.preact_resnet import PreActResNet

class Network(PreActResNet):
    def forward(self, x):
        if not self.training and len(x) > 2:  # two images are tried before the first step
            Path("watching").touch()
        return super().forward(x)

def build(num_classes):
    return Network((2, 2, 2, 2), classes=num_classes, width=8, mean=[0.5] * 3, std=[0.25] * 3)
"""


def test_an_interrupt_while_large_images_are_watched_is_answered_in_a_second_and_saved_in_five(moat_process, alone):
    (alone / "network.py").write_text(NETWORK)
    x, y = np.random.default_rng(0).integers(0, 256, (308, 224, 224, 3), np.uint8), np.arange(308) % 2
    np.savez(alone / "large.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    command = ["train", "fgsm", "--data", "large.npz", "--model", "network:build", "--batch-size", 4, "--epochs", 1]
    process = moat_process(*command, "--holdout", 300, "--threads", 1, "--out", "run")
    record = alone / "run" / "run.json"
    try:
        wait_for((alone / "watching").exists, process)  # for 300 images, longer than this test may take
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        begun, line = time.monotonic(), ""
        while "interrupted: saving" not in line:
            line = process.stderr.readline()
            assert line, "it ended without an answer"
        answered = time.monotonic() - begun
        err = process.communicate(timeout=30)[1]
        ended = time.monotonic() - begun
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert answered < 1
    assert ended < 5
    assert err.splitlines()[-1].startswith("moat: interrupted by SIGINT after step 2 of 2")
    assert json.loads(record.read_text())["status"] == "interrupted"
    assert torch.load(alone / "run" / "checkpoint.pt", weights_only=True)["progress"]["step"] == 2
    assert not (alone / "run" / "metrics.jsonl").read_text()  # the epoch is watched when the run resumes


def test_a_quiet_run_is_interrupted_with_one_line(moat_process, alone, tiny_options):
    process = moat_process("-q", "train", "fgsm", *tiny_options, "--epochs", 5000, "--out", "run")
    metrics = alone / "run" / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text(), process)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (143, "")
    assert err.startswith("moat: interrupted by SIGTERM")
    assert err.count("\n") == 1
