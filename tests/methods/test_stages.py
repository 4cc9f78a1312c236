"""Every stage against its formula."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from moatlab.attacks.alignment import misalignment
from moatlab.attacks.norms import Threat
from moatlab.methods.batches import prepare_loss
from moatlab.methods.context import Context, When
from moatlab.methods.language import parse_method
from moatlab.methods.stages import STAGES
from moatlab.methods.stages.regularised import gradalign
from models_for_tests import Linear, small_network

EPS = 8 / 255
SHAPE = (6, 3, 4, 4)
CLASSES = 3


def draws(seed=7):
    return torch.Generator().manual_seed(seed)


def images(seed=0, shape=SHAPE):
    """Images in [0, 1] with some pixels exactly at the borders, channels last as in training."""
    x = torch.rand(shape, generator=draws(seed)) * 1.2 - 0.1
    return x.clamp(0, 1).contiguous(memory_format=torch.channels_last)


def labels(count=SHAPE[0], seed=1):
    return torch.randint(CLASSES, (count,), generator=draws(seed))


def context(model, *, eps=EPS, bn="train", seed=7, classes=CLASSES):
    return Context(model, model, Threat("linf", eps), draws(seed), classes, bn)


@pytest.fixture
def linear():
    return Linear(torch.randn(CLASSES, 48, generator=draws(3)))


def linear_gradient(model, x, y):
    """The gradient of the cross-entropy of W x: W^T (softmax(W x) - onehot(y))."""
    weight = model.weight.detach()
    probabilities = torch.softmax(x.flatten(1) @ weight.T, 1)
    return ((probabilities - F.one_hot(y, CLASSES)) @ weight).view(x.shape)


def project(x, centre, eps=EPS):
    return torch.minimum(torch.maximum(x, centre - eps), centre + eps).clamp(0, 1)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_standard_trains_on_the_batch_as_it_is(linear):
    x, y = images(), labels()
    trained_x, target = STAGES["standard"].code(context(linear), x, y, None)
    assert torch.equal(trained_x, x)
    assert torch.equal(target, y)


def test_fgsm_is_one_step_of_eps_from_x_itself_clipped_to_the_image_range(linear):
    x, y = images(), labels()
    adversarial, target = STAGES["fgsm"].code(context(linear), x, y, None)
    close(adversarial, (x + EPS * linear_gradient(linear, x, y).sign()).clamp(0, 1))
    assert torch.equal(target, y)


def test_fast_is_a_projected_random_start_and_one_projected_step_of_one_and_a_quarter_eps(linear):
    x, y = images(), labels()
    adversarial, _ = STAGES["fast"].code(context(linear), x, y, None)
    start = project(x + Threat("linf", EPS).noise(x, draws()), x)
    close(adversarial, project(start + 1.25 * EPS * linear_gradient(linear, start, y).sign(), x))


def test_nfgsm_is_noise_of_two_eps_and_a_step_of_eps_that_may_leave_the_ball(linear):
    x, y = images(), labels()
    adversarial, _ = STAGES["nfgsm"].code(context(linear), x, y, None)
    noisy = (x + Threat("linf", 2 * EPS).noise(x, draws())).clamp(0, 1)
    close(adversarial, (noisy + EPS * linear_gradient(linear, noisy, y).sign()).clamp(0, 1))
    assert (adversarial - x).abs().max() > 1.5 * EPS


@pytest.mark.parametrize(("steps", "step_size"), [(1, EPS), (2, EPS / 2), (3, EPS / 3), (4, EPS / 4), (8, EPS / 4)])
def test_pgd_takes_k_projected_steps_of_the_larger_of_a_quarter_eps_and_eps_by_k(linear, steps, step_size):
    x, y = images(), labels()
    adversarial, _ = STAGES["pgd"].code(context(linear), x, y, steps)
    expected = project(x + Threat("linf", EPS).noise(x, draws()), x)
    for _ in range(steps):
        expected = project(expected + step_size * linear_gradient(linear, expected, y).sign(), x)
    close(adversarial, expected)


def test_pgd_with_one_step_is_not_the_fast_batch(linear):
    x, y = images(), labels()
    one_step, _ = STAGES["pgd"].code(context(linear), x, y, 1)
    fast, _ = STAGES["fast"].code(context(linear), x, y, None)
    assert not torch.equal(one_step, fast)


def test_attacks_on_a_network_equal_the_plain_way_with_loss_backward():
    model = small_network().eval()
    x, y = images(), labels()
    model(x)
    adversarial, _ = STAGES["pgd"].code(context(model), x, y, 5)
    expected = project(x + Threat("linf", EPS).noise(x, draws()), x)
    for _ in range(5):
        variable = expected.contiguous().requires_grad_()
        F.cross_entropy(model(variable), y).backward()
        expected = project(variable.detach() + EPS / 4 * variable.grad.sign(), x)
    close(adversarial, expected)


def test_mixup_mixes_images_and_labels_with_one_lambda_for_the_batch(linear):
    x, y = images(), labels()
    mixed, target = STAGES["mixup"].code(context(linear), x, y, None)
    source = draws()
    weight, order = torch.rand((), generator=source), torch.randperm(len(x), generator=source)
    close(mixed, weight * x + (1 - weight) * x[order])
    onehot = F.one_hot(y, CLASSES).float()
    close(target, weight * onehot + (1 - weight) * onehot[order])


def test_mixup_draws_lambda_uniformly():
    x, y = torch.stack([torch.zeros(1, 1, 1), torch.ones(1, 1, 1)]), torch.tensor([0, 1])
    weights = []
    for seed in range(2000):
        _, target = STAGES["mixup"].code(context(None, seed=seed, classes=2), x, y, None)
        if target[0, 0] < 1:  # the shuffle swapped the two
            weights.append(target[0, 0].item())
    weights = torch.tensor(weights)
    assert 800 < len(weights) < 1200
    assert abs(weights.mean() - 0.5) < 0.03
    assert abs(weights.std() - 12**-0.5) < 0.02  # of U(0, 1); Beta(1/5, 1/5) would have 0.42


@given(seed=st.integers(0, 10_000), height=st.integers(1, 9), width=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_cutmix_pastes_one_box_and_mixes_labels_by_its_true_area(seed, height, width):
    count = 4
    x = torch.arange(count).float().view(-1, 1, 1, 1).expand(count, 3, height, width).contiguous()
    y = torch.arange(count) % CLASSES
    mixed, target = STAGES["cutmix"].code(context(None, seed=seed), x, y, None)
    source = draws(seed)
    weight, order = torch.rand((), generator=source), torch.randperm(count, generator=source)
    changed = (mixed != x).any(1).any(0) if (order != torch.arange(count)).any() else torch.zeros(height, width).bool()
    rows, columns = changed.any(1).nonzero().flatten(), changed.any(0).nonzero().flatten()
    if len(rows):
        box = torch.zeros_like(changed)
        box[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] = True
        assert torch.equal(changed, box)  # one rectangle, the same for every image
        assert torch.equal(mixed[:, :, changed], x[order][:, :, changed])
        side = (1 - weight).sqrt()
        assert len(rows) <= side * height + 1
        assert len(columns) <= side * width + 1
        area = changed.float().mean()
        onehot = F.one_hot(y, CLASSES).float()
        close(target, (1 - area) * onehot + area * onehot[order])
    close(target.sum(1), torch.ones(count))


def test_kim_trains_on_the_smallest_stretch_that_fools_the_model():
    """Two classes, logits (0, w x): the prediction is 1 where w x > 0, so each stretch can be worked out by hand."""
    eps, parts, pixels = 0.1, 5, 48
    direction = torch.where(torch.rand(pixels, generator=draws(2)) < 0.5, -1.0, 1.0)
    base = torch.full((64, pixels), 0.5)
    margin = torch.linspace(-0.9, 0.9, 64)  # of w x, in units of what eps can move
    base = base + eps * margin[:, None] * direction
    offset = 0.5 * direction.sum()

    class Half(Linear):
        def forward(self, x):
            return super().forward(x) - torch.stack([torch.zeros(()), offset])

    model = Half(torch.stack([torch.zeros(pixels), direction]))
    x, y = base.view(64, 3, 4, 4), torch.ones(64, dtype=torch.long)
    trained, _ = STAGES["kim"].code(context(model, eps=eps, classes=2), x, y, parts)

    start = project(x + Threat("linf", eps).noise(x, draws()), x, eps)
    delta = project(start - 1.25 * eps * direction.view(1, 3, 4, 4), x, eps) - x
    seen = set()
    for image, begin, move, result in zip(x, start, delta, trained, strict=True):
        stretch = 1.0
        if (begin.flatten() @ direction) - offset <= 0:
            stretch = 0.0
        else:
            for k in range(1, parts):
                if ((image + k / parts * move).flatten() @ direction) - offset <= 0:
                    stretch = k / parts
                    break
        close(result, image + stretch * move)
        seen.add(stretch)
    assert len(seen) >= 4  # plain, some stretches, and the whole perturbation all occur


def test_kim_attacks_in_eval_mode_whatever_the_recipe_says():
    for bn in ("train", "eval"):
        model = small_network()
        x, y = images(), labels()
        prepare_loss(parse_method("kim:3").stages[0], context(model, bn=bn), x, y)()
        assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize("bn", ["train", "eval"])
def test_gradalign_equals_a_naive_double_backward_in_value_and_in_gradient(bn):
    model, x, y, weight = small_network(), images(), labels(), 0.7
    model(x)
    reference = copy.deepcopy(model)
    loss = gradalign(context(model, bn=bn), x, y, weight)
    loss.backward()

    clean = x.clone().requires_grad_()
    (g1,) = torch.autograd.grad(F.cross_entropy(reference(clean), y), clean)
    adversarial = (x + EPS * g1.sign()).clamp(0, 1)
    adversarial_loss = F.cross_entropy(reference(adversarial), y)
    noisy = (x + Threat("linf", EPS).noise(x, draws())).requires_grad_()
    (g2,) = torch.autograd.grad(F.cross_entropy(reference(noisy), y), noisy, create_graph=True)
    cosines = [(a.flatten() @ b.flatten()) / (a.norm() * b.norm()) for a, b in zip(g1, g2, strict=True)]
    expected = adversarial_loss + weight * (1 - sum(cosines) / len(cosines))
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    # As in the authors' code, whatever the mode of attacks: train mode, and the noisy images last.
    torch.testing.assert_close(model[1].running_mean, reference[1].running_mean)
    torch.testing.assert_close(model[1].running_var, reference[1].running_var)


def test_misalignment_leaves_out_examples_whose_gradient_vanishes():
    g1 = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [3e-15, 0.0], [1.0, 1.0]])
    g2 = torch.tensor([[0.0, 2.0], [1.0, 1.0], [0.0, 0.0], [1e-15, 0.0], [1e-40, 0.0]], requires_grad=True)
    value = misalignment(g1, g2)
    value.backward()
    close(value.detach(), torch.tensor((1.0 + 0.0) / 2))
    assert torch.isfinite(g2.grad).all()
    assert misalignment(torch.zeros(2, 3), torch.zeros(2, 3)) == 0


SPECS = ["standard", "mixup", "cutmix", "fgsm", "fast", "nfgsm", "pgd:1", "pgd:3", "kim:3"]


@given(spec=st.sampled_from(SPECS), eps=st.floats(1e-3, 0.5), seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_batch_stays_in_the_ball_and_in_the_image_range_where_it_should(spec, eps, seed):
    model, x, y = small_network().eval(), images(seed), labels(seed=seed)
    stage = parse_method(spec).stages[0]
    trained, _ = STAGES[stage.name].code(context(model, eps=eps, seed=seed), x, y, stage.value)
    assert trained.shape == x.shape
    assert trained.min() >= 0
    assert trained.max() <= 1
    radius = {"mixup": 1, "cutmix": 1, "nfgsm": 3 * eps}.get(stage.name, eps)
    assert (trained.double() - x.double()).abs().max() <= radius + 1e-6


@pytest.mark.parametrize("bn", ["train", "eval"])
@pytest.mark.parametrize("spec", [*SPECS, "gradalign:0.5"])
def test_a_stage_leaves_the_model_as_it_found_it(spec, bn):
    model, x, y = small_network(), images(), labels()
    model(x)
    model[1].eval()  # a layer that the user keeps in eval mode
    model[0].bias.requires_grad_(False)  # and a parameter that the user keeps fixed
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 2.0)
    before = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    random_state = torch.get_rng_state()
    weights = copy.deepcopy([p.detach() for p in model.parameters()])
    prepare_loss(parse_method(spec).stages[0], context(model, bn=bn), x, y)()
    assert ([m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]) == before
    assert all((p.grad == 2.0).all() for p in model.parameters() if p.requires_grad)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)


MOVES_IN_TRAIN_MODE = {"standard": 1, "mixup": 1, "fgsm": 2, "fast": 2, "nfgsm": 2, "pgd:3": 4, "gradalign:1": 3}


@pytest.mark.parametrize("spec", MOVES_IN_TRAIN_MODE)
def test_batchnorm_statistics_move_with_attack_passes_only_in_train_mode(spec):
    in_eval_mode = 3 if spec.startswith("gradalign") else 1  # its regulariser is always in train mode
    for bn, moves in (("train", MOVES_IN_TRAIN_MODE[spec]), ("eval", in_eval_mode)):
        model = small_network()
        prepare_loss(parse_method(spec).stages[0], context(model, bn=bn), images(), labels())()
        assert model[1].num_batches_tracked == moves


def test_the_model_is_as_found_even_when_the_attack_fails():
    model = small_network()
    model(images())
    with pytest.raises(IndexError):
        prepare_loss(parse_method("fgsm").stages[0], context(model, bn="eval"), images(), labels() + 100)()
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())


NUMBERED = ("pgd", "trades", "mart", "free", "yopo")


@pytest.mark.parametrize("spec", [name + (":3" if name in NUMBERED else "") for name in STAGES])
def test_no_stage_waits_for_its_device_in_l2(spec):
    """On the device `meta`, as whole steps in tests/training/test_meta_device.py, which are in L-inf."""
    model = small_network().to("meta").to(memory_format=torch.channels_last)
    x = torch.empty(SHAPE, device="meta").contiguous(memory_format=torch.channels_last)
    y = torch.empty(SHAPE[0], dtype=torch.int64, device="meta")
    (stage,) = parse_method(spec).stages
    numbers = torch.empty(SHAPE[0], dtype=torch.int64, device="meta")
    given = Context(model, model, Threat("l2", EPS), draws(), CLASSES, numbers=numbers, images=9, when=When(1, 3, 5))
    given.memory["liet"] = torch.empty(CLASSES, *SHAPE[1:], device="meta")
    loss = prepare_loss(stage, given, x, y)()
    loss.backward()
    assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())
    with pytest.raises(RuntimeError):
        loss.item()
