import sys

import pytest
import torch

from moatlab.models.registry import build_model
from moatlab.models.yours import build_by_factory
from moatlab.runtime.errors import UserError

MODULE = """
import torch

def by_name(num_classes=3, bias=False): return torch.nn.Linear(4, num_classes, bias)
def by_position(outputs): return torch.nn.Linear(4, outputs)
def fixed(): return torch.nn.Linear(4, 7)
def greedy(classes, width): return torch.nn.Linear(width, classes)
def broken(classes): raise RuntimeError("no room")
def other(classes): return [classes]
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A module of the user's, on the import path, and a current folder elsewhere."""
    (tmp_path / "my_factories.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_factories"
    sys.modules.pop("my_factories", None)


@pytest.mark.parametrize(("factory", "outputs"), [("by_name", 5), ("by_position", 5), ("fixed", 7)])
def test_a_factory_is_called_with_the_number_of_classes_if_it_takes_one(mine, factory, outputs):
    model = build_model(f"{mine}:{factory}", classes=5, arguments={})
    assert model(torch.rand(2, 4)).shape == (2, outputs)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("greedy", "the number of classes and nothing else"),
        ("broken", r"the factory failed \(RuntimeError: no room\)"),
        ("other", "the factory returned a list"),
        ("nosuch", "my_factories has no 'nosuch'; it has by_name, by_position"),
    ],
)
def test_what_is_no_factory_is_refused_in_a_sentence(mine, factory, says):
    with pytest.raises(UserError, match=says):
        build_by_factory(f"{mine}:{factory}", 5)


def test_a_library_call_does_not_change_the_import_path(tmp_path, monkeypatch, mine):
    """A current folder of somebody else's must not become a place that Python imports from."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = list(sys.path)
    build_model(f"{mine}:fixed", classes=5, arguments={})
    with pytest.raises(UserError, match="can't be imported"):
        build_model("nosuch_module:net", classes=5, arguments={})
    assert sys.path == before
