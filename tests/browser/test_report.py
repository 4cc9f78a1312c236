"""The page in a real browser. Needs Chromium (Debian: apt install chromium); without one these tests are left out,
unless MOAT_BROWSER=required (`make test-browser`)."""

import math
from pathlib import Path

import pytest
import torch

from moatlab import make_recipe
from moatlab.attacks.catalog import NAMES, PAPER
from moatlab.evaluation.card import Card, Data, Result
from moatlab.evaluation.red_flags import Measured
from moatlab.evaluation.result import Settings, Share
from moatlab.evaluation.target import Subject
from moatlab.methods.language import parse_method
from moatlab.report.page import render
from moatlab.report.portrait import SIDE, Curve, Example, Portrait, Surface, as_png
from moatlab.report.views import RunView
from moatlab.training.run_folder import RunRecord

EVIL = "<script>alert(1)</script>"
EPOCHS = 200
METHODS = "fgsm fast gradalign:0.2 kim pgd:2 pgd:7 moat:2 imoat:1,2,3 moat:5 imoat:2,5,8 nfgsm mixup|nfgsm|pgd:2"


def a_run(number, method, epochs=EPOCHS):
    """A run as its files would tell it; every fourth collapses halfway."""
    recipe = make_recipe(method, preset="mini", epochs=epochs)
    parsed, half = parse_method(method), epochs // 2
    collapsed_at = half if number % 4 == 0 else None
    metrics = [
        {
            "epoch": epoch + 1,
            "stage": str(parsed.stage_at(epoch, epochs)),
            "clean": 0.4 + 0.1 * epoch / epochs,
            "fgsm": 0.2 + 0.02 * number / 12,
            "comparable": parsed.ends_cycle(epoch),
            "pgd7": 0.0 if collapsed_at and epoch + 1 >= half else 0.15 + 0.03 * math.sin(epoch / 9 + number),
        }
        for epoch in range(epochs)
    ]
    torch.manual_seed(number)
    pictures = {name: as_png(torch.rand(3, 32, 32)) for name in ("image", "adversarial", "change")}
    example = Example(label="cat", predicted="cat", attacked=EVIL, magnified=8.0, **pictures)
    ticks = [2 * i / (SIDE - 1) - 1 for i in range(SIDE)]
    loss = [[1 + a + 0.3 * math.sin(4 * b) for b in ticks] for a in ticks]
    wrong = [[int(a > 0.5) for _ in ticks] for a in ticks]
    portrait = Portrait(
        weights="0",
        eps="16/255",
        norm="linf",
        steps=10,
        curve=Curve(eps=[i / 8 * 16 / 255 for i in range(9)], accuracy=[0.5 - 0.05 * i for i in range(9)], images=200),
        examples=[example] * 8,
        surface=Surface(image=0, label="cat", loss=loss, wrong=wrong),
    )
    passes = parsed.cost(epochs).as_dict()
    final = {"clean": 0.45, "fgsm": 0.2, "pgd7": 0.01 * number, "images": 1000}
    known = ("finished", "0", method, str(parsed), epochs, 39, recipe.setting, passes, passes, 1e12, {}, {})
    outcome = "collapsed" if collapsed_at else "robust"
    record = RunRecord(*known, train_seconds=120.0, outcome=outcome, collapsed_at=collapsed_at, final=final)
    return RunView(Path(f"run{number}"), recipe, record, metrics, portrait=portrait, label=method)


def a_card(names=NAMES, unfinished=None):
    """An evaluation with these attacks."""
    share = {"accuracy": 0.1234, "interval": [0.1, 0.15], "standing": 123}
    counts = {"forwards": 10, "gradients": 10, "seconds": 1.0}
    sizes = {"images": 1000, "chunk_size": 1000, "batch_size": 250, "classes": 10}
    measured = {"randomised": False, "probabilities": False, "labels": [100] * 10, "sample": 200, "clean": 0.5}
    measured |= {"zero_gradients": 0.0, "fgsm": 0.2, "pgd20": {"1": 0.3, "2": 0.2, "3": 0.1}, "pgd20_at_half": 0.0}
    return Card(
        subject=Subject(name="run", model="m", file=None, data="mini", sha256="0", weights="0", unfinished=unfinished),
        data=Data(name="mini", part="test", images=1000, sha256="0", note=None),
        settings=Settings(attacks=list(names), eps="16/255", norm="linf", seed=0, audit=False, **sizes),
        results={name: Result(**share, **counts) for name in names},
        all_attacks=Share(**share),
        flags=[],
        measured=Measured(**measured),
        adversarial=None,
        environment={},
        first_broken_by=[],
        broken_by={},
    )


@pytest.fixture
def look_at(browser, tmp_path):
    """`look_at(views, width=390)`: the page, opened from a file; what it complains of or asks for is in `.heard`."""
    contexts = []

    def look(views, *, width=1280, scheme="light"):
        file = tmp_path / "report.html"
        file.write_text(render(views), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.heard = []
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        page.on("dialog", lambda dialog: (page.heard.append(dialog.message), dialog.dismiss()))
        addresses = ("file:", "data:")
        page.on("request", lambda request: request.url.startswith(addresses) or page.heard.append(request.url))
        page.goto(file.as_uri())
        return page

    yield look
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def many():
    return [a_run(number, method) for number, method in enumerate(METHODS.split())]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_plot_is_there_and_nothing_complains_overflows_or_asks_for_anything(look_at, many, width, scheme):
    page = look_at(many, width=width, scheme=scheme)
    assert page.locator("svg").count() == 3 + 2 * len(many)
    for number in range(page.locator("svg").count()):
        drawing = page.locator("svg").nth(number)
        drawing.scroll_into_view_if_needed()
        box = drawing.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 150
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    assert page.heard == []


@pytest.mark.parametrize("width", [1280, 390])
def test_a_wide_table_scrolls_visibly_with_the_names_of_runs_in_place(look_at, width):
    view = a_run(1, "fast", epochs=3)
    view.cards = [a_card(unfinished="interrupted after step 120 of 819")]
    page = look_at([view], width=width)
    box = page.locator(".scroll:has(#headline)")
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    assert "linear-gradient" in box.evaluate("box => getComputedStyle(box).backgroundImage")
    name, last = page.locator("#headline tbody td").first, page.locator("#headline tbody td").last
    before = name.bounding_box()["x"]
    box.evaluate("box => box.scrollLeft = 10000")
    assert name.bounding_box()["x"] == pytest.approx(before, abs=1)
    right = last.bounding_box()
    assert right["x"] + right["width"] <= width
    assert last.inner_text() == "finished"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "was evaluated unfinished, interrupted after step 120 of 819." in page.locator("body").inner_text()


def test_the_usual_columns_of_five_runs_fit_on_a_screen(look_at, many):
    for view in many[:5]:
        view.cards = [a_card(PAPER)]
    page = look_at(many[:5])
    for view in many[:5]:
        view.cards = []
    assert page.locator(".scroll:has(#headline)").evaluate("box => box.scrollWidth <= box.clientWidth")


@pytest.mark.parametrize("epochs", [1, 3, 4, 21])
def test_epochs_are_whole_numbers_on_the_axes(look_at, epochs):
    page = look_at([a_run(1, "fast", epochs)])
    for chart in ("#epochs", ".curves"):
        texts = page.locator(f"{chart} .tick[text-anchor=middle]").all_text_contents()
        assert texts
        assert all(text.isdigit() for text in texts)


def test_hovering_over_a_curve_shows_the_values_there(look_at, many):
    page = look_at(many)
    plot = page.locator("#epochs .plot")
    plot.scroll_into_view_if_needed()
    assert not plot.locator(".tip").is_visible()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    told = plot.locator(".tip").inner_text()
    epoch = int(told.splitlines()[0].removeprefix("epoch "))
    assert 80 < epoch < 120
    value = 100 * many[5].metrics[epoch - 1]["pgd7"]
    assert f"pgd:7 {value:.1f} %" in told
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] - 40)
    assert not plot.locator(".tip").is_visible()


def test_hovering_over_a_point_shows_which_run_it_is(look_at, many):
    page = look_at(many)
    point = page.locator("#cost circle").last
    point.scroll_into_view_if_needed()
    point.hover()
    told = page.locator("#cost .tip").inner_text()
    assert "pgd:7" in told
    assert "1600 passes" in told


def test_dark_is_dark_and_light_is_light(look_at, many):
    def brightness(page, what):
        colour = page.evaluate(f"getComputedStyle(document.body).{what}")
        return sum(map(int, colour[4:-1].split(", ")))

    light, dark = look_at(many[:2]), look_at(many[:2], scheme="dark")
    assert brightness(light, "backgroundColor") > 700 > 200 > brightness(light, "color")
    assert brightness(dark, "backgroundColor") < 200 < 600 < brightness(dark, "color")


def test_a_run_called_like_a_script_stays_text(look_at):
    view = a_run(0, "fgsm", epochs=21)
    view.label = EVIL
    page = look_at([view])
    assert EVIL in page.locator("h2").all_inner_texts()
    assert page.locator("figcaption").first.inner_text().endswith(f"attacked: {EVIL}")
    assert page.heard == []


def test_what_is_folded_away_opens(look_at):
    page = look_at([a_run(6, "moat:2", epochs=21)])
    recipe = page.locator("details").first
    assert not recipe.locator("pre").is_visible()
    recipe.locator("summary").click()
    assert 'method = "moat:2"' in recipe.locator("pre").inner_text()


def test_twelve_runs_of_200_epochs_scroll_without_long_frames(look_at, many):
    """The middle frame of a scroll through the whole page; a machine that does other things may take long for some."""
    page = look_at(many)
    frames = page.evaluate(
        """() => new Promise(done => {
            const times = []; let before = performance.now();
            const step = now => {
                times.push(now - before); before = now;
                scrollBy(0, 150);
                if (scrollY + innerHeight < document.documentElement.scrollHeight - 2 && times.length < 400)
                    requestAnimationFrame(step);
                else done(times.sort((a, b) => a - b));
            };
            requestAnimationFrame(step); })"""
    )
    assert len(frames) > 20
    assert frames[len(frames) // 2] < 100


def test_on_paper_every_run_is_printed_and_legends_keep_their_colours(look_at, many):
    page = look_at(many[:3])
    page.emulate_media(media="print")
    for number in range(page.locator(".run").count()):
        run = page.locator(".run").nth(number)
        assert run.evaluate("element => getComputedStyle(element).contentVisibility") == "visible"
        assert run.bounding_box()["height"] > 500
    key = page.locator(".key").first
    assert key.evaluate("element => getComputedStyle(element).printColorAdjust") == "exact"
