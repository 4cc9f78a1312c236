import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moatlab
from moatlab.models.pretrained import load_pretrained
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile


def network(classes=3):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, classes))


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.backbone = inner


@pytest.fixture
def source():
    torch.manual_seed(1)
    return network()


def same(model, other):
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


def test_weights_come_from_a_file_or_a_folder_of_a_hub(source, tmp_path):
    state = source.state_dict()
    save_file(state, tmp_path / "weights.safetensors")
    torch.save({"state_dict": state}, tmp_path / "weights.pt")
    for name, write in ((RunFile.MODEL, save_file), ("pytorch_model.bin", torch.save)):
        folder = tmp_path / f"hub {name}"
        folder.mkdir()
        write(state, folder / name)
    for path in tmp_path.iterdir():
        model = network()
        load_pretrained(model, str(path))
        assert same(model, source), path


@pytest.mark.parametrize("prefix", ["module.", "model.", "backbone.", "module.model."])
def test_a_common_prefix_of_the_names_does_not_matter(source, tmp_path, prefix):
    torch.save({prefix + name: tensor for name, tensor in source.state_dict().items()}, tmp_path / "prefixed.pt")
    torch.save(source.state_dict(), tmp_path / "plain.pt")
    for file in ("prefixed.pt", "plain.pt"):
        for model in (network(), Wrapped(network())):
            load_pretrained(model, str(tmp_path / file))
            assert same(model, source)


@pytest.mark.usefixtures("aloud")
def test_a_head_with_another_number_of_classes_starts_with_new_weights(source, tmp_path, capsys):
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    model = network(classes=5)
    before = [parameter.detach().clone() for parameter in model[3].parameters()]
    load_pretrained(model, str(tmp_path / "weights.pt"))
    assert all(torch.equal(old, new) for old, new in zip(before, model[3].parameters(), strict=True))
    assert same(model[:3], source[:3])
    assert "has 3 classes, the data 5: the last layer starts with new weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "classes", "reason"),
    [
        (lambda state: state.pop("3.bias"), 3, "it lacks '3.bias'"),
        (lambda state: state.update(more=torch.ones(1)), 3, "it has 'more', which the model lacks"),
        (lambda state: state.update({"3.weight": torch.ones(3, 9)}), 5, r"'3.weight' is \(3, 9\) there, but \(5, 4\)"),
        (lambda state: state.update({"3.bias": torch.ones(7)}), 5, r"'3.weight' is \(3, 4\) there, but \(5, 4\)"),
        (lambda state: state.update({"0.bias": torch.ones(2)}), 5, r"'0.bias' is \(2,\) there, but \(4,\)"),
    ],
)
def test_anything_else_that_does_not_fit_is_refused_by_its_first_mismatch(source, tmp_path, change, classes, reason):
    state = dict(source.state_dict())
    change(state)
    torch.save(state, tmp_path / "weights.pt")
    model = network(classes)
    model[3].weight.data.zero_()
    with pytest.raises(UserError, match=f"don't fit the model: {reason}"):
        load_pretrained(model, str(tmp_path / "weights.pt"))
    assert not model[3].weight.any()


def test_weights_come_from_timm_where_it_works(source, monkeypatch):
    asked = []

    def create_model(name, pretrained):
        asked.append((name, pretrained))
        if name == "unknown":
            raise OSError("no network")
        return source

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    model = Wrapped(network())
    load_pretrained(model, "timm:vit_tiny")
    assert asked == [("vit_tiny", True)]
    assert same(model, source)
    with pytest.raises(UserError, match=r"timm:unknown can't be loaded \(OSError: no network\)"):
        load_pretrained(model, "timm:unknown")


def test_without_timm_its_weights_are_refused_in_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError, match="needs the package timm, which can't be imported"):
        load_pretrained(network(), "timm:resnet18")


def test_a_run_starts_from_pretrained_weights_of_other_classes(tiny, tmp_path):
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    torch.save(nn.Sequential(*layers, nn.Linear(4, 7)).state_dict(), tmp_path / "weights.pt")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *layers[1:], nn.Linear(4, len(moatlab.load_images(str(tiny)).classes)))
    options = {"init": str(tmp_path / "weights.pt"), "holdout": 0, "batch_size": 8, "epochs": 3, "max_steps": 0}
    run = moatlab.train(model, str(tiny), method="moat:2", out=tmp_path / "run", **options)
    assert torch.equal(run.model[0].weight, layers[0].weight)
