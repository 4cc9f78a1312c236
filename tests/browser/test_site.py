"""The documentation builds without a warning, its links lead somewhere, and its site works offline in a browser."""

import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
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


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("page", ["index", "methods", "results/reproduction"])
def test_a_page_fits_asks_nobody_and_complains_of_nothing(site, browser, width, page):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    asked, complaints = [], []
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto((site / f"{page}.html").as_uri())
    assert tab.locator("h1").is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert [address for address in asked if not address.startswith("file://")] == []
    assert complaints == []
    tab.close()


def test_the_search_finds_a_page_without_a_network(site, browser):
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.goto((site / "index.html").as_uri())
    tab.locator("input[name=query]").first.focus()
    tab.keyboard.type("catastrophic overfitting")
    result = tab.locator(".md-search-result__link").first
    result.wait_for(state="visible", timeout=15_000)
    assert "Concepts" in tab.locator(".md-search-result__list").inner_text()
    tab.close()
