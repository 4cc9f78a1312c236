# %% [markdown]
# # Audit a robustness claim
#
# A defence that needs no adversarial training: round each pixel to a few levels before the network sees it, so that
# small perturbations are rounded away. Its authors report that PGD finds almost nothing. Is that true? Three minutes on
# two cores.

# %%
import torch
from torch import nn

import moatlab
from moatlab.attacks import pgd

EPS = 8 / 255
images = moatlab.load_images("mini")
x, y = images.test_x[:200].permute(0, 3, 1, 2) / 255, images.test_y[:200]
plain = moatlab.train(
    "preact_resnet18", "mini", method="standard", epochs=6, out="runs/plain", resume=True
).model


class Rounded(nn.Module):
    """The claimed defence: eight levels per channel, then the network."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network((x * 7).round() / 7)


defended = Rounded(plain).eval()


# %% [markdown]
# ## The claim
#
# The attack of many papers: PGD without a random start, judged by its last point.


# %%
def accuracy(model, points):
    with torch.no_grad():
        return f"{100 * (model(points).argmax(1) == y).float().mean():.1f} %"


for name, model in {"undefended": plain, "defended": defended}.items():
    found = pgd(model, x, y, eps=EPS, step_size=EPS / 4, steps=20)
    print(f"{name + ':':<12} clean", accuracy(model, x), "  PGD-20", accuracy(model, found))

# %% [markdown]
# Nothing is lost at all, which is itself suspicious.
#
# ## The audit

# %%
result = moatlab.evaluate(defended, x, y, attacks=["fgsm", "pgd50", "aa"], eps=EPS)
for name, value in result.accuracy.items():
    print(f"{name:<6} {100 * value:5.1f} %")
for flag in result.flags:
    print(f"\nRED FLAG {flag.name}\n  {flag.evidence}\n  {flag.meaning}")

# %% [markdown]
# Rounding has a gradient of zero, so gradient attacks do not move. Square, the last attack of AutoAttack, uses no
# gradients and finds what the others missed. The red flags report this, and that the remaining accuracy may still be
# too high.
#
# ## What is the true robustness?
#
# Attack the network behind the rounding, which has gradients, and test the examples on the whole defence (the idea of
# BPDA; Athalye, Carlini and Wagner, 2018).

# %%
found = pgd(plain, x, y, eps=EPS, step_size=EPS / 4, steps=50)
assert (found - x).abs().max() <= EPS + 1e-6
print("defended, attacked around the rounding:", accuracy(defended, found))

# %% [markdown]
# An attack that knows the defence leaves far less than claimed. No evaluation is guaranteed to find such an attack: a
# card without flags is not a proof, and one with flags is a reason to look closer.
