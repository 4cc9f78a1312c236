"""Attacks as pure functions on a model (or a `Probe` of it): they return examples and leave the model as found."""

from moatlab.attacks.first_order import fgsm, pgd
from moatlab.attacks.probe import Probe

__all__ = ["Probe", "fgsm", "pgd"]
