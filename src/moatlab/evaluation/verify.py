"""Verify a card: its numbers against its verdicts, its verdicts against the model and the saved examples."""

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from moatlab.attacks.catalog import AUDIT, CATALOG
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import distance
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.images import as_floats
from moatlab.evaluation.card import Card
from moatlab.evaluation.red_flags import judge
from moatlab.evaluation.result import NOT_FOUND, first_broken_by, shares
from moatlab.evaluation.target import load_target
from moatlab.models.foreign import is_foreign
from moatlab.models.registry import BUILT_IN
from moatlab.runtime import console
from moatlab.runtime.device import Autocast, device_of, full_precision
from moatlab.runtime.errors import RunFailed, UserError, needs_trust, users_code
from moatlab.runtime.files import UNREADABLE_ARRAYS, read_json_and_check
from moatlab.runtime.trust import is_trusted

TOLERANCE = 1e-6
AT_ONCE = 500


class Verification(TypedDict):
    card: str
    checked: int
    largest_distance: float
    failures: list[str]


def verify_card(
    path: Path, *, data_dir: Path | None = None, device: str = "auto", trust_model_code: bool = False
) -> Verification:
    """Check each saved example: within eps + 1e-6 of its image in float64, in [0, 1], and misclassified.

    Also checked: model and images are those of the card, every broken image has its example, clean verdicts are right,
    and the card's numbers follow from its verdicts.
    """
    fields, unchanged = read_json_and_check(path)
    card = Card.parse(fields, path)
    subject, settings, threat, broken_by = card.subject, card.settings, card.settings.threat, card.broken_by
    if not card.adversarial:
        raise UserError(f"{path} has no saved examples; evaluate with --save-adversarial")
    if card.measured.randomised:
        raise UserError(f"{path} can't be verified: it is of a randomised model, whose outputs vary")
    known = subject.model in BUILT_IN or is_foreign(subject.model)
    if not known and not (trust_model_code or is_trusted(subject.model)):
        raise needs_trust(subject.model, path)
    beside = path.parent / Path(subject.file).name if subject.file else None
    loading: dict[str, Any] = {"data_dir": data_dir, "device": device, "trust_model_code": trust_model_code}
    target = load_target(beside, model=subject.model, data=subject.data, **loading)
    images, report = target.images, Verification(card=str(path), checked=0, largest_distance=0.0, failures=[])
    failures = report["failures"]
    if not unchanged:
        failures.append("the card is damaged, or was changed after it was written: its checksum does not match")
    if inconsistent := inconsistency(card):
        failures.append(inconsistent)
    if mismatch := card.mismatch(model=target.sha256, data=images.sha256, threat=None):
        failures.append(f"the card does not match this model and these images: {mismatch}")
    if card.data.images > len(images.test_y):
        failures.append(f"there are only {len(images.test_y)} test images")
    if failures:
        return report
    model = target.model if settings.precision == "fp32" else Autocast(target.model, settings.precision)
    limit = threat.eps + TOLERANCE * max(1, threat.eps)
    probe, device_used = Probe(model, batch_size=settings.batch_size), device_of(model, torch.empty(0))

    def is_right(z: Tensor, rows: Tensor) -> Tensor:
        with users_code("the model failed on an adversarial example", RunFailed):
            return ~is_wrong(probe.logits(z.to(device_used)), images.test_y[rows].to(device_used)).cpu()

    with evaluating(model), full_precision(), console.Bar("verify", len(broken_by)) as bar:
        for rows in _pieces(torch.arange(settings.images)):
            for row, right in zip(rows.tolist(), is_right(as_floats(images.test_x[rows]), rows).tolist(), strict=True):
                if right != (broken_by["clean"][row] is None):
                    answer = "right" if right else "wrong"
                    failures.append(f"clean: the model is {answer} about image {row}, unlike the card")
        names = [name for name in broken_by if name != "clean"]
        for name, numbers, points in read_examples(path.parent / Path(card.adversarial).name, names):
            broken = [row for row, verdict in enumerate(broken_by[name]) if verdict not in NOT_FOUND]
            shape = (len(broken), *as_floats(images.test_x[:1]).shape[1:])
            if sorted(numbers.tolist()) != broken or points.dtype != torch.float32 or points.shape != shape:
                failures.append(f"{name}: the saved examples are not those of the card's broken images")
                continue
            for rows, z in zip(_pieces(numbers), _pieces(points), strict=True):
                change = z.double() - as_floats(images.test_x[rows]).double()
                far = distance(change, threat.norm).nan_to_num(nan=math.inf)
                for trouble, which in (
                    (f"is further than {threat.text} from its image", far > limit),
                    ("leaves [0, 1]", ~((z >= 0) & (z <= 1)).flatten(1).all(1)),
                    ("is classified correctly", is_right(z, rows)),
                ):
                    failures += [f"{name}: the example of image {row} {trouble}" for row in rows[which].tolist()]
                report["largest_distance"] = max([report["largest_distance"], *far.tolist()])
                report["checked"] += len(rows)
            bar.update(names.index(name) + 1, f"{report['checked']} examples")
    return report


def inconsistency(card: Card) -> str | None:
    """What in a card does not follow from its verdicts."""
    broken_by, count = card.broken_by, card.data.images
    if {card.settings.images, *map(len, broken_by.values())} != {count}:
        return f"there is not one verdict for each of the {count} images"
    attacks = {name: verdicts for name, verdicts in broken_by.items() if name != AUDIT}
    for name, verdicts in broken_by.items():
        before = first_broken_by(attacks) if name == AUDIT else broken_by["clean"]
        wrong_before = [verdict in ("clean", "before") for verdict in verdicts]
        on_every_image = name in CATALOG and CATALOG[name].judged == "last"
        if not on_every_image and wrong_before != [verdict is not None for verdict in before]:
            return f"{name}: the images that were wrong before the attack are not those of the other verdicts"
    first = first_broken_by(broken_by)
    shown = {name: dict(result) for name, result in card.results.items()} | {"strongest": dict(card.all_attacks)}
    counted = {name: dict(shares(verdicts)) for name, verdicts in {**attacks, "strongest": first}.items()}
    if shown.keys() != counted.keys() or any(shown[name] | counted[name] != shown[name] for name in shown):
        return "the accuracies do not match the verdicts"
    if card.first_broken_by != first:
        return "the list of what broke each image first does not match the verdicts"
    raised = judge(card.measured, broken_by, card.settings.norm, chosen_on_test=card.subject.chosen_on_test)
    if missing := {flag.name for flag in raised} - {flag.name for flag in card.flags}:
        return f"its numbers raise a red flag that it does not list: {min(missing)}"
    return None


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [tensor[begin : begin + AT_ONCE] for begin in range(0, len(tensor), AT_ONCE)]


def read_examples(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield attack, numbers of images and points; one attack in memory at a time."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("compressed, which moatlab never writes")
        with np.load(path) as archive:
            for name in names:
                yield name, torch.from_numpy(archive[f"{name}_rows"]), torch.from_numpy(archive[f"{name}_x"])
    except UNREADABLE_ARRAYS:
        raise UserError(f"{path} is missing or damaged") from None
