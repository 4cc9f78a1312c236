"""The leaderboard in a real browser; see test_report.py."""

import pytest

from cards_for_tests import ten_cards
from moatlab import write_leaderboard

RANKED = ["model-0", "model-1", "model-2", "model-3", "smoothed", "model-4", "quick"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    return write_leaderboard(ten_cards(folder / "cards"), folder / "board.html")[0]


@pytest.fixture
def look(browser, file):
    """`look(width=390)`: the page, opened from its file; what it complains of or asks for is in `.heard`."""
    contexts = []

    def open_page(*, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.heard = []
        page.on("console", lambda message: page.heard.append(message.text))
        page.on("pageerror", lambda error: page.heard.append(str(error)))
        addresses = ("file:", "data:")
        page.on("request", lambda request: request.url.startswith(addresses) or page.heard.append(request.url))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def names(page, table=0):
    """Of the rows that can be seen, in their order."""
    rows = page.locator(".board").nth(table).locator("tbody tr:visible")
    return rows.evaluate_all("rows => rows.map(row => row.dataset.name)")


def column(page, heading):
    index = page.locator(".board").first.locator("th").all_inner_texts().index(heading)
    return page.locator(".board").first.locator(f"tbody tr:visible td:nth-child({index + 1})").all_inner_texts()


def sort_by(page, heading):
    page.locator(".board").first.get_by_role("button", name=heading, exact=True).click()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ten_cards_fit_on_a_screen_in_light_and_dark_and_nothing_complains_or_asks_for_anything(look, width, scheme):
    page = look(width=width, scheme=scheme)
    assert [len(names(page, table)) for table in range(4)] == [7, 1, 1, 1]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".chart svg:visible").bounding_box()["width"] > 250
    assert page.get_by_text("Not comparable.").is_visible()
    assert page.locator("tbody .flag:visible").all_inner_texts() == ["pgd-far-above-aa"]
    assert "95 % interval of PGD minus AutoAttack accuracy above 6 points" in page.locator("#flags").inner_text()
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(", "))) > 400) == (scheme == "light")
    assert page.locator("td").first.bounding_box()["width"] < width / 2
    assert page.heard == []


def test_a_click_on_a_heading_sorts_its_table_and_a_second_one_turns_it_round(look):
    page = look()
    assert names(page) == RANKED
    heading = page.locator(".board").first.locator("th", has_text="clean %")
    sort_by(page, "clean %")
    assert names(page) == ["quick", "smoothed", "model-4", "model-3", "model-2", "model-1", "model-0"]
    assert heading.get_attribute("aria-sort") == "descending"
    sort_by(page, "clean %")
    assert column(page, "clean %") == sorted(column(page, "clean %"))
    assert heading.get_attribute("aria-sort") == "ascending"
    assert page.locator(".board").first.locator("th[aria-sort]").count() == 1
    sort_by(page, "model")
    assert names(page) == sorted(RANKED)
    for _ in range(2):  # what is not known is last in both directions
        sort_by(page, "aa %")
        assert names(page)[-1] == "quick"
    assert page.heard == []


def test_the_keyboard_sorts_as_well(look):
    page = look()
    button = page.locator(".board").first.get_by_role("button", name="pgd50 %", exact=True)
    button.focus()
    page.keyboard.press("Enter")
    assert names(page)[0] == "smoothed"
    page.keyboard.press("Space")
    assert names(page)[-1] == "smoothed"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "fgsm %"


def test_filters_leave_the_rows_asked_for(look):
    page = look()
    count = page.locator("output")
    assert count.inner_text() == "10 of 10 rows"
    page.get_by_label("name").fill("MODEL-0")
    assert (names(page, 0), names(page, 3)) == (["model-0"], ["model-0"])
    assert count.inner_text() == "2 of 10 rows"
    assert page.locator(".board:visible").count() == 2
    page.get_by_label("name").fill("")
    page.get_by_label("data").select_option("cifar100")
    assert page.locator(".board:visible h2").all_inner_texts() == ["cifar100, L-inf eps 8/255, 200 test images"]
    page.get_by_label("data").select_option("all")
    page.get_by_label("threat").select_option("L-inf eps 4/255")
    assert count.inner_text() == "1 of 10 rows"
    page.get_by_label("threat").select_option("all")
    page.get_by_label("without red flags").check()
    assert "smoothed" not in names(page)
    assert count.inner_text() == "9 of 10 rows"
    assert page.heard == []


def test_another_attack_sorts_hides_and_draws(look):
    page = look()
    chart = page.locator(".board").first.locator(".chart:visible")
    assert chart.locator("h3").inner_text() == "aa against clean accuracy"
    assert chart.locator("circle").count() == 6
    page.get_by_label("attack").select_option("pgd50")
    assert chart.locator("h3").inner_text() == "pgd50 against clean accuracy"
    assert chart.locator("circle").count() == 7
    assert names(page)[0] == "smoothed"
    assert column(page, "pgd50 %") == sorted(column(page, "pgd50 %"), reverse=True)
    page.get_by_label("attack").select_option("aa")
    assert "quick" not in names(page)
    page.get_by_label("attack").select_option("main")
    assert names(page) == RANKED


def test_points_of_hidden_models_are_hidden_and_hovering_shows_the_others(look):
    page = look()
    page.get_by_label("name").fill("model-")
    chart = page.locator(".board").first.locator(".chart:visible")
    assert chart.locator("circle:visible").count() == 5
    chart.locator("circle:visible").first.hover()
    shown = chart.locator(".tip").inner_text()
    assert "model-0" in shown
    assert "65 % clean" in shown
    assert "34.0 %" in shown
    box = chart.locator(".plot").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 15, box["y"] + box["height"] * 0.75)  # near the hidden point
    assert "smoothed" not in chart.locator(".tip").inner_text()
    assert page.heard == []


def test_without_a_script_the_tables_are_there_and_the_filters_are_not(browser, file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("tbody tr:visible").count() == 10
    assert not page.locator("#filters").is_visible()
    context.close()
