"""PreAct ResNets (He et al., 2016, "Identity mappings"), in the four variants that public code calls by that name.

shortcut, final_norm     raw, yes: fast_adversarial      raw, no: GradAlign
                         activated, no: Kim et al.       activated, yes: Rice et al. (the default here)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.models.convolution import Conv2d


class Normalize(nn.Module):
    """(x - mean) / std as the model's first layer, so that the model takes images in [0, 1] and eps means pixels."""

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        mean_, std_ = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
        self.register_buffer("scale", 1 / std_, persistent=False)
        self.register_buffer("shift", -mean_ / std_, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale)


class PreActBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = Conv2d(inputs, outputs, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut_sees_activation = shortcut == "activated"
        # oneDNN's weight gradient of a strided 1x1 convolution of few channels overruns its buffers (fewer than 8 in
        # PyTorch 2.13 with AVX2), so there the stride is taken by hand. Elsewhere the convolution's own is quicker.
        self.by_hand = stride if inputs < 16 else 1
        changes_shape = stride != 1 or inputs != outputs
        self.shortcut = Conv2d(inputs, outputs, 1, stride // self.by_hand) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        activation = F.relu(self.bn1(x), inplace=True)
        if self.shortcut is not None:
            x = activation if self.shortcut_sees_activation else x
            x = self.shortcut(x[:, :, :: self.by_hand, :: self.by_hand] if self.by_hand > 1 else x)
        return x + self.conv2(F.relu(self.bn2(self.conv1(activation)), inplace=True))  # type: ignore[no-any-return]


class PreActBottleneck(nn.Module):
    """Three convolutions, the outer two of 1x1; four times as many channels come out."""

    def __init__(self, inputs: int, outputs: int, stride: int, shortcut: str) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = Conv2d(inputs, outputs // 4, 1)
        self.bn2 = nn.BatchNorm2d(outputs // 4)
        self.conv2 = Conv2d(outputs // 4, outputs // 4, 3, stride, padding=1)
        self.bn3 = nn.BatchNorm2d(outputs // 4)
        self.conv3 = Conv2d(outputs // 4, outputs, 1)
        self.shortcut_sees_activation = shortcut == "activated"
        changes_shape = stride != 1 or inputs != outputs
        self.shortcut = Conv2d(inputs, outputs, 1, stride) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        activation = F.relu(self.bn1(x), inplace=True)
        if self.shortcut is not None:
            x = self.shortcut(activation if self.shortcut_sees_activation else x)
        inside = self.conv2(F.relu(self.bn2(self.conv1(activation)), inplace=True))
        return x + self.conv3(F.relu(self.bn3(inside), inplace=True))  # type: ignore[no-any-return]


class PreActResNet(nn.Module):
    """Stages of blocks; each stage but the first halves the image and doubles the channels.

    `layers` is the number of blocks in each stage, `stem` the channels before the first (`width` if not given). A
    WideResNet (Zagoruyko and Komodakis, 2016) is one with a narrow stem and three stages.
    """

    def __init__(
        self,
        layers: Sequence[int],
        *,
        classes: int,
        block: type[PreActBlock | PreActBottleneck] = PreActBlock,
        stem: int | None = None,
        width: int = 64,
        shortcut: str = "activated",
        final_norm: bool = True,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        channels = stem or width
        self.conv1 = Conv2d(len(mean), channels, 3, padding=1)
        blocks = []
        for stage, count in enumerate(layers):
            outputs = width * 2**stage * (4 if block is PreActBottleneck else 1)
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(channels, outputs, stride, shortcut))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels) if final_norm else None
        self.linear = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.conv1(self.normalize(x)))
        if self.bn is not None:
            x = F.relu(self.bn(x), inplace=True)
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


PreActResNet18 = partial(PreActResNet, (2, 2, 2, 2))
PreActResNet34 = partial(PreActResNet, (3, 4, 6, 3))
PreActResNet50 = partial(PreActResNet, (3, 4, 6, 3), block=PreActBottleneck)
WideResNet28 = partial(PreActResNet, (4, 4, 4), stem=16, width=160)
WideResNet34 = partial(PreActResNet, (5, 5, 5), stem=16, width=160)
