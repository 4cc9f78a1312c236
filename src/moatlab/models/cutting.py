"""The first layer of any model, for attacks that move its input only."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from torch import Tensor, nn


class _Reached(Exception): ...


@contextmanager
def first_output(model: nn.Module, *, only: bool = False) -> Iterator[list[Tensor]]:
    """The output of the first layer with parameters that is called inside; `only`: the model ends there."""
    seen: list[Tensor] = []

    def keep(_layer: nn.Module, _inputs: object, output: Tensor) -> Tensor | None:
        if seen:
            return None
        seen.append(output)
        if only:
            raise _Reached
        return output.clone()  # an activation may overwrite it

    with ExitStack() as hooks:
        for layer in model.modules():
            if next(layer.parameters(recurse=False), None) is not None:
                hooks.enter_context(layer.register_forward_hook(keep))
        with suppress(_Reached):
            yield seen


def first_layer(model: nn.Module, x: Tensor) -> Tensor:
    with first_output(model, only=True) as seen:
        model(x)
    return seen[0]
