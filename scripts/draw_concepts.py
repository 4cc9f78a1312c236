"""Draw the two pictures of docs/concepts.md: an attack on real images, and the cost of each epoch of some methods.

.venv/bin/python scripts/draw_concepts.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

import moatlab
from moatlab.attacks import pgd
from moatlab.report.plots import COLOURS

ROOT = Path(__file__).parent.parent
EPS = 16 / 255
STAGE_COLOURS = {"mixup": COLOURS[2], "fast": COLOURS[4], "fgsm": COLOURS[4], "pgd": COLOURS[0]}


def draw_attack(path: Path) -> None:
    """Three test images of mini, the PGD-7 perturbation, and the adversarial images."""
    model = moatlab.load(ROOT / "tests/fixtures/mini_moat2.safetensors")
    images = moatlab.load_images("mini")
    x, y = images.test_x.permute(0, 3, 1, 2) / 255, images.test_y
    found = pgd(model, x[:300], y[:300], eps=EPS, step_size=EPS / 4, steps=7)
    with torch.no_grad():
        before, after = model(x[:300]).argmax(1), model(found).argmax(1)
    chosen = [i for i in range(300) if before[i] == y[i] != after[i]][:3]

    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots(len(chosen), 3)
    axes[0, 0].set_title("the image", fontsize=10)
    axes[0, 1].set_title("what is added, times 4", fontsize=10)
    axes[0, 2].set_title("the sum", fontsize=10)
    for row, i in zip(axes, chosen, strict=True):
        pictures = [x[i], 0.5 + 4 * (found[i] - x[i]), found[i]]
        captions = [images.classes[before[i]], "at most 16/255 a channel", images.classes[after[i]]]
        for place, picture, caption in zip(row, pictures, captions, strict=True):
            place.imshow(picture.permute(1, 2, 0).clamp(0, 1).numpy())
            place.set_xlabel(caption, fontsize=10)
            place.set_xticks([])
            place.set_yticks([])
    figure.savefig(path, dpi=110)


def draw_stages(path: Path, epochs: int = 21) -> None:
    """The planned passes of each epoch."""
    methods = ["fgsm", "moat:2", "imoat:2,5,8", "pgd:7"]
    figure = Figure(figsize=(7, 5), layout="constrained")
    for place, spec in zip(figure.subplots(len(methods), 1, sharex=True, sharey=True), methods, strict=True):
        method = moatlab.parse_method(spec)
        stages = [method.stage_at(epoch, epochs) for epoch in range(epochs)]
        place.bar(
            range(1, epochs + 1), [stage.step_cost.passes for stage in stages],
            color=[STAGE_COLOURS[stage.name] for stage in stages],
        )  # fmt: skip
        place.set_ylim(0, 9)
        place.set_title(f"{spec}: {method.cost(epochs).passes:g} passes", fontsize=10, loc="left")
        place.spines[["top", "right"]].set_visible(False)
    place.set_xlabel("epoch: green benign (mixup), yellow one step, red several steps")
    figure.supylabel("passes of the epoch", fontsize=10)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    pictures = ROOT / "docs" / "pictures"
    draw_attack(pictures / "attack.png")
    draw_stages(pictures / "stages.png")
