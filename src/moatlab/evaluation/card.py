"""The evaluation card: what was measured, on what, how, and every verdict."""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moatlab.attacks.norms import USUAL_EPS, Norm
from moatlab.data import Images
from moatlab.evaluation.checks import device_of
from moatlab.evaluation.evaluator import evaluate
from moatlab.evaluation.result import AUDIT, NOT_FOUND, Evaluation, first_broken_by, merged, shares
from moatlab.evaluation.state import discard, for_one_process, pieces
from moatlab.evaluation.target import Subject
from moatlab.runtime import console, distributed
from moatlab.runtime.console import warn
from moatlab.runtime.environment import describe_environment
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import atomic, read_json, remove_leftovers, with_checksum
from moatlab.training.recipe import parse_eps

NOTES = {"aa-fast": "an upper bound on robustness, not AutoAttack: apgd-ce and apgd-t only"}


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
    if count < distributed.count():
        raise UserError(f"{count} images are too few for {distributed.count()} processes")
    warn_of_sorted(images, count)
    device = device_of(subject.model, torch.empty(0))
    environment = describe_environment(device) | {"device": str(device)}
    identity = {
        "model": subject.sha256, "factory": subject.source["model"], "data": images.sha256,
        "moatlab": environment["moatlab"], "torch": environment["torch"], "threads": environment["threads"],
        "device": device.type,  # each process has a GPU of its own
    }  # fmt: skip
    distributed.agree("models or images", [*identity.values(), count, attacks, radius, norm, seed, precision])
    mine = distributed.share(count)
    parts = distributed.from_all(mine)
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
        result = merged(distributed.from_all(result))

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

        card = distributed.from_first(write)
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
    results = {name: {**shares(result.broken_by[name]), **result.cost[name]} for name in result.accuracy}
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
    if AUDIT in result.broken_by:
        verdicts = result.broken_by[AUDIT]
        broken = sum(verdict not in NOT_FOUND for verdict in verdicts)
        card["audit"] = {"attacked": broken + verdicts.count(None), "broken": broken, **result.cost["audit"]}
    return card


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
    console.note(f"the card that was there, of more attacks, images or examples, is kept as {kept}")


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
