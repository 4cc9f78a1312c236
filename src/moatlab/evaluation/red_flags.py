"""Signs that a measured robust accuracy may be too high. Most wrong claims come from gradients that mislead attacks."""

from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from moatlab.attacks.catalog import AUDIT, CATALOG
from moatlab.attacks.draws import Draws
from moatlab.attacks.first_order import fgsm, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Threat, distance
from moatlab.attacks.probe import Probe
from moatlab.evaluation.checks import Outputs
from moatlab.evaluation.intervals import wilson

# For each attack: what broke each image, None where nothing did; "clean", or "before" in the audit, where the image was
# misclassified without it.
Verdicts = dict[str, list[str | None]]
SAMPLE = 200  # images that are looked at
STEPS = 20
PASSES = 2 + 2 * STEPS  # over an image, about, because many break on the way

MEANING = {
    "square-beats-gradients": "Square, which sees no gradients, broke images that all gradient attacks left robust: "
    "gradients are masked, and more queries would break more.",
    "pgd-weaker-than-fgsm": "many small steps do less harm than one large step: the gradient misleads, so robustness "
    "against gradient attacks proves nothing.",
    "fgsm-above-clean": "the model is better on FGSM examples than on plain images: it has learnt to recognise the "
    "attack (label leaking, catastrophic overfitting).",
    "zero-gradients": "for many images the gradient is exactly zero (saturated or non-differentiable model): attacks "
    "that use it can't move, and their numbers are too high.",
    "randomised": "two answers for the same images differ: the model is randomised, and each number is the outcome of "
    "one draw; attacks must average over draws (EOT), which these do not.",
    "probabilities": "the outputs look like probabilities: remove the softmax, or the loss of attacks saturates and "
    "their numbers are too high.",
    "rises-with-eps": "accuracy under attack rises with eps, though a larger ball holds the smaller one: the attack "
    "fails to find what is there.",
    "not-zero-at-half": "some images are robust at a radius of 0.5 per pixel, where every image can be made plain "
    "grey: the attack fails to find what is there.",
    "no-better-than-guessing": "plain accuracy may be that of always giving the most frequent class: the robustness of "
    "a model that has learnt nothing means nothing; train it longer, or look at more images.",
    "catastrophic-overfitting": "FGSM accuracy is far above accuracy under a stronger attack: the model is robust to "
    "the single step only.",
    "audit-broke-more": "with another seed and more restarts, over 1 % of the robust images were broken: the attacks "
    "had not converged.",
}


class Flag(BaseModel, extra="forbid", strict=True, frozen=True):
    name: str
    evidence: str  # the numbers
    meaning: str  # one sentence for a person


class Measured(BaseModel, extra="forbid", strict=True):
    """What flags are judged by besides verdicts: shares of `sample` images, and what the model's outputs show."""

    randomised: bool
    probabilities: bool
    labels: Annotated[list[int], Field(min_length=1)]  # how many images there are of each class
    sample: PositiveInt
    clean: float
    zero_gradients: float
    fgsm: float
    pgd20: Annotated[dict[str, float], Field(min_length=3, max_length=3)]  # as the radius grows
    pgd20_at_half: float


def measure(
    probe: Probe, x: Tensor, y: Tensor, threat: Threat, draws: Draws, outputs: Outputs, labels: list[int]
) -> Measured:
    """What a few images show: zero gradients, FGSM, and PGD-20 accuracy as the radius grows."""
    gradient, logits = probe.gradient(x, y)
    right = ~is_wrong(logits, y)
    zero = (distance(gradient, "linf") == 0) & right
    single = fgsm(probe, x, y, eps=threat.eps, norm=threat.norm)
    after_one_step = (~is_wrong(probe.logits(single), y)).float().mean().item()

    def robust(ball: Threat) -> float:
        start = draws.in_ball(x, ball, "red flags")
        points = strong_pgd(probe, x, y, eps=ball.eps, step_size=ball.eps / 4, steps=STEPS, norm=ball.norm, start=start)
        return (~is_wrong(probe.logits(points), y) & right).float().mean().item()

    radii = {"at half of eps": 0.5, "at eps": 1, "at twice eps": 2}
    half = Threat(threat.norm, 0.5 if threat.norm == "linf" else 0.5 * x[0].numel() ** 0.5)
    return Measured(
        randomised=outputs.randomised,
        probabilities=outputs.probabilities,
        labels=labels,
        sample=len(x),
        clean=right.float().mean().item(),
        zero_gradients=zero.sum().item() / max(right.sum().item(), 1),
        fgsm=after_one_step,
        pgd20={where: robust(threat.scaled(factor)) for where, factor in radii.items()},
        pgd20_at_half=robust(half),
    )


def judge(measured: Measured, broken_by: Verdicts) -> list[Flag]:
    """The flags that the numbers raise. A number over all images is preferred to one over the sample. Where two numbers
    are compared, a difference of two or three images means nothing, however few there are."""
    raised: dict[str, str] = {}
    accuracy = {name: verdicts.count(None) / len(verdicts) for name, verdicts in broken_by.items() if name != AUDIT}
    ladder = list(measured.pgd20.values())
    sample, count = measured.sample, len(broken_by["clean"])
    on_all = "fgsm" in accuracy
    one = 1 / (count if on_all else sample)  # image
    sampled = "" if on_all else f" (on {sample} images)"
    single = accuracy.get("fgsm", measured.fgsm)
    clean = accuracy["clean"] if on_all else measured.clean
    strong = [(share, name) for name, share in accuracy.items() if on_all and name in CATALOG and CATALOG[name].rank]
    strongest, strong_name = min(strong or [(ladder[1], "pgd20")])

    right, guessing = broken_by["clean"].count(None), max(measured.labels) / count
    if wilson(right, count)[0] <= guessing:
        raised["no-better-than-guessing"] = f"{_of('clean', right / count)}, guessing {100 * guessing:.1f} %"
    broken, left = _only_square(broken_by)
    if broken > 0.002 * count:
        raised["square-beats-gradients"] = f"{broken} of {left} images that were left"
    many_steps = [name for name, attack in CATALOG.items() if attack.like_fgsm and on_all and name in accuracy]
    pairs = [(name, accuracy[name], single, one) for name in many_steps]
    for name, several, once, image in [*pairs, ("pgd20", ladder[1], measured.fgsm, 1 / sample)]:
        if several > once + 0.01 + 2 * image:
            raised.setdefault("pgd-weaker-than-fgsm", f"{_of(name, several)}, {_of('fgsm', once)}")
    if single > clean + one:
        raised["fgsm-above-clean"] = f"{_of('fgsm', single)}, {_of('clean', clean)}{sampled}"
    if measured.zero_gradients > 0.05:
        raised["zero-gradients"] = f"{100 * measured.zero_gradients:.0f} % of the images looked at"
    if measured.randomised:
        raised["randomised"] = "two forward passes differ"
    if measured.probabilities:
        raised["probabilities"] = "all outputs are in [0, 1] and sum to 1"
    if any(larger > smaller + 0.02 + 2 / sample for smaller, larger in pairwise(ladder)):
        shown = ", ".join(f"{100 * value:.0f} % {where}" for where, value in measured.pgd20.items())
        raised["rises-with-eps"] = f"PGD-20 {shown}"
    if measured.pgd20_at_half > 0.01:
        raised["not-zero-at-half"] = f"{100 * measured.pgd20_at_half:.0f} % of the images looked at"
    if single > strongest + 0.1 + 3 * one and strongest < single / 2:
        raised["catastrophic-overfitting"] = f"{_of('fgsm', single)}, {_of(strong_name, strongest)}{sampled}"
    audited = [verdict for verdict in broken_by.get(AUDIT, []) if verdict != "before"]
    if (more := len(audited) - audited.count(None)) > 0.01 * len(audited):
        raised["audit-broke-more"] = f"{more} of {len(audited)} images"
    return [Flag(name=name, evidence=evidence, meaning=MEANING[name]) for name, evidence in raised.items()]


def _only_square(broken_by: Verdicts) -> tuple[int, int]:
    """How many images Square broke, and how many there were, that no gradient attack had broken."""
    if "aa" in broken_by:
        left = [verdict for verdict in broken_by["aa"] if verdict in (None, "square")]
    else:
        # the gradient attacks that keep every point which fools the model
        others = [
            verdicts for name, verdicts in broken_by.items() if name in CATALOG and CATALOG[name].judged == "first"
        ]
        if not others or "square" not in broken_by:
            return 0, 0
        left = [own for own, *rest in zip(broken_by["square"], *others, strict=True) if not any(rest)]
    return left.count("square"), len(left)


def _of(name: str, value: float) -> str:
    return f"{name} {100 * value:.1f} %"
