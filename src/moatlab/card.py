"""The evaluation card: what was measured, on what, how, and every verdict; written, read and checked again."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from moatlab import display, processes, redflags
from moatlab.attacks.ensemble import LAST_ITERATE
from moatlab.attacks.geometry import USUAL_EPS, Norm, distance
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data import Images
from moatlab.data.batches import as_floats
from moatlab.display import warn
from moatlab.environment import describe_environment
from moatlab.errors import RunFailed, UserError, needs_trust
from moatlab.evaluation import Evaluation, audited, evaluate, merged
from moatlab.files import UNREADABLE_ARRAYS, atomic, read_json, read_json_and_check, remove_leftovers, with_checksum
from moatlab.intervals import wilson
from moatlab.models import BUILT_IN, users_code
from moatlab.partial import discard, for_one_process, pieces
from moatlab.precision import DTYPES, Autocast, full_precision
from moatlab.recipe import parse_eps
from moatlab.subject import Subject, load_subject
from moatlab.suitability import device_of

TOLERANCE = 1e-6
NOTES = {"aa-fast": "an upper bound on robustness, not AutoAttack: apgd-ce and apgd-t only"}
VERIFIED_AT_ONCE = 500
NOT_FOUND = (None, "clean", "before")  # verdicts without an adversarial example: standing, or wrong before the attack


def evaluate_subject(
    subject: Subject,
    *,
    attacks: list[str],
    eps: str | None = None,
    norm: Norm | None = None,
    count: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    audit: bool = False,
    save_adversarial: bool = False,
    precision: str = "fp32",
) -> dict[str, Any]:
    """Evaluate, write the card beside the model, and return it. Started again after any ending, it goes on.

    Connected processes take a part of the images each; the first writes the card.
    """
    images, norm = subject.images, norm or subject.norm
    # A radius of one norm means nothing in another.
    radius = eps or (subject.eps if norm == subject.norm else USUAL_EPS[norm])
    count = len(images.test_y) if count is None else count
    if count > len(images.test_y):
        raise UserError(f"--n {count} is more than the {len(images.test_y)} test images of {images.name}")
    if count < processes.count():
        raise UserError(f"{count} images are too few for {processes.count()} processes")
    warn_of_sorted(images, count)
    device = device_of(subject.model, torch.empty(0))
    environment = describe_environment(device) | {"device": str(device)}
    identity = {
        "model": subject.sha256, "factory": subject.source["model"], "data": images.sha256,
        "moatlab": environment["moatlab"], "torch": environment["torch"], "threads": environment["threads"],
        "device": device.type,  # each process has a GPU of its own
    }  # fmt: skip
    processes.agree("models or images", [*identity.values(), count, attacks, radius, norm, seed, precision])
    mine = processes.share(count)
    parts = processes.from_all(mine)
    stem = subject.card.name.removesuffix(".json")
    names = [f"{stem}.partial", *(f"{stem}_{number}.partial" for number in range(1, len(parts)))]
    states = [subject.card.with_name(name) for name in names]
    state = states[parts.index(mine)]
    saved = subject.card.with_name(f"{stem}_adversarial.npz")
    with for_one_process(state):
        for path in (subject.card, saved):
            remove_leftovers(path)
        result = evaluate(
            subject.model, images.test_x[mine], images.test_y[mine], attacks=attacks, eps=parse_eps(radius, norm),
            norm=norm, seed=seed, batch_size=batch_size, audit=audit, keep_adversarial=save_adversarial,
            precision=precision, examples=torch.arange(count)[mine], state=state, identity=identity,
        )  # fmt: skip
        result = merged(processes.from_all(result))

        def write() -> dict[str, Any]:
            card = make_card(result, subject, radius, environment, saved.name if save_adversarial else None)
            keep_previous(subject.card, card, saved)
            if save_adversarial:
                height, width, channels = images.test_x.shape[1:]
                attacked = [name for name in result.broken_by if name != "clean"]
                found = [(place, part.start) for place, part in zip(states, parts, strict=True)]
                write_examples(saved, found, attacked, (channels, height, width))
            write_card(subject.card, card)
            if not save_adversarial:
                saved.unlink(missing_ok=True)  # of an earlier card
            return card

        card = processes.from_first(write)
        discard(state)
    return card


def warn_of_sorted(images: Images, count: int) -> None:
    """The first images of a set that is sorted by class, as a user's arrays may be, say little about the others."""
    labels = images.test_y[:count]
    shown, all_classes = len(set(labels.tolist())), len(set(images.test_y.tolist()))
    if shown < all_classes and count > all_classes and bool((labels.diff() >= 0).all()):
        warn(f"the test images are sorted by class: the first {count} are of {shown} of {all_classes} classes only")


def make_card(
    result: Evaluation, subject: Subject, eps: str, environment: dict[str, Any], saved: str | None
) -> dict[str, Any]:
    count = result.settings["images"]
    numbers = {name: shares(result.broken_by[name]) for name in result.accuracy}
    results = {name: {**numbers[name], **result.cost[name]} for name in numbers}
    for name in NOTES.keys() & results.keys():
        results[name]["note"] = NOTES[name]
    first = first_broken_by(result.broken_by)
    card = {
        "subject": {"name": subject.name, **subject.source, "sha256": subject.sha256, "weights": subject.weights},
        "data": {
            "name": subject.images.name, "part": "test", "images": count, "sha256": subject.images.sha256,
            "note": subject.images.note,
        },
        "settings": {**result.settings, "eps": eps},
        "results": results,
        "all_attacks": shares(first),
        "flags": [asdict(flag) for flag in result.flags],
        "measured": result.measured,
        "adversarial": saved,
        "environment": environment,
        "first_broken_by": first,
        "broken_by": result.broken_by,
    }  # fmt: skip
    if "audit" in result.broken_by:
        verdicts = result.broken_by["audit"]
        broken = sum(verdict not in NOT_FOUND for verdict in verdicts)
        card["audit"] = {"attacked": broken + verdicts.count(None), "broken": broken, **result.cost["audit"]}
    return card


def shares(verdicts: list[str | None]) -> dict[str, Any]:
    standing = verdicts.count(None)
    interval = wilson(standing, len(verdicts))
    return {"accuracy": standing / len(verdicts), "interval": interval, "standing": standing}


def first_broken_by(broken_by: dict[str, list[str | None]]) -> list[str | None]:
    """For each example the first attack, in the order they ran, that broke it."""
    firsts: list[str | None] = []
    for verdicts in zip(*broken_by.values(), strict=True):
        broken = (name for name, verdict in zip(broken_by, verdicts, strict=True) if verdict is not None)
        firsts.append(next(broken, None))
    return firsts


def keep_previous(path: Path, card: dict[str, Any], saved: Path) -> None:
    """A card that took longer is not lost to one that was asked less: it stays as NAME_previous.json (then
    NAME_previous_2.json and so on), with its saved examples."""
    try:
        before = read_json(path)
        more = before["results"].keys() - card["results"].keys() or before["data"]["images"] > card["data"]["images"]
        more = more or (before["adversarial"] and not card["adversarial"])
    except (UserError, KeyError, TypeError, AttributeError):
        return  # no card, or one that can't be believed
    if not more:
        return
    kept, number = path.with_name(f"{path.stem}_previous.json"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.stem}_previous_{number}.json")
    if before.get("adversarial") and saved.exists():
        before["adversarial"] = f"{kept.stem}_adversarial.npz"
        saved.replace(path.with_name(before["adversarial"]))
    write_card(kept, before)
    display.note(f"the card that was there, of more attacks, images or examples, is kept as {kept}")


def write_card(path: Path, card: dict[str, Any]) -> None:
    """One line for each key, so that a person can read what comes before ten thousand verdicts."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in with_checksum(card).items()]
    with atomic(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def write_examples(
    path: Path, states: list[tuple[Path, int]], names: list[str], image_shape: tuple[int, ...]
) -> None:  # fmt: skip
    """`ATTACK_rows` and `ATTACK_x` (float32) for each attack, one piece in memory at a time; from the states of
    evaluations, each with the number of its first image."""
    with atomic(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name in names:
            numbers = (piece + first for state, first in states for piece in pieces(state, name, "rows"))
            rows = np.concatenate([np.zeros(0, np.int64), *numbers])
            _write_member(archive, f"{name}_rows.npy", rows.shape, rows.dtype, [rows])
            points = (
                piece.astype(np.float32, copy=False) for state, _ in states for piece in pieces(state, name, "points")
            )
            _write_member(archive, f"{name}_x.npy", (len(rows), *image_shape), np.dtype(np.float32), points)


def _write_member(archive: zipfile.ZipFile, name: str, shape: Any, dtype: Any, arrays: Any) -> None:
    with archive.open(name, "w", force_zip64=True) as member:
        header = {"shape": tuple(shape), "fortran_order": False, "descr": np.lib.format.dtype_to_descr(dtype)}
        np.lib.format.write_array_header_2_0(member, header)
        for array in arrays:
            member.write(np.ascontiguousarray(array).data)


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
    with evaluating(model), full_precision(), display.Bar("verify", max(len(broken_by), 1)) as bar:
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
    first = first_broken_by({name: verdicts for name, verdicts in broken_by.items() if name != "audit"})
    for name, verdicts in broken_by.items():
        beyond = [verdict is not None for verdict in (first if name == "audit" else broken_by["clean"])]
        if name not in LAST_ITERATE and [verdict in ("clean", "before") for verdict in verdicts] != beyond:
            return f"{name}: images that were wrong before the attack are not those that the card says"
    told = {name: results[name] for name in broken_by if name != "audit"} | {"all": card["all_attacks"]}
    counted = {name: broken_by[name] for name in broken_by if name != "audit"} | {"all": first_broken_by(broken_by)}
    if results.keys() != broken_by.keys() - {"audit"} or any(
        told[name][key] != (list(value) if key == "interval" else value)
        for name in counted
        for key, value in shares(counted[name]).items()
    ):
        return "the accuracies are not those of the verdicts"
    if card["first_broken_by"] != counted["all"]:
        return "the list of what broke each image first is not that of the verdicts"
    accuracy = {name: result["accuracy"] for name, result in results.items()}
    raised = {flag.name for flag in redflags.judge(card["measured"], accuracy, broken_by, audited(broken_by))}
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
