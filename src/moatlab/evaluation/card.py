"""The evaluation card, `eval.json`: model, data, settings, results and every verdict."""

import json
import zipfile
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel, PositiveInt, ValidationError

from moatlab.attacks.norms import Norm, Threat
from moatlab.data.images import Images
from moatlab.evaluation.checks import check_attacks
from moatlab.evaluation.evaluator import evaluate
from moatlab.evaluation.red_flags import Flag, Measured, Verdicts, WithoutGradients, judge
from moatlab.evaluation.result import Audit, Evaluation, Result, Settings, Share, first_broken_by, merged, summarise
from moatlab.evaluation.state import discard, for_one_process, pieces
from moatlab.evaluation.target import Subject, Target
from moatlab.runtime import distributed
from moatlab.runtime.console import counted, note, warn
from moatlab.runtime.device import device_of
from moatlab.runtime.environment import describe_environment
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import atomic, read_json, remove_leftovers, with_checksum
from moatlab.runtime.sheet import Line, Sheet


class Data(BaseModel, extra="forbid", strict=True):
    name: str
    part: str
    images: PositiveInt
    sha256: str
    note: str | None
    transform: str | None = None  # of the images of a folder; in the file only if they were resized


class Card(BaseModel, extra="forbid", strict=True):
    """The content of `eval.json`."""

    subject: Subject
    data: Data
    settings: Settings
    results: dict[str, Result]
    all_attacks: Share
    flags: list[Flag]
    measured: Measured | WithoutGradients
    adversarial: str | None  # the file of saved examples, beside the card
    environment: dict[str, str | int]
    first_broken_by: list[str | None]
    broken_by: Verdicts
    audit: Audit | None = None  # in the file only if there was one

    def summary(self) -> Sheet:
        """The table that `moat eval` prints."""
        sheet = summarise(self, f"{self.subject.name}: {counted(self.data.images, 'test image')} of {self.data.name}")
        if self.subject.preprocessing:
            sheet.lines.insert(0, Line(f"images are {self.subject.preprocessing}"))
        if self.subject.unfinished:
            sheet.lines.insert(0, Line(f"unfinished run: {self.subject.unfinished}", alert=True))
        return sheet

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.parse(read_json(path), path)

    @classmethod
    def parse(cls, fields: dict[str, Any], path: Path) -> Self:
        try:
            card = cls(**fields)
            if card.settings.threat and "clean" in card.broken_by:
                return card
        except (ValidationError, UserError, TypeError):
            pass
        raise UserError(f"{path} is not a card that moat eval wrote")

    def write(self, path: Path) -> None:
        """One line for each key, so that the results can be read above ten thousand verdicts."""
        fields = with_checksum(self.model_dump(exclude_defaults=True))
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        with atomic(path) as file:
            file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())

    def mismatch(
        self,
        *,
        model: str | None = None,
        weights: str | None = None,
        factory: str | None = None,
        data: str,
        threat: Threat | None,
    ) -> str | None:
        """Why this card is not of this model, data and threat, in fp32; None if it is.

        A model is given by its checksum (`Target.sha256`), or by that of its `weights` file and its factory. Without a
        threat, any threat and precision match.
        """
        own, settings = self.subject, self.settings
        pairs = ((model, own.sha256), (weights, own.weights), (factory, own.model))
        if any(wanted not in (None, there) for wanted, there in pairs):
            return "it is of another model"
        if data != self.data.sha256:
            return "it is on other images"
        if threat is None or (threat, "fp32") == (settings.threat, settings.precision):
            return None
        return f"it is at {settings.threat} in {settings.precision}, not at {threat} in fp32"


def evaluate_target(
    target: Target,
    *,
    attacks: list[str] | None,
    eps: float | str | None = None,
    norm: Norm | None = None,
    count: int | None = None,
    save_adversarial: bool = False,
    **options: Any,
) -> Card:
    """Evaluate the first `count` test images, write the card beside the model, and return it; resume if interrupted.
    `attacks` and `options` are those of `evaluate`: seed, batch_size, audit, precision. Connected processes share
    the images, and the first one writes the card."""
    check_attacks(target.model, attacks, audit=bool(options.get("audit")))
    if target.subject.preprocessing:
        note(f"{target.subject.name}: images are {target.subject.preprocessing}")
    images, norm = target.images, norm or target.threat.norm
    # A radius is meaningless in another norm.
    threat = target.threat if eps is None and norm == target.threat.norm else Threat.of(eps, norm)
    count = len(images.test_y) if count is None else count
    if count > len(images.test_y):
        raise UserError(f"--n {count} is more than the {len(images.test_y)} test images of {images.name}")
    if count < distributed.count():
        raise UserError(f"{count} images are too few for {distributed.count()} processes")
    warn_of_sorted(images, count)
    if target.subject.unfinished:
        warn(f"the run is not finished ({target.subject.unfinished}); its last saved weights are evaluated")
    device = device_of(target.model, torch.empty(0))
    environment = describe_environment(device) | {"device": str(device)}
    identity = {
        "model": target.sha256,
        "factory": target.subject.model,
        "data": images.sha256,
        **{name: environment[name] for name in ("moatlab", "torch", "threads")},
        "device": device.type,  # each process has a GPU of its own
    }
    distributed.agree("models or images", [*identity.values(), count, attacks, threat.text, norm, options])
    mine = distributed.share(count)
    parts = distributed.from_all(mine)
    stem = target.card.name.removesuffix(".json")
    states = [target.card.with_name(f"{stem}{f'_{number}' if number else ''}.partial") for number in range(len(parts))]
    state, saved = states[parts.index(mine)], target.card.with_name(f"{stem}_adversarial.npz")
    with for_one_process(state):
        for path in (target.card, saved):
            remove_leftovers(path)
        result = evaluate(
            target.model,
            images.test_x[mine],
            images.test_y[mine],
            attacks=attacks,
            eps=threat.text,
            norm=norm,
            keep_adversarial=save_adversarial,
            examples=torch.arange(count)[mine],
            state=state,
            identity=identity,
            **options,
        )
        result = merged(distributed.from_all(result))

        def write() -> Card:
            card = make_card(result, target, environment, saved.name if save_adversarial else None)
            keep_previous(target.card, card, saved)
            if save_adversarial:
                found = [(place, part.start) for place, part in zip(states, parts, strict=True)]
                height, width, channels = images.test_x.shape[1:]
                write_examples(saved, found, [*result.broken_by][1:], (channels, height, width))
            card.write(target.card)
            if not save_adversarial:
                saved.unlink(missing_ok=True)  # of an earlier card
            return card

        card = distributed.from_first(write)
        discard(state)
    return card


def warn_of_sorted(images: Images, count: int) -> None:
    """The first images of a sorted set, as users' arrays may be, do not represent it."""
    labels = images.test_y[:count]
    shown, all_classes = len(set(labels.tolist())), len(set(images.test_y.tolist()))
    if shown < all_classes and count > all_classes and bool((labels.diff() >= 0).all()):
        warn(f"the test images are sorted by class: the first {count} have only {shown} of {all_classes} classes")


def make_card(result: Evaluation, target: Target, environment: dict[str, str | int], saved: str | None) -> Card:
    images, chosen_on_test = target.images, target.subject.chosen_on_test
    return Card(
        subject=target.subject,
        data=Data(
            name=images.name,
            part="test",
            images=result.settings.images,
            sha256=images.sha256,
            note=images.note,
            transform=images.transform,
        ),
        settings=result.settings,
        results=result.results,
        all_attacks=result.all_attacks,
        flags=judge(result.measured, result.broken_by, result.settings.norm, chosen_on_test=chosen_on_test),
        measured=result.measured,
        adversarial=saved,
        environment=environment,
        first_broken_by=first_broken_by(result.broken_by),
        broken_by=result.broken_by,
        audit=result.audit,
    )


def keep_previous(path: Path, card: Card, saved: Path) -> None:
    """Keep a card of more attacks, images or examples as NAME_previous.json (then NAME_previous_2.json and so on)."""
    try:
        before = Card.read(path)
    except UserError:
        return  # no card, or a damaged one
    more = before.results.keys() - card.results.keys() or before.data.images > card.data.images
    if not more and not (before.adversarial and not card.adversarial):
        return
    kept, number = path.with_name(f"{path.stem}_previous.json"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.stem}_previous_{number}.json")
    if before.adversarial and saved.exists():
        before.adversarial = f"{kept.stem}_adversarial.npz"
        saved.replace(path.with_name(before.adversarial))
    before.write(kept)
    note(f"the earlier card has more attacks, images or examples; it is kept as {kept}")


def write_examples(path: Path, states: list[tuple[Path, int]], names: list[str], shape: tuple[int, ...]) -> None:
    """Write `ATTACK_rows` and `ATTACK_x` (float32) of each attack, one piece in memory at a time. `states`: folders of
    evaluations, each with the number of its first image."""
    with atomic(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name in names:
            rows = [piece + first for state, first in states for piece in pieces(state, name, "rows")]
            points = (piece for state, _ in states for piece in pieces(state, name, "points"))
            for kind, arrays, dtype, each in (("rows", rows, np.int64, ()), ("x", points, np.float32, shape)):
                header = {"shape": (sum(map(len, rows)), *each), "fortran_order": False, "descr": np.dtype(dtype).str}
                with archive.open(f"{name}_{kind}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array_header_2_0(member, header)
                    for array in arrays:
                        member.write(np.ascontiguousarray(array, dtype).data)
