"""`moatlab.compare` from Python."""

import json

import pytest

import moatlab
from moatlab.training.making import make_recipe


def recipes(tiny, *methods):
    options = {"data": str(tiny), "width": 8, "batch_size": 16, "epochs": 2}
    return [make_recipe(method, preset="mini", holdout=0, **options) for method in methods]


def test_methods_are_compared_in_silence_with_the_threads_that_were_asked_for(tiny, tmp_path, capfd):
    result = moatlab.compare(recipes(tiny, "fgsm", "fast"), tmp_path / "both", threads=1, device="cpu", verbose=False)
    assert capfd.readouterr() == ("", "")
    assert [row["method"] for row in result["rows"]] == ["fgsm", "fast"]
    assert [row["passes"] for row in result["rows"]] == [4, 4]
    for row in result["rows"]:
        record = json.loads((tmp_path / "both" / row["method"] / "run.json").read_text())
        assert (record["environment"]["threads"], record["environment"]["device"]) == (1, "cpu")
        assert {name: row[name] for name in ("clean", "fgsm", "pgd7")}.items() <= record["final"].items()
    assert (tmp_path / "both" / "pgd7.png").exists()
    assert (tmp_path / "both" / "report.html").exists()


def test_a_comparison_is_announced_where_that_is_asked_for(tiny, tmp_path, capfd):
    moatlab.compare(recipes(tiny, "fgsm"), tmp_path / "one", threads=1, verbose=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "run 1 of 1 done" in err


def test_each_method_is_named_once(tiny, tmp_path):
    with pytest.raises(moatlab.UserError, match="each method can be given only once"):
        moatlab.compare(recipes(tiny, "fgsm", "fgsm"), tmp_path)
