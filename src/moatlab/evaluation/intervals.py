"""How sure a measured share is: 95 % intervals over test images and over seeds."""

import math
import statistics
from collections.abc import Sequence

Z = 1.959964
# Student's t for 95 %, from 1 degree of freedom on; from 30 on the normal quantile is near enough.
T = """12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 2.201 2.179 2.160 2.145 2.131
       2.120 2.110 2.101 2.093 2.086 2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045"""


def wilson(robust: float, count: int) -> list[float]:
    """The interval of a share by Wilson's score, which stays sensible near 0 and 1."""
    share, weight = robust / count, Z * Z / count
    middle = (share + weight / 2) / (1 + weight)
    half = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return [max(middle - half, 0.0), min(middle + half, 1.0)]


def over_seeds(values: Sequence[float]) -> float:
    """Half of Student's interval of the mean of some seeds; 0 for a single one, of which no spread is known."""
    count = len(values)
    if count < 2:
        return 0.0
    quantile = float(dict(enumerate(T.split(), 2)).get(count, Z))
    return quantile * statistics.stdev(values) / math.sqrt(count)


def interval(accuracies: Sequence[float], images: int) -> list[float]:
    """Of the mean accuracy of some seeds on the same images: the draw of the images (Wilson) and of the seeds (Student)
    are independent, so their half widths add as squares do."""
    mean, seeds = statistics.fmean(accuracies), over_seeds(accuracies)
    low, high = wilson(mean * images, images)
    return [max(mean - math.hypot(mean - low, seeds), 0.0), min(mean + math.hypot(high - mean, seeds), 1.0)]


def paired_difference(ours: Sequence[Sequence[bool]], theirs: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """The mean difference of two methods over the same seeds and images, and half of its interval.

    `ours[s][i]`: whether image i is robust in seed s. Both methods see the same images, so what counts is how much
    the difference varies from image to image, which is much less than each accuracy does. Two more images, one robust
    with each method only, keep the interval from vanishing where no image tells the methods apart.
    """
    by_seed = [statistics.fmean(a) - statistics.fmean(b) for a, b in zip(ours, theirs, strict=True)]
    by_image = [
        statistics.fmean(a) - statistics.fmean(b)
        for a, b in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
    ]
    images = Z * statistics.stdev([*by_image, 1, -1]) / math.sqrt(len(by_image) + 2)
    return statistics.fmean(by_seed), math.hypot(images, over_seeds(by_seed))
