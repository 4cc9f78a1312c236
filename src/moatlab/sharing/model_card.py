"""README.md of an exported model: metadata for model hubs, results with their conditions, and usage."""

import json
from typing import Any

from moatlab.attacks.norms import NORM_NAMES, Threat
from moatlab.evaluation.card import Card

METADATA = """\
library_name: moatlab
pipeline_tag: image-classification
tags:
- adversarial-robustness
- adversarial-training
- image-classification
- pytorch
datasets:
- {data}
"""
RESULTS = """\
model-index:
- name: {method}
  results:
  - task:
      type: image-classification
    dataset:
      name: {data}
      type: {data}
      split: test
    metrics:
"""
USE = {
    "safetensors": """\
```python
import moatlab

model = moatlab.load("model.safetensors"{trust})
logits = model(images)  # float32, (N, C, H, W) in [0, 1]
```
""",
    "hub": """\
```python
import moatlab

model = moatlab.load("hf_hub:{repo}"{trust})  # or the path of a local copy
logits = model(images)  # float32, (N, C, H, W) in [0, 1]
```
""",
    "robustbench": """\
`model.pt` is a state dict of RobustBench's `PreActResNet` with the buffers `mu` and `sigma`. `model_info.json` is its \
model info, `zoo_entry.py` its entry for the model zoo, and `issue.md` the text of an issue for the leaderboard, with \
a list of what is missing.
""",
    "onnx": """\
```python
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
(logits,) = session.run(["logits"], {{"images": images}})  # float32, (N, C, H, W) in [0, 1]
```
""",
}
WITHOUT_MOATLAB = """
Without moatlab, with transformers, which runs the `modeling_moatlab.py` of this repository:

```python
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{repo}", trust_remote_code=True)
logits = model(images).logits
```
"""


def card_text(kind: str, description: dict[str, Any], card: Card | None, repo: str) -> str:
    data, method = (" ".join(str(description[name]).split()) for name in ("data", "method"))
    threat = f"{NORM_NAMES[description['norm']]}, eps {Threat.of(description['eps'], description['norm']).text}"
    quoted = {"data": json.dumps(data), "method": json.dumps(method)}
    metadata = METADATA.format(**quoted)
    results = "It has not been evaluated; run `moat eval RUN` before the export to add results here.\n\n"
    if card:
        metadata += RESULTS.format(**quoted)
        results = (
            f"The training run was not finished: {card.subject.unfinished}.\n\n" if card.subject.unfinished else ""
        )
        results += f"On {card.data.images:,} test images ({threat}):\n\n"
        results += "| attack | accuracy | 95 % interval |\n|---|---|---|\n"
        for name, result in card.results.items():
            title = json.dumps("accuracy" if name == "clean" else f"accuracy under {name} ({threat})")
            accuracy, low, high = (100 * share for share in (result.accuracy, *result.interval))
            metadata += f"    - type: accuracy\n      name: {title}\n      value: {accuracy:.2f}\n"
            results += f"| {name} | {accuracy:.1f} % | {low:.1f} to {high:.1f} % |\n"
        results += "\n"
        for flag in card.flags:
            results += f"Red flag `{flag.name}` ({flag.evidence}): {flag.meaning}\n\n"
    names_code = kind in ("safetensors", "hub") and ":" in str(description["model"])
    code = "The code of the model is not included and must be importable.\n\n" if names_code else ""
    trust = ", trust_model_code=True" if names_code else ""
    use = USE[kind] + (WITHOUT_MOATLAB if kind == "hub" and not names_code else "")
    height, width, channels = description["image_shape"]
    return (
        f"---\n{metadata}---\n\n# `{method}` on {data}\n\n"
        f"An image classifier, trained with `{method}` in moatlab to be robust ({threat}). It takes images in [0, 1] "
        f"without normalisation, {width}x{height} pixels with {channels} channels, and returns "
        f"{description['classes']} logits, in this order: {', '.join(map(str, description['class_names']))}.\n\n"
        f"{results}## Use\n\n{code}{use.format(trust=trust, repo=repo)}"
    )
