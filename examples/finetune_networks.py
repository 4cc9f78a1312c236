"""Two small networks in the style of those pretrained on ImageNet, for images of 16x16 pixels in [0, 1].

    cd examples
    moat train standard --data big.npz --model finetune_networks:vit --optimizer adamw --schedule cosine --out big
    moat train moat:2 --model finetune_networks:vit --init big --optimizer adamw --schedule cosine --eps-warmup 6

docs/results/finetune.md compares this with training from scratch.
"""

import torch
from torch import Tensor, nn

MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)  # of CIFAR-10


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(numbers).view(1, 3, 1, 1) for numbers in (MEAN, STD))
        return (x - mean) / std


class ViT(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021) with pre-norm blocks and the mean of all patches as feature."""

    def __init__(
        self, num_classes: int, *, patch: int = 4, dim: int = 64, depth: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.normalize = Normalize()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (16 // patch) ** 2, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, 2 * dim, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(self.normalize(x)).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut (He et al., 2016)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        return (self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())) + self.shortcut(x)).relu()


def vit(num_classes: int) -> nn.Module:
    return ViT(num_classes)


def resnet(num_classes: int, width: int = 32) -> nn.Module:
    """ResNet-18 with the stem for ImageNet: 7x7 with stride 2, then a 3x3 max pool, which leave 4x4 of 16x16 pixels."""
    stem = (
        nn.Conv2d(3, width, 7, 2, 3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    )
    sizes = [
        (width, width, 1),
        (width, 2 * width, 2),
        (2 * width, 4 * width, 2),
        (4 * width, 8 * width, 2),
    ]
    blocks = [
        Block(a, b, s) for start, b, stride in sizes for a, s in ((start, stride), (b, 1))
    ]
    head = nn.Linear(8 * width, num_classes)
    return nn.Sequential(
        Normalize(), *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head
    )
