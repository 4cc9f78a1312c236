"""Intervals and tests of accuracies over test images and seeds, and of rates; 95 % unless stated otherwise."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

LEVEL = 0.05
Z = statistics.NormalDist().inv_cdf(1 - LEVEL / 2)


def wilson(robust: float, count: int) -> list[float]:
    """Wilson's score interval, which is accurate near 0 and 1 too."""
    share, weight = robust / count, Z * Z / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return [max(middle - half, 0.0), min(middle + half, 1.0)]


def exact_rate(events: int, count: int) -> tuple[float, float]:
    """One-sided 95 % bounds of a rate, at least and at most: Clopper and Pearson's, from the binomial distribution."""

    def at_most(some: int, rate: float) -> float:
        return sum(math.comb(count, k) * rate**k * (1 - rate) ** (count - k) for k in range(some + 1))

    low = _solve(lambda rate: 1 - at_most(events - 1, rate) - LEVEL) if events else 0.0
    high = _solve(lambda rate: LEVEL - at_most(events, rate)) if events < count else 1.0
    return low, high


def student_quantile(level: float, degrees: int) -> float:
    """The t with P(|T| > t) = level, for Student's distribution with whole degrees of freedom."""
    return math.sqrt(degrees) * math.tan(_solve(lambda angle: _student(angle, degrees) - (1 - level), math.pi / 2))


def _student(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)), as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = degrees % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= math.cos(angle) ** 2 * k / (k + 1)
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _solve(rising: Callable[[float], float], high: float = 1.0) -> float:
    """The zero of a rising function between 0 and `high`."""
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def over_seeds(values: Sequence[float], level: float = LEVEL) -> float:
    """Half width of Student's interval of the mean over seeds; 0 for a single seed, whose spread is unknown."""
    count = len(values)
    return 0.0 if count < 2 else student_quantile(level, count - 1) * statistics.stdev(values) / math.sqrt(count)


def interval(accuracies: Sequence[float], images: int) -> list[float]:
    """Interval of the mean accuracy of several seeds on the same images. Images (Wilson) and seeds (Student) are
    independent draws, so the squares of their half widths add."""
    mean, seeds = statistics.fmean(accuracies), over_seeds(accuracies)
    low, high = wilson(mean * images, images)
    return [max(mean - math.hypot(mean - low, seeds), 0.0), min(mean + math.hypot(high - mean, seeds), 1.0)]


@dataclass(frozen=True)
class Estimate:
    """A weighted sum of accuracies: its value in each seed, and its standard error over the images."""

    by_seed: Sequence[float]
    image_error: float

    @property
    def value(self) -> float:
        return statistics.fmean(self.by_seed)

    def half(self, level: float = LEVEL) -> float:
        """Half the width of its interval: images and seeds are independent draws."""
        z = statistics.NormalDist().inv_cdf(1 - level / 2)
        return math.hypot(z * self.image_error, over_seeds(self.by_seed, level))

    def p_value(self, bound: float) -> float:
        """The level at which the interval just touches the bound; two-sided."""
        distance = abs(self.value - bound)
        if self.half(1e-9) < distance:
            return 1e-9
        return _solve(lambda level: distance - self.half(level)) if distance else 1.0


def paired(rows: Sequence[Sequence[Sequence[bool]]], weights: Sequence[float]) -> Estimate:
    """The sum of weight times accuracy over methods that share seeds and images; weights 1, -1 give a difference.

    `rows[m][s][i]`: whether image i is robust with method m in seed s. The images are the same, so only the variation
    of the sum from image to image counts, which is far below that of each accuracy. Two added images, with sums of plus
    and minus the largest weight, keep the error above zero where the methods agree on every image.
    """
    seeds = zip(*rows, strict=True)
    by_seed = [_sum_of_products(weights, map(statistics.fmean, some)) for some in seeds]
    shares = [[statistics.fmean(image) for image in zip(*row, strict=True)] for row in rows]
    by_image = [_sum_of_products(weights, image) for image in zip(*shares, strict=True)]
    most = max(map(abs, weights))
    return Estimate(by_seed, statistics.stdev([*by_image, most, -most]) / math.sqrt(len(by_image) + 2))


def unpaired(accuracies: Sequence[Sequence[float]], images: int, weights: Sequence[float]) -> Estimate:
    """The same where only accuracies are known, `accuracies[m][s]`: as if each method had images of its own."""
    by_seed = [_sum_of_products(weights, some) for some in zip(*accuracies, strict=True)]
    shares = [(images * statistics.fmean(row) + 1) / (images + 2) for row in accuracies]
    variance = _sum_of_products([weight**2 for weight in weights], [share * (1 - share) / images for share in shares])
    return Estimate(by_seed, math.sqrt(variance))


def _sum_of_products(first: Iterable[float], second: Iterable[float]) -> float:
    return math.fsum(a * b for a, b in zip(first, second, strict=True))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for their number (Holm, 1979): the k-th smallest of m times m - k + 1, kept increasing."""
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, p_values[number] * (len(p_values) - rank)))
        adjusted[number] = highest
    return adjusted
