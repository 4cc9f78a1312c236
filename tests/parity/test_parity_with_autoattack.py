"""Against the reference code of AutoAttack (the package `pyautoattack`), in float64, with its random draws fed in.

What is compared is what the model is asked: every iterate of APGD and FAB and every query of Square, for each example
as long as it is standing. Step sizes, best points and returns to them all show in the iterates.
"""

import json

import pyautoattack.autopgd_base
import pyautoattack.square
import pytest
import torch
from pyautoattack import AutoAttack
from pyautoattack.autopgd_base import APGDAttack, APGDAttack_targeted, L1_projection
from pyautoattack.fab_pt import FABAttack_PT
from pyautoattack.square import SquareAttack
from torch import nn

import moatlab
from moatlab.attacks import Draws, Probe, apgd, fab, square
from models_for_tests import FIXTURES

NAMES = {"linf": "Linf", "l2": "L2", "l1": "L1"}
TIMES = {"linf": 1, "l2": 10, "l1": 300}  # at these multiples of a radius about the same images fall
CLASSES = 6


@pytest.fixture
def in_float64(monkeypatch):
    """The reference casts to float32 here and there; for the length of a test that means float64."""
    torch.set_default_dtype(torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def exact_projection(monkeypatch):
    """The reference computes x + delta + correction, which leaves a pixel that should not change off by one rounding
    error. It counts such pixels as changed, and divides by their norm; here they do not change, as in ours."""

    def project(x, delta, eps):
        correction = L1_projection(x, delta, eps)
        delta.copy_(torch.where(correction == -delta, 0, delta + correction))
        return torch.zeros_like(delta)

    for module in (pyautoattack.autopgd_base, pyautoattack.square):
        monkeypatch.setattr(module, "L1_projection", project)
    return project


class ReferenceDraws(Draws):
    """The global generator, asked in the order in which the reference asks it."""

    def __init__(self, count):
        object.__setattr__(self, "count", count)  # Draws is frozen

    def of(self, rows):
        return ReferenceDraws(int(rows.sum()) if rows.dtype == torch.bool else len(rows))

    def each(self, _purpose, shape, *_counters, normal=False):
        return (torch.randn if normal else torch.rand)(self.count, *shape)

    def shared(self, _purpose, count, *_counters):
        return [torch.rand(1).item() for _ in range(count)]


class Recorded(nn.Module):
    """A small convolutional network that keeps whatever it is shown.

    It answers image by image, so that its last bits do not hang on how many others stand beside one: where two iterates
    have the same loss but for these, they would decide to which of them APGD returns.
    """

    def __init__(self, side):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1),
            nn.SiLU(), nn.Flatten(), nn.Linear(8 * ((side + 1) // 2) ** 2, CLASSES),
        )  # fmt: skip
        self.layers[1].running_mean.normal_()
        self.eval()
        self.shown = []

    def forward(self, x):
        self.shown.append(x.detach().clone())
        return torch.cat([self.layers(image[None]) for image in x])

    def take(self):
        shown, self.shown = self.shown, []
        return shown


def problem(side=8, count=12):
    """Images with the labels that the model gives them, and the distances at which about half of them fall."""
    model = Recorded(side)
    torch.manual_seed(2)
    x = torch.rand(count, 3, side, side)
    y = model(x).argmax(1)
    model.take()
    return model, x, y


def follow(model, y, ours, reference, ends=lambda logits, _z, y: logits.argmax(1) != y):
    """Every batch we asked about holds the reference's points for the examples that had not ended before."""
    standing = torch.ones(len(y), dtype=torch.bool)
    assert len(ours) <= len(reference)
    for asked, answer in zip(ours, reference, strict=False):
        assert len(asked) == standing.sum()
        torch.testing.assert_close(asked, answer[standing], rtol=0, atol=1e-9)
        standing &= ~ends(model.layers(answer).detach(), answer, y)
    return standing


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("eps", [0.002, 0.02])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("loss", ["ce", "dlr", "targeted-dlr"])
def test_apgd_asks_about_the_same_points(norm, loss, eps):
    model, x, y = problem()
    eps = eps * TIMES[norm]
    if loss == "targeted-dlr":
        theirs = APGDAttack_targeted(model, norm=NAMES[norm], eps=eps, device="cpu")
        theirs.y_target = model.layers(x).sort(1).indices[:, -3]
    else:
        theirs = APGDAttack(model, norm=NAMES[norm], eps=eps, loss=loss, device="cpu")
    theirs.init_hyperparam(x)
    torch.manual_seed(3)
    _, robust, _, _ = theirs.attack_single_run(x, y)
    reference = model.take()
    torch.manual_seed(3)
    found = apgd(model, x, y, eps=eps, norm=norm, loss=loss, ranks=[3], draws=ReferenceDraws(len(x)))
    ours = model.take()[1 if loss == "targeted-dlr" else 0 :]  # targets are chosen by the answers for x
    standing = follow(model, y, ours, reference)
    assert len(ours) == 101 or not standing.any()
    assert torch.equal(standing, robust.bool())
    assert torch.equal((found != x).flatten(1).any(1), ~standing)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("eps", [1.0, 9.0])
@pytest.mark.parametrize("loss", ["ce", "dlr", "targeted-dlr"])
def test_apgd_in_l1_asks_about_the_same_points(exact_projection, loss, eps):
    """As in the standard version: in balls of three radii, of which the last is judged."""
    model, x, y = problem()
    if loss == "targeted-dlr":
        theirs = APGDAttack_targeted(model, norm="L1", eps=eps, device="cpu")
        theirs.y_target = model.layers(x).sort(1).indices[:, -3]
    else:
        theirs = APGDAttack(model, norm="L1", eps=eps, loss=loss, device="cpu")
    theirs.init_hyperparam(x)
    torch.manual_seed(3)
    delta = torch.randn_like(x)
    for theirs.eps, theirs.n_iter in ((3 * eps, 30), (2 * eps, 30), (eps, 40)):  # as in its decr_eps_pgd
        exact_projection(x, delta, theirs.eps)
        best, robust, _, _ = theirs.attack_single_run(x, y, x_init=x + delta)
        delta = best - x
    reference = model.take()
    torch.manual_seed(3)
    found = apgd(model, x, y, eps=eps, norm="l1", loss=loss, ranks=[3], draws=ReferenceDraws(len(x)))
    ours = model.take()[1 if loss == "targeted-dlr" else 0 :]
    for asked, answer in zip(ours[:62], reference[:62], strict=True):
        torch.testing.assert_close(asked, answer, rtol=0, atol=1e-9)
    standing = follow(model, y, ours[62:], reference[62:])
    assert len(ours) == 62 + 41 or not standing.any()
    assert torch.equal(standing, robust.bool())
    assert torch.equal((found != x).flatten(1).any(1), ~standing)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize("eps", [0.001, 0.03])
def test_fab_asks_about_the_same_points(norm, rank, eps):
    model, x, y = problem()
    eps = eps * TIMES[norm]
    theirs = FABAttack_PT(model, norm=NAMES[norm], eps=eps, targeted=True, device="cpu")
    theirs.target_class = rank
    nearest = theirs.attack_single_run(x, y, is_targeted=True)
    reference = model.take()[2:]  # after the answers for x, each iterate is asked for its gradient, then for its label
    found = fab(model, x, y, eps=eps, norm=norm, ranks=[rank])
    ours = model.take()[1:]
    order = {"linf": float("inf"), "l2": 2, "l1": 1}[norm]

    def within(z):
        return torch.linalg.vector_norm((z - x).flatten(1), ord=order, dim=1) <= eps

    standing = torch.ones(len(y), dtype=torch.bool)
    for index, (asked, answer) in enumerate(zip(ours, reference, strict=False)):
        torch.testing.assert_close(asked, answer[standing], rtol=0, atol=1e-9)
        if index % 2:
            standing &= ~((model.layers(answer).argmax(1) != y) & within(answer))
    assert len(ours) == 200 or not standing.any()
    assert torch.equal(standing, ~(within(nearest) & (model.layers(nearest).argmax(1) != y)))
    assert torch.equal((found != x).flatten(1).any(1), ~standing)


@pytest.mark.usefixtures("in_float64", "exact_projection")
@pytest.mark.parametrize(
    ("norm", "side"), [*((norm, side) for norm in ("linf", "l2") for side in (8, 11, 16)), ("l1", 11)]
)
@pytest.mark.parametrize("eps", [0.005, 0.05])
def test_square_asks_the_same_queries(norm, side, eps):
    model, x, y = problem(side)
    eps = eps * {"linf": 1, "l2": 20, "l1": 200}[norm]
    theirs = SquareAttack(model, norm=NAMES[norm], eps=eps, n_queries=500, resc_schedule=False, device="cpu")
    theirs.init_hyperparam(x)
    torch.manual_seed(3)
    theirs.attack_single_run(x, y)
    reference = model.take()
    torch.manual_seed(3)
    probe = Probe(model, twice=False)
    found = square(probe, x, y, eps=eps, norm=norm, queries=range(500), draws=ReferenceDraws(len(x)))
    ours = model.take()
    assert len(ours) == len(reference)
    for asked, answer in zip(ours, reference, strict=True):
        torch.testing.assert_close(asked, answer, rtol=0, atol=1e-9)
    assert len(ours) == 501 or (model.layers(found).argmax(1) != y).all()


class Noisy(nn.Module):
    """Adds Gaussian noise to its input, from the global generator."""

    def __init__(self, model, size):
        super().__init__()
        self.model, self.size, self.shown = model, size, []

    def forward(self, x):
        self.shown.append(x.detach().clone())
        return self.model(x + self.size * torch.randn(x.shape))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("norm", "loss"), [("linf", "ce"), ("linf", "dlr"), ("l2", "ce")])
def test_with_averaged_gradients_apgd_asks_a_randomised_model_about_the_same_points(norm, loss):
    """No image is dropped, so the model draws the same noise in both."""
    layers, x, y = problem()
    model, eps = Noisy(layers.layers, 0.2), 0.01 * TIMES[norm]
    theirs = APGDAttack(model, norm=NAMES[norm], eps=eps, loss=loss, eot_iter=3, device="cpu")
    theirs.init_hyperparam(x)
    torch.manual_seed(3)
    theirs.attack_single_run(x, y)
    reference, model.shown = model.shown, []
    torch.manual_seed(3)
    found = apgd(model, x, y, eps=eps, norm=norm, loss=loss, average=3, draws=ReferenceDraws(len(x)))
    assert len(model.shown) == len(reference) - 2 == 301  # the last point needs no gradient
    for asked, answer in zip(model.shown, reference, strict=False):
        torch.testing.assert_close(asked, answer, rtol=0, atol=1e-9)
    some = torch.stack([(found == points).flatten(1).all(1) for points in model.shown])
    assert ((found == x).flatten(1).all(1) | some.any(0)).all()
    assert some.any()


def test_aa_rand_gets_the_verdicts_of_the_reference_within_their_spread():
    """Linear, because 4,000 gradients are needed. With this noise a tenth of the images is wrong by chance."""
    torch.manual_seed(0)
    model = Noisy(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).requires_grad_(False), 0.1).eval()
    x = torch.rand(150, 3, 4, 4)
    y = model.model(x).argmax(1)
    theirs, ours = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        reference = AutoAttack(model, eps=0.03, norm="Linf", version="rand", seed=seed)
        _, answers = reference.run_standard_evaluation(x, y)
        theirs.append((answers == y).sum().item())
        result = moatlab.evaluate(model, x, y, attacks="aa-rand", eps=0.03, seed=seed)
        ours.append(result.robust["aa-rand"].sum().item())
        assert result.settings.attacks == ["clean", "aa-rand"]
        assert "randomised" not in [flag.name for flag in result.flags]
    assert min(theirs) > 30
    assert max(theirs) < 120
    spread = max(max(theirs) - min(theirs), 5)  # three numbers may be close to each other by chance
    assert min(theirs) - spread <= sum(ours) / 3 <= max(theirs) + spread


@pytest.mark.parametrize(("attack", "eps", "differ"), [("apgd-ce", 12.0, 2), ("fab-t", 6.0, 0)])
def test_in_l1_an_attack_gets_the_verdicts_of_the_reference(attack, eps, differ):
    """The starts of APGD differ, FAB has none."""
    model, x, y = problem(count=30)
    model.forward = model.layers.forward
    model.requires_grad_(False)
    reference = AutoAttack(model, eps=eps, norm="L1", seed=0)
    reference.attacks_to_run = [attack]
    reference.fab.n_target_classes = CLASSES - 1
    points, _ = reference.run_standard_evaluation(x, y)
    theirs = model(points).argmax(1) == y
    ours = moatlab.evaluate(model, x, y, attacks=attack, eps=eps, norm="l1").robust[attack]
    assert 2 < theirs.sum() < 28
    assert (ours != theirs).sum() <= differ


def test_a_robust_model_gets_the_verdicts_of_the_reference():
    reference = json.loads((FIXTURES / "reference.json").read_text())
    theirs = torch.tensor(reference["stand"], dtype=torch.bool)[:60]
    data = moatlab.load_images("mini")
    model = moatlab.load(FIXTURES / "mini_moat2.safetensors")
    ours = moatlab.evaluate(model, data.test_x[:60], data.test_y[:60], attacks=["aa"], eps=16 / 255).robust["aa"]
    assert 3 < theirs.sum() < 30
    assert (ours == theirs).sum() >= 59
