"""The built-in networks of moatlab in plain PyTorch, for the transformers library. `moat export --format hub` copies
this file next to the weights, so that it must not import moatlab.

    model = AutoModelForImageClassification.from_pretrained(FOLDER, trust_remote_code=True)
    logits = model(images).logits  # of float32 images (N, C, H, W) in [0, 1], not normalised
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

STEMS = {"3x3": (3, 1, 1), "4x4s2": (4, 2, 1), "7x7s4": (7, 4, 2)}  # first convolution: kernel, stride, padding
# Blocks per stage, whether they are bottlenecks, and the channels before the first (None: the width).
NETWORKS = {
    "preact_resnet18": ((2, 2, 2, 2), False, None),
    "preact_resnet34": ((3, 4, 6, 3), False, None),
    "preact_resnet50": ((3, 4, 6, 3), True, None),
    "resnet18": ((2, 2, 2, 2), False, None),
    "wide_resnet28_10": ((4, 4, 4), False, 16),
    "wide_resnet34_10": ((5, 5, 5), False, 16),
}
ACTIVATIONS = {"relu": F.relu, "silu": F.silu}


class MoatlabConfig(PretrainedConfig):
    model_type = "moatlab"

    def __init__(
        self,
        network: str = "preact_resnet18",
        width: int = 64,
        stem: str = "3x3",
        shortcut: str = "activated",
        final_norm: bool = True,
        activation: str = "relu",
        mean: tuple[float, ...] = (0.0, 0.0, 0.0),
        std: tuple[float, ...] = (1.0, 1.0, 1.0),
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.network, self.width, self.stem, self.activation = network, width, stem, activation
        self.shortcut, self.final_norm, self.mean, self.std = shortcut, final_norm, mean, std


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)


class PreActBlock(nn.Module):
    def __init__(self, config: MoatlabConfig, inputs: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        inside = outputs // 4 if bottleneck else outputs
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = conv(inputs, inside, 1) if bottleneck else conv(inputs, inside, 3, stride, padding=1)
        self.bn2 = nn.BatchNorm2d(inside)
        self.conv2 = conv(inside, inside, 3, stride if bottleneck else 1, padding=1)
        if bottleneck:
            self.bn3 = nn.BatchNorm2d(inside)
            self.conv3 = conv(inside, outputs, 1)
        self.shortcut = conv(inputs, outputs, 1, stride) if stride != 1 or inputs != outputs else None
        self.bottleneck, self.shortcut_sees_activation = bottleneck, config.shortcut == "activated"
        self.act = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        activation = self.act(self.bn1(x))
        if self.shortcut is not None:
            x = self.shortcut(activation if self.shortcut_sees_activation else x)
        inside = self.conv2(self.act(self.bn2(self.conv1(activation))))
        return x + (self.conv3(self.act(self.bn3(inside))) if self.bottleneck else inside)


class ResNetBlock(nn.Module):
    def __init__(self, config: MoatlabConfig, inputs: int, outputs: int, stride: int, _bottleneck: bool) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride, padding=1), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.act = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        inside = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(inside + self.shortcut(x))


class MoatlabForImageClassification(PreTrainedModel):
    config_class = MoatlabConfig
    main_input_name = "pixel_values"

    def __init__(self, config: MoatlabConfig) -> None:
        super().__init__(config)
        layers, bottleneck, first = NETWORKS[config.network]
        preact = config.network != "resnet18"
        channels = first or config.width
        self.conv1 = conv(len(config.mean), channels, *STEMS[config.stem])
        self.bn1 = None if preact else nn.BatchNorm2d(channels)
        blocks = []
        for stage, count in enumerate(layers):
            outputs = config.width * 2**stage * (4 if bottleneck else 1)
            for number in range(count):
                block = PreActBlock if preact else ResNetBlock
                blocks.append(block(config, channels, outputs, 2 if stage > 0 and number == 0 else 1, bottleneck))
                channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels) if preact and config.final_norm else None
        self.linear = nn.Linear(channels, config.num_labels)
        self.act = ACTIVATIONS[config.activation]
        self.post_init()

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None, **_: Any) -> ImageClassifierOutput:
        mean, std = (pixel_values.new_tensor(one).view(-1, 1, 1) for one in (self.config.mean, self.config.std))
        x = self.conv1(torch.addcmul(-mean / std, pixel_values, 1 / std))
        x = self.act(self.bn1(x)) if self.bn1 is not None else x
        x = self.blocks(x)
        x = self.act(self.bn(x)) if self.bn is not None else x
        logits = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return ImageClassifierOutput(loss=loss, logits=logits)
