import pytest

from moatlab.runtime.console import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "epoch", "1 epoch"),
        (0, "epoch", "0 epochs"),
        (1000, "test image", "1,000 test images"),
        (1.0, "pass", "1 pass"),
        (2.5, "pass", "2.5 passes"),
    ],
)
def test_a_noun_after_a_number_has_its_plural(number, noun, text):
    assert counted(number, noun) == text
