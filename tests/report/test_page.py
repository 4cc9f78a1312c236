"""The page about runs: what is on it, what is missing from it, and that nothing on it runs."""

import base64
import io
import json
import math
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from images_for_tests import tiny_images
from moatlab import TrainedRun, UserError, make_recipe, train, write_report
from moatlab.attacks.norms import Threat
from moatlab.data.images import Images
from moatlab.data.loading import load_images
from moatlab.evaluation.card import Card
from moatlab.evaluation.red_flags import Flag
from moatlab.evaluation.target import Subject, Target, load_target
from moatlab.models.weights import fingerprint, read_weights
from moatlab.report.charts import Series, line_chart, pareto, scatter, surface, tag, ticks
from moatlab.report.page import default_path
from moatlab.report.portrait import RADII, draw_portrait
from moatlab.runtime.files import locked, read_json, write_json
from moatlab.training.run_folder import RunFolder
from models_for_tests import Linear


class Page(HTMLParser):
    """A page as a browser sees it: its text, its elements, and all that it would load."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.words, self.tags, self.addresses, self.ids = [], [], [], set()
        self.feed(source)
        self.text = " ".join(self.words)

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        for key, value in attributes:
            if key in ("src", "href", "action", "data", "srcset"):
                self.addresses.append(value)
            if key == "id":
                self.ids.add(value)
            assert not key.startswith("on"), f"{name} has a handler {key}"

    def handle_data(self, data):
        self.words.append(" ".join(data.split()))


@pytest.fixture(scope="session")
def trained(tmp_path_factory, tiny):
    """Two runs of three epochs, with their pages' data."""
    folder = tmp_path_factory.mktemp("reported")
    for method in ("fgsm", "moat:2"):
        recipe = make_recipe(method, data=str(tiny), width=8, batch_size=16, epochs=3, holdout=0)
        train(recipe, folder / method.replace(":", "-"), threads=1)
    write_report(folder).unlink()
    return folder


@pytest.fixture
def runs(trained, alone):
    return shutil.copytree(trained, alone / "runs")


def page_of(moat, *arguments):
    ended = moat("report", *arguments, "-o", "page.html")
    assert ended.code == 0, ended.err
    assert ended.out == "report: page.html\n"
    source = Path("page.html").read_text(encoding="utf-8")
    return Page(source), source, ended.err


def test_a_page_shows_every_run_its_accuracies_and_its_plots(moat, runs):
    for path in [*runs.rglob("portrait.*"), *runs.rglob("curves.png")]:
        path.unlink()
    page, source, _ = page_of(moat, runs)
    for name in ("fgsm", "moat-2"):
        record = read_json(runs / name / "run.json")
        for attack in ("clean", "fgsm", "pgd7"):
            assert f"{100 * record['final'][attack]:.1f}" in page.text
    assert {"epochs", "cost", "radius-linf", "headline", "run1", "run2"} <= page.ids
    assert page.tags.count("svg") == 3 + 2 * 2
    assert page.tags.count("img") == 2 * 8 * 3
    assert "recipe.toml" in page.text
    assert len(source) < 500_000
    for name in ("portrait.json", "portrait.png", "curves.png"):
        assert (runs / "fgsm" / name).exists()


def test_runs_of_two_norms_have_a_plot_by_radius_each_and_robustness_at_two_radii_no_front(moat, runs):
    for name, pgd7, passes in (("fgsm", 0.1, 4.0), ("moat-2", 0.2, 6.0)):
        record = read_json(runs / name / "run.json")
        record["final"]["pgd7"], record["counted"]["passes"] = pgd7, passes
        write_json(runs / name / "run.json", record)
    page, source, _ = page_of(moat, runs)
    assert 'class="front"' in source
    assert "radius-l2" not in page.ids
    portrait = read_json(runs / "fgsm" / "portrait.json")
    write_json(runs / "fgsm" / "portrait.json", portrait | {"norm": "l2", "eps": "128/255"})
    recipe = runs / "fgsm" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('eps = "8/255"', 'eps = "4/255"'))
    page, source, _ = page_of(moat, runs)
    assert {"radius-linf", "radius-l2"} <= page.ids
    assert 'class="front"' not in source
    assert "robustness is not comparable" in page.text


def test_a_picture_that_can_not_be_written_costs_no_page(moat, runs):
    for path in (runs / "fgsm" / "portrait.json", runs / "fgsm" / "curves.png"):
        path.unlink()
    (runs / "fgsm" / "curves.png").mkdir()
    page, _, err = page_of(moat, runs)
    assert "curves.png" in err
    assert "radius-linf" in page.ids


def test_a_page_loads_nothing_and_runs_only_its_own_script(moat, runs):
    page, source, _ = page_of(moat, runs)
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert page.tags.count("script") == 1
    assert not {"iframe", "object", "embed", "form"} & set(page.tags)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', source)[1]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[\w+/=]+'", policy.replace("&#39;", "'").replace("&#43;", "+"))


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</pre><b>bold</b>"])
def test_whatever_is_in_the_files_of_a_run_stays_text(moat, runs, evil):
    run = runs / "fgsm"
    moat("report", run)
    moat("eval", run, "--attacks", "fgsm")
    events = {"event": "collapse", "epoch": 2, "pgd7": 0.0, "message": evil, "action": evil}
    (run / "events.jsonl").write_text(json.dumps(events) + "\n")
    portrait = read_json(run / "portrait.json")
    portrait["surface"]["class"] = evil
    for example in portrait["examples"]:
        example |= {"class": evil, "predicted": evil, "attacked": evil, "image": evil}
    write_json(run / "portrait.json", portrait)
    lines = [json.loads(line) | {"stage": evil} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run / "run.json", read_json(run / "run.json") | {"metrics": RunFolder(run).metrics_sha256})
    card = Card.read(run / "eval.json")
    flag = Flag(name=evil, evidence=evil, meaning=evil)
    update = {"subject": card.subject.model_copy(update={"name": evil}), "flags": [flag]}
    results = {"results": {**card.results, evil: card.results["clean"]}}
    card.model_copy(update=update | results).write(run / "eval.json")
    page, source, _ = page_of(moat, run)
    assert page.tags.count("script") == 1
    assert evil not in source
    shown = " ".join(evil.split())
    assert page.text.count(shown) >= 8  # shown, as text
    assert shown in page.text.partition("Red flags")[2].partition("Results")[0]
    assert shown in page.text.partition("evaluation card")[2]


def test_a_folder_called_like_a_script_stays_text(moat, runs):
    for name in ("<script>alert(1)<", "b"):  # two runs of one method are told apart by their folders
        shutil.copytree(runs / "fgsm", runs / name)
    page, source, _ = page_of(moat, runs)
    assert "<script>alert(1)" in page.text
    assert "<script>alert" not in source


@pytest.mark.parametrize("name", ["recipe.toml", "run.json", "metrics.jsonl", "model.safetensors", "eval.json"])
@pytest.mark.parametrize("damage", ["missing", "garbage", "empty"])
def test_a_run_with_a_bad_file_is_named_and_the_rest_of_the_page_is_made(moat, runs, name, damage):
    path = runs / "fgsm" / name
    if damage == "missing":
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(b"\0garbage" if damage == "garbage" else b"")
    page, _, err = page_of(moat, runs / "fgsm", runs / "moat-2")
    if (name, damage) != ("eval.json", "missing"):  # a run need not have been evaluated
        assert name in page.text.partition("Not shown")[2]
        assert name in err
    assert "moat:2" in page.text
    assert page.tags.count("svg") >= 3 + 2


def test_a_damaged_portrait_is_drawn_again(moat, runs):
    page_of(moat, runs / "fgsm")
    before = read_json(runs / "fgsm" / "portrait.json")
    (runs / "fgsm" / "portrait.json").write_text("{}")
    page_of(moat, runs / "fgsm")
    assert read_json(runs / "fgsm" / "portrait.json") == before


@pytest.mark.parametrize("status", ["finished", "stopped"])
def test_a_card_of_another_model_is_not_shown_beside_this_one(moat, runs, status):
    moat("eval", runs / "moat-2", "--attacks", "pgd50")
    shutil.copy(runs / "moat-2" / "eval.json", runs / "fgsm" / "eval.json")
    write_json(runs / "fgsm" / "run.json", read_json(runs / "fgsm" / "run.json") | {"status": status})
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "is of another model" in page.text


def test_a_card_of_the_same_weights_in_another_network_is_not_shown(moat, runs, alone):
    """A factory of the user's may put something before the network that masks its gradients."""
    (alone / "masked.py").write_text(
        "from moatlab.models.registry import build_model\n"
        "def build(num_classes):\n"
        "    return build_model('preact_resnet18', classes=num_classes, arguments={'width': 8, 'std': (9.0,) * 3})\n"
    )
    assert moat("eval", runs / "fgsm", "--model", "masked:build", "--attacks", "fgsm").code == 0
    assert (runs / "fgsm" / "eval.json").exists()
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "is of another model" in page.text


def test_a_model_that_no_run_wrote_is_named_and_the_others_are_shown(moat, runs):
    (runs / "fgsm" / "run.json").unlink()
    save_file({"weight": torch.zeros(2, 2)}, runs / "fgsm" / "model.safetensors")
    page, _, _ = page_of(moat, runs / "fgsm", runs / "moat-2")
    assert "was not written by moatlab" in page.text
    assert "moat:2" in page.text
    assert "pgd50 %" not in page.text


def test_a_card_on_other_images_is_not_shown_beside_other_runs(moat, runs, tmp_path):
    (tiny_images(tmp_path / "others") / "test" / "dark" / "0.png").unlink()
    assert moat("eval", runs / "fgsm", "--attacks", "pgd50", "--data", tmp_path / "others").code == 0
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "is on other images" in page.text
    assert "pgd50 %" not in page.text


def test_a_portrait_of_the_users_own_model_is_shown_again_without_running_its_code(moat, alone, tiny):
    (alone / "mine.py").write_text(
        "from torch import nn\ndef build(n): return nn.Sequential(nn.Flatten(), nn.Softmax(1), nn.Linear(192, n))"
    )
    options = ("--data", tiny, "--batch-size", 16, "--holdout", 0, "--epochs", 1, "--out", "run")
    ended = moat("train", "fgsm", *options, "--model", "mine:build")
    assert "5 steps in all" in ended.err
    assert "on 80 training images" in ended.err
    assert "next: moat eval run\n" in ended.out
    before = (alone / "run" / "report.html").read_text()
    (alone / "mine.py").write_text("raise SystemExit('run without being asked')")
    assert moat("report", "run").code == 0
    assert (alone / "run" / "report.html").read_text().count("<svg") == before.count("<svg") > 2


def test_a_card_at_another_radius_is_not_shown_as_the_run_s_robustness(moat, runs):
    moat("eval", runs / "fgsm", "--attacks", "pgd50", "--eps", "1/255")
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "it is at L-inf eps 1/255" in page.text
    assert "pgd50 %" not in page.text


def test_a_card_in_another_precision_is_not_shown(moat, runs):
    assert moat("eval", runs / "fgsm", "--attacks", "pgd50", "--precision", "bf16").code == 0
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "in bf16, not at" in page.text
    assert "pgd50 %" not in page.text


def test_of_two_cards_the_one_of_more_images_shows_the_clean_accuracy(moat, runs):
    moat("eval", runs / "fgsm", "--attacks", "fgsm", "--n", 20)
    large = read_json(runs / "fgsm" / "eval.json")
    small = json.loads(json.dumps(large))
    large["results"]["clean"]["accuracy"], small["results"]["clean"]["accuracy"] = 0.123, 0.987
    small["data"]["images"] = 5
    write_json(runs / "fgsm" / "eval.json", large)
    write_json(runs / "fgsm" / "eval_aa.json", small)
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "12.3" in page.text
    assert page.text.partition("evaluation card")[0].count("98.7") == 1
    assert "clean 98.7 % on the 5 images of fgsm" in page.text  # a note below the table


def test_runs_measured_on_different_numbers_of_images_are_not_compared(moat, runs):
    page, _, _ = page_of(moat, runs)
    assert "not comparable" not in page.text
    assert moat("eval", runs / "moat-2", "--attacks", "pgd7", "--n", 10).code == 0
    page, _, _ = page_of(moat, runs)
    assert "Measured on different images, so not comparable: clean, pgd7." in page.text
    assert "The runs were measured on different numbers of images: their robustness is not comparable." in page.text
    assert "Pareto" not in page.text


def test_misshapen_files_with_good_checksums_are_named_or_measured_again(moat, runs):
    """Whoever writes them can make a checksum that fits."""
    run = runs / "fgsm"
    moat("eval", run, "--attacks", "fgsm")
    moat("report", run)
    card, record, portrait = (read_json(run / f"{name}.json") for name in ("eval", "run", "portrait"))
    for broken in ({"results": {"fgsm": {}}}, {"data": {}}, {"flags": [{}]}, {"subject": []}, {"settings": None}):
        write_json(run / "eval.json", card | broken)
        assert "is not a card" in page_of(moat, run)[0].text
    write_json(run / "eval.json", card)
    for broken in ({"counted": {}}, {"final": {"clean": 1.0}}):
        write_json(run / "run.json", record | broken)
        assert "it lacks passes or final accuracies" in page_of(moat, run)[0].text
    write_json(run / "run.json", record)
    for broken in ({"curve": {}}, {"norm": 3}, {"examples": []}, {"surface": {"loss": [[0.0]]}}, {"steps": None}):
        write_json(run / "portrait.json", portrait | broken)
        assert page_of(moat, run)[0].tags.count("svg") == 2 + 2
        assert read_json(run / "portrait.json") == portrait


def test_a_run_in_a_folder_of_runs_is_named_though_its_record_is_gone(moat, runs):
    (runs / "fgsm" / "run.json").unlink()
    page, _, _ = page_of(moat, runs)
    assert "fgsm/run.json" in page.text
    assert {"epochs", "radius-linf"} <= page.ids


def test_a_portrait_that_is_there_needs_no_images(moat, tiny_options, alone):
    shutil.copytree(tiny_options[1], alone / "images")
    options = ("--data", "images", *tiny_options[2:], "--epochs", 1)
    moat("train", "fgsm", *options, "--out", "one")
    shutil.rmtree(alone / "images")
    page, _, _ = page_of(moat, "one")
    assert "Not shown" not in page.text
    assert page.tags.count("img") == 8 * 3


def test_text_that_is_no_text_and_odd_names_make_a_page_all_the_same(moat, alone, tiny):
    """A lone surrogate in a file, a class called like a formula, a radius written in an odd way."""
    for part in ("train", "test"):
        shutil.copytree(tiny / part, alone / "images" / part)
        first = sorted((alone / "images" / part).iterdir())[0]
        first.rename(first.with_name("$_$"))
    options = ("--data", "images", "--width", 8, "--batch-size", 16, "--threads", 1, "--epochs", 1, "--eps", "8.0/255")
    assert moat("train", "fgsm", *options, "--out", "one").code == 0
    (alone / "one" / "events.jsonl").write_text(json.dumps({"event": "x", "message": "\ud800 here"}) + "\n")
    page, _, _ = page_of(moat, "one")
    assert "? here" in page.text
    assert "$_$" in page.text


def test_a_page_about_a_stopped_run_is_renewed_when_it_is_finished(moat, tiny_options, alone):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "one", "--resume")
    moat(*arguments, "--max-steps", 2)
    moat("report", "one")
    assert "stopped" in Page((alone / "one" / "report.html").read_text()).text
    moat(*arguments)
    assert "stopped" not in Page((alone / "one" / "report.html").read_text()).text


def test_a_run_that_was_killed_is_shown_as_interrupted_and_a_living_one_as_running(moat, runs):
    record = read_json(runs / "fgsm" / "run.json") | {"status": "running", "steps_done": 7, "final": None}
    write_json(runs / "fgsm" / "run.json", record)
    page, _, _ = page_of(moat, runs / "fgsm")
    assert "interrupted after step 7 of 15" in page.text
    assert "running" not in page.text
    with locked(runs / "fgsm"):
        page, _, _ = page_of(moat, runs / "fgsm")
    assert "running after step 7 of 15" in page.text
    assert read_json(runs / "fgsm" / "run.json") == record


def test_an_evaluation_of_an_unfinished_run_says_so_on_the_screen_the_card_and_the_page(moat, tiny_options, alone):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "one", "--resume")
    moat(*arguments, "--max-steps", 2)
    ended = moat("eval", "one", "--attacks", "fgsm")
    assert "warning: the run is not finished (stopped after step 2 of 5)" in ended.err
    assert "unfinished run: stopped after step 2 of 5" in ended.out
    assert Card.read(alone / "one" / "eval.json").subject.unfinished == "stopped after step 2 of 5"
    page, _, _ = page_of(moat, "one")
    assert "fgsm was evaluated unfinished, stopped after step 2 of 5." in page.text
    moat(*arguments)
    ended = moat("eval", "one", "--attacks", "fgsm")
    assert "finished" not in ended.out + ended.err
    assert "unfinished" not in (alone / "one" / "eval.json").read_text()
    assert "unfinished" not in page_of(moat, "one")[0].text


def test_several_runs_get_a_page_of_their_own_beside_the_first(moat, runs):
    for name in ("fgsm", "moat-2"):
        (runs / name / "report.html").unlink(missing_ok=True)
    assert moat("report", runs / "fgsm", runs / "moat-2").out == f"report: {runs / 'report_fgsm_moat-2.html'}\n"
    assert not [*runs.glob("*/report.html")]
    assert default_path([runs / "fgsm"]) == runs / "fgsm" / "report.html"
    names = [f"imoat-2-5-8_mini_s{number}" for number in range(12)]
    assert default_path([Path("runs", name) for name in names]) == Path(
        "runs/report_imoat-2-5-8_mini_s0_and_11_more.html"
    )


def test_a_radius_is_shown_as_a_fraction_however_it_was_typed(moat, tiny_options):
    typed = str(8 / 255)
    trained = moat("train", "fgsm", *tiny_options, "--epochs", 1, "--eps", typed, "--out", "one")
    evaluated = moat("eval", "one", "--attacks", "pgd7")
    assert moat("export", "one", "--format", "safetensors").code == 0
    page, _, _ = page_of(moat, "one")
    card = Path("one/export-safetensors/README.md").read_text()
    for shown in (trained.err, evaluated.out, page.text.partition("recipe.toml")[0], card):
        assert "8/255" in shown
        assert typed not in shown


def test_passes_are_rounded_and_an_unfinished_status_has_a_column_of_its_own(moat, runs):
    record = read_json(runs / "fgsm" / "run.json")
    record["counted"]["passes"] = 1234.56789
    write_json(runs / "fgsm" / "run.json", record | {"status": "failed", "message": "it broke", "final": None})
    page, source, _ = page_of(moat, runs / "fgsm", runs / "moat-2")
    assert "1,234.6" in page.text
    header = re.search(r'<table id="headline"><thead><tr>(.*?)</tr>', source)[1]
    assert header.endswith("<th>outcome</th><th>status</th>")
    assert "failed after step 15 of 15 : it broke" in page.text


def test_red_flags_and_a_collapse_are_at_the_top(moat, runs):
    run = runs / "fgsm"
    record = read_json(run / "run.json") | {"collapsed_at": 2}
    write_json(run / "run.json", record)
    page, _, _ = page_of(moat, run)
    assert page.text.index("robustness was lost at epoch 2") < page.text.index("Results")
    moat("eval", run, "--attacks", "fgsm")
    card = read_json(run / "eval.json")
    card["flags"] = [{"name": "zero-gradients", "evidence": "all of them", "meaning": "nothing moves"}]
    write_json(run / "eval.json", card)
    page, _, _ = page_of(moat, run)
    assert page.text.index("nothing moves") < page.text.index("Results")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "nowhere is not a folder"),
        ((".",), "contains no run"),
        ((), "RUNS"),
        (("run", "-o", "."), "is a folder"),
    ],
)
def test_what_is_no_run_is_refused_in_one_sentence(moat, trained, alone, arguments, says):
    if "run" in arguments:
        shutil.copytree(trained / "fgsm", alone / "run")
    ended = moat("report", *arguments)
    assert ended.code == 2
    assert says in ended.err
    assert "Traceback" not in ended.err


def test_train_and_compare_write_a_page_too(moat, tiny_options, alone):
    assert "report: one/report.html" in moat("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "one").out
    assert "fgsm" in Page((alone / "one" / "report.html").read_text()).text
    ended = moat("compare", "fgsm", "fast", *tiny_options, "--epochs", 1, "--out", "two")
    assert "report: two/report.html" in ended.out
    assert {"fgsm", "fast"} <= set(Page((alone / "two" / "report.html").read_text()).text.split())


def test_a_page_does_not_import_what_the_file_of_a_model_names(moat, tiny_options, alone):
    """Whoever gives somebody a finished run to `--resume` decides what its model.safetensors says."""
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "one", "--resume")
    assert moat(*arguments).code == 0
    (alone / "evil.py").write_text("from pathlib import Path\nPath('ran').touch()\ndef model(classes): pass\n")
    tensors, description = read_weights(alone / "one")
    description = {name: value for name, value in description.items() if name != "sha256"} | {"model": "evil:model"}
    description["sha256"] = fingerprint(tensors, description)
    save_file(tensors, alone / "one" / "model.safetensors", {"moatlab": json.dumps(description)})
    record = read_json(alone / "one" / "run.json")
    write_json(alone / "one" / "run.json", record | {"model": description["sha256"]})
    (alone / "one" / "report.html").unlink()
    assert moat(*arguments).code == 0
    assert moat("report", "one").code == 0
    assert not (alone / "ran").exists()
    assert "--trust-model-code" in Page((alone / "one" / "report.html").read_text()).text


def test_a_stopped_run_gets_no_page_until_it_is_finished(moat, tiny_options, alone):
    arguments = ("train", "fgsm", *tiny_options, "--epochs", 1, "--out", "one", "--resume")
    moat(*arguments, "--max-steps", 2)
    assert not (alone / "one" / "report.html").exists()
    moat(*arguments)
    assert (alone / "one" / "report.html").exists()


def test_ten_runs_make_a_page_below_5_mb_without_measuring_anything(moat, runs):
    moat("report", runs / "moat-2")
    for number in range(10):
        shutil.copytree(runs / "moat-2", runs / f"copy{number}")
    begun = time.monotonic()
    page, source, _ = page_of(moat, *(runs / f"copy{number}" for number in range(10)))
    assert len(source) < 5_000_000
    assert time.monotonic() - begun < 60  # 10 s on a machine with nothing else to do
    assert page.tags.count("svg") == 3 + 10 * 2


# --- the portrait


class Shade(nn.Module):
    """Two logits: how dark and how bright an image is, on the whole."""

    def forward(self, x):
        mean = 4 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-mean, mean], 1)


def pixels_of(png):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png)))).astype(int)


def target_of(model, images=None):
    subject = Subject(name="a model", model="a:model", file=None, data="mini", sha256="0", weights="0")
    return Target(model, subject, None, images or load_images("mini"), Threat.of("16/255"))


def test_robustness_by_radius_of_a_linear_model_is_the_closed_form():
    """An image is robust at eps if no other class can be brought above its own: (w_j - w_y).x + eps |w_j - w_y|_1 < 0
    for all j, with the pixels that eps would take out of [0, 1] going only to its border."""
    images = load_images("mini")
    torch.manual_seed(0)
    model = Linear(torch.randn(10, 3 * 16 * 16) / 100)
    curve = draw_portrait(target_of(model)).curve
    assert curve.eps == pytest.approx([number / RADII * 16 / 255 for number in range(RADII + 1)])
    assert curve.accuracy == sorted(curve.accuracy, reverse=True)
    x, y = images.test_x[:200].permute(0, 3, 1, 2).flatten(1).float() / 255, images.test_y[:200]
    with torch.no_grad():
        toward = model.weight[None] - model.weight[y][:, None]  # (images, classes, pixels)
        for eps, share in zip(curve.eps, curve.accuracy, strict=True):
            moved = torch.where(toward > 0, (x + eps).clamp(max=1)[:, None], (x - eps).clamp(min=0)[:, None])
            highest = (toward * moved).sum(2).scatter(1, y[:, None], -math.inf).amax(1)
            robust = (highest < 0).float().mean().item()
            assert robust <= share + 1e-6 <= robust + 0.05  # one attack of ten steps misses some
    assert len(set(curve.accuracy)) > 2  # they do break, one after another


def test_the_example_of_a_robust_image_is_the_last_iterate_of_the_attack():
    """Bright and dark images, far from the boundary of a model that looks at the mean."""
    y = torch.tensor([0, 1] * 10)
    x = (y * 155 + 50).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 8, 8, 3)
    images = Images("own", x, y, x, y, ("dark", "bright"), (0.5,) * 3, (0.2,) * 3, "arrays own", None, "0")
    examples = draw_portrait(target_of(Shade(), images)).examples
    for one in examples:
        assert one.attacked == one.predicted == one.label
        before, after, change = (pixels_of(png) for png in (one.image, one.adversarial, one.change))
        assert set((after - before).flatten().tolist()) == {16 if one.label == "dark" else -16}
        assert set(change.flatten().tolist()) == {255 if one.label == "dark" else 0}


def test_the_loss_surface_of_a_linear_model_rises_along_the_gradient_from_its_middle():
    torch.manual_seed(0)
    model = Linear(torch.randn(10, 3 * 16 * 16) / 20)
    grid = draw_portrait(target_of(model)).surface
    ahead = [row[12] for row in grid.loss[12:]]
    assert ahead == sorted(ahead)  # the loss of a linear model is convex
    assert ahead[-1] > ahead[0]
    assert len(grid.loss) == len(grid.loss[0]) == 25
    points = [
        (loss, wrong) for row in zip(grid.loss, grid.wrong, strict=True) for loss, wrong in zip(*row, strict=True)
    ]
    assert not any(wrong for loss, wrong in points if loss < 0.6931)  # more than half of the probability
    assert {wrong for _, wrong in points} == {0, 1}


def test_a_portrait_leaves_the_model_as_it_was_and_is_the_same_twice(trained):
    target = load_target(trained / "moat-2")
    target.model.train()
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    state = torch.get_rng_state()
    first = draw_portrait(target)
    assert target.model.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in target.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert draw_portrait(target) == first


@pytest.mark.parametrize(("side", "most"), [(8, 200), (96, 32)])
def test_a_portrait_sends_as_many_images_at_once_as_an_evaluation(side, most):
    """Photos of 224 pixels, 625 at once, would exhaust the memory of a run that has just ended."""
    sizes = set()

    class Recording(Linear):
        def forward(self, x):
            sizes.add(len(x))
            return super().forward(x)

    torch.manual_seed(0)
    x = torch.randint(256, (220, side, side, 3), dtype=torch.uint8)
    model = Recording(torch.randn(3, 3 * side * side) / side)
    y = model(x.permute(0, 3, 1, 2) / 255).argmax(1)
    images = Images("own", x, y, x, y, ("a", "b", "c"), (0.5,) * 3, (0.2,) * 3, "arrays own", None, "0")
    sizes.clear()
    curve = draw_portrait(target_of(model, images)).curve
    assert curve.images == 200
    assert curve.accuracy[-1] < curve.accuracy[0] == 1
    assert most / 2 <= max(sizes) <= most


# --- from Python


def test_a_report_is_written_from_folders_or_from_what_train_returned(runs, capsys):
    run = TrainedRun(runs / "fgsm", RunFolder(runs / "fgsm").read_record(), None)
    assert write_report(run) == runs / "fgsm" / "report.html"
    assert write_report(str(runs)) == runs / "report.html"
    assert write_report([run, runs / "moat-2"], runs / "new" / "page.html") == runs / "new" / "page.html"
    pages = [Page((runs / name).read_text()) for name in ("fgsm/report.html", "report.html", "new/page.html")]
    assert ["run2" in page.ids for page in pages] == [False, True, True]
    assert capsys.readouterr() == ("", "")
    for wrong, says in ((runs / "nowhere", "is not a folder"), ([], "at least one"), (runs / "new", "contains no run")):
        with pytest.raises(UserError, match=says):
            write_report(wrong)


def test_what_a_page_lacks_is_printed_if_it_is_asked_for(runs, capsys):
    (runs / "fgsm" / "eval.json").write_text("{}")
    for verbose, printed in ((None, False), (False, False), (True, True)):
        write_report(runs / "fgsm", verbose=verbose)
        assert ("eval.json can't be read" in capsys.readouterr().err) == printed


# --- charts


@given(st.floats(0, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_few_and_within_the_axis(low, span):
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 8
    assert all(low - 1e-6 * span <= value <= low + span * (1 + 1e-6) for value in found)


@given(st.integers(1, 300), st.integers(0, 300))
def test_epochs_have_whole_ticks(first, count):
    found = ticks(first, first + count, whole=True)
    assert 1 <= len(found) <= 8
    assert all(value == int(value) for value in found)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_holds_those_that_no_other_beats(points):
    front = pareto(points)
    beaten = {(x, y) for x, y in points if any((a <= x and b >= y and (a, b) != (x, y)) for a, b in points)}
    assert set(front) == set(points) - beaten


@given(st.text(), st.text())
def test_any_text_in_a_chart_is_escaped(name, label):
    drawings = [
        line_chart([Series(name, 0, [(1.0, 2.0), (2.0, 3.0)])], x_label=label, y_label="y"),
        scatter([(name, 0, 1.0, 50.0)], x_label=label, y_label="y"),
        tag("text", name, title=label),
    ]
    for drawing in drawings:
        assert set(Page(str(drawing)).tags) <= {"div", "svg", "line", "path", "circle", "text", "rect", "g"}


def test_charts_of_nothing_and_of_one_point_are_drawn_inside_their_frame():
    """Their axes have no length; what is on them is drawn all the same, and at numbers."""
    one = [(1.0, 0.0)]
    for drawing, circles in (
        (line_chart([], x_label="x", y_label="y"), 0),
        (line_chart([Series("a", 0, one)], x_label="x", y_label="y"), 1),
        (line_chart([Series("a", 0, one, bold=one, marks=(one[0],))], x_label="x", y_label="y"), 1),
        (scatter([], x_label="x", y_label="y"), 0),
        (scatter([("a", 0, 0.0, 0.0)], x_label="x", y_label="y", front=one), 1),
        (surface([[0.0] * 3] * 3, [[0] * 3] * 3), 1),
    ):
        page = Page(str(drawing))
        assert page.tags[:2] == ["div", "svg"]
        assert page.tags.count("circle") == circles
        assert not re.search("nan|inf", str(drawing))
        numbers = [float(number) for number in re.findall(r' (?:c?x|c?y|[xy][12])="([^"]+)"', str(drawing))]
        assert all(0 <= number <= 520 for number in numbers)
        places = re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", re.sub(r'd="M-6,[^"]*"', "", str(drawing)))
        assert all(0 <= float(x) <= 520 and 0 <= float(y) <= 320 for x, y in places)
