"""Attacks as pure functions of a model (or a `Probe` of it): they return images and leave the model unchanged."""

from typing import TYPE_CHECKING

from moatlab.runtime.lazy import lazily

if TYPE_CHECKING:
    from moatlab.attacks.auto_pgd import apgd
    from moatlab.attacks.draws import Draws
    from moatlab.attacks.ensemble import autoattack
    from moatlab.attacks.fast_boundary import fab
    from moatlab.attacks.first_order import cw, fgsm, mim, pgd, strong_pgd
    from moatlab.attacks.norms import Threat
    from moatlab.attacks.probe import Probe
    from moatlab.attacks.square_attack import square

__all__ = ["Draws", "Probe", "Threat", "apgd", "autoattack", "cw", "fab", "fgsm", "mim", "pgd", "square", "strong_pgd"]

__getattr__ = lazily(
    __name__,
    {
        "auto_pgd": "apgd",
        "draws": "Draws",
        "ensemble": "autoattack",
        "fast_boundary": "fab",
        "first_order": "cw fgsm mim pgd strong_pgd",
        "norms": "Threat",
        "probe": "Probe",
        "square_attack": "square",
    },
)
