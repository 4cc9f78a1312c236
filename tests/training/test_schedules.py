from fractions import Fraction
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moatlab.training.recipe import Recipe
from moatlab.training.schedules import SCHEDULES, cycled_momentum, cyclic, stepwise

runs = st.tuples(st.integers(1, 400), st.integers(1, 50))  # epochs, steps per epoch
peaks = st.floats(1e-6, 1e3)


@given(runs, peaks, st.data())
def test_the_cyclic_rate_is_a_triangle_over_the_whole_run(run, peak, data):
    epochs, steps_per_epoch = run
    total = epochs * steps_per_epoch
    step = data.draw(st.integers(0, total - 1))
    exact = Fraction(peak) * (1 - abs(Fraction(2 * step, total) - 1))
    rate = cyclic(step, epochs=epochs, steps_per_epoch=steps_per_epoch, peak=peak)
    assert rate == pytest.approx(float(exact), rel=1e-9, abs=1e-12 * peak)
    assert 0 <= rate <= peak


@given(runs, peaks)
def test_the_cyclic_rate_begins_at_zero(run, peak):
    assert cyclic(0, epochs=run[0], steps_per_epoch=run[1], peak=peak) == 0


@given(st.integers(1, 400), st.integers(1, 50), peaks)
def test_the_cyclic_rate_peaks_in_the_middle_of_the_run(half, steps_per_epoch, peak):
    rates = [cyclic(step, epochs=2 * half, steps_per_epoch=steps_per_epoch, peak=peak)
             for step in (half * steps_per_epoch - 1, half * steps_per_epoch, half * steps_per_epoch + 1)]  # fmt: skip
    assert rates[1] == peak
    assert rates[0] < peak
    assert rates[2] < peak


def test_the_cyclic_rate_of_the_mini_run_at_its_quarters():
    rates = [cyclic(step, epochs=4, steps_per_epoch=39, peak=0.2) for step in (0, 39, 78, 117, 155)]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.1, 0.2 * 2 / 156])


@pytest.mark.parametrize("epochs", [200, 201])
@given(steps_per_epoch=st.integers(1, 400))
def test_the_stepwise_rate_falls_at_epochs_60_120_and_160_of_the_paper(epochs, steps_per_epoch):
    for epoch, expected in [(0, 0.2), (59, 0.2), (60, 0.02), (119, 0.02), (120, 0.002), (159, 0.002), (160, 0.0002)]:
        for step in (epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch - 1):
            rate = stepwise(step, epochs=epochs, steps_per_epoch=steps_per_epoch, peak=0.2)
            assert rate == pytest.approx(expected, rel=1e-12)
    last = stepwise(epochs * steps_per_epoch - 1, epochs=epochs, steps_per_epoch=steps_per_epoch, peak=0.2)
    assert last == pytest.approx(0.0002, rel=1e-12)


@given(runs, peaks)
def test_the_stepwise_rate_begins_at_its_peak_however_short_the_run(run, peak):
    assert stepwise(0, epochs=run[0], steps_per_epoch=run[1], peak=peak) == peak


@given(runs, peaks)
def test_the_stepwise_rate_never_rises_and_stays_the_same_within_an_epoch(run, peak):
    epochs, steps_per_epoch = run
    rates = [
        [stepwise(epoch * steps_per_epoch + step, epochs=epochs, steps_per_epoch=steps_per_epoch, peak=peak)
         for step in {0, steps_per_epoch - 1}]
        for epoch in range(epochs)
    ]  # fmt: skip
    assert all(len(set(of_epoch)) == 1 for of_epoch in rates)
    first = [of_epoch[0] for of_epoch in rates]
    assert first == sorted(first, reverse=True)


def test_every_schedule_that_a_recipe_may_name_exists():
    assert set(SCHEDULES) == set(get_args(Recipe.model_fields["schedule"].annotation))


@pytest.mark.parametrize("total", [10, 24, 818])
def test_rate_and_momentum_are_those_of_pytorch_s_cyclic_schedule(total):
    """As fast_adversarial and Kim et al. call it, with its defaults for the momentum."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
    up = total / 2
    schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0, max_lr=0.2, step_size_up=up, step_size_down=up)
    for step in range(total):
        group = optimizer.param_groups[0]
        assert cyclic(step, epochs=1, steps_per_epoch=total, peak=0.2) == pytest.approx(group["lr"], abs=1e-9)
        assert cycled_momentum(step, steps=total, highest=0.9) == pytest.approx(group["momentum"], abs=1e-9)
        optimizer.step()
        schedule.step()
