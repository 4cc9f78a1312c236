"""Attacks on linear models, where the answer is known: the distance of an image to the boundary towards class j is
(z_y - z_j) / ||w_y - w_j||_q, with q = 1 for the L-inf ball and 2 for the L2 ball.

An image nearer than 0.9 eps must be broken, one further than (1 + 1e-4) eps never.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moatlab.attacks import Draws, apgd, autoattack, cw, fab, fgsm, mim, pgd, square, strong_pgd
from moatlab.attacks.fast_boundary import onto_hyperplane
from moatlab.attacks.norms import Threat, distance
from models_for_tests import Linear

DUAL = {"linf": 1, "l2": 2}
shapes = st.tuples(st.integers(1, 3), st.integers(2, 9), st.integers(2, 9))
seeds = st.integers(0, 2**20)


def random_start(x, eps, norm):
    return Draws.numbered(1, len(x)).in_ball(x, Threat.of(eps, norm), "test")


def targeted(attack, **options):
    """All targets side by side."""
    return lambda model, x, y, **threat: attack(model, x, y, ranks=range(2, len(model.weight) + 1), **threat, **options)


TWO_CLASSES = {
    "fgsm": fgsm,
    "pgd": lambda m, x, y, *, eps, norm: pgd(
        m, x, y, eps=eps, norm=norm, step_size=eps / 4, steps=50, start=random_start(x, eps, norm)
    ),
    "strong_pgd": lambda m, x, y, *, eps, norm: strong_pgd(
        m, x, y, eps=eps, norm=norm, step_size=eps / 4, steps=50, start=random_start(x, eps, norm)
    ),
    "mim": lambda m, x, y, *, eps, norm: mim(m, x, y, eps=eps, norm=norm, step_size=eps / 50, steps=50),
    "apgd-ce": apgd,
}
MORE_CLASSES = {
    "cw": lambda m, x, y, *, eps, norm: cw(m, x, y, eps=eps, norm=norm, step_size=eps / 4, steps=50),
    "apgd-t": targeted(apgd, loss="targeted-dlr"),
    "fab-t": targeted(fab),
}


def check(attack, model, x, y, eps, norm, distances):
    """Broken, and by a point inside the ball and inside [0, 1], where the images are near; never where they are far."""
    z = attack(model, x, y, eps=eps, norm=norm)
    assert distance(z.double() - x.double(), norm).max() <= eps + 1e-6
    assert z.min() >= 0
    assert z.max() <= 1
    broken = model(z).argmax(1) != y
    assert broken[distances < 0.9 * eps].all()
    assert not broken[distances > (1 + 1e-4) * eps].any()


def away_from_borders(shape, count=8):
    return 0.3 + 0.4 * torch.rand(count, *shape)


def nearest_boundaries(model, x, norm):
    """The label of each image by the model, and min_j (z_y - z_j) / ||w_y - w_j||_q."""
    logits, weight = model(x).detach(), model.weight.detach()
    y = logits.argmax(1)
    gaps = (weight[y][:, None] - weight[None]).norm(DUAL[norm], dim=2)
    distances = (logits.gather(1, y[:, None]) - logits) / gaps
    return y, distances.scatter(1, y[:, None], torch.inf).min(1).values


def radius_for(distances):
    """About half of the images are in reach, and no ball reaches 0 or 1."""
    return min(distances.median().item(), 0.3)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", TWO_CLASSES)
@settings(max_examples=15)
@given(shape=shapes, seed=seeds)
def test_with_two_classes_what_is_near_falls_and_what_is_far_stands(name, norm, shape, seed):
    torch.manual_seed(seed)
    x = away_from_borders(shape)
    weight = torch.randn(2, x[0].numel()) / x[0].numel() ** 0.5  # or the cross-entropy saturates
    model = Linear(weight)
    y, distances = nearest_boundaries(model, x, norm)
    check(TWO_CLASSES[name], model, x, y, radius_for(distances), norm, distances)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", MORE_CLASSES)
@settings(max_examples=6)
@given(shape=shapes, classes=st.integers(4, 12), seed=seeds)
def test_with_more_classes_what_is_near_falls_and_what_is_far_stands(name, norm, shape, classes, seed):
    """Untargeted ascent may follow the wrong class where boundaries lie at different angles, or where it is led on by
    its start; so for `cw` every class has pixels of its own and weights of the same sizes, and it starts at x."""
    torch.manual_seed(seed)
    classes = min(classes, shape[0] * shape[1] * shape[2])
    x = away_from_borders(shape)
    size = x[0].numel()
    weight = torch.randn(classes, size)
    if name == "cw":
        share = size // classes
        weight = torch.zeros(classes, size)
        values = torch.rand(share) + 0.5
        for number in range(classes):
            signs = torch.randint(2, (share,)) * 2 - 1
            weight[number, number * share : (number + 1) * share] = values[torch.randperm(share)] * signs
    if classes < 4:
        return
    model = Linear(weight)
    y, distances = nearest_boundaries(model, x, norm)
    check(MORE_CLASSES[name], model, x, y, radius_for(distances), norm, distances)


@pytest.mark.parametrize("name", TWO_CLASSES)
@settings(max_examples=15)
@given(shape=shapes, seed=seeds)
def test_at_the_borders_a_pixel_moves_only_as_far_as_it_has_room(name, shape, seed):
    """Over the ball cut by [0, 1] the margin falls by at most the sum of |w_i| min(eps, room_i)."""
    torch.manual_seed(seed)
    x = torch.rand(16, *shape).mul(1.4).sub(0.2).clamp(0, 1)  # many pixels at 0 and 1
    weight = torch.randn(2, x[0].numel()) / x[0].numel() ** 0.5  # or the cross-entropy saturates
    model = Linear(weight)
    logits = model(x).detach()
    y = logits.argmax(1)
    margin = (logits[:, 0] - logits[:, 1]).abs()
    downhill = torch.where(y[:, None] == 0, -1, 1) * (weight[0] - weight[1]).sign()
    room = torch.where(downhill > 0, 1 - x.flatten(1), x.flatten(1))
    eps = 0.1
    reach = ((weight[0] - weight[1]).abs() * room.clamp(max=eps)).sum(1)
    z = TWO_CLASSES[name](model, x, y, eps=eps, norm="linf")
    broken = model(z).argmax(1) != y
    assert z.min() >= 0
    assert z.max() <= 1
    assert broken[margin < 0.9 * reach].all()
    assert not broken[margin > (1 + 1e-4) * reach].any()


@pytest.mark.parametrize(("norm", "share"), [("linf", 0.5), ("l2", 0.3)])
@settings(max_examples=4)
@given(side=st.integers(8, 10), seed=seeds)
def test_square_breaks_what_is_well_inside_the_radius(norm, share, side, seed):
    """Random search, as its authors wrote it, never touches the last row and column again after its first point, and
    its smooth L2 humps follow weights that are pure noise only so far."""
    torch.manual_seed(seed)
    x = away_from_borders((3, side, side))
    weight = torch.randn(4, x[0].numel())
    model = Linear(weight)
    y, distances = nearest_boundaries(model, x, norm)
    eps = min(1.25 / share * distances.median().item(), 0.3)
    z = square(model, x, y, eps=eps, norm=norm, queries=range(3000))
    broken = model(z).argmax(1) != y
    assert distance(z.double() - x.double(), norm).max() <= eps + 1e-6
    assert broken[distances < share * eps].all()
    assert not broken[distances > (1 + 1e-4) * eps].any()


@pytest.mark.parametrize("norm", ["linf", "l2"])
@settings(max_examples=40)
@given(size=st.integers(1, 60), seed=seeds)
def test_the_step_onto_a_hyperplane_is_the_shortest_inside_the_box(norm, size, seed):
    """Against bisection for the level t at which the pixels, each moved by min(t v, room), reach the plane."""
    draws = torch.Generator().manual_seed(seed)
    z = torch.rand(6, 1, 1, size, generator=draws, dtype=torch.float64)
    w = torch.randn(6, 1, 1, size, generator=draws, dtype=torch.float64)
    w[torch.rand(w.shape, generator=draws) < 0.2] = 0
    gap = torch.randn(6, generator=draws, dtype=torch.float64) * size / 6
    d = onto_hyperplane(z, w, gap, norm)
    assert ((z + d >= -1e-12) & (z + d <= 1 + 1e-12)).all()
    for row in range(6):
        weight = w[row].flatten() * gap[row].sign()  # moving against it closes the gap
        room = torch.where(weight > 0, z[row].flatten(), 1 - z[row].flatten())
        speed = torch.ones_like(weight) if norm == "linf" else weight.abs()
        low, high = 0.0, 1e6
        for _ in range(200):
            middle = (low + high) / 2
            reached = (weight.abs() * torch.minimum(middle * speed, room)).sum() >= gap[row].abs()
            low, high = (low, middle) if reached else (middle, high)
        expected = -weight.sign() * torch.minimum(high * speed, room)
        torch.testing.assert_close(d[row].flatten(), expected, rtol=1e-7, atol=1e-7)


def test_autoattack_breaks_exactly_what_is_in_reach_of_a_linear_model():
    torch.manual_seed(0)
    x = away_from_borders((3, 8, 8), count=12)
    weight = torch.randn(5, x[0].numel())
    model = Linear(weight)
    y, distances = nearest_boundaries(model, x, "linf")
    eps = distances.median().item() * 1.05
    z = autoattack(model, x, y, eps=eps)
    broken = model(z).argmax(1) != y
    assert torch.equal(broken, distances < eps)
    assert torch.equal(z[~broken], x[~broken])
