"""Attacks as functions, the probe they go through, and the meter that counts them."""

import pytest
import torch
import torch.nn.functional as F

from moatlab.attacks import Probe, fgsm, pgd
from moatlab.attacks.probe import evaluating, frozen
from moatlab.methods.cost import Cost
from moatlab.methods.meter import Meter
from moatlab.runtime.device import full_precision
from models_for_tests import Linear, small_network


@pytest.mark.parametrize("shape", [(1, 3, 4, 4), (2, 1, 5, 7), (9, 3, 2, 2)])
@pytest.mark.parametrize("eps", [1 / 255, 0.1])
def test_on_a_linear_model_of_two_classes_pgd_reaches_the_best_corner_of_the_ball(shape, eps):
    """With logits (0, w x) the worst case is known: x - eps sign(w) for label 1, x + eps sign(w) for label 0."""
    torch.manual_seed(0)
    weight = torch.randn(shape[1] * shape[2] * shape[3])
    model = Linear(torch.stack([torch.zeros_like(weight), weight]))
    x, y = torch.rand(shape), torch.arange(shape[0]) % 2
    away = torch.where(y == 1, -1.0, 1.0).view(-1, 1, 1, 1) * weight.sign().view(1, *shape[1:])
    worst = (x + eps * away).clamp(0, 1)
    start = x + eps * (2 * torch.rand(shape) - 1)
    torch.testing.assert_close(fgsm(model, x, y, eps=eps), worst, rtol=0, atol=1e-6)
    found = pgd(model, x, y, eps=eps, step_size=eps / 4, steps=8, start=start)
    torch.testing.assert_close(found, worst, rtol=0, atol=1e-6)


def test_a_probe_gives_each_example_the_gradient_of_its_own_loss():
    model = small_network().eval()
    x, y = torch.rand(5, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1])
    gradient, logits = Probe(model).gradient(x, y)
    assert not gradient.requires_grad
    assert not logits.requires_grad
    torch.testing.assert_close(logits, model(x).detach())
    for index in range(5):
        one = x[index : index + 1].clone().requires_grad_()
        F.cross_entropy(model(one), y[index : index + 1]).backward()
        torch.testing.assert_close(gradient[index], one.grad[0])


def test_a_batch_of_one_goes_as_two_of_the_same():
    seen = []
    model = small_network().eval()
    model.register_forward_hook(lambda _m, inputs, _o: seen.append(len(inputs[0])))
    x, y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    probe = Probe(model)
    both, _ = probe.gradient(x, y)
    single, logits = probe.gradient(x[:1], y[:1])
    assert seen == [2, 2]
    assert logits.shape == probe.logits(x[:1]).shape == (1, 3)
    assert torch.equal(single[0], both[0])


def test_an_attack_works_where_gradients_are_switched_off_and_leaves_them_off():
    model, x, y = small_network().eval(), torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    with torch.no_grad():
        adversarial = fgsm(model, x, y, eps=0.1)
        assert not torch.is_grad_enabled()
    assert torch.equal(adversarial, fgsm(model, x, y, eps=0.1))


def test_freezing_and_evaluating_end_as_they_began_even_after_an_error():
    model = small_network()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]

    def fail_inside():
        with frozen(model), evaluating(model):
            assert not any(m.training for m in model.modules())
            assert not any(p.requires_grad for p in model.parameters())
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == before


def test_full_precision_switches_shortened_arithmetic_off_and_back_whichever_way_it_was_asked_for():
    torch.manual_seed(0)
    a, b = torch.rand(64, 64), torch.rand(64, 64)
    exact = a @ b
    backends = torch.backends
    for place, name, value in [
        (backends.cudnn, "allow_tf32", True),
        (backends.cuda.matmul, "allow_tf32", True),
        (backends.cuda.matmul, "fp32_precision", "tf32"),
        (backends.mkldnn.matmul, "fp32_precision", "bf16"),
    ]:
        before = getattr(place, name)
        try:
            setattr(place, name, value)
            with torch.autocast("cpu", dtype=torch.bfloat16), full_precision():
                assert torch.equal(a @ b, exact)
                for switch in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul):
                    assert switch.fp32_precision == "ieee"
                with backends.cudnn.flags(enabled=False):  # as a user's model may have it
                    assert torch.equal(a @ b, exact)
            assert getattr(place, name) == value
        finally:
            setattr(place, name, before)


def test_a_gradient_that_is_not_a_number_gives_no_direction():
    class Constant(torch.nn.Module):
        def forward(self, x):
            flat = x.flatten(1)
            return flat[:, :3] / (flat.var(1, keepdim=True).sqrt() + 1)  # no slope of a root at zero

    x = torch.full((2, 3, 4, 4), 0.5)
    gradient, _ = Probe(Constant()).gradient(x, torch.tensor([0, 1]))
    assert torch.equal(gradient, torch.zeros_like(x))


def test_the_meter_tells_the_four_kinds_apart():
    model, meter = small_network(), Meter()
    x, y = torch.rand(4, 3, 4, 4), torch.tensor([0, 1, 2, 0])
    with meter.counting(model):
        Probe(model).logits(x)
        assert meter.take() == Cost(4, 0, 0, 0)  # images
        Probe(model).gradient(x, y)
        assert meter.take() == Cost(4, 4, 0, 0)
        F.cross_entropy(model(x), y).backward()
        assert meter.take() == Cost(4, 0, 4, 0)
        variable = x.clone().requires_grad_()
        F.cross_entropy(model(variable), y).backward()  # input and weights in one backward
        assert meter.take() == Cost(4, 0, 4, 0)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(variable), y), variable, create_graph=True)
        gradient.square().sum().backward()
        assert meter.take() == Cost(4, 4, 0, 4)
    model(x)
    assert meter.take() == Cost()
