"""The L1 ball inside [0, 1]: its projection, and attacks on linear models, whose worst case moves the pixels with the
largest weights to 0 or 1, one after the other, until eps is used up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moatlab.attacks import Draws, apgd, cw, fab, fgsm, mim, pgd, square, strong_pgd
from moatlab.attacks.fast_boundary import onto_hyperplane
from moatlab.attacks.l1 import largest_signs, project_l1
from moatlab.attacks.norms import Threat, distance
from models_for_tests import Linear

seeds = st.integers(0, 2**20)


def some_points(seed, shape, *, spread, on_grid):
    """Points around images with many pixels at 0 and 1; on a grid, so that many changes are equal, or not."""
    draws = torch.Generator().manual_seed(seed)
    x = (1.4 * torch.rand(5, *shape, generator=draws, dtype=torch.float64) - 0.2).clamp(0, 1)
    z = x + spread * torch.randn(x.shape, generator=draws, dtype=torch.float64)
    return ((8 * x).round() / 8, (8 * z).round() / 8) if on_grid else (x, z)


def by_bisection(z, x, eps):
    """The amount by which the changes of each image are reduced, by halving an interval 60 times."""
    delta = z - x
    room = torch.where(delta > 0, 1 - x, x)

    def left(amount):
        return (delta.abs() - amount.view(-1, 1, 1, 1)).clamp(min=0).minimum(room)

    low, high = torch.zeros(len(x), dtype=x.dtype), delta.abs().flatten(1).amax(1)
    inside = left(low).flatten(1).sum(1) <= eps
    for _ in range(60):
        middle = (low + high) / 2
        too_far = left(middle).flatten(1).sum(1) > eps
        low, high = torch.where(too_far, middle, low), torch.where(too_far, high, middle)
    return x + delta.sign() * left(torch.where(inside, 0, high))


@settings(max_examples=30)
@given(
    seed=seeds,
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7), st.integers(1, 7)),
    spread=st.sampled_from([0.01, 0.3, 5.0]),
    share=st.floats(0.001, 0.8),
    on_grid=st.booleans(),
)
def test_the_projection_is_the_nearest_point_of_ball_and_box(seed, shape, spread, share, on_grid):
    x, z = some_points(seed, shape, spread=spread, on_grid=on_grid)
    eps = share * x[0].numel()
    found = project_l1(z, x, eps)
    assert distance(found - x, "l1").max() <= eps * (1 + 1e-12)
    assert ((found >= 0) & (found <= 1)).all()
    torch.testing.assert_close(found, by_bisection(z, x, eps), rtol=0, atol=1e-11)
    torch.testing.assert_close(project_l1(found, x, eps), found, rtol=0, atol=1e-12)
    other = project_l1(x + torch.randn_like(x), x, eps)
    assert (distance(found - z, "l2") <= distance(other - z, "l2") + 1e-9).all()


@pytest.mark.parametrize("eps", [0.05, 1.0, 12.0])
@pytest.mark.parametrize("spread", [0.001, 0.05, 1.0])
def test_in_float32_rounding_does_not_leave_the_ball(eps, spread):
    torch.manual_seed(0)
    x = torch.rand(20, 3, 32, 32)
    found = project_l1(x + spread * torch.randn_like(x), x, eps)
    assert found.dtype == torch.float32
    far = distance(found.double() - x.double(), "l1")
    assert far.max() <= eps
    assert far.min() >= min(eps - 2e-4, 0.5 * spread)


def test_large_batches_are_projected_in_parts(monkeypatch):
    torch.manual_seed(0)
    x = torch.rand(7, 3, 4, 4)
    z = x + torch.randn_like(x)
    whole = project_l1(z, x, 2.0)
    monkeypatch.setattr("moatlab.attacks.l1.AT_ONCE", 100)  # about two images
    assert torch.equal(project_l1(z, x, 2.0), whole)
    assert project_l1(z[:0], x[:0], 2.0).shape == (0, 3, 4, 4)


def test_pixels_that_do_not_change_are_exactly_those_of_the_image():
    torch.manual_seed(0)
    x = torch.rand(10, 3, 16, 16)
    found = project_l1(x + torch.randn_like(x), x, 3.0)
    assert 0 < (found != x).sum() < 0.1 * x.numel()


@pytest.mark.parametrize(("share", "count"), [(0.0, 1), (0.1, 5), (0.5, 24), (1.0, 48)])
def test_a_step_has_norm_one_and_the_signs_of_the_largest_gradients(share, count):
    torch.manual_seed(0)
    gradient = torch.randn(4, 3, 4, 4)
    step = largest_signs(gradient, share)
    torch.testing.assert_close(distance(step, "l1"), torch.ones(4))
    assert ((step != 0).flatten(1).sum(1) == count).all()
    for sizes, moved in zip(gradient.abs().flatten(1), (step != 0).flatten(1), strict=True):
        assert sizes[moved].min() == sizes.sort(descending=True).values[count - 1]
    assert torch.equal(step.sign()[step != 0], gradient.sign()[step != 0])
    assert not largest_signs(torch.zeros_like(gradient), share).any()


def reach(x, y, weight, eps):
    """How much the margin of two classes can fall: |w| times the room, of the largest |w| first, up to eps in total."""
    difference = weight[0] - weight[1]
    downhill = torch.where(y[:, None] == 0, -1, 1) * difference.sign()
    room = torch.where(downhill > 0, 1 - x.flatten(1), x.flatten(1))
    order = difference.abs().argsort(descending=True)
    room, size = room[:, order], difference.abs()[order]
    moved = (eps - (room.cumsum(1) - room)).clamp(min=0).minimum(room)
    return (moved * size).sum(1)


@pytest.mark.parametrize("attack", [apgd, fab])
@settings(max_examples=12)
@given(seed=seeds, side=st.integers(5, 9), eps=st.floats(0.3, 6))
def test_a_linear_model_is_broken_where_the_largest_weights_reach(attack, seed, side, eps):
    torch.manual_seed(seed)
    x = (1.4 * torch.rand(16, 3, side, side) - 0.2).clamp(0, 1)
    weight = torch.randn(2, x[0].numel()) / x[0].numel() ** 0.5  # or the cross-entropy saturates
    model = Linear(weight)
    logits = model(x).detach()
    y, margin = logits.argmax(1), (logits[:, 0] - logits[:, 1]).abs()
    most = reach(x, y, weight, eps)
    z = attack(model, x, y, eps=eps, norm="l1")
    assert distance(z.double() - x.double(), "l1").max() <= eps * (1 + 1e-6)
    assert ((z >= 0) & (z <= 1)).all()
    broken = model(z).argmax(1) != y
    assert broken[margin < 0.9 * most].all()
    assert not broken[margin > (1 + 1e-4) * most].any()


@pytest.mark.parametrize("name", ["fgsm", "pgd", "strong_pgd", "cw", "mim", "square"])
def test_the_other_attacks_break_what_is_well_inside_and_nothing_outside(name):
    """Of 48 pixels, a hundredth is the one with the largest gradient."""
    torch.manual_seed(1)
    x = 0.4 + 0.2 * torch.rand(40, 3, 4, 4)
    weight = torch.randn(2, 48) / 7
    weight -= weight.mean(1, keepdim=True)  # so that the boundary is near
    model = Linear(weight)
    logits = model(x).detach()
    y, margin, eps = logits.argmax(1), (logits[:, 0] - logits[:, 1]).abs(), 0.15
    steps = {"norm": "l1", "step_size": eps / (50 if name == "mim" else 4), "steps": 50}
    start = Draws.numbered(0, len(x)).in_ball(x, Threat("l1", eps), "test")
    z = {
        "fgsm": lambda: fgsm(model, x, y, eps=eps, norm="l1"),
        "pgd": lambda: pgd(model, x, y, eps=eps, start=start, **steps),
        "strong_pgd": lambda: strong_pgd(model, x, y, eps=eps, start=start, **steps),
        "cw": lambda: cw(model, x, y, eps=eps, start=start, **steps),
        "mim": lambda: mim(model, x, y, eps=eps, **steps),
        "square": lambda: square(model, x, y, eps=eps, norm="l1", queries=range(1000)),
    }[name]()
    assert distance(z.double() - x.double(), "l1").max() <= eps + 1e-6
    most, broken = reach(x, y, weight, eps), model(z).argmax(1) != y
    share = 0.2 if name == "square" else 0.95
    assert 0 < (margin < share * most).sum() < 40
    assert broken[margin < share * most].all()
    assert not broken[margin > (1 + 1e-4) * most].any()


@pytest.mark.parametrize("attack", [lambda *given, **how: apgd(*given, loss="targeted-dlr", **how), fab])
def test_with_more_classes_what_is_near_is_broken_and_what_is_far_is_not(attack):
    torch.manual_seed(0)
    x = 0.3 + 0.4 * torch.rand(30, 3, 6, 6)
    weight = torch.randn(5, x[0].numel())
    weight -= weight.mean(1, keepdim=True)  # so that the boundaries are near
    model = Linear(weight)
    logits = model(x).detach()
    y = logits.argmax(1)
    largest = (weight[y][:, None] - weight[None]).abs().amax(2)
    distances = ((logits.gather(1, y[:, None]) - logits) / largest).scatter(1, y[:, None], torch.inf).amin(1)
    eps = 0.28  # no pixel reaches 0 or 1
    z = attack(model, x, y, eps=eps, norm="l1", ranks=range(2, 6))
    broken = model(z).argmax(1) != y
    assert 0 < (distances < 0.95 * eps).sum() < 30
    assert broken[distances < 0.95 * eps].all()
    assert not broken[distances > (1 + 1e-4) * eps].any()


@settings(max_examples=20)
@given(size=st.integers(1, 30), seed=seeds)
def test_the_step_onto_a_hyperplane_moves_the_largest_weights_first(size, seed):
    draws = torch.Generator().manual_seed(seed)
    z = torch.rand(4, 1, 1, size, generator=draws, dtype=torch.float64)
    w = torch.randn(4, 1, 1, size, generator=draws, dtype=torch.float64)
    w[torch.rand(w.shape, generator=draws) < 0.2] = 0
    gap = torch.randn(4, generator=draws, dtype=torch.float64) * size / 6
    moves = onto_hyperplane(z, w, gap, "l1").flatten(1)
    for row in range(4):
        left, expected = gap[row].item(), torch.zeros(size, dtype=torch.float64)
        for index in w[row].flatten().abs().argsort(descending=True).tolist():
            weight, pixel = w[row, 0, 0, index].item(), z[row, 0, 0, index].item()
            if weight:
                expected[index] = min(max(-left / weight, -pixel), 1 - pixel)
                left += weight * expected[index].item()
        torch.testing.assert_close(moves[row], expected, rtol=0, atol=1e-9)
