"""Counts the calls of a model while it trains, in images."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from moatlab.methods.cost import Cost


class Meter:
    """Counts with hooks on the model, on its outputs and on its parameters.

    forward          the model is called
    weight backward  a gradient reaches the output of a call, in a backward pass that reaches parameters
    input backward   the same, in a backward pass that does not
    double backward  a gradient reaches an output again, through the graph of the first gradient
    """

    def __init__(self) -> None:
        self._cost = Cost()
        self._arrivals: list[tuple[int, int]] = []  # (backward pass, images) of gradients at outputs
        self._reaching: set[int] = set()  # backward passes that reach parameters

    def take(self) -> Cost:
        """The count since the last call, in images."""
        for backward, images in self._arrivals:
            reaches = backward in self._reaching
            self._cost += Cost(weight_backwards=images) if reaches else Cost(input_backwards=images)
        taken, self._cost = self._cost, Cost()
        self._arrivals, self._reaching = [], set()
        return taken

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = register_multi_grad_hook(parameters, lambda _: self._reaching.add(_backward()), mode="any")
        with model.register_forward_hook(self._called), weights:
            yield

    def _called(self, _model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        images = len(inputs[0])
        self._cost += Cost(forwards=images)
        if not output.requires_grad:
            return
        has_graph: list[bool] = []  # whether a gradient that reached the output can be differentiated

        def reached(_gradient: Tensor) -> None:
            if has_graph:
                self._cost += Cost(double_backwards=images)
            else:
                self._arrivals.append((_backward(), images))
            if torch.is_grad_enabled():  # the backward pass builds a graph
                has_graph.append(True)

        output.register_hook(reached)  # type: ignore[no-untyped-call]


def _backward() -> int:
    """The number of the running backward pass."""
    return torch._C._current_graph_task_id()
