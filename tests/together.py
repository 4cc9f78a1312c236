"""What two processes do in the tests: `torchrun ... -m together FOLDER DATA`. One process does it by itself."""

import sys
from pathlib import Path

from moatlab.evaluation.card import evaluate_target
from moatlab.evaluation.target import load_target
from moatlab.runtime import distributed
from moatlab.training.api import train_recipe as train
from moatlab.training.recipe import make_recipe

STAGES = "moat:2", "imoat:1,2,3", "standard | cutmix | nfgsm", "fgsm | kim | gradalign:0.5"


def everything(folder, data):
    distributed.connect()
    for kind in ("in_double", "in_single"):
        for number, method in enumerate(STAGES):
            recipe = make_recipe(
                method, preset="mini", data=str(data), model=f"models_for_tests:{kind}", epochs=3, batch_size=12,
                holdout=0, augment=True, lr=0.05,
            )  # fmt: skip
            train(recipe, folder / f"{kind}-{number}")
        run = folder / f"{kind}-0"
        target = load_target(run, trust_model_code=True)
        evaluate_target(target, attacks=["clean", "pgd50", "apgd-ce"], save_adversarial=True)


if __name__ == "__main__":
    everything(Path(sys.argv[1]), Path(sys.argv[2]))
