"""MOAT with the Trainer of Hugging Face's transformers: the batch stage goes into `compute_loss`.

pip install transformers accelerate
python examples/hugging_face_trainer.py --epochs 6
"""

import argparse
from typing import Any

import torch.nn.functional as F
from plain_loop import small_network
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

import moatlab


class Pictures(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {"pixel_values": self.x[number].permute(2, 0, 1) / 255, "labels": self.y[number]}


class LogitsOf(nn.Module):
    """Models of transformers take `pixel_values` by name; attacks need a module from images to logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor:  # noqa: ARG002 (required by Trainer)
        return self.network(pixel_values)


class RobustTrainer(Trainer):
    def __init__(self, *, method: str, eps: float, classes: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.method, self.eps, self.classes = moatlab.parse_method(method), eps, classes

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], **_others: Any
    ) -> Tensor:
        epochs = int(self.args.num_train_epochs)
        stage = self.method.stage_at(min(int(self.state.epoch or 0), epochs - 1), epochs)
        x, target = moatlab.make_batch(
            model,
            inputs["pixel_values"],
            inputs["labels"],
            stage,
            eps=self.eps,
            classes=self.classes,
        )
        return F.cross_entropy(model(x), target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="moat:2")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--out", default="runs/hugging_face")
    options = parser.parse_args()

    set_seed(0)
    data = moatlab.load_images("mini")
    model = LogitsOf(small_network(len(data.classes)))
    arguments = TrainingArguments(
        output_dir=options.out,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=128,
        learning_rate=0.05,
        optim="sgd",
        optim_args="momentum=0.9",
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    pictures = Pictures(data.train_x[: options.images], data.train_y[: options.images])
    RobustTrainer(
        method=options.method,
        eps=8 / 255,
        classes=len(data.classes),
        model=model,
        args=arguments,
        train_dataset=pictures,
    ).train()

    model.cpu()
    result = moatlab.evaluate(
        model, data.test_x[:200], data.test_y[:200], attacks=["fgsm", "pgd50"], eps=8 / 255
    )
    print({name: round(value, 3) for name, value in result.accuracy.items()})


if __name__ == "__main__":
    main()
