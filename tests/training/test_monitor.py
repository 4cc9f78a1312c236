import pytest
import torch
import torch.nn.functional as F

from moatlab.data.images import as_floats
from moatlab.runtime.randomness import generator, key
from moatlab.training.monitor import measure
from models_for_tests import small_network


def images(count):
    draws = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, 4, 4, 3), dtype=torch.uint8, generator=draws)
    return x, torch.randint(0, 3, (count,), generator=draws)


def test_an_answer_that_is_not_a_number_is_wrong():
    class Nothing(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] * torch.nan

    x, y = images(9)
    assert [measure(Nothing(), x, y, eps=0.1, seed=0)[name] for name in ("clean", "fgsm", "pgd7")] == [0, 0, 0]


def test_accuracies_equal_attacks_written_out():
    model, eps, seed = small_network(), 0.1, 5
    model(torch.rand(64, 3, 4, 4))
    x, y = images(251)  # two blocks, the second of a single image
    measured = measure(model, x, y, eps=eps, seed=seed)
    model.eval()
    right, cosines = {"clean": 0, "fgsm": 0, "pgd7": 0}, []
    for block, begin in enumerate((0, 250)):
        floats, labels = as_floats(x[begin : begin + 250]), y[begin : begin + 250]

        def gradient(point, labels=labels):
            point = point.clone().requires_grad_()
            F.cross_entropy(model(point), labels, reduction="sum").backward()
            return point.grad

        def step(point, size, floats=floats, gradient=gradient):
            moved = point + size * gradient(point).sign()
            return torch.minimum(torch.maximum(moved, floats - eps), floats + eps).clamp(0, 1)

        noise = torch.empty_like(floats).uniform_(-eps, eps, generator=generator(seed, "monitor", block))
        iterate = (floats + noise).clamp(0, 1)
        cosines += F.cosine_similarity(gradient(floats).flatten(1), gradient(iterate).flatten(1)).tolist()
        for _ in range(7):
            iterate = step(iterate, eps / 4)
        for name, examples in (("clean", floats), ("fgsm", step(floats, eps)), ("pgd7", iterate)):
            right[name] += (model(examples).argmax(1) == labels).sum().item()
    assert measured.pop("alignment") == pytest.approx(sum(cosines) / 251, abs=1e-5)
    assert measured.pop("zero_gradients") == 0
    assert measured == pytest.approx({name: count / 251 for name, count in right.items()}, abs=1.5 / 251)


def test_large_images_go_through_the_model_in_smaller_batches_and_measure_the_same():
    sizes = []

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)

        def forward(self, x):
            sizes.append(len(x))
            return self.linear(x.mean((2, 3)))

    torch.manual_seed(0)
    model = Counts()
    for side, most in ((32, 250), (64, 62), (224, 5)):
        x, y = torch.randint(256, (251 if side == 32 else 70, side, side, 3), dtype=torch.uint8), torch.zeros(251)
        y = y[: len(x)].long()
        sizes.clear()
        measured = measure(model, x, y, eps=0.1, seed=0)
        assert max(sizes) <= most
        assert measured["clean"] == (model(as_floats(x)).argmax(1) == y).float().mean().item()


def test_measuring_leaves_the_model_and_the_generators_as_they_were():
    model = small_network()
    model(torch.rand(8, 3, 4, 4))
    statistics, state = model[1].running_mean.clone(), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    first, again = (measure(model, *images(30), eps=0.1, seed=0) for _ in range(2))
    assert first == again
    assert torch.equal(model[1].running_mean, statistics)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


class Flat(torch.nn.Module):
    """Always the first class, whatever the image: every gradient is zero."""

    def forward(self, x):
        return torch.tensor([1.0, 0.0, 0.0]) + 0 * x.flatten(1)[:, :3]


def test_gradients_that_are_all_zero_are_counted_and_not_called_aligned():
    measured = measure(Flat(), *images(30), eps=0.1, seed=0)
    assert (measured["alignment"], measured["zero_gradients"]) == (0.0, 1.0)


def test_images_without_a_gradient_are_left_out_of_the_alignment():
    class HalfFlat(torch.nn.Module):
        """Linear where the first pixel is bright, flat where it is dark."""

        def forward(self, x):
            slope = (x[:, 0, 0, 0] > 0.5).float().detach()[:, None]
            return slope * torch.stack([x.sum((1, 2, 3)), -x.sum((1, 2, 3)), x[:, 0].sum((1, 2))], 1)

    x, y = images(200)
    x[:100, 0, 0, 0], x[100:, 0, 0, 0] = 0, 255
    measured = measure(HalfFlat(), x, y, eps=0.1, seed=0)
    assert measured["zero_gradients"] == 0.5
    alone = measure(HalfFlat(), x[100:], y[100:], eps=0.1, seed=0)
    assert alone["zero_gradients"] == 0
    assert measured["alignment"] > 0.5


def test_keys_are_fixed_for_ever_and_share_nothing_between_neighbours():
    """A stored run must draw the same in every later version."""
    assert key(0, "order", 0) == 6942163024847554866
    keys = {key(seed, purpose, step) for seed in range(20) for purpose in ("order", "stage") for step in range(50)}
    assert len(keys) == 2000
    assert key(1, "order", 12) != key(11, "order", 2)


def test_float_images_are_measured_as_the_bytes_that_they_were_and_left_as_they_are():
    model = small_network().eval()
    x, y = torch.randint(256, (9, 4, 4, 3), dtype=torch.uint8), torch.arange(9) % 3
    floats = as_floats(x).contiguous()
    before = floats.clone()
    measured = measure(model, floats, y, eps="8/255", seed=0)
    assert torch.equal(floats, before)
    assert measured == measure(model, x, y, eps=8 / 255, seed=0)
