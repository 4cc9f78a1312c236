"""A stage of your own in ten lines: Gaussian noise instead of mixup, then MOAT's other two stages.

python examples/own_stage.py --epochs 6
"""

import argparse

import torch

import moatlab
from moatlab.methods.language import Argument


def noise(context, x, y, sigma):
    """Images with Gaussian noise of sigma / 255. Drawn from the context's generator: same seed, same bits."""
    drawn = torch.randn(x.shape, generator=context.generator, device=x.device)
    return (x + sigma / 255 * drawn).clamp(0, 1), y


sigmas = Argument("SIGMA", whole=False, low=0, high=255, default=8)
moatlab.add_stage("noise", noise, argument=sigmas)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--out", default="runs/own_stage")
    options = parser.parse_args()
    run = moatlab.train(
        "preact_resnet18",
        "mini",
        method="noise:16 | fast | pgd:2",
        epochs=options.epochs,
        width=8,
        out=options.out,
        max_steps=options.max_steps,
    )
    print(run.record.counted)


if __name__ == "__main__":
    main()
