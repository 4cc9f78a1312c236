"""ResNet-18 (He et al., 2016, "Deep residual learning"), without the early pooling, as usual for small images."""

import torch.nn.functional as F
from torch import Tensor, nn

from moatlab.models.convolution import Conv2d
from moatlab.models.preact_resnet import Activation, Channels, Normalize, first_convolution


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, activation: str) -> None:
        super().__init__()
        self.activation = Activation(activation)
        self.conv1 = Conv2d(inputs, outputs, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = Conv2d(outputs, outputs, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(Conv2d(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.activation(self.bn1(self.conv1(x)))
        return self.activation(self.bn2(self.conv2(inside)) + self.shortcut(x))  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    def __init__(
        self,
        *,
        classes: int,
        width: int = 64,
        stem: str = "3x3",
        activation: str = "relu",
        mean: Channels = (0.0, 0.0, 0.0),
        std: Channels = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.conv1 = first_convolution(len(mean), width, stem)
        self.bn1 = nn.BatchNorm2d(width)
        self.activation = Activation(activation)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = []
        for inputs, outputs, stride in zip(widths, widths[1:], (1, 2, 2, 2), strict=False):
            blocks += [Block(inputs, outputs, stride, activation), Block(outputs, outputs, 1, activation)]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.bn1(self.conv1(self.normalize(x))))
        return self.linear(F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))  # type: ignore[no-any-return]
