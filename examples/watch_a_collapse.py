# %% [markdown]
# # Watch a model collapse, and heal it
#
# Single-step adversarial training is cheap, and it fails in a peculiar way: from one epoch to the next robustness is
# gone, while the training numbers look splendid. Here a small network is trained on the embedded images with FGSM, we
# look at what happened, and train it once more with a nurse at its side. Six to eight minutes on two cores.

# %%
import json

import matplotlib.pyplot as plt

import moatlab

sick = moatlab.train("preact_resnet18", "mini", method="fgsm", epochs=21, out="runs/sick", resume=True)
print(f"collapsed at epoch {sick.record.collapsed_at}; on the test images: {sick.record.final}")

# %% [markdown]
# After each epoch the monitor attacks images that the run does not train on: by one step (`fgsm`, what it was trained
# against) and by seven small ones (`pgd7`). A robust model loses a little more to the seven. This one loses everything
# to them, and at the same time becomes better and better against the one.


# %%
def watched(run):
    """What the monitor saw: one line of metrics.jsonl for each epoch."""
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


def draw(run, title):
    lines = watched(run)
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in ("clean", "fgsm", "pgd7"):
        left.plot([line["epoch"] for line in lines], [100 * line[name] for line in lines], marker=".", label=name)
    left.set(title=title, xlabel="epoch", ylabel="accuracy on held-out images, %", ylim=(0, None))
    left.legend()
    right.plot([line["epoch"] for line in lines], [line["alignment"] for line in lines], marker=".", color="black")
    right.set(title="cosine of the gradients at x and nearby", xlabel="epoch", ylim=(0, 1))
    plt.show()


draw(sick, "fgsm")

# %% [markdown]
# The right-hand plot says why. Near 1, the loss is straight around an image, and one step along the gradient is as good
# as several. Near 0 the gradient at the image says nothing about the gradient a little further on: the network
# has bent its loss so that the single step ends in a hollow.
#
# The monitor raises an alarm where both signs come together. By default it says so and goes on. With
# `on_collapse="heal"` the next epochs are multi-step ones (`pgd:2`), until robustness is back; then single steps go on
# (and after a second collapse, multi-step epochs to the end).

# %%
healed = moatlab.train(
    "preact_resnet18", "mini", method="fgsm", epochs=21, on_collapse="heal", out="runs/healed", resume=True
)
for line in (healed.folder / "events.jsonl").read_text().splitlines():
    print(json.loads(line)["message"])
extra = healed.record.healing["passes"]
print(f"{healed.record.counted['passes']:g} passes, {extra:g} of them for healing; {healed.record.final}")

# %%
draw(healed, "fgsm, healed")

# %% [markdown]
# PGD-7 is a quick look. What do the two hold against a thorough attack?

# %%
images = moatlab.load_images("mini")
for name, run in {"sick": sick, "healed": healed}.items():
    result = moatlab.evaluate(
        run.model, images.test_x[:200], images.test_y[:200], attacks=["fgsm", "pgd50", "aa"], eps=16 / 255
    )
    print(name, {attack: f"{100 * value:.1f} %" for attack, value in result.accuracy.items()})
    for flag in result.flags:
        print(f"   {flag.name}: {flag.evidence}")
