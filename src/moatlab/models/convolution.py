"""A convolution with a fast weight gradient on a CPU."""

from typing import Any

import torch
from torch import Tensor, nn

PATCH_BYTES = 5 * 2**20  # patches at a time, which fit into a CPU's cache
FEWEST_CHANNELS = 64  # with fewer, and for 1x1 kernels, oneDNN's weight gradient is as fast


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` (square, without bias) with a faster weight gradient: a matrix product over patches of the input.

    oneDNN's weight gradient is the slowest part of a training step on an AVX2 machine. The matrix product is 1.2 to 1.6
    times as fast, and 3 times on 2x2 images. Under torch.func and autocast PyTorch's own is used, except on a CPU
    without instructions for autocast's type, where it is ten times slower than float32: there, weights and input are
    rounded to that type, multiplied and summed in float32, and the sums rounded, as hardware with them does it. So are
    strided convolutions of 1x1 images, whose bfloat16 weight gradient oneDNN leaves uninitialised (PyTorch 2.13).
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding, bias=False)
        self.by_patches = inputs >= FEWEST_CHANNELS and kernel > 1

    def forward(self, x: Tensor) -> Tensor:
        if (short := short_for_this_cpu(x, self.stride[0] > 1 and 1 in x.shape[2:])) is not None:
            with torch.autocast("cpu", enabled=False):
                rounded, weight = (number.to(short).float() for number in (x, self.weight))
                return torch.conv2d(rounded, weight, None, self.stride, self.padding).to(short)
        trained = self.weight.requires_grad and torch.is_grad_enabled() and x.dim() == 4
        plain = not torch.is_autocast_enabled("cpu") and torch._C._functorch.peek_interpreter_stack() is None
        if self.by_patches and trained and plain and x.device.type == "cpu":
            return _ByPatches.apply(x, self.weight, self.stride[0], self.padding[0])  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)


def short_for_this_cpu(x: Tensor, fails: bool) -> torch.dtype | None:
    """Autocast's type, if this CPU has no instructions for it, or oneDNN's convolution `fails`."""
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    short, ops = torch.get_autocast_dtype("cpu"), torch.ops.mkldnn
    known = ops._is_mkldnn_bf16_supported() if short == torch.bfloat16 else ops._is_mkldnn_fp16_supported()
    return None if known and not fails else short


class _ByPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return torch.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wanted_x, wanted_weight = (is_wanted(node) for node, _ in ctx.next_functions[:2])
        batched = torch._C._functorch.is_legacy_batchedtensor(gradient)  # grad(is_grads_batched=True)
        by_patches = wanted_weight and not batched and not torch.is_grad_enabled()  # else PyTorch's own
        geometry = ([ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1)  # the last four are the defaults
        wanted = [wanted_x, wanted_weight and not by_patches, False]
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(gradient, x, weight, None, *geometry, wanted)
        if by_patches:
            of_weight = weight_gradient(x, gradient, weight.shape[2], ctx.stride, ctx.padding)
        return of_x, of_weight, None, None


def is_wanted(node: Any) -> bool:
    """Whether this backward pass will reach a node (`ctx.needs_input_grad`: whether one could)."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf among the inputs of torch.autograd.grad
        return True


def weight_gradient(x: Tensor, gradient: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """patches(x)^T gradient, summed over images and positions; `gradient` is that of the output."""
    count, channels, height, width = x.shape
    outputs, rows, columns = gradient.shape[1:]
    length = kernel * kernel * channels
    images = min(count, max(1, PATCH_BYTES // (rows * columns * length * x.element_size())))
    padded = x.new_zeros(images, height + 2 * padding, width + 2 * padding, channels)  # channels last
    inner = padded[:, padding : padding + height, padding : padding + width]
    patches = x.new_empty(images, rows, columns, kernel, kernel, channels)
    image, row, column, channel = padded.stride()
    views = padded.as_strided(patches.shape, (image, stride * row, stride * column, row, column, channel))
    result = x.new_zeros(length, outputs)
    some = torch.split(x.permute(0, 2, 3, 1), images)
    above = torch.split(gradient.permute(0, 2, 3, 1).reshape(-1, outputs), images * rows * columns)
    for part, gradient_part in zip(some, above, strict=True):
        if len(part) < images:  # the last ones
            inner, patches, views = inner[: len(part)], patches[: len(part)], views[: len(part)]
        inner.copy_(part)
        patches.copy_(views)
        torch.addmm(result, patches.view(-1, length).T, gradient_part, out=result)
    return result.view(kernel, kernel, channels, outputs).permute(3, 2, 0, 1)
