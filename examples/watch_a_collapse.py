# %% [markdown]
# # Watch a model collapse, and heal it
#
# Single-step adversarial training is cheap, but it can fail abruptly: from one epoch to the next robustness is gone,
# while training accuracy looks excellent (catastrophic overfitting). Here a small network is trained with FGSM on the
# embedded images, its collapse is plotted, and a second run is healed. Six to eight minutes on two cores.

# %%
import json

import matplotlib.pyplot as plt

import moatlab

sick = moatlab.train(
    "preact_resnet18", "mini", method="fgsm", epochs=21, out="runs/sick", resume=True
)
print(f"collapsed at epoch {sick.record.collapsed_at}; on the test images: {sick.record.final}")

# %% [markdown]
# After each epoch the monitor attacks images that the run does not train on: with one step (`fgsm`, as in training) and
# with seven small ones (`pgd7`). A robust model loses slightly more accuracy to seven steps. This one loses all of it,
# while its accuracy against one step keeps rising.


# %%
def watched(run):
    """The monitor's measurements: one line of metrics.jsonl per epoch."""
    return [
        json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()
    ]


def draw(run, title):
    lines = watched(run)
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in ("clean", "fgsm", "pgd7"):
        left.plot(
            [line["epoch"] for line in lines],
            [100 * line[name] for line in lines],
            marker=".",
            label=name,
        )
    left.set(
        title=title, xlabel="epoch", ylabel="accuracy on held-out images, %", ylim=(0, None)
    )
    left.legend()
    right.plot(
        [line["epoch"] for line in lines],
        [line["alignment"] for line in lines],
        marker=".",
        color="black",
    )
    right.set(title="cosine of the gradients at x and nearby", xlabel="epoch", ylim=(0, 1))
    plt.show()


draw(sick, "fgsm")

# %% [markdown]
# The right-hand plot shows why. Near 1, the loss is almost linear around an image, and one step along the gradient is
# as good as several. Near 0, the gradient at the image does not predict the gradient nearby: the network has curved its
# loss so that a single step ends where the loss is low.
#
# The monitor raises an alarm if both signs occur together. By default it prints a warning and training continues. With
# `on_collapse="heal"` the next epochs are multi-step (`pgd:2`) until robustness is back; then single steps resume
# (after a second collapse, all remaining epochs are multi-step).

# %%
healed = moatlab.train(
    "preact_resnet18",
    "mini",
    method="fgsm",
    epochs=21,
    on_collapse="heal",
    out="runs/healed",
    resume=True,
)
for line in (healed.folder / "events.jsonl").read_text().splitlines():
    print(json.loads(line)["message"])
passes, extra = healed.record.counted["passes"], healed.record.healing["passes"]
print(f"{passes:g} passes, {extra:g} of them for healing; {healed.record.final}")

# %%
draw(healed, "fgsm, healed")

# %% [markdown]
# PGD-7 is a quick check. How robust are the two models to stronger attacks?

# %%
images = moatlab.load_images("mini")
for name, run in {"sick": sick, "healed": healed}.items():
    result = moatlab.evaluate(
        run.model,
        images.test_x[:200],
        images.test_y[:200],
        attacks=["fgsm", "pgd50", "aa"],
        eps=16 / 255,
    )
    print(name, {attack: f"{100 * value:.1f} %" for attack, value in result.accuracy.items()})
    for flag in result.flags:
        print(f"   {flag.name}: {flag.evidence}")
