"""Learning rates and momentum as functions of the step: no state to save."""

import math


def cyclic(step: int, *, epochs: int, steps_per_epoch: int, peak: float) -> float:
    """One triangle over the run, lr(s) = peak (1 - |2s/S - 1|): up to the middle, down to the end."""
    return peak * (1 - abs(2 * step / (epochs * steps_per_epoch) - 1))


def stepwise(step: int, *, epochs: int, steps_per_epoch: int, peak: float) -> float:
    """Divided by ten at 30, 60 and 80 % of the epochs: 60, 120, 160 of the paper's 200 (or 201)."""
    epoch = step // steps_per_epoch
    drops = sum(epoch >= max(1, epochs * tenths // 10) for tenths in (3, 6, 8))
    return float(peak * 10.0**-drops)


def cosine(step: int, *, epochs: int, steps_per_epoch: int, peak: float) -> float:
    """Half a cosine, lr(s) = peak (1 + cos(pi s/S))/2 (Loshchilov and Hutter, 2017)."""
    return peak * (1 + math.cos(math.pi * step / (epochs * steps_per_epoch))) / 2


MOMENTUM_FALL = 0.1


def cycled_momentum(step: int, *, steps: int, highest: float) -> float:
    """momentum(s) = highest - 0.1 (1 - |2s/S - 1|): lowest at the peak of the cyclic rate. 0.9 and 0.8 are the defaults
    of PyTorch's CyclicLR, and so of the code of Wong et al. (2020), Kim et al. (2021) and de Jorge et al. (2022)."""
    return highest - MOMENTUM_FALL * (1 - abs(2 * step / steps - 1))


def can_cycle(schedule: str, optimizer: str, momentum: object) -> bool:
    return schedule == "cyclic" and optimizer == "sgd" and float(str(momentum)) >= MOMENTUM_FALL


def ramp(step: int, steps: float) -> float:
    """The factor of a warm-up, min(1, (s + 1)/steps): never zero, so that no step is wasted."""
    return min(1.0, (step + 1) / steps) if steps else 1.0


SCHEDULES = {"cyclic": cyclic, "stepwise": stepwise, "cosine": cosine}
