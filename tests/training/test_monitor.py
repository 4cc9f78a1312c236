import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from moatlab.data.images import as_floats
from moatlab.methods.language import parse_method
from moatlab.runtime.randomness import generator, key
from moatlab.training.collapse import collapsed_at as collapsed_at_checks
from moatlab.training.collapse import judge
from moatlab.training.monitor import measure
from models_for_tests import small_network

ONE_STAGE, CYCLE = parse_method("fgsm"), parse_method("moat:2")


def comparable(values, method):
    return [(epoch + 1, value) for epoch, value in enumerate(values) if method.ends_cycle(epoch)]


def collapsed_at(values, method):
    return collapsed_at_checks(comparable(values, method))


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


def test_fgsm_that_falls_to_zero_has_collapsed_at_the_first_low_epoch():
    assert collapsed_at([0.1, 0.2, 0.25, 0.02, 0.0, 0.01], ONE_STAGE) == 4


def test_a_fall_that_recovers_is_no_collapse():
    assert collapsed_at([0.1, 0.2, 0.02, 0.2, 0.21], ONE_STAGE) is None


def test_below_a_third_of_the_best_counts_even_above_five_percent():
    assert collapsed_at([0.1, 0.45, 0.14, 0.1], ONE_STAGE) == 3
    assert collapsed_at([0.1, 0.45, 0.16, 0.16], ONE_STAGE) is None


def test_the_dips_of_a_cycle_at_its_first_stage_are_not_looked_at():
    assert collapsed_at([0.02, 0.1, 0.2, 0.02, 0.1, 0.2, 0.02], CYCLE) is None
    assert collapsed_at([0.02, 0.1, 0.2, 0.02, 0.1, 0.04], CYCLE) == 6


def test_the_first_epoch_alone_is_no_collapse():
    assert collapsed_at([0.01], ONE_STAGE) is None
    assert collapsed_at([], ONE_STAGE) is None
    assert collapsed_at([0.01, 0.3, 0.3], ONE_STAGE) is None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12), st.sampled_from([ONE_STAGE, CYCLE]))
def test_collapse_is_what_its_definition_says(values, method):
    checks = comparable(values, method)
    floor = max(0.05, max((value for _, value in checks), default=0) / 3)
    candidates = [
        epoch for epoch, _ in checks if epoch >= 2 and all(value < floor for later, value in checks if later >= epoch)
    ]
    assert collapsed_at(values, method) == min(candidates, default=None)


def checks(*rows):
    return [dict(zip(("fgsm", "pgd7", "alignment"), row, strict=True)) for row in rows]


HEALTHY = (0.25, 0.20, 0.8)


@pytest.mark.parametrize(
    ("last", "verdict"),
    [
        ((0.24, 0.18, 0.7), "good"),
        ((0.15, 0.11, 0.7), "good"),  # above half of the best: a bad epoch
        ((0.13, 0.07, 0.7), "low"),  # fallen, but neither a gap nor a bent loss
        ((0.40, 0.07, 0.7), "collapsed"),  # the gap alone
        ((0.12, 0.07, 0.2), "collapsed"),  # the alignment alone: fast collapses so
        ((0.45, 0.00, 0.05), "collapsed"),
    ],
)
def test_an_alarm_needs_a_fall_and_a_loss_that_is_bent(last, verdict):
    assert judge(checks(HEALTHY, HEALTHY, last)) == verdict


def test_what_was_never_robust_has_nothing_to_lose():
    assert judge(checks((0.30, 0.01, 0.1), (0.30, 0.0, 0.1))) == "good"


def test_the_first_check_is_no_alarm():
    assert judge(checks((0.30, 0.02, 0.3))) == "good"
    assert judge(checks((0.30, 0.06, 0.3))) == "good"


def test_robustness_is_back_when_half_of_its_best_is():
    fallen = (0.4, 0.01, 0.1)
    assert judge(checks(HEALTHY, fallen, (0.14, 0.09, 0.6))) == "low"
    assert judge(checks(HEALTHY, fallen, (0.14, 0.10, 0.6))) == "good"


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 2, st.floats(-1, 1)), min_size=1, max_size=9))
def test_a_best_check_is_never_an_alarm(rows):
    best = max(row[1] for row in rows)
    assert judge(checks(*rows, (1.0, best, -1.0))) == "good"


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
