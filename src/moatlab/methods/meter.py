"""Counts the calls of a model while it trains."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from moatlab.methods.cost import Cost


class Meter:
    """Counts every call of a model with hooks on the model and on its gradients.

    forward          the model is called
    input backward   a gradient reaches the output of a call whose input requires one
    double backward  a gradient reaches that output again, through the graph of the first gradient
    weight backward  a backward pass reaches parameters
    """

    def __init__(self) -> None:
        self._cost = Cost()

    def take(self) -> Cost:
        """The count since the last call."""
        taken, self._cost = self._cost, Cost()
        return taken

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        weights = register_multi_grad_hook(parameters, lambda _: self._add(Cost(weight_backwards=1)), mode="any")
        with model.register_forward_hook(self._called), weights:
            yield

    def _add(self, cost: Cost) -> None:
        self._cost += cost

    def _called(self, _model: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._add(Cost(forwards=1))
        if inputs[0].requires_grad and output.requires_grad:
            kinds = iter([Cost(input_backwards=1)])
            output.register_hook(lambda _: self._add(next(kinds, Cost(double_backwards=1))))  # type: ignore[no-untyped-call]
