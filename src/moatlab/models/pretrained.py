"""Starting from pretrained weights: of a run, a file, a folder from a model hub, or timm."""

from pathlib import Path

from torch import Tensor, nn

from moatlab.models.weights import mismatches, named_alike, read_weights, set_weights
from moatlab.runtime.console import note
from moatlab.runtime.errors import UserError, first_line, users_code
from moatlab.runtime.files import RunFile

TIMM = "timm:"
HUB_FILE = "pytorch_model.bin"


def load_pretrained(model: nn.Module, source: str) -> None:
    """Load weights into a model. If nothing but the last linear layer differs in shape, because it has another number
    of classes, that layer keeps its initial weights."""
    tensors, own = named_alike(model, _read(source)), model.state_dict()
    wrong, head = mismatches(model, tensors), _head(model)
    pairs = {name: (tensors[name].shape, own[name].shape) for name in wrong if name in head and name in tensors}
    resized = {name: (there[0], here[0]) for name, (there, here) in pairs.items() if there[1:] == here[1:]}
    if wrong and resized.keys() == wrong.keys() and len(set(resized.values())) == 1:
        (there, here), *_ = resized.values()
        note(f"{source} has {there} classes, the data {here}: the last layer starts with new weights")
        tensors |= {name: own[name] for name in wrong}
    set_weights(model, tensors, source)


def _head(model: nn.Module) -> set[str]:
    """The names of the weight and bias of the last linear layer."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return {f"{linear[-1]}.{part}".removeprefix(".") for part in ("weight", "bias")} if linear else set()


def _read(source: str) -> dict[str, Tensor]:
    if source.startswith(TIMM):
        return _read_timm(source)
    path = Path(source).expanduser()
    if path.is_dir() and not (path / RunFile.MODEL).exists() and (path / HUB_FILE).exists():
        path /= HUB_FILE
    return read_weights(path)[0]


def _read_timm(source: str) -> dict[str, Tensor]:
    try:
        import timm
    except ImportError as error:
        raise UserError(f"{source} needs the package timm, which can't be imported ({first_line(error)})") from None
    with users_code(f"the weights {source} can't be loaded"):
        weights: dict[str, Tensor] = timm.create_model(source.removeprefix(TIMM), pretrained=True).state_dict()
    return weights
