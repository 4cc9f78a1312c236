import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from moatlab.models import convolution
from moatlab.models.convolution import Conv2d, weight_gradient


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 7),
    channels=st.integers(1, 5),
    outputs=st.integers(1, 5),
    height=st.integers(3, 7),
    width=st.integers(3, 7),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    images_at_a_time=st.integers(1, 8),
    channels_last=st.booleans(),
)
def test_the_weight_gradient_is_pytorchs_for_every_shape_layout_and_split(
    count, channels, outputs, height, width, kernel, stride, padding, images_at_a_time, channels_last
):
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(count, channels, height, width, dtype=torch.float64).contiguous(memory_format=layout)
    weight = torch.randn(outputs, channels, kernel, kernel, dtype=torch.float64, requires_grad=True)
    answer = F.conv2d(x, weight, None, stride, padding)
    above = torch.randn_like(answer)
    (expected,) = torch.autograd.grad(answer, weight, above)
    with pytest.MonkeyPatch.context() as patched:
        one_image = 8 * answer.shape[2] * answer.shape[3] * channels * kernel**2
        patched.setattr(convolution, "PATCH_BYTES", images_at_a_time * one_image)
        torch.testing.assert_close(weight_gradient(x, above, kernel, stride, padding), expected)


@pytest.fixture
def layer(monkeypatch):
    """A small layer that goes by patches, and the calls of weight_gradient while it is used."""
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return weight_gradient(*arguments)

    monkeypatch.setattr(convolution, "FEWEST_CHANNELS", 2)
    monkeypatch.setattr(convolution, "weight_gradient", counted)
    torch.manual_seed(0)
    return Conv2d(2, 3, 3, stride=2, padding=1).double(), calls


def test_first_and_second_derivatives_are_right(layer):
    convolve, _ = layer
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)

    def function(x, weight):
        return torch.func.functional_call(convolve, {"weight": weight}, (x,)).square()

    assert gradcheck(function, (x, convolve.weight))
    assert gradgradcheck(function, (x, convolve.weight))


def test_the_weight_gradient_is_computed_only_where_it_is_asked_for(layer):
    convolve, calls = layer
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad(convolve(x).sum(), x)
    assert not calls
    torch.autograd.grad(convolve(x).sum(), [x, convolve.weight])
    assert len(calls) == 1
    convolve(x).sum().backward()
    assert len(calls) == 2
    convolve(x).sum().backward(inputs=[convolve.weight])
    assert len(calls) == 3
    convolve.weight.requires_grad_(False)
    convolve(x).sum().backward()
    assert len(calls) == 3


def test_transforms_of_torch_func_and_batches_of_gradients_work_as_with_pytorchs_own(layer):
    convolve, _ = layer
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    plain = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False).double()
    plain.load_state_dict(convolve.state_dict())

    def of_the_weights(module):
        def loss(parameters, image):
            return torch.func.functional_call(module, parameters, (image[None],)).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        return each({"weight": module.weight}, x)["weight"]

    torch.testing.assert_close(of_the_weights(convolve), of_the_weights(plain))
    torch.testing.assert_close(convolve(x[0]), plain(x[0]))  # one image, without a batch around it

    def jacobian(module):
        answer = module(x)
        some = torch.eye(4, answer.numel(), dtype=torch.float64).view(4, *answer.shape)
        return torch.autograd.grad(answer, module.weight, some, is_grads_batched=True)[0]

    torch.testing.assert_close(jacobian(convolve), jacobian(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_numbers_that_the_cpu_can_not_multiply_are_multiplied_and_added_as_float32(monkeypatch, dtype):
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: False)
    torch.manual_seed(0)
    convolve = Conv2d(8, 4, 3, stride=2, padding=1)
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    with torch.autocast("cpu", dtype):
        answer = convolve(x)
        assert answer.dtype == dtype
        answer.float().square().sum().backward()
    exact = x.detach().to(dtype).double().requires_grad_()
    weight = convolve.weight.detach().to(dtype).double().requires_grad_()
    expected = F.conv2d(exact, weight, None, 2, 1)
    torch.testing.assert_close(answer.double(), expected, rtol=2**-8, atol=1e-6)  # one rounding, at the end
    above = 2 * answer.detach().double()
    wanted = torch.autograd.grad(expected, (exact, weight), above.to(dtype).double())
    for got, known in zip((x.grad, convolve.weight.grad), wanted, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), known, rtol=2**-8, atol=1e-4)


def test_under_autocast_a_layer_is_pytorchs_own(layer):
    convolve, calls = layer
    convolve.float()
    x = torch.randn(2, 2, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        answer = convolve(x)
        assert torch.equal(answer, F.conv2d(x, convolve.weight, None, 2, 1))
    assert answer.dtype == torch.bfloat16
    answer.sum().backward()
    assert not calls
    assert convolve.weight.grad.dtype == torch.float32


def test_few_channels_and_single_pixels_are_left_to_pytorch():
    assert not Conv2d(32, 64, 3).by_patches
    assert not Conv2d(64, 64, 1).by_patches
    assert Conv2d(64, 64, 3).by_patches


@pytest.mark.parametrize(("stride", "side"), [(2, 1), (1, 1), (2, 2)])
def test_the_weight_gradient_in_bfloat16_is_right_on_the_smallest_images(stride, side):
    """oneDNN leaves that of a strided convolution of 1x1 images uninitialised."""
    torch.manual_seed(0)
    convolve, x = Conv2d(16, 16, 3, stride, 1), torch.randn(8, 16, side, side)
    (expected,) = torch.autograd.grad(convolve(x).sum(), convolve.weight)
    for _ in range(3):
        junk = [torch.full((100_003,), torch.nan) for _ in range(3)]  # in memory that is used again
        del junk
        with torch.autocast("cpu", torch.bfloat16):
            (found,) = torch.autograd.grad(convolve(x).float().sum(), convolve.weight)
        assert torch.allclose(found, expected, atol=0.05 * float(expected.abs().max()))
