"""The table of attacks, read by all code that lists, checks, prices or ranks attacks. Imports no torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from moatlab.runtime.console import warn
from moatlab.runtime.errors import UserError, did_you_mean

RESTARTS, TARGETS = 10, 9
L1_RESTARTS, L1_TARGETS = 5, 5  # of Auto-PGD in L1, as in AutoAttack
EOT = 20  # gradients averaged per step, to attack a randomised model ("expectation over transformation")
AUDIT = "audit"  # listed among the attacks in results, but not an attack that can be requested
ALL = "all"  # can be requested, but is not an attack


@dataclass(frozen=True)
class Attack:
    """`judged`: at the `plain` image, at the `last` iterate, at the `first` adversarial point (or the image; with
    `average`, the last such point), at the `best` point found, or by its `members` in turn. `passes` is the cost per
    try (for all queries) on a robust image.
    """

    name: str
    judged: Literal["plain", "last", "first", "best", "members"]
    passes: float = 0.0
    tries: Literal["one", "restarts", "targets", "queries"] = "one"
    members: tuple[str, ...] = ()
    classes: int = 2  # the minimum: the targeted DLR loss reads the four largest logits
    average: int = 1  # gradients per step; several for randomised models
    rank: int = 0  # strength, for the catastrophic-overfitting flag and the axis of plots; 0: not compared
    thorough: bool = False  # strong enough to report a robust accuracy
    in_paper: bool = False  # a column of the paper's tables
    watched: bool = False  # measured after each epoch of a run
    like_fgsm: bool = False  # many small steps on FGSM's loss: a red flag if it is weaker than FGSM
    in_audit: bool = False  # repeated by the audit, with another seed and more restarts
    note: str = ""


AUTOATTACK, RAND = ("apgd-ce", "apgd-t", "fab-t", "square"), ("apgd-ce-eot", "apgd-dlr-eot")
FAST_NOTE = "an upper bound on robustness, not AutoAttack: apgd-ce and apgd-t only"
RAND_NOTE = f"for randomised models: each step averages {EOT} gradients, and each verdict is one call of the model"
ATTACKS = (
    Attack("clean", "plain", 0.5, in_paper=True, watched=True),
    Attack("fgsm", "last", 1, in_paper=True, watched=True),
    Attack("pgd7", "last", 7, rank=1, watched=True, like_fgsm=True),
    Attack("pgd50", "first", 50, "restarts", rank=2, thorough=True, in_paper=True, like_fgsm=True),
    Attack("cw50", "first", 50, "restarts", rank=2, thorough=True, in_paper=True, in_audit=True),
    Attack("mim50", "last", 50, in_paper=True),
    Attack("apgd-ce", "first", 100, rank=2, thorough=True, in_audit=True),
    Attack("apgd-t", "first", 100, "targets", classes=4, thorough=True, in_audit=True),
    Attack("fab-t", "first", 150, "targets"),
    Attack("square", "best", 2500, "queries"),
    Attack("aa-fast", "members", members=AUTOATTACK[:2], classes=4, rank=3, thorough=True, note=FAST_NOTE),
    Attack("aa", "members", members=AUTOATTACK, classes=4, rank=4, thorough=True, in_paper=True),
    Attack("apgd-ce-eot", "first", 100 * EOT, average=EOT, thorough=True),
    Attack("apgd-dlr-eot", "first", 100 * EOT, average=EOT, classes=3, thorough=True),
    Attack("aa-rand", "members", members=RAND, average=EOT, classes=3, thorough=True, note=RAND_NOTE),
)
CATALOG = {attack.name: attack for attack in ATTACKS}
NAMES = tuple(CATALOG)
REQUESTS = (*NAMES, ALL)
PAPER = tuple(attack.name for attack in ATTACKS if attack.in_paper)
WATCHED = tuple(attack.name for attack in ATTACKS if attack.watched)


def check_names(names: Iterable[str] | str) -> list[str]:
    """The names, from a list or a comma-separated text, in order and without `clean`, which is always measured. What
    `all` means depends on the model: see `working_attacks`."""
    names = names.split(",") if isinstance(names, str) else names
    names = list(dict.fromkeys(name.strip() for name in names))
    if not names:
        raise UserError(f"name at least one attack: {', '.join(REQUESTS)}")
    for name in names:
        if name not in REQUESTS:
            raise UserError(f"unknown attack '{name}'{did_you_mean(name, NAMES)}; choose from {', '.join(REQUESTS)}")
    return [name for name in names if name != "clean"]


def every_attack(randomised: bool) -> list[str]:
    """What `all` means: the attacks that are not parts of another one, without `clean`. Only a randomised model is
    attacked with averaged gradients."""
    parts = {member for attack in ATTACKS for member in attack.members} | {"aa-fast", "clean"}
    return [attack.name for attack in ATTACKS if attack.name not in parts and (randomised or attack.average == 1)]


def working_attacks(names: list[str], classes: int, *, randomised: bool) -> list[str]:
    """The attacks to run. `all` is replaced by its attacks. If there are too few classes for AutoAttack, it is replaced
    by its members that work."""
    found: list[str] = []
    names = [one for name in names for one in (every_attack(randomised) if name == ALL else [name])]
    for name in names:
        if CATALOG[name].average > 1 and not randomised:
            warn(f"the model is not randomised: {name} repeats each gradient, and aa is stronger")
        members = [member for member in CATALOG[name].members if CATALOG[member].classes <= classes]
        if members and classes < CATALOG[name].classes:
            needed = {3: "three", 4: "four"}[CATALOG[name].classes]
            warn(f"AutoAttack needs {needed} classes; using its parts {', '.join(members)} instead")
            found += members
        else:
            check_classes(name, classes)
            found.append(name)
    return list(dict.fromkeys(found))


def check_classes(name: str, classes: int) -> None:
    if classes < (needed := CATALOG[name].classes):
        others = ", ".join(attack.name for attack in ATTACKS if attack.classes <= classes)
        raise UserError(f"{name} needs at least {needed} classes, this model has {classes}; choose from {others}")
