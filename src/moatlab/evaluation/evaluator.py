"""Run attacks over a data set, chunk by chunk; each part of an attack sees only images that are still robust."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moatlab.attacks.catalog import AUDIT, CATALOG, working_attacks
from moatlab.attacks.draws import Draws
from moatlab.attacks.ensemble import Part, parts_of
from moatlab.attacks.losses import is_wrong
from moatlab.attacks.norms import Norm, Threat
from moatlab.attacks.probe import Probe, evaluating
from moatlab.data.given import images_and_labels
from moatlab.data.images import as_floats
from moatlab.evaluation import checks, red_flags
from moatlab.evaluation.checks import Outputs
from moatlab.evaluation.progress import Progress, Step
from moatlab.evaluation.result import Cost, Evaluation, Precision, Settings
from moatlab.evaluation.state import Partial, State
from moatlab.models.graphs import Script, has_gradients
from moatlab.models.outputs import giving_logits
from moatlab.models.weights import hash_of
from moatlab.runtime.console import note, verbosity
from moatlab.runtime.device import DTYPES, Autocast, device_of, full_precision, left_as_found
from moatlab.runtime.errors import Interrupted, RunFailed, UserError, users_code
from moatlab.runtime.randomness import key
from moatlab.runtime.signals import Caught, signals_caught

CHUNK_IMAGES, CHUNK_BYTES = 1000, 2**26
AUDIT_RESTARTS = 20


def evaluate(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    attacks: Sequence[str] | str | None = None,
    eps: float | str | None = None,
    norm: Norm = "linf",
    seed: int = 0,
    batch_size: int | None = None,
    chunk_size: int | None = None,
    examples: Tensor | None = None,
    audit: bool = False,
    keep_adversarial: bool = False,
    precision: Precision = "fp32",
    state: str | Path | None = None,
    identity: dict[str, Any] | None = None,
    verbose: bool | None = None,
) -> Evaluation:
    """Accuracy of `model` on images `x` with labels `y`, clean and under the named attacks.

    `x`, `y`: images as floats (N, C, H, W) in [0, 1] or bytes (N, H, W, C), and labels; or a `Dataset` or `DataLoader`
    of both in their place, or a split of Hugging Face `datasets`. `eps`: a number or text such as "8/255"; the default
    is 8/255 in L-inf, 128/255 in L2 and 12 in L1. `attacks`: by default "aa"; "square" for an ONNX model, which has no
    gradients.
    With two or three classes, the parts of AutoAttack that work replace "aa". The model runs in eval mode and float32,
    and is left unchanged; with `precision` "bf16" or "fp16" the model under autocast is evaluated and attacked. An
    image counts as broken only if the model itself misclassifies a point inside the ball.

    `examples` numbers the images within their data set (default 0, 1, ...). Random draws depend on the seed and this
    number only, not on batches, chunks, order or shards. `state`: a folder from which an interrupted evaluation
    resumes, unless weights, images, settings, outputs or `identity` (what else must match) differ. `verbose`: progress
    on stderr; by default only in a terminal or a notebook.
    """
    if isinstance(model, torch.jit.ScriptModule):
        model = Script(model)  # which takes hooks
    names, threat = checks.check_attacks(model, attacks, audit=audit), Threat.of(eps, norm)
    with verbosity(verbose):
        x, y = images_and_labels(x, y)
    if examples is not None and examples.shape != y.shape:
        raise UserError("examples must be one number for each image")
    if precision not in DTYPES:
        raise UserError(f"the precision must be one of {', '.join(DTYPES)}, not '{precision}'")
    if precision != "fp32" and not has_gradients(model):
        raise UserError(f"an ONNX model computes in the precision of its graph; leave out --precision={precision}")
    for name, size in (("batch_size", batch_size), ("chunk_size", chunk_size)):
        if size is not None and size < 1:
            raise UserError(f"{name} must be at least 1, not {size}")
    device, returning = device_of(model, x), giving_logits(model, y)
    if precision != "fp32":
        model = Autocast(model, precision)
    undisturbed = torch.inference_mode(False), evaluating(model), full_precision(), left_as_found(device)
    with ExitStack() as inside:
        for one in (returning, verbosity(verbose), *undisturbed):
            inside.enter_context(one)
        torch.manual_seed(key(seed, "inside the model"))  # a randomised model draws from the global generators
        data = _Data(x, y.to(device), torch.arange(len(y)) if examples is None else examples.cpu())
        outputs = checks.check_model(model, data.images(slice(8)), data.y)
        names = working_attacks(names, outputs.classes, randomised=outputs.randomised)
        settings = Settings(
            attacks=["clean", *names],
            eps=threat.text,
            norm=threat.norm,
            seed=seed,
            images=len(y),
            audit=audit,
            chunk_size=chunk_size or data.usual_chunk,
            batch_size=batch_size or checks.images_at_once(x[0].numel()),
            classes=outputs.classes,
            precision=precision,
        )
        if state is not None:
            identity = {
                **settings.model_dump(exclude_defaults=True),
                "eps": threat.eps,
                "model": hash_of("", [*model.named_parameters(), *model.named_buffers()]),
                "set of images": hash_of("", [("x", x), ("y", y), ("examples", data.examples)]),
                "keep_adversarial": keep_adversarial,
                **(identity or {}),
            }
        partial = Partial(None if state is None else Path(state), identity or {}, keep_examples=keep_adversarial)
        return _Job(model, data, settings, outputs, partial).run(catch_signals=state is not None)


@dataclass(frozen=True)
class _Data:
    """Images on any device, labels on the model's device, and the images' numbers in the data set."""

    x: Tensor
    y: Tensor
    examples: Tensor

    def images(self, which: slice | Tensor) -> Tensor:
        """Contiguous floats on the model's device."""
        return as_floats(self.x[which].to(self.y.device)).contiguous()

    @property
    def usual_chunk(self) -> int:
        return max(min(CHUNK_IMAGES, CHUNK_BYTES // (4 * self.x[0].numel())), 1)


class _Job:
    def __init__(self, model: nn.Module, data: _Data, settings: Settings, outputs: Outputs, partial: Partial) -> None:
        self.data, self.settings, self.outputs, self.partial = data, settings, outputs, partial
        # Some models rely on contiguous images; the copy is laid out for channels last.
        twin, size = checks.channels_last_copy(model, data.images(slice(8))), settings.batch_size
        self.layout = torch.contiguous_format if twin is None else torch.channels_last
        self.untouched = Probe(model, batch_size=size, memory_format=torch.contiguous_format)
        attacked = model if twin is None else twin
        self.attacked = Probe(attacked, batch_size=size, memory_format=self.layout, inference_mode=attacked is twin)
        self.names = [*settings.attacks[1:], *([AUDIT] if settings.audit else [])]
        self.parts = {name: self._parts_of(name) for name in self.names}
        count, size = settings.images, settings.chunk_size
        self.chunks = [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]
        self.steps = [
            Step(chunk, place, name, number, part)
            for chunk, place in enumerate(self.chunks)
            for name in self.names
            for number, part in enumerate(self.parts[name])
        ]
        self.state = State(
            identity=partial.identity,
            answers=outputs.answers.tolist(),
            broken_by={name: [None] * count for name in ("clean", *self.names)},
            cost={name: Cost(forwards=0, gradients=0, seconds=0.0) for name in ("clean", *self.names)},
        )
        self.progress = Progress(self.steps, count, lambda: sum(self._calls()) / 2)

    def _parts_of(self, name: str) -> list[Part]:
        threat, classes = self.settings.threat, self.settings.classes
        if name != AUDIT:
            return parts_of(name, threat, classes)
        members = [one.name for one in CATALOG.values() if one.in_audit and one.classes <= classes]
        return [part for one in members for part in parts_of(one, threat, classes, restarts=AUDIT_RESTARTS)]

    def run(self, *, catch_signals: bool) -> Evaluation:
        with self.progress, signals_caught() if catch_signals else nullcontext(Caught()) as caught:

            def tick() -> None:
                caught.raise_if_any()
                self.progress.show()

            self.attacked.tick = self.untouched.tick = tick
            try:
                if saved := self.partial.load(self.state):
                    note("resuming the evaluation")
                    self.state = saved
                    for step in self.steps[: saved.step]:
                        self.progress.end(step, saved)
                else:
                    self._begin()
                for step in self.steps[self.state.step :]:
                    points = self._attack(step)
                    following = self.parts[step.name][step.number + 1 :]
                    self.state.points = points if following and following[0].continues else None
                    self.state.step += 1
                    self.progress.end(step, self.state)
                    self.partial.save(self.state)
            except (Interrupted, RunFailed) as error:
                self.partial.flush()
                if isinstance(error, Interrupted):
                    error.args = (f"{error}; nothing is lost",)
                raise
        assert self.state.measured is not None
        return Evaluation(self.state.broken_by, self.state.cost, self.state.measured, self.settings, self.partial.found)

    @users_code("the model failed under attack", RunFailed)
    def _begin(self) -> None:
        """Clean accuracy, and the measurements for red flags."""
        data, begun, calls = self.data, time.perf_counter(), self._calls()
        for place in self.chunks:
            logits = self.untouched.logits(data.images(place))
            if logits.isnan().any():
                row = int(data.examples[place.start + int(logits.isnan().any(1).nonzero()[0])])
                raise UserError(f"the model's output for image {row} is NaN")
            wrong = is_wrong(logits, data.y[place]).tolist()
            self.state.broken_by["clean"][place] = ["clean" if one else None for one in wrong]
        self._charge("clean", begun, calls)
        labels = data.y.bincount(minlength=self.outputs.classes).tolist()
        if not has_gradients(self.attacked.model):
            self.state.measured = red_flags.without_gradients(self.outputs, labels)
            return
        some = slice(min(red_flags.SAMPLE, data.usual_chunk))
        x, y, draws = data.images(some), data.y[some], Draws(self.settings.seed, data.examples[some])
        self.progress.expect("red flags", self.progress.left + len(y) * red_flags.PASSES)
        self.state.measured = red_flags.measure(self.attacked, x, y, self.settings.threat, draws, self.outputs, labels)

    @users_code("the model failed under attack", RunFailed)
    def _attack(self, step: Step) -> Tensor | None:
        """Attack the images that are still robust and record those it breaks. Returns the points of the others."""
        data, seed, verdicts = self.data, self.settings.seed, self.state.broken_by[step.name]
        if step.number == 0:
            self._skip(step)
        numbers = range(step.place.start, step.place.stop)
        rows = torch.tensor([row for row in numbers if verdicts[row] is None], dtype=torch.int64)
        self.progress.begin(self.state, len(rows))
        if not len(rows):
            return None
        begun, calls = time.perf_counter(), self._calls()
        x, y = data.images(rows).contiguous(memory_format=self.layout), data.y[rows]
        draws = Draws(key(seed, AUDIT) if step.name == AUDIT else seed, data.examples[rows])
        before = self.state.points  # where the previous part of Square ended
        if before is not None:  # a file keeps no memory format
            before = before.to(y.device).contiguous(memory_format=self.layout)
        torch.manual_seed(key(seed, "inside the model", step.chunk, self.names.index(step.name), step.number))
        points = step.part.run(self.attacked, x, y, draws, before)
        broken = self._broken(points, y)
        # Where rounding fools only the copy, the attack stopped too early: repeat it on the model itself.
        claimed = is_wrong(self.attacked.logits(points), y)
        if CATALOG[step.part.attack].judged == "first":  # any point but x fooled the copy in an earlier batch
            claimed |= (points != x).flatten(1).any(1)
        disputed = claimed & ~broken
        if CATALOG[step.part.attack].average > 1:  # not rounding: calls of a randomised model differ
            disputed.zero_()
        if disputed.any():
            again = None if before is None else before[disputed]
            points[disputed] = step.part.run(self.untouched, x[disputed], y[disputed], draws.of(disputed), again)
            broken = self._broken(points, y)
        found = rows[broken.cpu()]
        self.partial.keep(step.name, f"{step.chunk:06}-{step.number:03}", found, points[broken])
        for row in found.tolist():
            verdicts[row] = step.part.attack
        self._charge(step.name, begun, calls)
        return points[~broken]

    def _broken(self, points: Tensor, y: Tensor) -> Tensor:
        """Finite points that the untouched model misclassifies."""
        return is_wrong(self.untouched.logits(points), y) & points.isfinite().flatten(1).all(1)

    def _skip(self, step: Step) -> None:
        """Skip images that are misclassified without an attack; in the audit, those broken by any attack.

        Attacks that are judged at their last iterate run on every image, by definition.
        """
        if step.name != AUDIT and CATALOG[step.name].judged == "last":
            return
        broken_by, verdict = self.state.broken_by, "before" if step.name == AUDIT else "clean"
        earlier = ["clean", *(self.names[:-1] if step.name == AUDIT else [])]
        for row in range(step.place.start, step.place.stop):
            if any(broken_by[name][row] for name in earlier):
                broken_by[step.name][row] = verdict

    def _calls(self) -> tuple[int, int]:
        """Forward passes and input gradients so far, in images."""
        return self.attacked.forwards + self.untouched.forwards, self.attacked.gradients + self.untouched.gradients

    def _charge(self, name: str, begun: float, before: tuple[int, int]) -> None:
        cost, (forwards, gradients) = self.state.cost[name], self._calls()
        cost.forwards += forwards - before[0]
        cost.gradients += gradients - before[1]
        cost.seconds += time.perf_counter() - begun
