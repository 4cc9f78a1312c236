"""MOAT in a Lightning module: the batch stage goes into `training_step`.

pip install lightning
python examples/lightning_module.py --epochs 6
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from plain_loop import small_network
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import moatlab


class RobustClassifier(lightning.LightningModule):
    def __init__(self, method: str, eps: float, classes: int) -> None:
        super().__init__()
        self.network = small_network(classes)
        self.method, self.eps, self.classes = moatlab.parse_method(method), eps, classes

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        stage = self.method.stage_at(self.current_epoch, self.trainer.max_epochs)
        x, target = moatlab.make_batch(
            self.network, *batch, stage, eps=self.eps, classes=self.classes
        )
        loss = F.cross_entropy(self(x), target)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="moat:2")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--images", type=int, default=5000)
    options = parser.parse_args()

    lightning.seed_everything(0)
    data = moatlab.load_images("mini")
    x = data.train_x[: options.images].permute(0, 3, 1, 2) / 255
    loader = DataLoader(
        TensorDataset(x, data.train_y[: options.images]), batch_size=128, shuffle=True
    )
    module = RobustClassifier(options.method, 8 / 255, len(data.classes))
    trainer = lightning.Trainer(
        max_epochs=options.epochs, logger=False, enable_checkpointing=False
    )
    trainer.fit(module, loader)

    result = moatlab.evaluate(
        module, data.test_x[:200], data.test_y[:200], attacks=["fgsm", "pgd50"], eps=8 / 255
    )
    print({name: round(value, 3) for name, value in result.accuracy.items()})


if __name__ == "__main__":
    main()
