"""Training steps, the monitor and attacks on the device `meta`, whose tensors have no values.

Asking for a value (`.item()`, `if tensor`, a mask as an index) and mixing devices are errors there: what an accelerator
would have to wait for, or refuse, fails here on any machine. `WAITS` lists what may ask for values, and when.
"""

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import extract_stack

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moatlab.attacks import auto_pgd, fast_boundary, first_order, square_attack
from moatlab.attacks.probe import Probe
from moatlab.data.loading import load_images
from moatlab.methods.stages import STAGES
from moatlab.runtime.device import Autocast
from moatlab.training import monitor, optimizer
from moatlab.training.averaging import Average
from moatlab.training.making import make_recipe
from moatlab.training.run_folder import RunFolder
from moatlab.training.setup import Session
from moatlab.training.trainer import Trainer

META = torch.device("meta")
WAITS = {
    "look": "NanGuard reads which steps were not finite: every 50 steps, and before a save",
    "measure": "reads sums: a fixed number of times in a measurement",
    "auto": "reads the running mean of its cosine: every 20 steps",
    "strong_pgd": "drops broken images: once a step",
    "apgd": "drops broken images: once a step",
    "fab": "drops broken images: once a step",
    "square": "drops broken images: once a query",
    "onto_hyperplane": "ends when Newton's method has converged: once an iteration",
    "checked_labels": "once in a measurement",
    "giving_logits": "reads the range of the labels: once in a measurement",
}
NUMBERED = {"pgd": ":2", "trades": ":2", "mart": ":2", "free": ":2", "yopo": ":2,n=2"}
HELPERS = {
    "ema": {"average": "ema"},
    "swa": {"average": "swa"},
    "awp": {"awp": 0.01},
    "dropout": {"dropout": 0.3, "activation": "silu"},
    "smoothing": {"label_smoothing": 0.1},
    "skipping": {"on_nan": "skip"},
    "adamw": {"optimizer": "adamw"},
    "warm-up": {"eps_warmup": 1, "warmup": 1, "epochs": 3},
    "momentum": {"cycle_momentum": True},
    "eval mode": {"bn_in_attack": "eval"},
    "crops": {"augment": True},
    "l2": {"norm": "l2", "eps": "128/255"},
}


class Generator(torch.Generator):
    """A CPU generator that gives the device it was asked for: `meta` has none."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls)
        made.asked = torch.device(device)
        return made

    @property
    def device(self):
        return self.asked


class CastLikeAutocast(TorchFunctionMode):
    """Autocast has no device `meta`: convolutions and linear layers compute in `dtype`, as under autocast."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, arguments=(), named=None):
        if function in (torch.conv2d, torch.nn.functional.conv2d, torch.nn.functional.linear):
            arguments = [a.to(self.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
        return function(*arguments, **(named or {}))


@pytest.fixture(autouse=True, scope="module")
def fused_kernels():
    """PyTorch has none for `meta`; these check that all tensors are on the device."""

    def kernel(*lists, found_inf=None, grad_scale=None, **_options):
        tensors = [tensor for some in lists if isinstance(some, (list, tuple)) for tensor in some]
        extra = [tensor for tensor in (found_inf, grad_scale) if tensor is not None]
        assert all(tensor.device == META for tensor in tensors + extra)

    library = torch.library.Library("aten", "IMPL")
    for name in ("_fused_sgd_", "_fused_adamw_"):
        library.impl(name, kernel, "Meta")
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def a_device_without_values(monkeypatch):
    """`meta` gets what other devices have: generators, autocast and fused optimizers."""
    autocast = torch.autocast

    def cast(device, *dtype, **options):
        return CastLikeAutocast(*dtype) if device == "meta" else autocast(device, *dtype, **options)

    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "autocast", cast)
    monkeypatch.setattr(optimizer, "FUSED", (*optimizer.FUSED, "meta"))


@pytest.fixture(scope="module")
def images(tiny):
    return load_images(str(tiny), None)


@contextmanager
def moved(recipe, images, folder):
    """A trainer that was made on the CPU, with its model, optimizer, images and records moved to the device."""
    session = Session(recipe, torch.device("cpu"), images)
    trainer = Trainer(session, RunFolder(folder))
    session.device, model = META, session.model.to(META).to(memory_format=torch.channels_last)
    session.trained_model = model if session.precision == "fp32" else Autocast(model, session.precision)
    session.forward = session.trained_model
    session.batches = replace(session.batches, x=session.batches.x.to(META), y=session.batches.y.to(META))
    settings = {"lr": recipe.lr, "momentum": recipe.momentum, "weight_decay": recipe.weight_decay}
    session.optimizer = optimizer.OPTIMIZERS[recipe.optimizer](model.parameters(), **settings)
    session.scaler = torch.amp.GradScaler("meta", enabled=session.precision == "fp16")
    if session.average:
        session.average = Average(model, recipe.average, None, session.total_steps)
    trainer.guard.trained = list(model.parameters())
    trainer.guard.bad = trainer.guard.bad.to(META)
    trainer.loss_sum = trainer.loss_sum.to(META)
    with trainer.counting():
        yield trainer


def recipe_of(images, method, precision="fp32", **options):
    fields = {"width": 8, "batch_size": 16, "holdout": 16, "augment": False, "epochs": 2, "monitor": "train"}
    return make_recipe(method, preset="laptop", data=images.source.split()[-1], precision=precision, **fields | options)


def step_without_waiting(recipe, images, folder):
    with moved(recipe, images, folder) as trainer:
        trainer.progress.step = int(recipe.method == "auto")  # at step 0 it reads its mean
        trainer.step()
        model, average = trainer.session.model, trainer.session.average
        assert all(weight.device == META and weight.grad.stride() == weight.stride() for weight in model.parameters())
        assert trainer.progress.cost.passes > 0
        if average:
            average.update_buffers(model, trainer.session.images_to_estimate(0))
            assert all(weight.device == META for weight in average.model.state_dict().values())
        with pytest.raises((RuntimeError, NotImplementedError)):
            trainer.guard.look()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("method", [name + NUMBERED.get(name, "") for name in STAGES])
def test_a_training_step_never_waits_for_its_device(method, precision, images, tmp_path):
    step_without_waiting(recipe_of(images, method, precision), images, tmp_path)


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_never_waits_for_its_device(helper, images, tmp_path):
    step_without_waiting(recipe_of(images, "trades:2", **HELPERS[helper]), images, tmp_path)


QUESTIONS = {"__bool__": False, "item": 0.0, "__int__": 0, "__float__": 0.0, "equal": True}


class Answering(TorchFunctionMode):
    """Answers questions for values with zero, and counts them by the function that asks, which must be in WAITS."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()

    def __torch_function__(self, function, types, arguments=(), named=None):
        about = [one for one in arguments if isinstance(one, torch.Tensor) and one.device == META]
        name = getattr(function, "__name__", "")
        if not about or name not in (*QUESTIONS, "tolist"):
            return function(*arguments, **(named or {}))
        asking = next(frame.name for frame in reversed(extract_stack()) if "moatlab" in Path(frame.filename).parts)
        assert asking in WAITS
        self.asked[asking] += 1
        return QUESTIONS[name] if name in QUESTIONS else torch.zeros(about[0].shape, dtype=about[0].dtype).tolist()


def network():
    layers = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(8 * 64, 10)).eval().to(META)


def batch(count=4):
    return torch.empty(count, 3, 8, 8, device=META), torch.empty(count, dtype=torch.int64, device=META)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_attacks_judged_at_their_last_iterate_never_wait(norm):
    (x, y), probe = batch(), Probe(network())
    assert first_order.fgsm(probe, x, y, eps=0.1, norm=norm).device == META
    for attack in (first_order.pgd, first_order.mim):
        assert attack(probe, x, y, eps=0.1, step_size=0.02, steps=3, norm=norm).device == META


STEPS = 12
DROPPING = {
    "pgd": ("strong_pgd", first_order.strong_pgd, {"step_size": 0.02, "steps": STEPS}),
    "cw": ("strong_pgd", first_order.cw, {"step_size": 0.02, "steps": STEPS}),
    "apgd-ce": ("apgd", auto_pgd.apgd, {"steps": STEPS}),
    "apgd-dlr": ("apgd", auto_pgd.apgd, {"steps": STEPS, "loss": "dlr"}),
    "apgd-t": ("apgd", auto_pgd.apgd, {"steps": STEPS, "loss": "targeted-dlr", "ranks": (2, 3)}),
    "square": ("square", square_attack.square, {"queries": range(STEPS + 1)}),
}


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("name", DROPPING)
def test_attacks_that_drop_broken_images_wait_once_a_step(name, norm):
    (x, y), (asking, attack, options) = batch(), DROPPING[name]
    with Answering() as answers:
        assert attack(Probe(network()), x, y, eps=0.1, norm=norm, **options).device == META
    assert answers.asked == {asking: STEPS + 1}


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_fab_waits_for_its_projections_and_once_a_step(norm):
    (x, y), probe = batch(), Probe(network())
    with Answering() as answers:
        fast_boundary.fab(probe, x, y, eps=0.1, norm=norm, ranks=(2, 3), steps=STEPS)
    assert answers.asked == {"fab": STEPS, "onto_hyperplane": 2 * STEPS}  # they end after one iteration here


def test_a_measurement_waits_no_more_often_for_more_images():
    asked = []
    for count in (monitor.BATCH, 3 * monitor.BATCH):
        x, y = torch.empty(count, 8, 8, 3, dtype=torch.uint8, device=META), batch(count)[1]
        with Answering() as answers:
            monitor.measure(network(), x, y, eps=0.1)
        asked.append(answers.asked)
    assert asked[0] == asked[1]
