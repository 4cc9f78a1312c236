"""A card: what is in the file, what is none, and whose card it is."""

import json
import shutil

import pytest

from moatlab import UserError
from moatlab.attacks.norms import Threat
from moatlab.evaluation.card import Card, evaluate_target
from moatlab.evaluation.target import load_target
from moatlab.runtime.errors import Damaged
from moatlab.runtime.files import read_json, write_json
from models_for_tests import FIXTURES


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    target = load_target(shutil.copy(FIXTURES / "mini_fgsm.safetensors", folder / "model.safetensors"))
    return target, evaluate_target(target, attacks=["fgsm", "aa-fast"], count=12, audit=True)


def test_a_card_is_read_as_it_was_written_a_line_for_each_key(evaluated, tmp_path):
    target, card = evaluated
    assert Card.read(target.card) == card
    card.write(tmp_path / "again.json")
    text = target.card.read_text()
    assert (tmp_path / "again.json").read_text() == text
    lines = text.splitlines()
    keys = [line.partition(":")[0].strip('"') for line in lines[1:-1]]
    assert (lines[0], lines[-1]) == ("{", "}")
    assert keys == list(json.loads(text))
    assert " ".join(keys) == (
        "schema subject data settings results all_attacks flags measured adversarial environment first_broken_by "
        "broken_by audit checksum"
    )
    content = json.loads(text)
    assert " ".join(content["results"]["fgsm"]) == "accuracy interval standing forwards gradients seconds"
    assert list(content["results"]["aa-fast"])[-1] == "note"
    assert "precision" not in content["settings"]
    assert " ".join(content["audit"]) == "attacked broken forwards gradients seconds"


@pytest.mark.parametrize(
    "change",
    [
        {"results": {"fgsm": {}}},
        {"measured": None},
        {"flags": [{"name": "x"}]},
        {"settings": {}},
        {"broken_by": {}},
        {"surprise": 1},
        {"subject": "me"},
    ],
)
def test_a_file_with_other_content_is_no_card(evaluated, tmp_path, change):
    write_json(tmp_path / "eval.json", read_json(evaluated[0].card) | change)
    with pytest.raises(UserError, match=r"eval\.json is not a card that moat eval wrote"):
        Card.read(tmp_path / "eval.json")


@pytest.mark.parametrize(("name", "value"), [("eps", "8"), ("eps", 0.1), ("norm", "l0"), ("images", 0), ("seed", "0")])
def test_settings_that_can_not_be_are_no_cards(evaluated, tmp_path, name, value):
    fields = read_json(evaluated[0].card)
    fields["settings"][name] = value
    write_json(tmp_path / "eval.json", fields)
    with pytest.raises(UserError, match="is not a card that moat eval wrote"):
        Card.read(tmp_path / "eval.json")


def test_a_card_that_was_changed_is_damaged(evaluated, tmp_path):
    (tmp_path / "eval.json").write_text(evaluated[0].card.read_text().replace('"standing": 0', '"standing": 9'))
    with pytest.raises(Damaged, match="its checksum does not match"):
        Card.read(tmp_path / "eval.json")
    with pytest.raises(Damaged, match="it is missing"):
        Card.read(tmp_path / "none.json")


def test_a_card_says_why_it_is_not_of_a_model_its_images_or_its_threat(evaluated):
    target, card = evaluated
    names = {"model": target.sha256, "weights": target.subject.weights, "factory": "preact_resnet18"}
    own = {"data": target.images.sha256, "threat": Threat.of("16/255")}
    for name, value in names.items():
        assert card.mismatch(**{name: value}, **own) is None
        assert card.mismatch(**names | {name: "0"}, **own) == "it is of another model"
    assert card.mismatch(**names, **own) is None
    assert card.mismatch(**names, **own | {"data": "0"}) == "it is on other images"
    other = card.mismatch(**names, **own | {"threat": Threat.of("8/255")})
    assert other == "it is at L-inf eps 16/255 in fp32, not at L-inf eps 8/255 in fp32"
    assert "not at L2 eps 16/255" in card.mismatch(**names, **own | {"threat": Threat.of("16/255", "l2")})
    assert card.mismatch(**names, **own | {"threat": Threat.of(16 / 255)}) is None
    short = card.model_copy(update={"settings": card.settings.model_copy(update={"precision": "bf16"})})
    assert "in bf16, not" in short.mismatch(**names, **own)
    assert short.mismatch(**names, **own | {"threat": None}) is None
