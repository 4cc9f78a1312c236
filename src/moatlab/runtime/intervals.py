"""95 % confidence intervals of accuracies, over test images and over seeds."""

import math
import statistics
from collections.abc import Sequence

Z = 1.959964
# Student's t for 95 %, with 1 to 29 degrees of freedom; Z approximates it from 30 on.
T = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131
       2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045"""


def wilson(robust: float, count: int) -> list[float]:
    """Wilson's score interval, which is accurate near 0 and 1 too."""
    share, weight = robust / count, Z * Z / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return [max(middle - half, 0.0), min(middle + half, 1.0)]


def over_seeds(values: Sequence[float]) -> float:
    """Half width of Student's interval of the mean over seeds; 0 for a single seed, whose spread is unknown."""
    count = len(values)
    if count < 2:
        return 0.0
    quantile = float(dict(enumerate(T.split(), 2)).get(count, Z))
    return quantile * statistics.stdev(values) / math.sqrt(count)


def interval(accuracies: Sequence[float], images: int) -> list[float]:
    """Interval of the mean accuracy of several seeds on the same images. Images (Wilson) and seeds (Student) are
    independent draws, so the squares of their half widths add."""
    mean, seeds = statistics.fmean(accuracies), over_seeds(accuracies)
    low, high = wilson(mean * images, images)
    return [max(mean - math.hypot(mean - low, seeds), 0.0), min(mean + math.hypot(high - mean, seeds), 1.0)]


def paired_difference(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """Mean difference of two methods over the same seeds and images, and half the width of its interval.

    `ours[s][i]`: whether image i is robust in seed s. The images are the same, so only the variation of the difference
    from image to image counts, which is far below that of each accuracy. Two added images, one robust with each method
    only, keep the width above zero where the methods agree on every image.
    """
    by_seed = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(ours, theirs, strict=True)]
    images = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    by_image = [statistics.fmean(a) - statistics.fmean(b) for a, b in images]
    over_images = Z * statistics.stdev([*by_image, 1, -1]) / math.sqrt(len(by_image) + 2)
    return statistics.fmean(by_seed), math.hypot(over_images, over_seeds(by_seed))
