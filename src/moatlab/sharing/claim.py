"""A claim for RobustBench's leaderboard: the entry for its model zoo, and the text of the issue "[New Model] ...". What
is not known, or does not meet RobustBench's rules, is listed in the issue as missing."""

from typing import Any

from moatlab.attacks.norms import Threat
from moatlab.data.loading import KNOWN_SIZES
from moatlab.evaluation.card import Card

BOARDS = {("cifar10", "linf"): "8/255", ("cifar10", "l2"): "0.5", ("cifar100", "linf"): "8/255"}  # with their eps
THREATS = {"linf": "Linf", "l2": "L2"}
ENTRY = """\
# For robustbench/model_zoo/{data}.py. Replace NAME by author, year and first word of the title, such as
# Rice2020Overfitting, and GDRIVE_ID by the id of model.pt on Google Drive.


class NAMENet(PreActResNet):
    def __init__(self):
        super().__init__({block}, {layers}, num_classes={classes}, bn_before_fc={final_norm})
        self.register_buffer("mu", torch.zeros(1, 3, 1, 1))
        self.register_buffer("sigma", torch.ones(1, 3, 1, 1))

    def forward(self, x):
        return super().forward((x - self.mu) / self.sigma)


# An item of the models of {threat}:
entry = ("NAME", {{"model": NAMENet, "gdrive_id": "GDRIVE_ID"}})
"""
ISSUE = """\
Title: [New Model] NAME

{missing}
# Paper Information

- **Paper Title**: (yours)
- **Paper URL**: (yours)
- **Paper authors**: (yours)

# Leaderboard Claim(s)

## Model 1

- **Architecture**: {architecture}
- **Dataset**: {data}
- **Threat Model**: {threat}
- **eps**: {eps}
- **Clean accuracy**: {clean}
- **Robust accuracy**: {robust}
- **Additional data**: {additional}
- **Evaluation method**: {evaluation}
- **Checkpoint and code**: (the address of model.pt); trained with moatlab, `{method}`

# Model Zoo:

- [ ] I want to add my models to the Model Zoo (check if true)
- [ ] I use an architecture that is **not** included in the model zoo (it is included: `PreActResNet`)
- [ ] I agree to release my model(s) under MIT license (check if true) **OR**
- [ ] I want my models to be released under a custom license, located here: (custom license URL here)
"""


def zoo_entry(description: dict[str, Any], block: str, layers: list[int]) -> str:
    return ENTRY.format(
        data=description["data"],
        block=block,
        layers=layers,
        classes=description["classes"],
        final_norm=description["arguments"]["final_norm"],
        threat=THREATS[description["norm"]],
    )


def issue_text(description: dict[str, Any], card: Card | None, architecture: str) -> str:
    results = card.results if card else {}
    clean, robust = (f"{100 * results[name].accuracy:.2f} %" if name in results else "" for name in ("clean", "aa"))
    lacking = what_is_missing(description, card)
    listed = "".join(f"- {one}\n" for one in lacking)
    images = f", on {card.data.images:,} test images" if card else ""
    return ISSUE.format(
        missing=f"Before you submit this, delete this list. Missing or to be checked:\n\n{listed}",
        architecture=architecture,
        data=description["data"],
        threat=THREATS[description["norm"]],
        eps=Threat.of(description["eps"], description["norm"]).text,
        clean=clean or "(missing)",
        robust=robust or "(missing)",
        additional=f"(unknown: training started from {init})" if (init := description.get("init")) else "false",
        evaluation=f"AutoAttack, standard version, in moatlab{images}" if robust else "(missing)",
        method=description["method"],
    )


def what_is_missing(description: dict[str, Any], card: Card | None) -> list[str]:
    """What RobustBench asks for and the export can't fill in."""
    data, threat = description["data"], Threat.of(description["eps"], description["norm"])
    lacking = ["the name of the model, and title, address and authors of your paper", "the address of model.pt"]
    board = BOARDS.get((data, description["norm"]))
    if board is None:
        lacking.append(f"RobustBench has no leaderboard for {data} in {THREATS[description['norm']]}")
    elif Threat.of(board, description["norm"]).eps != threat.eps:
        lacking.append(f"RobustBench's leaderboard is at eps {board}; this model is for eps {threat.text}")
    if description.get("init"):
        lacking.append(f"whether the weights that training started from ({description['init']}) saw additional data")
    if card is None:
        return [*lacking, "an evaluation: run `moat eval RUN --attacks aa` and export again"]
    everything = KNOWN_SIZES[data][1]
    if "aa" not in card.results:
        lacking.append("AutoAttack: run `moat eval RUN --attacks aa` and export again")
    if card.data.images < everything:
        lacking.append(f"an evaluation on all {everything:,} test images: {card.data.images:,} were used")
    if card.data.note:
        lacking.append(f"an evaluation on the official images; these differ: {card.data.note}")
    if card.subject.unfinished:
        lacking.append(f"the end of the training run: {card.subject.unfinished}")
    return lacking + [f"red flag {flag.name} ({flag.evidence}): {flag.meaning}" for flag in card.flags]
