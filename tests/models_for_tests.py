"""Small models that tests bring along as a user would, by `--model models_for_tests:NAME`."""

import os
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

FIXTURES = Path(__file__).parent / "fixtures"  # two small models trained on mini: moat:2, and fgsm, which collapsed

CALLS = Counter()  # what `counted` really saw


class CountGradient(torch.autograd.Function):
    """The identity; counts gradients that reach an input, and gradients of those gradients."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        CALLS["input_backwards"] += 1
        return CountSecondGradient.apply(gradient)


class CountSecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, gradient):
        return gradient.clone()

    @staticmethod
    def backward(_ctx, gradient):
        CALLS["double_backwards"] += 1
        return gradient


class Counted(nn.Module):
    """A small convolutional network that counts its own calls, with nothing from the trainer."""

    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=4)
        self.bn = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, num_classes)
        self.linear.weight.register_post_accumulate_grad_hook(self.count_weights)

    @staticmethod
    def count_weights(_parameter):
        CALLS["weight_backwards"] += 1

    def forward(self, x):
        CALLS["forwards"] += 1
        x = CountGradient.apply(x) if x.requires_grad else x
        return self.linear(torch.nn.functional.silu(self.bn(self.conv(x))).mean((2, 3)))


def counted(num_classes):
    CALLS.clear()
    return Counted(num_classes)


def with_dropout(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, num_classes))


class Linear(nn.Module):
    """logits = W x, so that every gradient is known in closed form."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x):
        return x.flatten(1) @ self.weight.T


def small_network(classes=3, channels=3):
    """For 4x4 images. Convolution, BatchNorm, a smooth bend: what second derivatives and modes can go wrong on."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Softplus(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


class WithoutBatchNorm(nn.Module):
    """What several processes train to the same weights as one."""

    def __init__(self, num_classes, dtype):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, num_classes),
        ).to(dtype)  # fmt: skip

    def forward(self, x):
        return self.net(x.to(self.net[0].weight.dtype))


def in_double(num_classes):
    return WithoutBatchNorm(num_classes, torch.float64)


def in_single(num_classes):
    return WithoutBatchNorm(num_classes, torch.float32)


class Slow(Counted):
    """Time to be killed in."""

    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)


def slow(num_classes):
    return Slow(num_classes)


class FailsInTheSecond(Counted):
    """Well for an epoch and a bit; then the second of several processes fails."""

    calls = 0

    def forward(self, x):
        if torch.is_grad_enabled() and self.training:
            FailsInTheSecond.calls += 1
            if FailsInTheSecond.calls > 12 and os.environ.get("RANK") == "1":
                raise RuntimeError("out of luck")
        return super().forward(x)


def fails_in_the_second(num_classes):
    return FailsInTheSecond(num_classes)


def network(classes=5, side=8, seed=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.SiLU(), nn.Flatten(), nn.Linear(8 * (side // 2) ** 2, classes),
    ).eval()  # fmt: skip


def images(count, model, side=8, seed=4):
    """Images with the labels that the model gives them, but for one wrong one."""
    torch.manual_seed(seed)
    x = torch.rand(count, 3, side, side)
    y = model(x.to(next(model.parameters()))).argmax(1)
    y[0] = (y[0] + 1) % model(x[:1].to(next(model.parameters()))).shape[1]
    return x, y


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def as_onnx(folder, *, side=4, classes=4, batch="n", weights=None, seed=0):
    """The file `model.onnx`: logits = W x."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    drawn = np.random.default_rng(seed).normal(size=(3 * side**2, classes)).astype("float32")
    weights = weights or numpy_helper.from_array(drawn, "w")
    nodes = helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], ["logits"])
    ends = ("x", [batch, 3, side, side]), ("logits", [batch, classes])
    places = [[helper.make_tensor_value_info(end, TensorProto.FLOAT, shape)] for end, shape in ends]
    graph = helper.make_graph(nodes, "linear", *places, [weights])
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (folder / "model.onnx").write_bytes(content.SerializeToString())
    return folder / "model.onnx"
