"""The documentation builds without a warning, its links lead somewhere, and its site works offline in a browser."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return out


def test_every_link_of_the_site_leads_to_a_page_and_a_place_that_are_there(site):
    pages = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    assert len(pages) >= 20
    for page, text in pages.items():
        for address in re.findall(r'(?:href|src)="([^"]*)"', text):
            name, _, place = unquote(unescape(address)).partition("#")
            if name.startswith(("https://", "http://", "data:", "mailto:", "javascript:")) or page.name == "404.html":
                continue
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {address}"
            if place and target.suffix == ".html":
                assert re.search(rf'(id|name)="{re.escape(place)}"', pages[target]), f"{page.name}: {address}"


def test_formulas_are_drawn_and_none_is_left_as_source(site):
    for name in ("methods", "evaluation", "concepts"):
        text = (site / f"{name}.html").read_text(encoding="utf-8")
        assert text.count("<math") >= 4
        assert "\\mathrm" not in re.sub(r"<code>.*?</code>", "", text)
        assert "<merror" not in text


LOOK = r"""() => {
  const article = document.querySelector("article, main");
  const texts = [];
  const walker = document.createTreeWalker(article, NodeFilter.SHOW_TEXT);
  while (walker.nextNode())
    if (!walker.currentNode.parentElement.closest("pre, script, style")) texts.push(walker.currentNode);

  const lines = (text, from, to) => {
    const range = document.createRange();
    range.setStart(text, from);
    range.setEnd(text, to);
    return new Set([...range.getClientRects()].map(box => Math.round(box.top / 4))).size;
  };
  const broken = texts.flatMap(text => [...text.data.matchAll(/--[a-z][a-z0-9-]*/g)]
    .filter(found => lines(text, found.index, found.index + found[0].length) > 1).map(found => found[0]));

  // A scroll bar without a style of its own may be drawn only while one scrolls.
  const cut = box => getComputedStyle(box).overflowX !== "visible" && box.scrollWidth > box.clientWidth + 1;
  const hidden = [...article.querySelectorAll("table")].filter(table => {
    for (let box = table; box !== article; box = box.parentElement)
      if (cut(box)) return !parseFloat(getComputedStyle(box, "::-webkit-scrollbar").height);
    return table.getBoundingClientRect().right > innerWidth;
  });

  return {
    heading: Boolean(document.querySelector("h1")?.offsetHeight),
    width: document.documentElement.scrollWidth,
    stray_formulas: [...article.querySelectorAll("math:not([display=block])")]
      .filter(math => !math.closest("p, td, th, li, dd, h1, h2, h3, h4")).map(math => math.textContent),
    broken_formulas: [...article.querySelectorAll("math")]
      .filter(math => math.querySelector("merror") || math.textContent.includes("\\")).map(math => math.textContent),
    escapes: texts.filter(text => /\\[|{}]/.test(text.data)).map(text => text.data),
    broken_options: broken,
    hidden_columns: hidden.map(table => table.textContent.trim().slice(0, 60)),
    cut_code: [...article.querySelectorAll("pre, pre > code")].filter(code => code.scrollWidth > code.clientWidth + 1)
      .map(code => code.textContent.slice(0, 60)),
    quotations_in_quotations: article.querySelectorAll("blockquote blockquote").length,
    giants: [...document.querySelectorAll("svg")].filter(icon => icon.getBoundingClientRect().width > 100).length,
  };
}"""


class Seen(NamedTuple):
    page: str
    width: int
    facts: dict[str, Any]
    requests: list[str]
    errors: list[str]


@pytest.fixture(scope="module")
def seen(site, browser):
    """What the browser shows of every page, on a desktop and on a phone: each is loaded once and resized."""
    tab = browser.new_page()
    looks = []
    for path in sorted(site.rglob("*.html")):
        requests, errors = [], []
        listeners = {
            "request": lambda request, urls=requests: urls.append(request.url),
            "console": lambda line, texts=errors: texts.append(line.text) if line.type == "error" else None,
            "pageerror": lambda error, texts=errors: texts.append(str(error)),
        }
        for event, listener in listeners.items():
            tab.on(event, listener)
        for width in (1280, 390):
            tab.set_viewport_size({"width": width, "height": 900})
            if width == 1280:
                tab.goto(path.as_uri())
            name = path.relative_to(site).with_suffix("").as_posix()
            looks.append(Seen(name, width, tab.evaluate(LOOK), requests, errors))
        for event, listener in listeners.items():
            tab.remove_listener(event, listener)
    tab.close()
    return looks


def found(seen, fact, width=None):
    """The pages on which a look found something that should not be there, with what was found."""
    return {
        (look.page, look.width): look.facts[fact] for look in seen if look.facts[fact] and width in (None, look.width)
    }


def test_every_page_fits_loads_nothing_from_elsewhere_and_logs_no_error(seen):
    for look in seen:
        assert look.facts["heading"], look.page
        assert look.facts["width"] <= look.width, (look.page, look.width)
        assert [address for address in look.requests if not address.startswith("file://")] == [], look.page
        assert look.errors == [], look.page


def test_every_formula_is_inside_a_paragraph_a_cell_or_a_block_of_its_own(seen):
    assert found(seen, "stray_formulas") == {}


def test_no_formula_shows_its_source(seen):
    assert found(seen, "broken_formulas") == {}


def test_no_page_shows_an_escaped_bar_or_brace(seen):
    assert found(seen, "escapes") == {}


def test_no_column_is_cut_off_without_a_visible_scroll_bar(seen):
    assert found(seen, "hidden_columns") == {}


def test_no_option_is_broken_at_a_hyphen(seen):
    assert found(seen, "broken_options") == {}


def test_no_code_is_cut_off_on_a_desktop(seen):
    assert found(seen, "cut_code", width=1280) == {}


def test_no_doctest_is_drawn_as_a_quotation(seen):
    assert found(seen, "quotations_in_quotations") == {}


def test_no_icon_is_drawn_without_its_style(seen):
    assert found(seen, "giants") == {}


def test_the_reference_lists_the_fields_of_what_is_returned(site):
    text = (site / "reference.html").read_text(encoding="utf-8")
    sections = dict(re.findall(r'<h3 [^>]*id="[\w.]*\.(\w+)"(.*?)(?=<h[23])', text, re.DOTALL))
    expected = {
        "TrainedRun": ("folder", "record", "model"),
        "RunRecord": ("counted", "collapsed_at", "final", "environment"),
        "Evaluation": ("accuracy", "robust", "broken_by", "flags"),
    }
    for name, fields in expected.items():
        for field in fields:
            assert f"<td><code>{field}</code></td>" in sections[name], (name, field)


def test_every_page_of_a_figure_shows_it(site):
    pages = sorted((site / "results").glob("figure*.html"))
    assert len(pages) >= 3
    for page in pages:
        assert re.search(rf'<img [^>]*src="{page.stem}\.png"', page.read_text(encoding="utf-8")), page.name


def test_the_search_finds_a_page_without_a_network(site, browser):
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto((site / "index.html").as_uri())
    tab.locator("input[name=query]").first.focus()
    tab.keyboard.type("catastrophic overfitting")
    result = tab.locator(".md-search-result__link").first
    result.wait_for(state="visible", timeout=15_000)
    assert "Concepts" in tab.locator(".md-search-result__list").inner_text()
    tab.close()
