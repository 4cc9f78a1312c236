# %% [markdown]
# # Make your own classifier robust, on a budget
#
# You have a network, images and a budget: a number of passes over your training set. How much robustness does it buy?
# Here the network is a small custom one and the images are tensors. About eight minutes on two cores.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

import moatlab

mini = moatlab.load_images("mini")  # use your own here: bytes (N, H, W, C), and labels
train, test = (mini.train_x, mini.train_y), (mini.test_x[:500], mini.test_y[:500])
print(train[0].shape, train[0].dtype)


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, len(mini.classes)),
    )


# %% [markdown]
# ## What does it cost?
#
# A pass is one forward and one backward over the training set. The cost of a method is known before it runs, so the
# budget sets the number of epochs. A cycle should end with its last stage: its epochs are a multiple of three.

# %%
BUDGET = 42
METHODS = ["standard", "fast", "imoat:1,2,3", "pgd:7"]
epochs = {}
for spec in METHODS:
    method = moatlab.parse_method(spec)
    step = len(method.slots)
    affordable = [n for n in range(step, 100, step) if method.cost(n).passes <= BUDGET]
    epochs[spec] = max(affordable)
    print(f"{spec:<12} {epochs[spec]:>3} epochs  {method.cost(epochs[spec]).passes:>4g} passes")

# %% [markdown]
# ## Train
#
# One call per method. If a run is stopped, the same call resumes it (`resume=True`).

# %%
runs = {
    spec: moatlab.train(
        network(),
        (train, test),
        method=spec,
        epochs=epochs[spec],
        eps="8/255",
        lr=0.1,
        holdout=500,
        out=f"runs/budget_{spec.replace(':', '-').replace(',', '-')}",
        resume=True,
    )
    for spec in METHODS
}
for spec, run in runs.items():
    counted, collapsed = run.record.counted["passes"], run.record.collapsed_at
    print(f"{spec:<12} {counted:>4g} passes counted, collapsed: {collapsed}")

# %% [markdown]
# ## What did it buy?
#
# AutoAttack on the first 200 test images, at three radii. Radius 0 is clean accuracy.

# %%
x, y = test[0][:200], test[1][:200]
_, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for spec, run in runs.items():
    results = {
        eps: moatlab.evaluate(run.model, x, y, attacks=["aa"], eps=eps / 255)
        for eps in (4, 8, 12)
    }
    accuracy = [
        results[4].accuracy["clean"],
        *(result.accuracy["aa"] for result in results.values()),
    ]
    print(f"{spec:<12}", "  ".join(f"{100 * value:5.1f} %" for value in accuracy))
    axes.plot(
        [0, 4, 8, 12],
        [100 * value for value in accuracy],
        marker="o",
        label=f"{spec}, {epochs[spec]} epochs",
    )
axes.set(xlabel="eps times 255", ylabel="accuracy under AutoAttack, %", ylim=(0, None))
axes.legend()
plt.show()

# %% [markdown]
# (`standard` may be reported as collapsed above: it has no robustness to lose.) With 200 images and one seed,
# differences of five points mean little, and the three adversarial methods are about that close here. They differ in
# risk: `fast` collapses with some seeds and not with others, and the monitor reports it.
#
# Each run folder has the model, recipe and metrics. It knows the network by its class only; to use `moat eval`, `moat
# report` or `moat export` later, put the network into a file and name it: `moatlab.train("mynet:build", ...)`.
