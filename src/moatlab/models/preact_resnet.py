"""PreAct ResNets (He et al., 2016, "Identity mappings"), in the four variants found in public code.

shortcut, final_norm     raw, yes: fast_adversarial      raw, no: GradAlign
                         activated, no: Kim et al.       activated, yes: Rice et al. (the default here)
"""

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.models.convolution import Conv2d
from moatlab.models.flops import STEMS

Channels: TypeAlias = Sequence[float]  # one number per channel
ACTIVATIONS = ("relu", "silu")


def first_convolution(inputs: int, outputs: int, stem: str) -> Conv2d:
    if stem not in STEMS:
        raise ValueError(f"stem must be one of {', '.join(STEMS)}")
    return Conv2d(inputs, outputs, *STEMS[stem])


class Normalize(nn.Module):
    """(x - mean) / std as the first layer, so that a model takes images in [0, 1] and eps is in pixels."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Channels, std: Channels) -> None:
        super().__init__()
        mean_, std_ = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / std_, persistent=False)
        self.register_buffer("shift", -mean_ / std_, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


class Activation(nn.Module):
    """ReLU or SiLU, then dropout at a rate that training sets."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if kind not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}")
        self.kind, self.dropout = kind, 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x, inplace=True) if self.kind == "relu" else F.silu(x)
        return F.dropout(x, self.dropout) if self.dropout and self.training else x


class PreActBlock(nn.Module):
    """Batch norm, activation and 3x3 convolution, twice; a bottleneck has three, of 1x1, 3x3 and 1x1."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, shortcut: str, bottleneck: bool, activation: str
    ) -> None:
        super().__init__()
        self.activation = Activation(activation)
        inside = outputs // 4 if bottleneck else outputs
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = Conv2d(inputs, inside, 1) if bottleneck else Conv2d(inputs, inside, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv2 = Conv2d(inside, inside, 3, stride if bottleneck else 1, padding=1)
        if bottleneck:
            self.bn3 = nn.BatchNorm2d(inside)
            self.conv3 = Conv2d(inside, outputs, 1)
        self.bottleneck, self.shortcut_sees_activation = bottleneck, shortcut == "activated"
        # oneDNN's weight gradient of a strided 1x1 convolution of few channels overruns its buffers (fewer than 8 in
        # PyTorch 2.13 with AVX2), so there the input is sliced instead. Elsewhere the strided convolution is faster.
        self.sliced = stride if inputs < 16 else 1
        changes_shape = stride != 1 or inputs != outputs
        self.shortcut = Conv2d(inputs, outputs, 1, stride // self.sliced) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        activation = self.activation(self.bn1(x))
        if self.shortcut is not None:
            x = activation if self.shortcut_sees_activation else x
            x = self.shortcut(x[:, :, :: self.sliced, :: self.sliced] if self.sliced > 1 else x)
        inside = self.conv2(self.activation(self.bn2(self.conv1(activation))))
        if self.bottleneck:
            inside = self.conv3(self.activation(self.bn3(inside)))
        return x + inside  # type: ignore[no-any-return]


class PreActResNet(nn.Module):
    """Stages of blocks; each stage but the first halves the image and doubles the channels. `layers` are the blocks per
    stage, `first` the channels before the first (`width` by default), `stem` the first convolution. Three stages and
    few first channels make a WideResNet (Zagoruyko and Komodakis, 2016)."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        classes: int,
        bottleneck: bool = False,
        first: int | None = None,
        width: int = 64,
        stem: str = "3x3",
        shortcut: str = "activated",
        final_norm: bool = True,
        activation: str = "relu",
        mean: Channels = (0.0, 0.0, 0.0),
        std: Channels = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        channels = first or width
        self.conv1 = first_convolution(len(mean), channels, stem)
        blocks = []
        for stage, count in enumerate(layers):
            outputs = width * 2**stage * (4 if bottleneck else 1)
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(PreActBlock(channels, outputs, stride, shortcut, bottleneck, activation))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels) if final_norm else None
        self.activation = Activation(activation)
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv1(self.normalize(x)))
        if self.bn is not None:
            x = self.activation(self.bn(x))
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


PreActResNet18 = partial(PreActResNet, (2, 2, 2, 2))
