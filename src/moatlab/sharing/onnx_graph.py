"""A model as an ONNX graph."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from moatlab.runtime.errors import RunFailed, users_code
from moatlab.runtime.randomness import generator

NEARNESS = 1e-4  # of logits, relative to the largest


def onnx_files(model: nn.Module, image_shape: Sequence[int]) -> dict[str, bytes]:
    """The model as a graph for any batch size. Its logits are compared with the model's before it is returned."""
    import onnxruntime

    height, width, channels = image_shape
    images = torch.rand(4, channels, height, width, generator=generator(0, "images to compare"))
    model = model.eval().requires_grad_(False)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    with users_code("the model can't be exported to ONNX", RunFailed), torch.no_grad(), _quiet():
        program: Any = torch.onnx.export(model, (images,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        graph: bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    for part in (images, images[:1], images[:3]):
        logits = torch.from_numpy(session.run(["logits"], {"images": part.numpy()})[0])
        with torch.no_grad():
            distance = float((logits - model(part)).abs().max())
        if not distance <= NEARNESS * max(1.0, float(logits.abs().max())):
            raise RunFailed(f"the ONNX graph answers otherwise than the model, by {distance:.2g}; it is not kept")
    return {"model.onnx": graph}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's warnings and its notes about packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
