"""Signs that a robust accuracy may be overestimated. The most frequent cause are gradients that mislead attacks."""

from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor

from moatlab.attacks.catalog import AUDIT, CATALOG
from moatlab.attacks.draws import Draws
from moatlab.attacks.first_order import fgsm, pgd, strong_pgd
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, Threat, distance
from moatlab.attacks.probe import Probe
from moatlab.evaluation.checks import Outputs
from moatlab.runtime.intervals import paired, wilson

# For each attack and image: what broke it; None: robust; "clean", or "before" in the audit: misclassified already.
Verdicts = dict[str, list[str | None]]
SAMPLE, STEPS = 200, 20
ENOUGH = 50  # images; on fewer, the interval of almost any accuracy includes guessing
PASSES = 2 + 2 * STEPS  # per image, roughly: many images break early
USUAL_GAP = 0.06  # PGD accuracy minus AutoAttack's is at most this; about 0.04 for most models

MEANING = {
    "square-beats-gradients": "Square, which uses no gradients, broke images that no gradient attack broke: gradients "
    "are masked, and more queries would break more.",
    "pgd-weaker-than-fgsm": "many small steps break less than one large step: the gradient misleads attacks.",
    "fgsm-above-clean": "accuracy is higher on FGSM examples than on clean images: the model recognises the attack.",
    "zero-gradients": "many gradients are exactly zero: gradient attacks can't move, and accuracies are too high.",
    "randomised": "two outputs for the same image differ: attacks must average over calls (EOT), and these do not: "
    "use --attacks aa-rand.",
    "probabilities": "the outputs look like probabilities: remove the softmax, which saturates the loss of attacks.",
    "rises-with-eps": "accuracy rises with eps, though a larger ball contains the smaller: attacks miss examples.",
    "not-zero-at-half": "at radius 0.5 each image can be made grey, and yet some are robust: attacks miss examples.",
    "no-better-than-guessing": "the model may only guess the most frequent class: train longer, or use more images.",
    "catastrophic-overfitting": "the model is robust to the single step of FGSM only, not to stronger attacks.",
    "audit-broke-more": "a new seed and more restarts broke over 1 % of the robust images: attacks had not converged.",
    "pgd-far-above-aa": "AutoAttack breaks far more images than PGD, as after label smoothing: report aa only.",
    "epoch-chosen-on-test": "the epoch was chosen on test images, so its accuracies on these are too high.",
}

# When each is raised, briefly; docs/evaluation.md has the exact rules.
RAISED_IF = {
    "square-beats-gradients": "Square broke over 0.2 % of the images that no gradient attack broke",
    "pgd-weaker-than-fgsm": "PGD accuracy over 1 point above FGSM accuracy",
    "fgsm-above-clean": "FGSM accuracy above clean accuracy",
    "zero-gradients": "no gradient on over 5 % of the correct images",
    "randomised": "two forward passes differ by over 0.01 % of the largest logit",
    "probabilities": "all outputs at least 0, with sum 1",
    "rises-with-eps": "PGD-20 accuracy over 2 points higher at a larger radius",
    "not-zero-at-half": "PGD-20 accuracy over 1 % at radius 0.5",
    "no-better-than-guessing": "95 % interval of clean accuracy includes the share of the most frequent class",
    "catastrophic-overfitting": "a stronger attack's accuracy over 10 points below FGSM's and under half of it",
    "audit-broke-more": "the audit broke over 1 % of the images it attacked",
    "pgd-far-above-aa": "95 % interval of PGD minus AutoAttack accuracy above 6 points",
    "epoch-chosen-on-test": "the best epoch of a run that monitored test images",
}


class Flag(BaseModel, extra="forbid", strict=True, frozen=True):
    name: str
    evidence: str  # the numbers
    meaning: str


class Measured(BaseModel, extra="forbid", strict=True):
    """What flags depend on besides verdicts. Accuracies are fractions of `sample` images."""

    randomised: bool
    probabilities: bool
    labels: Annotated[list[int], Field(min_length=1)]  # images of each class, among all
    sample: PositiveInt
    clean: float
    zero_gradients: float
    fgsm: float
    pgd20: Annotated[dict[str, float], Field(min_length=3, max_length=3)]  # by radius, increasing
    pgd20_at_half: float


class WithoutGradients(BaseModel, extra="forbid", strict=True):
    """What can be measured of a model without gradients, and why not more."""

    randomised: bool
    probabilities: bool
    labels: Annotated[list[int], Field(min_length=1)]
    not_measured: str


def without_gradients(outputs: Outputs, labels: list[int]) -> WithoutGradients:
    reason = "red flags that need gradients were not measured: the model has none"
    return WithoutGradients(
        randomised=outputs.randomised, probabilities=outputs.probabilities, labels=labels, not_measured=reason
    )


def measure(
    probe: Probe, x: Tensor, y: Tensor, threat: Threat, draws: Draws, outputs: Outputs, labels: list[int]
) -> Measured:
    """Measure zero gradients, FGSM accuracy, and PGD-20 accuracy at growing radii, on a few images."""
    gradient, logits = probe.gradient(x, y)
    right = ~is_wrong(logits, y)
    zero = (distance(gradient, "linf") == 0) & right
    single = fgsm(probe, x, y, eps=threat.eps, norm=threat.norm)
    after_one_step = (~is_wrong(probe.logits(single), y)).float().mean().item()

    attack = pgd if outputs.randomised else strong_pgd  # an iterate that is misclassified once may be right next time

    def robust(ball: Threat) -> float:
        start = draws.in_ball(x, ball, "red flags")
        points = attack(probe, x, y, eps=ball.eps, step_size=ball.eps / 4, steps=STEPS, norm=ball.norm, start=start)
        return (~is_wrong(probe.logits(points), y) & right).float().mean().item()

    radii = {"at half of eps": 0.5, "at eps": 1, "at twice eps": 2}
    half = Threat(threat.norm, 0.5 * x[0].numel() ** {"linf": 0, "l2": 0.5, "l1": 1}[threat.norm])
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


def judge(
    measured: Measured | WithoutGradients, broken_by: Verdicts, norm: Norm, *, chosen_on_test: bool = False
) -> list[Flag]:
    """The red flags. Accuracies on all images are preferred to those on the sample; differences of two or three images
    are ignored. In L1 a single step is weak against any model, so it is not compared with stronger attacks.
    `chosen_on_test`: see `Subject`."""
    raised = _seen_in_outputs(measured, broken_by)
    if chosen_on_test:
        raised["epoch-chosen-on-test"] = "its run monitored test images"
    if isinstance(measured, WithoutGradients):
        return _as_flags(raised)
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

    broken, left = _only_square(broken_by)
    if broken > 0.002 * count:
        raised["square-beats-gradients"] = f"{broken} of {left} remaining images"
    many_steps = [name for name, attack in CATALOG.items() if attack.like_fgsm and on_all and name in accuracy]
    pairs = [(name, accuracy[name], single, one) for name in many_steps]
    for name, several, once, image in [*pairs, ("pgd20", ladder[1], measured.fgsm, 1 / sample)]:
        if several > once + 0.01 + 2 * image:
            raised.setdefault("pgd-weaker-than-fgsm", f"{_of(name, several)}, {_of('fgsm', once)}")
    if single > clean + one:
        raised["fgsm-above-clean"] = f"{_of('fgsm', single)}, {_of('clean', clean)}{sampled}"
    if measured.zero_gradients > 0.05:
        raised["zero-gradients"] = f"{100 * measured.zero_gradients:.0f} % of the sample"
    if any(larger > smaller + 0.02 + 2 / sample for smaller, larger in pairwise(ladder)):
        shown = ", ".join(f"{100 * value:.0f} % {where}" for where, value in measured.pgd20.items())
        raised["rises-with-eps"] = f"PGD-20 {shown}"
    if measured.pgd20_at_half > 0.01:
        raised["not-zero-at-half"] = f"{100 * measured.pgd20_at_half:.0f} % of the sample"
    if norm != "l1" and single > strongest + 0.1 + 3 * one and strongest < single / 2:
        raised["catastrophic-overfitting"] = f"{_of('fgsm', single)}, {_of(strong_name, strongest)}{sampled}"
    audited = [verdict for verdict in broken_by.get(AUDIT, []) if verdict != "before"]
    if (more := len(audited) - audited.count(None)) > 0.01 * len(audited):
        raised["audit-broke-more"] = f"{more} of {len(audited)} images"
    if gap := _pgd_far_above_aa(broken_by):
        raised["pgd-far-above-aa"] = gap
    return _as_flags(raised)


def _as_flags(raised: dict[str, str]) -> list[Flag]:
    return [Flag(name=name, evidence=evidence, meaning=MEANING[name]) for name, evidence in raised.items()]


def _seen_in_outputs(measured: Measured | WithoutGradients, broken_by: Verdicts) -> dict[str, str]:
    """Flags that need no gradients."""
    raised: dict[str, str] = {}
    clean = broken_by["clean"]
    right, count, most = clean.count(None), len(clean), max(measured.labels)
    if count >= ENOUGH and wilson(right, count)[0] <= most / count:
        raised["no-better-than-guessing"] = f"{_of('clean', right / count)}, guessing {100 * most / count:.1f} %"
    averaged = any(name in CATALOG and CATALOG[name].average > 1 for name in broken_by)
    if measured.randomised and not averaged:
        raised["randomised"] = "two forward passes differ"
    if measured.probabilities:
        raised["probabilities"] = "all outputs are in [0, 1] and sum to 1"
    return raised


def _only_square(broken_by: Verdicts) -> tuple[int, int]:
    """Of the images that no gradient attack broke: how many Square broke, and how many there are."""
    if "aa" in broken_by:
        left = [verdict for verdict in broken_by["aa"] if verdict in (None, "square")]
    else:
        gradient_attacks = [name for name, attack in CATALOG.items() if attack.judged == "first"]
        others = [broken_by[name] for name in gradient_attacks if name in broken_by]
        if not others or "square" not in broken_by:
            return 0, 0
        left = [own for own, *rest in zip(broken_by["square"], *others, strict=True) if not any(rest)]
    return left.count("square"), len(left)


def _pgd_far_above_aa(broken_by: Verdicts) -> str | None:
    """The accuracies, if the 95 % interval of their difference, paired by image, is above the usual one.

    PGD is `pgd50`; without it the Auto-PGD on cross-entropy, with which AutoAttack begins.
    """
    ensemble = next((name for name in ("aa", "aa-fast") if name in broken_by), None)
    if ensemble is None:
        return None
    alone = [verdict if verdict in ("clean", "apgd-ce") else None for verdict in broken_by[ensemble]]
    name, pgd = ("pgd50", broken_by["pgd50"]) if "pgd50" in broken_by else ("apgd-ce", alone)
    robust = [[verdict is None for verdict in verdicts] for verdicts in (pgd, broken_by[ensemble])]
    difference = paired([[verdicts] for verdicts in robust], [1, -1])
    if difference.value - difference.half() <= USUAL_GAP:
        return None
    shares = [sum(verdicts) / len(verdicts) for verdicts in robust]
    return f"{_of(name, shares[0])}, {_of(ensemble, shares[1])}"


def _of(name: str, value: float) -> str:
    return f"{name} {100 * value:.1f} %"
