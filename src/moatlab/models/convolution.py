"""A convolution whose weight gradient is quick on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PATCH_BYTES = 5 * 2**20  # patches at a time: few enough to stay in a CPU's cache
FEWEST_CHANNELS = 64  # below, and for 1x1 kernels, oneDNN's own weight gradient is as quick


class Conv2d(nn.Conv2d):
    """`nn.Conv2d` (square, without bias): the same parameters and answers, only its weight gradient is computed by us.

    oneDNN's is the slowest part of a training step on an AVX2 machine: it runs at about half of the speed of a matrix
    product. As a matrix product over patches of the input it is 1.2 to 1.6 times as quick, and 3 times on 2x2 images.
    Under the transforms of torch.func it is PyTorch's own. So it is under autocast, unless the CPU can't multiply such
    short numbers: PyTorch's loop over them takes ten times as long as float32. There, weights and input are rounded to
    them, multiplied and added in float32, as hardware that can does it, and the sums rounded.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding, bias=False)
        self.by_patches = inputs >= FEWEST_CHANNELS and kernel > 1

    def forward(self, x: Tensor) -> Tensor:
        short = short_for_this_cpu(x)
        if short is not None:
            with torch.autocast("cpu", enabled=False):
                rounded, weight = (number.to(short).float() for number in (x, self.weight))
                return torch.conv2d(rounded, weight, None, self.stride, self.padding).to(short)
        trained = self.weight.requires_grad and torch.is_grad_enabled() and x.dim() == 4
        plain = not torch.is_autocast_enabled("cpu") and torch._C._functorch.peek_interpreter_stack() is None
        if self.by_patches and trained and plain and x.device.type == "cpu":
            return _ByPatches.apply(x, self.weight, self.stride[0], self.padding[0])  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(x)


def short_for_this_cpu(x: Tensor) -> torch.dtype | None:
    """The type that autocast asks for, where this CPU has no instructions for it."""
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
        return None
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    short = torch.get_autocast_dtype("cpu")
    known: bool = (
        torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if short == torch.bfloat16
        else torch.ops.mkldnn._is_mkldnn_fp16_supported()
    )
    return None if known else short


class _ByPatches(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding = stride, padding
        return torch.conv2d(x, weight, None, stride, padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wanted_x, wanted_weight = (asked_for(node) for node, _ in ctx.next_functions[:2])
        batched = torch._C._functorch.is_legacy_batchedtensor(gradient)  # by autograd.grad(..., is_grads_batched=True)
        # What is differentiated again is left to PyTorch, too.
        by_patches = wanted_weight and not torch.is_grad_enabled() and not batched
        of_x, of_weight, _ = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, [ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1,
            [wanted_x, wanted_weight and not by_patches, False],
        )  # fmt: skip
        if by_patches:
            of_weight = weight_gradient(x, gradient, weight.shape[2], ctx.stride, ctx.padding)
        return of_x, of_weight, None, None


def asked_for(node: Any) -> bool:
    """Whether the backward pass under way goes on to a node. `ctx.needs_input_grad` says only whether one could."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient torch.autograd.grad was asked for
        return True


def weight_gradient(x: Tensor, gradient: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
    """Of a convolution of x whose output has this gradient: patches^T gradient, summed over images and positions."""
    count, channels, height, width = x.shape
    outputs, rows, columns = gradient.shape[1:]
    length = kernel * kernel * channels
    images = min(count, max(1, PATCH_BYTES // (rows * columns * length * x.element_size())))
    padded = x.new_zeros(images, height + 2 * padding, width + 2 * padding, channels)  # channels last
    inner = padded[:, padding : padding + height, padding : padding + width]
    of_image, of_row, of_column, of_channel = padded.stride()
    patches = x.new_empty(images, rows, columns, kernel, kernel, channels)
    views = padded.as_strided(
        patches.shape, (of_image, stride * of_row, stride * of_column, of_row, of_column, of_channel)
    )
    matrix = patches.view(-1, length).T
    result = x.new_zeros(length, outputs)
    some = torch.split(x.permute(0, 2, 3, 1), images)
    above = torch.split(gradient.permute(0, 2, 3, 1).reshape(-1, outputs), images * rows * columns)
    for part, gradient_part in zip(some, above, strict=True):
        if len(part) < images:  # the last ones
            inner, patches, views = inner[: len(part)], patches[: len(part)], views[: len(part)]
            matrix = patches.view(-1, length).T
        inner.copy_(part)
        patches.copy_(views)
        torch.addmm(result, matrix, gradient_part, out=result)
    return result.view(kernel, kernel, channels, outputs).permute(3, 2, 0, 1)
