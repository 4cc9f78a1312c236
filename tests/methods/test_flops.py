"""Floating-point operations: by shape, by hooks, and by PyTorch's own counter of each operation."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moatlab.attacks.norms import Threat
from moatlab.methods.batches import prepare_loss
from moatlab.methods.context import Context
from moatlab.methods.cost import DOUBLE, Cost
from moatlab.methods.language import parse_method
from moatlab.models.flops import SHAPES, built_in_flops
from moatlab.models.operations import counting_flops
from moatlab.models.registry import BUILT_IN, build_model


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(("stem", "shape"), [("3x3", (3, 16, 16)), ("4x4s2", (3, 33, 40)), ("7x7s4", (1, 70, 64))])
def test_the_shapes_of_a_built_in_network_give_what_its_layers_do(name, stem, shape):
    half = [0.5] * shape[0]
    model = build_model(name, classes=7, arguments={"width": 16, "stem": stem, "mean": half, "std": half}).eval()
    with torch.no_grad(), counting_flops(model) as found:
        model(torch.zeros(1, *shape))
    assert sum(found) == built_in_flops(name, width=16, stem=stem, shape=shape, classes=7)


def test_a_user_s_own_network_has_no_known_shape():
    assert SHAPES.keys() == BUILT_IN.keys()
    assert built_in_flops("mine:net", width=16, stem="auto", shape=(3, 32, 32), classes=10) is None


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func._overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


@pytest.mark.parametrize("spec", ["standard", "fgsm", "pgd:3", "kim:3", "gradalign:0.2"])
def test_the_operations_of_a_step_are_those_that_pytorch_counts(spec):
    """Within 2 %: a weight backward needs no input gradient of the first layer; a double backward is a measurement."""
    half = [0.5] * 3
    model = build_model("preact_resnet18", classes=10, arguments={"width": 16, "mean": half, "std": half})
    x, y = torch.rand(4, 3, 16, 16), torch.arange(4)
    stage = parse_method(spec).stages[0]
    context = Context(model, model, Threat.of(8 / 255), torch.Generator().manual_seed(0), 10)
    with Counter() as counter:
        prepare_loss(stage, context, x, y)().backward(inputs=list(model.parameters()))
    forward = 4 * built_in_flops("preact_resnet18", width=16, stem="3x3", shape=(3, 16, 16), classes=10)
    assert stage.step_cost.flops(forward) == pytest.approx(counter.total, rel=0.02)


def test_kinds_of_calls_have_their_price():
    assert Cost(3, 2, 1, 1).flops(10.0) == pytest.approx(10 * (3 + 2 + 2 + DOUBLE))
