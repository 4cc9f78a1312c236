"""An evaluation as text and as a card of a notebook."""

import shutil

import moatlab
from models_for_tests import FIXTURES


def evaluated(name):
    images = moatlab.load_images("mini")
    model = moatlab.load(FIXTURES / f"mini_{name}.safetensors")
    return moatlab.evaluate(model, images.test_x[:60], images.test_y[:60], attacks="fgsm,pgd7", eps="16/255")


def test_an_evaluation_prints_the_table_of_the_command_and_has_a_short_repr(moat, alone):
    shutil.copy(FIXTURES / "mini_fgsm.safetensors", alone / "model.safetensors")
    command = moat("eval", "model.safetensors", "--attacks", "fgsm,pgd7", "--n", 60).out
    result = evaluated("fgsm")
    numbers = [line.split("│")[1:4] for line in command.splitlines() if "│" in line]
    assert [line.split("│")[1:4] for line in str(result).splitlines() if "│" in line] == numbers
    assert len(numbers) == 4
    assert "60 images, L-inf eps 16/255" in str(result)
    assert "RED FLAG catastrophic-overfitting" in str(result)
    assert len(repr(result)) < 200
    assert "\n" not in repr(result)


def test_a_card_has_intervals_the_setting_and_red_flags():
    collapsed, robust = evaluated("fgsm")._repr_html_(), evaluated("moat2")._repr_html_()
    for html in (collapsed, robust):
        assert "60 images, L-inf eps 16/255" in html
        assert "95 %" in html
        assert "<script" not in html
        assert "http" not in html
    assert "RED FLAG catastrophic-overfitting" in collapsed
    assert "no red flags" in robust
