"""Floating-point operations of the built-in networks, computed from their shapes, so that a plan needs no torch."""

STEMS = {"3x3": (3, 1, 1), "4x4s2": (4, 2, 1), "7x7s4": (7, 4, 2)}  # first convolution: kernel, stride, padding
# Blocks per stage, whether they are bottlenecks, and the channels before the first (None: the width).
SHAPES: dict[str, tuple[tuple[int, ...], bool, int | None]] = {
    "preact_resnet18": ((2, 2, 2, 2), False, None),
    "preact_resnet34": ((3, 4, 6, 3), False, None),
    "preact_resnet50": ((3, 4, 6, 3), True, None),
    "resnet18": ((2, 2, 2, 2), False, None),
    "wide_resnet28_10": ((4, 4, 4), False, 16),
    "wide_resnet34_10": ((5, 5, 5), False, 16),
}


def stem_for(side: int) -> str:
    """The stem that gives the blocks of a ResNet 24 to 56 positions per side."""
    return "3x3" if side <= 48 else "4x4s2" if side <= 96 else "7x7s4"


def built_in_flops(name: str, *, width: int, stem: str, shape: tuple[int, int, int], classes: int) -> int | None:
    """Of a forward on one image of shape (C, H, W): two per multiply-add; None for a user's own network."""
    if name not in SHAPES:
        return None
    layers, bottleneck, first = SHAPES[name]
    channels, *sides = shape
    kernel, stride, padding = STEMS[stem_for(min(sides)) if stem == "auto" else stem]
    sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
    start = first or width
    total = start * channels * kernel**2 * sides[0] * sides[1]
    channels = start
    for stage, count in enumerate(layers):
        outputs = width * 2**stage * (4 if bottleneck else 1)
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            before = sides[0] * sides[1]
            sides = [(side - 1) // stride + 1 for side in sides]
            after = sides[0] * sides[1]
            if bottleneck:
                inside = outputs // 4
                total += channels * inside * before + 9 * inside**2 * after + inside * outputs * after
            else:
                total += 9 * (channels + outputs) * outputs * after
            total += channels * outputs * after if stride > 1 or channels != outputs else 0
            channels = outputs
    return 2 * (total + channels * classes)
