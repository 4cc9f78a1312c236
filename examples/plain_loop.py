"""MOAT in your own PyTorch loop: one line makes the training batch of the epoch's stage.

python examples/plain_loop.py --epochs 6
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import moatlab


def small_network(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="moat:2")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=5000)
    options = parser.parse_args()

    torch.manual_seed(0)
    data = moatlab.load_images("mini")
    x = data.train_x[: options.images].permute(0, 3, 1, 2) / 255  # (N, C, H, W) in [0, 1]
    y = data.train_y[: options.images]
    model = small_network(len(data.classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    method = moatlab.parse_method(options.method)

    for epoch in range(options.epochs):
        stage = method.stage_at(epoch, options.epochs)
        for batch in torch.randperm(len(y)).split(128):
            images, target = moatlab.make_batch(
                model, x[batch], y[batch], stage, eps=8 / 255, classes=10
            )
            loss = F.cross_entropy(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}  {stage}  loss {loss.item():.3f}")

    result = moatlab.evaluate(
        model, data.test_x[:200], data.test_y[:200], attacks=["fgsm", "pgd50"], eps=8 / 255
    )
    print({name: round(value, 3) for name, value in result.accuracy.items()})


if __name__ == "__main__":
    main()
