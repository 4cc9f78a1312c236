"""What two processes do in the tests: `torchrun ... -m together FOLDER DATA`, which one process does by itself, too; or
`torchrun ... -m together refusals CASES`, where each command line must be refused by both."""

import json
import os
import sys
from pathlib import Path

from moatlab.cli.main import cli
from moatlab.evaluation.card import evaluate_target
from moatlab.evaluation.target import load_target
from moatlab.runtime import distributed
from moatlab.runtime.errors import UserError
from moatlab.training.api import train_recipe as train
from moatlab.training.making import make_recipe

STAGES = (
    *("moat:2", "imoat:1,2,3", "standard | cutmix | nfgsm", "fgsm | kim | gradalign:0.5"),
    *("trades:1 | mart:1 | elle", "liet | zerograd | gat", "free:3", "yopo:2,n=1", "auto:2,trust=1"),
)


def everything(folder, data):
    distributed.connect()
    for kind in ("in_double", "in_single"):
        for number, method in enumerate(STAGES):
            recipe = make_recipe(
                method, preset="mini", data=str(data), model=f"models_for_tests:{kind}", epochs=3, batch_size=12,
                holdout=0, augment=True, lr=0.05, average="ema",
            )  # fmt: skip
            train(recipe, folder / f"{kind}-{number}")
        run = folder / f"{kind}-0"
        target = load_target(run, trust_model_code=True)
        evaluate_target(target, attacks=["clean", "pgd50", "apgd-ce"], save_adversarial=True)


def refusals(cases):
    """Each command line in this process; prints rank, number of the case, and the sentence. The second process is in
    another folder."""
    if distributed.number() == 1:
        os.chdir("other")
    for number, arguments in enumerate(json.loads(cases.read_text())):
        try:
            cli.main(arguments, standalone_mode=False)
            sentence = "not refused"
        except UserError as error:
            sentence = str(error)
        line = json.dumps([distributed.number(), number, sentence]) + "\n"
        os.write(1, line.encode())  # whole, beside those of the other process


if __name__ == "__main__":
    if sys.argv[1] == "refusals":
        refusals(Path(sys.argv[2]))
    else:
        everything(Path(sys.argv[1]), Path(sys.argv[2]))
