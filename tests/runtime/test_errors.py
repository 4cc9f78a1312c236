"""One sentence, in the words of its caller: options on the command line, arguments in Python."""

import pickle

import pytest

import moatlab
from moatlab.attacks.norms import Threat
from moatlab.runtime import console
from moatlab.runtime.errors import RunFailed, UserError, in_callers_words, naming_options


@pytest.mark.parametrize(
    ("message", "in_python"),
    [
        ("--batch-size 512 is too large", "batch_size=512 is too large"),
        ("--lr -1: must be above 0", "lr=-1: must be above 0"),
        ("--out runs/a--b has a run already; add --resume", "out runs/a--b has a run already; add resume=True"),
        ("there is no such device; use --device=cpu", 'there is no such device; use device="cpu"'),
        ("if you trust it, add --trust-model-code.", "if you trust it, add trust_model_code=True."),
        ("a lower --lr may help", "a lower lr may help"),
    ],
)
def test_a_message_names_options_on_the_command_line_and_arguments_in_python(message, in_python):
    assert in_callers_words(message) == str(UserError(message)) == str(RunFailed(message)) == in_python
    with naming_options():
        assert in_callers_words(message) == str(UserError(message)) == message


def test_an_error_of_another_process_is_shown_in_the_words_of_this_one():
    error = pickle.loads(pickle.dumps(UserError("--epochs 0: too few")))
    with naming_options():
        assert str(error) == "--epochs 0: too few"
    assert str(error) == "epochs=0: too few"


@pytest.mark.usefixtures("aloud")
def test_warnings_use_the_same_words(capsys):
    console.warn("use more --epochs, or --resume")
    assert "use more epochs, or resume=True" in capsys.readouterr().err


def test_the_same_bad_radius_is_named_by_python_and_by_the_command_line_in_their_own_words(moat):
    sentence = "8: the radius must be a number between 0 and 1; did you mean 8/255?"
    with pytest.raises(UserError) as error:
        moatlab.make_recipe("moat:2", eps=8)
    assert str(error.value) == f"eps={sentence}"
    assert f"--eps {sentence}" in moat("plan", "moat:2", "--eps", 8).err


@pytest.mark.parametrize(
    ("eps", "text"), [(8 / 255, "8/255"), (0.5, "0.5"), (0.2, "0.2"), ("8 / 255", "8 / 255"), (0.03, "0.03")]
)
def test_a_radius_that_is_a_number_of_255ths_is_written_as_one(eps, text):
    threat = Threat.of(eps)
    assert threat.text == text
    assert str(threat) == f"L-inf eps {text}"
    assert str(Threat("linf", threat.eps)).endswith(text.replace(" ", ""))
    assert Threat.of(threat.text).eps == threat.eps


def test_a_recipe_writes_a_radius_that_was_a_number_as_a_fraction():
    assert moatlab.make_recipe("fast", eps=8 / 255) == moatlab.make_recipe("fast", eps="8/255")
