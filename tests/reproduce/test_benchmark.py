import json

import pytest
import torch
from torch import nn

from moatlab.data.loading import load_images
from moatlab.methods.batches import prepare_loss
from moatlab.models.preact_resnet import PreActResNet18
from moatlab.reproduce import benchmark
from moatlab.runtime.console import Bar
from moatlab.runtime.device import Machine
from moatlab.runtime.errors import RunFailed
from moatlab.training.making import make_recipe


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(benchmark, "STEPS", 1)
    monkeypatch.setattr(benchmark, "ROUNDS", 1)
    monkeypatch.setattr(benchmark, "SIZE", 256)


def test_the_bench_measures_steps_epochs_and_memory_and_draws_a_chart(moat, alone):
    ended = moat("bench", "--width", 8, "--batch-size", 4, "--image-size", 8, "--json", "--out", "here")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result == json.loads((alone / "here" / "bench.json").read_text())
    assert result["limit"]["gemm_gflops"] >= result["limit"]["median_gemm_gflops"] > 0
    for name in ("inference", "attack_step", "training_step"):
        row = result[name]
        assert row["images_per_second"] > 0
        assert row["gflops"] == pytest.approx(row["images_per_second"] * row["gflop_per_image"])
        assert row["share_of_limit"] == pytest.approx(row["gflops"] / result["limit"]["gemm_gflops"])
    assert list(result["epochs"]) == ["fgsm", "fast", "pgd:7", "moat:2", "imoat:2,5,8"]
    for row in result["epochs"].values():
        assert row["overhead"] == pytest.approx(row["seconds"] / row["passes_seconds"] - 1)
    assert result["memory"]["training_step_gib"] >= result["memory"]["start_gib"] > 0
    assert (alone / "here" / "bench.png").read_bytes().startswith(b"\x89PNG")
    assert not (alone / "runs").exists()


def test_the_bench_prints_a_chart_that_fits_a_terminal(moat):
    threads = torch.get_num_threads()
    ended = moat("bench", "--width", 8, "--batch-size", 4, "--image-size", 8, "--threads", 1)
    assert ended.code == 0, ended.err
    for name in ("limit", "inference", "attack step", "training step", "imoat:2,5,8", "memory", "chart: "):
        assert any(line.startswith(name) for line in ended.out.splitlines()), name
    assert max(map(len, ended.out.splitlines())) <= 80
    assert torch.get_num_threads() == threads


def test_a_model_of_ones_own_is_benched_too_and_one_that_does_not_fit_is_refused(moat, alone):
    (alone / "own.py").write_text(
        "import torch\n"
        "def factory(classes):\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, classes))\n"
    )
    ended = moat("bench", "--model", "own:factory", "--image-size", 8, "--batch-size", 4, "--json")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert result["inference"]["gflop_per_image"] == pytest.approx(2 * 192 * 10 / 1e9)
    assert result["training_step"]["gflop_per_image"] == pytest.approx(2 * 2 * 192 * 10 / 1e9)  # no input gradient
    ended = moat("bench", "--model", "own:factory", "--image-size", 9, "--batch-size", 4)
    assert ended.code == 2
    assert "(3, 9, 9)" in ended.err


def test_operations_are_counted_as_written_out_for_a_convolution():
    class Two(nn.Module):
        """A convolution that goes by patches, and one that does not."""

        def __init__(self):
            super().__init__()
            self.net = PreActResNet18(classes=10, width=32)
            self.wide, self.narrow = self.net.blocks[3].conv1, self.net.blocks[0].conv1

        def forward(self, x):
            wide = self.wide(x.repeat(1, 22, 1, 1)[:, :64])
            return wide.mean((2, 3))[:, :10] + self.narrow(x.repeat(1, 11, 1, 1)[:, :32]).mean((2, 3))[:, :10]

    x, y = torch.rand(2, 3, 5, 5), torch.tensor([0, 1])
    forward = 2 * (64 * 64 + 32 * 32) * 9 * 25 / 1e9
    counts = {name: benchmark.count_gigaflops(step) / 2 for name, step in benchmark.three_steps(Two(), x, y).items()}
    assert counts["inference"] == pytest.approx(forward)
    assert counts["attack_step"] == pytest.approx(2 * forward)
    assert counts["training_step"] == pytest.approx(2 * forward)  # the images themselves need no gradient


def test_a_loss_that_is_not_a_number_ends_a_benchmark_with_a_sentence(monkeypatch):
    def broken(*given):
        return lambda: prepare_loss(*given)() * float("nan")

    monkeypatch.setattr("moatlab.training.trainer.prepare_loss", broken)
    with pytest.raises(RunFailed, match=r"became NaN or infinite at step 1 \(epoch 1, stage fgsm"):
        benchmark.measure_epochs(torch.device("cpu"), Bar("bench", 2.0))
    with pytest.raises(RunFailed, match="became NaN"):
        benchmark.seconds_per_pass(make_recipe("moat:2"), Machine(threads=1), load_images("mini"))


def test_a_pass_is_timed_with_real_steps_of_training(monkeypatch):
    taken = []
    monkeypatch.setattr(
        benchmark, "real_step", lambda trainer, step: taken.append((trainer.session.method.spec, step)) or 0.5
    )
    recipe = make_recipe("imoat:2,5,8", width=8)
    seconds, has_gpu = benchmark.seconds_per_pass(recipe, Machine("cpu", 1), load_images("mini"))
    assert taken == [("fgsm", step) for step in range(benchmark.FEW_STEPS + 1)]
    assert (seconds, has_gpu) == (0.5 / 2 * (5000 // 128), False)
