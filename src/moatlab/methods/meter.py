"""Counts passes where they happen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from moatlab.methods.cost import Cost


class Meter:
    """Counts what is really asked of a model, whoever asks: hooks on its calls and on its gradients.

    forward          the model is called
    input backward   a gradient reaches the output of a call whose input wants one
    double backward  a gradient reaches that output again, through the graph of the first gradient
    weight backward  a backward pass reaches parameters
    """

    def __init__(self) -> None:
        self._cost = Cost()

    def take(self) -> Cost:
        """What was counted since the last time."""
        taken, self._cost = self._cost, Cost()
        return taken

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        handles = [
            model.register_forward_hook(self._called),
            torch.autograd.graph.register_multi_grad_hook(parameters, self._reached_weights, mode="any"),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, _model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._cost += Cost(forwards=1)
        if inputs[0].requires_grad and output.requires_grad:
            kinds = iter([Cost(input_backwards=1)])

            def reached(_gradient: Tensor) -> None:
                self._cost += next(kinds, Cost(double_backwards=1))

            output.register_hook(reached)  # type: ignore[no-untyped-call]

    def _reached_weights(self, _gradient: Tensor) -> None:
        self._cost += Cost(weight_backwards=1)
