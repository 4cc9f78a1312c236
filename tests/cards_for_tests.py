"""Cards as `moat eval` writes them, of models that never were: their verdicts give the accuracies asked for."""

from moatlab.evaluation.card import Card, Data
from moatlab.evaluation.red_flags import Measured, judge
from moatlab.evaluation.result import Cost, Evaluation, Settings, first_broken_by
from moatlab.evaluation.target import Subject

MEASURED = Measured(
    randomised=False,
    probabilities=False,
    labels=[0],
    sample=200,
    clean=0.8,
    zero_gradients=0.0,
    fgsm=0.5,
    pgd20={"at half of eps": 0.6, "at eps": 0.45, "at twice eps": 0.2},
    pgd20_at_half=0.0,
)


def a_card(name, *, images=200, eps="8/255", norm="linf", data="mini", precision="fp32", weights=None, **accuracy):
    """`a_card("one", clean=0.8, aa=0.3)`; attacks of names such as apgd-ce are written apgd_ce."""
    subject = {"model": "preact_resnet18", "file": None, "data": data, "sha256": f"of {name}", "weights": weights}
    accuracy = {attack.replace("_", "-"): round(images * share) for attack, share in accuracy.items()}
    clean = ["clean"] * (images - accuracy["clean"])
    broken_by = {}
    for attack, robust in accuracy.items():
        broken = clean + [attack] * (images - robust - len(clean))
        broken_by[attack] = broken + [None] * robust
    settings = Settings(
        attacks=list(accuracy),
        eps=eps,
        norm=norm,
        seed=0,
        images=images,
        audit=False,
        chunk_size=1000,
        batch_size=250,
        classes=10,
        precision=precision,
    )
    measured = MEASURED.model_copy(update={"labels": [images // 10] * 10})
    cost = {attack: Cost(forwards=1, gradients=1, seconds=1.0) for attack in accuracy}
    result = Evaluation(broken_by, cost, measured, settings)
    return Card(
        subject=Subject(name=name, **subject),
        data=Data(name=data, part="test", images=images, sha256=f"of {data}", note=None),
        settings=settings,
        results=result.results,
        all_attacks=result.all_attacks,
        flags=judge(measured, broken_by, "linf"),
        measured=measured,
        adversarial=None,
        environment={},
        first_broken_by=first_broken_by(broken_by),
        broken_by=broken_by,
    )


def ten_cards(folder):
    """Seven that can be compared, the last two of them flagged or without AutoAttack; and three measured otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    cards = [
        a_card(
            f"runs/model-{number}",
            **{"clean": 0.65 + 0.01 * number, "fgsm": 0.45, "pgd50": 0.37 - 0.01 * number, "aa": 0.34 - 0.01 * number},
        )
        for number in range(5)
    ]
    cards.append(a_card("runs/smoothed", clean=0.7, fgsm=0.55, pgd50=0.5, aa=0.3))
    cards.append(a_card("runs/quick", clean=0.72, fgsm=0.45, pgd50=0.36))
    cards.append(a_card("runs/model-0", images=1000, clean=0.66, fgsm=0.45, pgd50=0.36, aa=0.33))
    cards.append(a_card("runs/wide", eps="4/255", clean=0.7, fgsm=0.6, pgd50=0.55, aa=0.52))
    cards.append(a_card("runs/hundred", data="cifar100", clean=0.4, fgsm=0.25, pgd50=0.2, aa=0.18))
    paths = [folder / f"{number}.eval.json" for number in range(len(cards))]
    for card, path in zip(cards, paths, strict=True):
        card.write(path)
    return paths
