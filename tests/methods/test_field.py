"""Stages of other papers against naive re-statements of their published steps, in float64.

A re-statement is a plain loop that takes its draws from a generator of the same seed, in the same order.
"""

import copy
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moatlab.attacks.norms import Threat
from moatlab.methods.batches import prepare_loss
from moatlab.methods.context import Context, When
from moatlab.methods.cost import Cost
from moatlab.methods.language import parse_method
from moatlab.methods.meter import Meter
from models_for_tests import small_network

EPS = 8 / 255
BATCH, CLASSES, IMAGES = 8, 5, 12


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads of so small a model only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Wave(nn.Module):
    def forward(self, x):
        return x.sin()


def network():
    """In float64, so bent that a step of eps lowers the loss of some images, and with statistics unlike a batch's."""
    model = small_network(CLASSES).double()
    model[2] = Wave()
    with torch.no_grad():
        model[1].weight.fill_(16)
        model(images(seed=20) ** 2)
    return model


def draws(seed):
    return torch.Generator().manual_seed(seed)


def images(seed=0):
    """Images in [0, 1] with some pixels exactly at the borders, channels last as in training."""
    x = torch.rand(BATCH, 3, 4, 4, generator=draws(seed), dtype=torch.float64) * 1.2 - 0.1
    return x.clamp(0, 1).contiguous(memory_format=torch.channels_last)


def labels(seed=1):
    return torch.randint(CLASSES, (BATCH,), generator=draws(seed))


@dataclass
class Step:
    """What a re-statement works with: a model and memory of its own, and draws."""

    model: nn.Module
    x: Tensor = field(default_factory=images)
    y: Tensor = field(default_factory=labels)
    eps: float = EPS
    bn: str = "train"
    seed: int = 18
    position: int = 0
    epoch: int = 0
    epochs: int = 10
    numbers: Tensor = field(default_factory=lambda: torch.randperm(IMAGES, generator=draws(9))[:BATCH])
    memory: dict = field(default_factory=dict)

    def __post_init__(self):
        self.source = draws(self.seed)

    def context(self, model, memory):
        """The same step for moatlab."""
        when, threat = When(self.position, self.epoch, self.epochs), Threat("linf", self.eps)
        kept = {"memory": memory, "numbers": self.numbers, "images": IMAGES}
        return Context(model, model, threat, draws(self.seed), CLASSES, self.bn, when=when, **kept)

    def drawn(self, low, high, like=None):
        return torch.empty_like(self.x if like is None else like).uniform_(low, high, generator=self.source)

    def clip(self, z):
        return torch.max(torch.min(z, self.x + self.eps), self.x - self.eps).clamp(0, 1)

    def gradient(self, point, loss, mode=None):
        """Of loss(logits) at the point; afterwards in train mode, as the trained passes are."""
        self.model.train((mode or self.bn) == "train")
        point = point.detach().clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(self.model(point)), point)
        self.model.train()
        return found

    def ce(self, logits):
        return cross_entropy(logits, F.one_hot(self.y, CLASSES).double())


def cross_entropy(logits, target):
    return -(target * logits.log_softmax(1)).sum(1).mean()


def divergence(p, q):
    """The sum over classes of p log(p/q), for each image."""
    return torch.stack([sum(a * (a / b).log() for a, b in zip(*rows, strict=True)) for rows in zip(p, q, strict=True)])


# The re-statements. Each returns the loss, and a batch stage also its batch.


def zerograd(step, q):
    start = (step.x + step.drawn(-step.eps, step.eps)).clamp(0, 1)
    gradient, moved = step.gradient(start, step.ce), start.clone()
    for image, slope in zip(moved, gradient, strict=True):
        ranked = slope.abs().flatten().sort().values
        below, share = divmod(q * (len(ranked) - 1), 1)
        limit = (1 - share) * ranked[int(below)] + share * ranked[int(below) + 1]
        image += 2 * step.eps * slope.sign() * (slope.abs() >= limit)
    batch = step.clip(moved)
    return step.ce(step.model(batch)), batch


def pgd(step, steps, size):
    point = step.clip(step.x + step.drawn(-step.eps, step.eps))
    for _ in range(steps):
        point = step.clip(point + size * step.eps * step.gradient(point, step.ce).sign())
    return step.ce(step.model(point)), point


def climb(step, steps, loss):
    """The attack of TRADES and MART, in eval mode."""
    point = step.x + 0.001 * torch.empty_like(step.x).normal_(generator=step.source)
    for _ in range(steps):
        gradient = step.gradient(point, loss, "eval")
        point = step.clip(point + max(0.226, 1 / steps) * step.eps * gradient.sign())
    return point


def trades(step, steps, beta):
    clean = step.model.eval()(step.x).softmax(1).detach()
    batch = climb(step, steps, lambda logits: divergence(clean, logits.softmax(1)).sum())
    logits, attacked = step.model(step.x), step.model(batch)
    return step.ce(logits) + beta * divergence(logits.softmax(1), attacked.softmax(1)).sum() / BATCH, batch


def mart(step, steps, weight):
    batch = climb(step, steps, step.ce)
    clean, attacked = step.model(step.x).softmax(1), step.model(batch)
    total, p = step.ce(attacked), attacked.softmax(1)
    apart = divergence(clean, p)
    for i, label in enumerate(step.y.tolist()):
        runner_up = next(c for c in p[i].argsort(descending=True).tolist() if c != label)
        total = total - (1.0001 - p[i, runner_up] + 1e-12).log() / BATCH
        total = total + weight / BATCH * apart[i] * (1.0000001 - clean[i, label])
    return total, batch


def elle(step, *weights):
    batch = (step.x + step.eps * step.gradient(step.x, step.ce).sign()).clamp(0, 1)
    loss = step.ce(step.model(batch))
    a, b = (step.x + step.drawn(-step.eps, step.eps) for _ in range(2))
    share = step.drawn(0, 1, like=step.x[:, 0, 0, 0])
    between = torch.stack([(1 - s) * one + s * other for s, one, other in zip(share, a, b, strict=True)])
    logits = step.model(torch.cat([a, b, between])).log_softmax(1)
    at = [-logits[i, step.y[i % BATCH]] for i in range(3 * BATCH)]
    errors = [at[2 * BATCH + i] - (1 - share[i]) * at[i] - share[i] * at[BATCH + i] for i in range(BATCH)]
    return loss + weights[step.eps > EPS] * sum(error**2 for error in errors) / BATCH


def aaer(step, over, *weights):
    radius, size = (2 * step.eps, step.eps) if over == "nfgsm" else (step.eps, 1.25 * step.eps)
    start, before = (step.x + step.drawn(-radius, radius)).clamp(0, 1), []
    gradient = step.gradient(start, lambda logits: before.append(logits.detach()) or step.ce(logits), "train")
    moved = start + size * gradient.sign()
    logits = step.model(moved.clamp(0, 1) if over == "nfgsm" else step.clip(moved))
    changes = {True: [], False: []}
    for old, new, label in zip(before[0], logits, step.y, strict=True):
        abnormal = bool(old.log_softmax(0)[label] < new.log_softmax(0)[label])  # the loss fell
        changes[abnormal].append(((new - old) ** 2).sum())
    assert all(changes.values())  # or nothing of the method is tested
    excess = sum(changes[True]) / len(changes[True]) - (sum(changes[False]) / len(changes[False])).item()
    assert excess > 0
    return step.ce(logits) + weights[step.eps > EPS] * len(changes[True]) / BATCH * excess


def guided(step, weight, guide):
    clean = step.model(step.x)
    signs = torch.where(step.drawn(0, 1) > 0.5, 1.0, -1.0).double()
    start = (step.x + step.eps / 2 * signs).clamp(0, 1)
    extra = weight if step.position % 2 else 0.0
    gradient = step.gradient(start, lambda out: step.ce(out) + extra * guide(clean.detach(), out), "eval")
    attacked = step.model(step.clip(start + step.eps * gradient.sign()))
    return step.ce(clean) + weight * guide(clean, attacked)


def nuat(step):
    weight = 4.5 * min(step.epoch / (0.9 * step.epochs), 1) * (BATCH / 64) ** 0.5
    return guided(step, weight, lambda one, other: torch.linalg.svdvals(one - other).sum() / BATCH)


def gat(step):
    weight = 40 if step.epoch > 0.85 * step.epochs else 10
    return guided(step, weight, lambda one, other: ((one.softmax(1) - other.softmax(1)) ** 2).sum() / BATCH)


def liet(step):
    def noisy_labels(y):
        target = torch.empty(len(y), CLASSES, dtype=torch.float64).uniform_(generator=step.source)
        for row, label in zip(target, y.tolist(), strict=True):
            row[label] = 0
            row *= 0.6 / row.sum()
            row[label] = 0.4
        return target

    radius = 2 * step.eps if step.eps > EPS else step.eps
    if step.position % 20 == 0:
        target, grey = noisy_labels(torch.arange(CLASSES)), torch.full((CLASSES, 3, 4, 4), 0.5).double()
        slope = step.gradient(grey, lambda logits: cross_entropy(logits, target), "eval")
        step.memory["liet"] = step.eps * slope.sign()
    share, side = (torch.rand((), generator=step.source).item() for _ in range(2))
    delta, noise, places = step.memory["liet"][step.y], step.drawn(-radius, radius), step.drawn(0, 1)
    delta = torch.where(places < 0.1 + 0.4 * share, noise, delta) * (-1 if side < 0.5 else 1)
    start = (step.x + delta).clamp(0, 1).requires_grad_()
    at_start = step.model(start)
    (gradient,) = torch.autograd.grad(cross_entropy(at_start, noisy_labels(step.y)), start, retain_graph=True)
    moved = start.detach() + step.eps * gradient.sign()
    logits = step.model(moved.clamp(0, 1) if step.eps > EPS else step.clip(moved))
    p, q = at_start.softmax(1), logits.softmax(1)
    apart = (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)).mean() / 2
    return cross_entropy(logits, noisy_labels(step.y)) + 100 * (step.epoch + 1) / step.epochs * apart


def pgi(step):
    memory, since = step.memory, step.epoch // round(0.36 * step.epochs)
    if memory.get("pgi since") != since:
        signs = torch.empty(IMAGES, 3, 4, 4, dtype=torch.float64).uniform_(-1, 1, generator=step.source).sign()
        memory |= {"pgi since": torch.tensor(since), "pgi": step.eps * signs, "pgi momentum": 0 * signs}
    target = torch.full((BATCH, CLASSES), 0.4 / (CLASSES - 1), dtype=torch.float64)
    target[range(BATCH), step.y] = 0.6
    delta = memory["pgi"][step.numbers].requires_grad_()
    at_start = step.model(step.x + delta)
    (gradient,) = torch.autograd.grad(cross_entropy(at_start, target), delta, retain_graph=True)
    delta = delta.detach()
    logits = step.model(step.clip(step.x + delta + step.eps * gradient.sign()))
    for i, number in enumerate(step.numbers):
        memory["pgi momentum"][number] = 0.3 * memory["pgi momentum"][number] + gradient[i] / gradient.abs().sum()
    moved = step.x + delta + step.eps * memory["pgi momentum"][step.numbers].sign()
    memory["pgi"][step.numbers] = step.clip(moved) - step.x
    return cross_entropy(logits, target) + 10 * ((logits - at_start) ** 2).sum() / (BATCH * CLASSES)


def free(step):
    """Also takes the gradients, as delta moves by those of the same backward pass."""
    delta = step.memory.setdefault("free", torch.zeros_like(step.x))
    point = (step.x + delta).clamp(0, 1).requires_grad_()
    loss = step.ce(step.model(point))
    loss.backward()
    step.memory["free"] = (delta + step.eps * point.grad.sign()).clamp(-step.eps, step.eps)
    return loss.detach()


def yopo(step, times, steps):
    """The mean loss. Also takes the gradients: the average of `times` backward passes, and of first layer . p."""
    first, mean = step.model[0], 0.0
    point = step.clip(step.x + step.drawn(-step.eps, step.eps))
    for _ in range(times):
        output = first(point)
        output.retain_grad()
        loss = step.ce(step.model[1:](output)) / times
        loss.backward()
        mean += loss.detach()
        for _ in range(steps):
            point = point.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((first(point) * output.grad).sum(), point)
            point = step.clip(point.detach() + step.eps / 4 * gradient.sign())
        (first(point) * output.grad).sum().backward()
    return mean


BATCH_STAGES = {
    "zerograd": (zerograd, 0.35), "zerograd:q=0.6": (zerograd, 0.6), "pgd:3,step=0.7": (pgd, 3, 0.7),
    "trades:3,beta=4": (trades, 3, 4), "trades:6": (trades, 6, 6), "mart:3": (mart, 3, 5),
    "mart:5,lambda=2": (mart, 5, 2),
}  # fmt: skip
LOSS_STAGES = {
    "elle": (elle, 1000, 5000), "elle:lambda=7": (elle, 7, 7), "aaer": (aaer, "fast", 1.5, 3.25),
    "aaer:over=nfgsm": (aaer, "nfgsm", 0.15, 1.5), "aaer:over=nfgsm,lambda=3": (aaer, "nfgsm", 3, 3),
    "nuat": (nuat,), "gat": (gat,), "liet": (liet,), "pgi": (pgi,), "free:2": (free,), "yopo:3,n=2": (yopo, 3, 2),
}  # fmt: skip
COSTS = {  # forwards, input and weight backwards of a step in batches
    "zerograd": (2, 1, 1), "pgd:3,step=0.7": (4, 3, 1), "trades:3,beta=4": (6, 3, 2), "mart:3": (5, 3, 2),
    "elle": (5, 1, 4), "aaer": (2, 1, 1), "aaer:over=nfgsm": (2, 1, 1), "nuat": (3, 1, 2), "gat": (3, 1, 2),
    "liet": (2, 1, 2), "pgi": (2, 1, 2), "free:2": (1, 0, 1), "yopo:3,n=2": (3, 0, 3),
}  # fmt: skip


def batch_of(spec, context, x, y):
    (stage,) = parse_method(spec).stages
    return stage.entry.code(context, x, y, stage.value, **stage.arguments(context.threat))


def take(spec, step, model, memory):
    """One step of moatlab up to the gradients, as the trainer makes it; the loss."""
    context = step.context(model, memory)
    loss = prepare_loss(parse_method(spec).stages[0], context, step.x, step.y)()
    loss.backward(inputs=[*model.parameters(), *(leaf for leaf, _ in context.watched)])
    for leaf, action in context.watched:
        action(leaf.grad)
    return loss.detach()


def close(mine, theirs, scale=1.0):
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11 * scale, check_stride=False)


def compare(spec, step, model, memory):
    """Loss, gradients, running statistics and memory of a step. The batch of a batch stage."""
    loss = take(spec, step, model, memory)
    restatement, *values = (BATCH_STAGES | LOSS_STAGES)[spec]
    found = restatement(step, *values)
    expected, batch = found if spec in BATCH_STAGES else (found, None)
    close(loss, expected.detach())
    if expected.requires_grad:
        expected.backward()
    scale = max(parameter.grad.abs().max().item() for parameter in step.model.parameters())
    close(*([parameter.grad for parameter in one.parameters()] for one in (model, step.model)), scale)
    close(list(model.buffers()), list(step.model.buffers()))
    close(memory, step.memory)
    return batch


BOTH = [{"bn": "train"}, {"bn": "eval", "epoch": 5}]
MODES = [(spec, fields) for spec in [*BATCH_STAGES, *LOSS_STAGES] for fields in BOTH]
WIDER = [(spec, {"eps": 2 * EPS}) for spec in ("elle", "aaer", "aaer:over=nfgsm", "liet")]  # defaults of 16/255
TIMES = [{"position": position, "epoch": epoch} for position, epoch in ((0, 3), (1, 3), (20, 8), (21, 9))]
LATER = [(spec, fields) for spec in ("nuat", "gat", "liet") for fields in TIMES]


@pytest.mark.parametrize(("spec", "fields"), [*MODES, *WIDER, *LATER])
def test_a_step_equals_its_restatement_in_loss_gradients_statistics_and_batch(spec, fields):
    model, memory = network(), {}
    if spec == "liet":
        memory["liet"] = EPS * torch.randn(CLASSES, 3, 4, 4, generator=draws(4), dtype=torch.float64).sign()
    step, other = Step(copy.deepcopy(model), memory=copy.deepcopy(memory), **fields), copy.deepcopy(model)
    batch = compare(spec, step, model, memory)
    if batch is not None:
        made, target = batch_of(spec, step.context(other, {}), step.x, step.y)
        close(made, batch)
        assert torch.equal(target, step.y)


def train_on(spec, steps):
    """Steps in a row with updates between them, compared; the memory after each."""
    model, memory, states, after = network(), {}, {}, []
    for seed, fields in enumerate(steps):
        compare(spec, Step(copy.deepcopy(model), seed=seed, memory=states, **fields), model, memory)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        after.append(copy.deepcopy(memory))
    return after


def test_pgi_keeps_a_perturbation_and_a_momentum_of_each_image_until_its_reset():
    first, second = torch.arange(8), torch.arange(4, 12)
    steps = [(0, first), (1, second), (3, first), (4, first), (7, second)]  # of 10 epochs: a reset every 4th
    memories = train_on("pgi", [{"epoch": epoch, "numbers": numbers} for epoch, numbers in steps])
    deltas = [memory["pgi"] for memory in memories]
    assert all(delta.abs().max() <= EPS + 1e-15 for delta in deltas)
    assert torch.equal(deltas[0][:4], deltas[1][:4])  # not in the second batch
    assert not torch.equal(deltas[0][4:8], deltas[1][4:8])
    for fresh in (0, 3):  # images 8 to 11 have not been trained on since the reset
        assert (memories[fresh]["pgi momentum"][8:] == 0).all()
        assert (deltas[fresh][8:].abs() == EPS).all()
    assert (memories[2]["pgi momentum"] != 0).flatten(1).any(1).all()


def test_free_carries_its_perturbation_over_replays_and_batches():
    a, b = ({"x": images(seed), "y": labels(seed)} for seed in (3, 4))
    deltas = [memory["free"] for memory in train_on("free:2", [a, a, b, b])]
    assert (deltas[0].abs() == EPS).all()
    assert all(set((delta.abs() / EPS).round(decimals=9).unique().tolist()) <= {0, 1} for delta in deltas)
    assert all(not torch.equal(one, other) for one, other in pairwise(deltas))


def test_liet_refreshes_its_perturbations_every_twenty_steps_only():
    memories = train_on("liet", [{"position": position} for position in (0, 1, 19, 20, 21, 0)])
    same = [torch.equal(one["liet"], other["liet"]) for one, other in pairwise(memories)]
    assert same == [True, True, False, True, False]


@given(spec=st.sampled_from([*BATCH_STAGES]), eps=st.floats(1e-3, 0.5), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_every_batch_stays_in_the_ball_and_in_the_image_range(spec, eps, seed):
    step = Step(network(), x=images(seed), eps=eps, seed=seed)
    made, _ = batch_of(spec, step.context(step.model, {}), step.x, step.y)
    assert made.min() >= 0
    assert made.max() <= 1
    assert (made - step.x).abs().max() <= eps + 1e-12


@pytest.mark.parametrize("bn", ["train", "eval"])
@pytest.mark.parametrize("spec", COSTS)
def test_a_stage_leaves_the_model_and_the_batch_as_it_found_them(spec, bn):
    model, x, y = network(), images(), labels()
    model[1].eval()  # a layer that the user keeps in eval mode
    model[0].bias.requires_grad_(False)  # and a parameter that the user keeps fixed
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 2.0)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    random_state, kept = torch.get_rng_state(), copy.deepcopy([x, y, *(p.detach() for p in model.parameters())])
    context = Step(model, bn=bn, position=1).context(model, {})
    prepare_loss(parse_method(spec).stages[0], context, x, y)()
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == before
    assert all((p.grad == 2.0).all() for p in model.parameters() if p.requires_grad)
    assert all(torch.equal(one, other) for one, other in zip([x, y, *model.parameters()], kept, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not x.requires_grad
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("bn", ["train", "eval"])
@pytest.mark.parametrize("spec", COSTS)
def test_the_meter_counts_what_a_stage_declares(spec, bn):
    model, memory, meter, stage = network(), {}, Meter(), parse_method(spec).stages[0]
    for position in (0, 1):
        with meter.counting(model):
            take(spec, Step(model, bn=bn, position=position, epoch=position), model, memory)
        extra = Cost(CLASSES, CLASSES) if spec == "liet" and position == 0 else Cost()
        assert meter.take() == stage.work(position, BATCH, CLASSES) == Cost(*COSTS[spec]) * BATCH + extra


def test_the_work_of_a_method_is_the_sum_over_its_steps():
    method, epochs, steps = parse_method("trades:2 | liet | zerograd > yopo:3 | pgi"), 11, 45
    total = Cost()
    for epoch in range(epochs):
        for position in range(steps):
            total += method.stage_at(epoch, epochs).work(position, BATCH, CLASSES)
    assert method.work(epochs, steps, BATCH, CLASSES) == total
    refreshed = 3 * 3 * CLASSES  # 3 epochs of liet, 3 refreshes in each
    assert total == method.cost(epochs) * (steps * BATCH) + Cost(refreshed, refreshed)
