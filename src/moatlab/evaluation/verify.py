"""A card, checked again: its numbers against its verdicts, its verdicts against the model and the saved examples."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moatlab.attacks.ensemble import LAST_ITERATE
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import distance
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.batches import as_floats
from moatlab.evaluation import red_flags
from moatlab.evaluation.checks import device_of
from moatlab.evaluation.result import AUDIT, NOT_FOUND, audited, first_broken_by, shares
from moatlab.evaluation.target import Subject, load_subject
from moatlab.models import BUILT_IN, users_code
from moatlab.runtime import console
from moatlab.runtime.device import DTYPES, Autocast, full_precision
from moatlab.runtime.errors import RunFailed, UserError, needs_trust
from moatlab.runtime.files import UNREADABLE_ARRAYS, read_json_and_check
from moatlab.training.recipe import parse_eps

TOLERANCE = 1e-6
VERIFIED_AT_ONCE = 500


def verify(
    path: Path, *, data_dir: Path | None = None, device: str = "auto", trust_model_code: bool = False
) -> dict[str, Any]:
    """Each saved example of a card again: within eps + 1e-6 of its image in float64, in [0, 1], and misclassified.

    Also that they are the examples which the card says are broken, of the model and the images that it names, that the
    model is right and wrong about the plain images where the card says so, and that its numbers follow from its
    verdicts.
    """
    card, unchanged = read_json_and_check(path)
    if not card.get("adversarial"):
        raise UserError(f"{path} has no saved examples; evaluate with --save-adversarial")
    try:
        source, settings, broken_by = card["subject"], card["settings"], card["broken_by"]
        eps, norm = parse_eps(settings["eps"], settings["norm"]), settings["norm"]
        file, saved = source["file"], path.parent / Path(card["adversarial"]).name
        checksums = source["sha256"], card["data"]["sha256"]
        options = {"model": source["model"], "data": source["data"]}
        beside = path.parent / Path(file).name if file else None
        if not all(isinstance(value, str) for value in (*options.values(), *checksums, settings["eps"])):
            raise TypeError
        inconsistent = _inconsistency(card)
        randomised = card["measured"]["randomised"]
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError):
        raise UserError(f"{path} is not a card that moat eval wrote") from None
    if randomised:
        raise UserError(
            f"{path} is of a randomised model, whose answers differ from time to time; nothing can be verified"
        )
    if not trust_model_code and options["model"] not in BUILT_IN:
        raise needs_trust(options["model"], path)
    subject = load_subject(beside, **options, data_dir=data_dir, device=device)
    model, precision = subject.model, str(settings.get("precision", "fp32"))
    if precision in DTYPES and precision != "fp32":
        model = Autocast(model, precision)
    failures: list[str] = []
    if not unchanged:
        failures.append("the card was changed after it was written, or is damaged: its checksum does not fit")
    if inconsistent:
        failures.append(inconsistent)
    if subject.sha256 != checksums[0]:
        failures.append("the model is not the one that was evaluated")
    if subject.images.sha256 != checksums[1]:
        failures.append("the images are not those that were evaluated")
    if failures:
        return {"card": str(path), "checked": 0, "largest_distance": 0.0, "failures": failures}
    examples = read_examples(saved, [name for name in broken_by if name != "clean"])
    checked = 0
    worst = 0.0
    with evaluating(model), full_precision(), console.Bar("verify", max(len(broken_by), 1)) as bar:
        failures += _plain_failures(model, subject, broken_by["clean"], settings["batch_size"])
        for number, (name, rows, points) in enumerate(examples):
            expected = [row for row, verdict in enumerate(broken_by[name]) if verdict not in NOT_FOUND]
            shape = (len(rows), *as_floats(subject.images.test_x[:1]).shape[1:])
            if sorted(rows.tolist()) != expected or points.dtype != torch.float32 or points.shape != shape:
                failures.append(f"{name}: the saved examples are not those that the card says are broken")
                continue
            for begin in range(0, len(rows), VERIFIED_AT_ONCE):
                chosen, z = rows[begin : begin + VERIFIED_AT_ONCE], points[begin : begin + VERIFIED_AT_ONCE]
                far, outside, right = _check(model, subject, chosen, z, norm, settings["batch_size"])
                worst = max(worst, float(far.max()))
                for trouble, which in (
                    (f"is further than {settings['eps']} from its image", far > eps + TOLERANCE * max(1, eps)),
                    ("leaves [0, 1]", outside),
                    ("is classified correctly", right),
                ):
                    failures += [f"{name}: the example of image {row} {trouble}" for row in chosen[which].tolist()]
                checked += len(chosen)
            bar.update(number + 1, f"{checked} examples")
    return {"card": str(path), "checked": checked, "largest_distance": worst, "failures": failures}


def _inconsistency(card: dict[str, Any]) -> str | None:
    """What a card says that does not follow from its verdicts, in a sentence."""
    broken_by, results, count = card["broken_by"], card["results"], card["data"]["images"]
    if any(len(verdicts) != count for verdicts in broken_by.values()):
        return f"the verdicts are not one for each of the {count} images"
    attacks = {name: verdicts for name, verdicts in broken_by.items() if name != AUDIT}
    for name, verdicts in broken_by.items():
        before = first_broken_by(attacks) if name == AUDIT else broken_by["clean"]
        told = [verdict in ("clean", "before") for verdict in verdicts]
        if name not in LAST_ITERATE and told != [verdict is not None for verdict in before]:
            return f"{name}: images that were wrong before the attack are not those that the card says"
    first = first_broken_by(broken_by)
    pairs = [(results[name], shares(verdicts)) for name, verdicts in attacks.items()]
    pairs.append((card["all_attacks"], shares(first)))
    if results.keys() != attacks.keys() or any(told | counted != told for told, counted in pairs):
        return "the accuracies are not those of the verdicts"
    if card["first_broken_by"] != first:
        return "the list of what broke each image first is not that of the verdicts"
    accuracy = {name: result["accuracy"] for name, result in results.items()}
    raised = {flag.name for flag in red_flags.judge(card["measured"], accuracy, broken_by, audited(broken_by))}
    if missing := raised - {flag["name"] for flag in card["flags"]}:
        return f"its numbers raise a red flag that it does not show: {min(missing)}"
    return None


def _plain_failures(model: nn.Module, subject: Subject, verdicts: list[str | None], batch_size: int) -> list[str]:
    """The plain images that the model answers otherwise than the card says."""
    failures = []
    for begin in range(0, len(verdicts), VERIFIED_AT_ONCE):
        rows = torch.arange(begin, min(begin + VERIFIED_AT_ONCE, len(verdicts)))
        _, _, right = _check(model, subject, rows, as_floats(subject.images.test_x[rows]), "linf", batch_size)
        told = torch.tensor([verdicts[row] is None for row in rows.tolist()])
        answer = {True: "right", False: "wrong"}
        failures += [
            f"clean: the model is {answer[not said]} about image {row}, and the card says {answer[said]}"
            for row, said in zip(rows[right != told].tolist(), told[right != told].tolist(), strict=True)
        ]
    return failures


def _check(
    model: nn.Module, subject: Subject, rows: torch.Tensor, z: torch.Tensor, norm: Any, batch_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    device = device_of(subject.model, z)
    x = as_floats(subject.images.test_x[rows])
    far = distance(z.double() - x.double(), norm).nan_to_num(nan=math.inf)
    outside = ~((z >= 0) & (z <= 1)).flatten(1).all(1)
    with users_code("the model failed on an adversarial example", RunFailed):
        logits = Probe(model, batch_size=batch_size).logits(z.to(device))
    return far, outside, ~is_wrong(logits, subject.images.test_y[rows].to(device)).cpu()


def read_examples(path: Path, names: list[str]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Attack, numbers of images, points; one attack in memory at a time."""
    try:
        with zipfile.ZipFile(path) as archive:
            if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                raise ValueError("compressed, which moatlab never does")
        with np.load(path) as archive:
            for name in names:
                yield name, torch.from_numpy(archive[f"{name}_rows"]), torch.from_numpy(archive[f"{name}_x"])
    except UNREADABLE_ARRAYS:
        raise UserError(f"{path} is missing or damaged") from None
