"""The leaderboard: which models share a table, how they are ranked, and that page, Markdown and JSON agree."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from cards_for_tests import a_card, ten_cards
from moatlab import UserError, make_recipe, train, write_leaderboard
from moatlab.evaluation.card import Card, evaluate_target
from moatlab.evaluation.target import load_target
from moatlab.report.board import make_board
from moatlab.runtime.files import read_json, write_json
from moatlab.training.run_folder import RunFolder

EVIL = "<script>alert(1)|`x`*[y](z)"


@pytest.fixture
def board(tmp_path):
    """`board(card, ...)`: the leaderboard of these cards."""

    def make(*cards):
        paths = [tmp_path / f"{number}.eval.json" for number in range(len(cards))]
        for card, path in zip(cards, paths, strict=True):
            card.write(path)
        return make_board(paths)

    return make


class Tables(HTMLParser):
    """The texts in the cells of each table of a page, row by row; names without their flags, which come last."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tables, self.flag, self.inside = [], False, False
        self.feed(page)

    def handle_starttag(self, name, attributes):
        if name == "table":
            self.tables.append([])
        elif name == "tr":
            self.tables[-1].append([])
            self.flags = []
        elif name in ("td", "th"):
            self.tables[-1][-1].append("")
            self.inside = True
        self.flag = dict(attributes).get("class") == "flag"

    def handle_endtag(self, name):
        if name == "tr":
            self.tables[-1][-1].append(", ".join(self.flags) or "-")
        self.flag = False
        self.inside = self.inside and name not in ("td", "th")

    def handle_data(self, data):
        if self.flag:
            self.flags.append(data)
        elif self.inside:
            self.tables[-1][-1][-1] += data.strip()


def tables_in(markdown):
    found = []
    for line in markdown.splitlines():
        if line.startswith("| model |"):
            found.append([])
        if line.startswith("| ") and not line.startswith("| ---"):
            cells = re.split(r"(?<!\\) \| ", line[2:-2])
            found[-1].append([re.sub(r"\\(.)", r"\1", cell) for cell in cells])
    return found


def test_page_markdown_and_json_have_the_same_numbers(tmp_path):
    paths = ten_cards(tmp_path / "cards")
    card = a_card(EVIL, clean=0.71, fgsm=0.6, pgd50=0.4, aa=0.1)
    card.write(paths[-1])
    page, data, text = write_leaderboard(paths, tmp_path / "board.html")
    shown = Tables(page.read_text()).tables
    written = tables_in(text.read_text())
    tables = read_json(data)["tables"]
    assert len(shown) == len(written) == len(tables) == 3
    assert "<script>alert" not in page.read_text()
    for one, other, table in zip(shown, written, tables, strict=True):
        assert one[1:] == other[1:]
        assert one[0][:-1] == other[0][:-1]
        for cells, row in zip(one[1:], table["rows"], strict=True):
            named = dict(zip(one[0], cells, strict=True))
            assert named["model"] == row["name"]
            assert named["rank"] == str(row["rank"] or "-")
            assert cells[-1] == (", ".join(flag["name"] for flag in row["flags"]) or "-")
            for attack in ("clean", *table["attacks"]):
                share = row["results"].get(attack)
                assert named[f"{attack} %"] == (f"{100 * share['accuracy']:.1f}" if share else "-")
            main = row["results"].get(table["attack"])
            assert named["95 %"] == ("-".join(f"{100 * end:.1f}" for end in main["interval"]) if main else "-")


def test_only_models_measured_in_the_same_way_share_a_table(board):
    usual = {"clean": 0.7, "aa": 0.3}
    found = board(
        a_card("one", **usual),
        a_card("two", **usual),
        a_card("fewer images", images=100, **usual),
        a_card("smaller ball", eps="4/255", **usual),
        a_card("same ball", eps=str(8 / 255), **usual),
        a_card("other norm", norm="l2", eps="8/255", **usual),
        a_card("other data", data="cifar10", **usual),
        a_card("short numbers", precision="bf16", **usual),
    )
    assert [row.name for row in found.tables[0].rows] == ["one", "same ball", "two"]
    assert [len(table.rows) for table in found.tables] == [3, 1, 1, 1, 1, 1]
    assert found.warnings == [
        "The cards differ in data (mini, cifar10), threat (L-inf eps 8/255, L-inf eps 4/255, L2 eps 8/255), "
        "number of images (100, 200), precision (fp32, bf16): models in different tables can't be compared."
    ]
    assert board(a_card("one", **usual), a_card("two", **usual)).warnings == []


def test_two_data_sets_of_one_name_are_told_apart(board):
    one, other = a_card("one", clean=0.7, aa=0.3), a_card("two", clean=0.7, aa=0.3)
    other.data.sha256 = "another set"
    found = board(one, other)
    assert [table.data for table in found.tables] == ["mini (checksum of mini)", "mini (checksum another )"]
    assert "data (mini (checksum" in found.warnings[0]


def test_the_strongest_attack_that_most_models_have_ranks_them(board):
    strong = [a_card(f"strong {n}", clean=0.7, fgsm=0.5, pgd50=0.4 - n / 20, aa=0.3 + n / 20) for n in range(2)]
    weak = a_card("weak", clean=0.9, fgsm=0.8, pgd50=0.7)
    (table,) = board(weak, *strong).tables
    assert (table.attack, table.attacks) == ("aa", ["aa", "pgd50", "fgsm"])
    assert [(row.rank, row.name) for row in table.rows] == [(1, "strong 1"), (2, "strong 0"), (None, "weak")]
    assert table.warnings == ["Without a rank, because aa was not run: weak."]
    (table,) = board(weak, a_card("weak too", clean=0.8, fgsm=0.5, pgd50=0.4), strong[0]).tables
    assert table.attack == "pgd50"
    assert [row.rank for row in table.rows] == [1, 2, 2]
    (table,) = board(a_card("one", clean=0.7, fgsm=0.5)).tables
    assert table.warnings == ["fgsm alone is no evidence of robustness; evaluate with aa."]
    (table,) = board(a_card("one", clean=0.7)).tables
    assert (table.attack, table.warnings) == (None, ["These models were not attacked."])


def test_fast_autoattack_is_not_passed_off_as_the_whole(board):
    (table,) = board(a_card("one", clean=0.7, aa_fast=0.3)).tables
    assert table.warnings == ["aa-fast is an upper bound on robustness, not AutoAttack: apgd-ce and apgd-t only."]


def test_two_cards_of_a_model_are_one_row_with_the_lower_accuracy(board):
    first = a_card("one", clean=0.7, fgsm=0.5, pgd50=0.4)
    second = a_card("one", clean=0.7, pgd50=0.38, aa=0.3)
    (table,) = board(first, second).tables
    (row,) = table.rows
    assert {name: result.accuracy for name, result in row.results.items()} == {
        "clean": 0.7,
        "fgsm": 0.5,
        "pgd50": 0.38,
        "aa": 0.3,
    }
    assert len(row.cards) == 2


def test_the_clean_accuracy_of_a_table_is_that_of_its_attacked_images(board):
    found = board(a_card("one", images=500, clean=0.7, pgd50=0.4), a_card("one", images=200, clean=0.65, aa=0.3))
    assert {table.images: table.rows[0].results["clean"].accuracy for table in found.tables} == {500: 0.7, 200: 0.65}
    assert "number of images (200, 500)" in found.warnings[0]


def test_names_are_short_where_that_is_enough(board):
    cards = [a_card(name, clean=0.7, aa=0.3) for name in ("runs/a (last)", "x/b", "y/b", "c")]
    twin = a_card("c", clean=0.7, aa=0.3)
    twin.subject.sha256 = "another"
    names = [row.name for row in board(*cards, twin).tables[0].rows]
    assert names[:1] == ["a (last)"]
    assert {"x/b", "y/b"} < {*names}
    assert [name.startswith("c: ") for name in names].count(True) == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("run") / "fgsm"
    options = {"epochs": 1, "width": 8, "batch_size": 16, "holdout": 0}
    train(make_recipe("fgsm", data=str(tiny), **options), folder, threads=1)
    evaluate_target(load_target(folder), attacks=["fgsm", "pgd50"])
    return folder


def test_the_cost_is_that_of_the_run_beside_the_card_and_unknown_elsewhere(run, tmp_path):
    copied = shutil.copy(run / "eval.json", tmp_path / "copied.eval.json")
    record = RunFolder(run).read_record()
    (row,) = make_board([run / "eval.json"]).tables[0].rows
    assert (row.passes, row.flops) == (record.counted["passes"], record.flops)
    (row,) = make_board([copied]).tables[0].rows
    assert (row.passes, row.flops) == (None, None)
    other = shutil.copytree(run, tmp_path / "other")
    write_json(other / "run.json", read_json(run / "run.json") | {"model": "of other weights"})
    (row,) = make_board([other / "eval.json"]).tables[0].rows
    assert (row.passes, row.flops) == (None, None)


def test_the_command_makes_a_leaderboard_of_cards_and_a_report_of_runs(moat, run, alone):
    shutil.copytree(run, alone / "runs" / "fgsm")
    ended = moat("report", "runs/fgsm/eval.json")
    assert (ended.code, ended.out) == (0, "leaderboard: leaderboard.html, leaderboard.json, leaderboard.md\n")
    assert moat("report", "runs/fgsm/eval.json", "-o", "new/board.html").code == 0
    assert sorted(path.name for path in (alone / "new").iterdir()) == ["board.html", "board.json", "board.md"]
    assert moat("report", "runs").out == "report: runs/report.html\n"
    (alone / "cards").mkdir()
    shutil.copy(run / "eval.json", alone / "cards" / "model.eval.json")
    assert moat("report", "cards").out.startswith("leaderboard: ")
    both = moat("report", "cards/model.eval.json", "runs")
    assert both.code == 0
    (row,) = json.loads((alone / "leaderboard.json").read_text())["tables"][0]["rows"]
    assert row["cards"] == ["cards/model.eval.json", "runs/fgsm/eval.json"]  # of one model
    assert moat("report", "cards/model.eval.json", "cards").code == 0
    assert len(json.loads((alone / "leaderboard.json").read_text())["tables"][0]["rows"][0]["cards"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.json",), "none.json can't be read: it is missing, damaged or not from moatlab"),
        (("notes.txt",), "notes.txt can't be read: it is missing, damaged or not from moatlab"),
        (("other.json",), "other.json is not a card that moat eval wrote"),
        (("newer.json",), "newer.json has schema 2; this version of moatlab reads 1"),
        (("good.json", "newer.json"), "newer.json has schema 2; this version of moatlab reads 1"),
        (("edited.json",), "edited.json can't be listed: the accuracies do not match the verdicts"),
        (("forged.json",), "forged.json is not a card that moat eval wrote: there is no attack 'magic'"),
        (("empty",), "empty contains no run"),
        (("good.json", "empty"), "empty contains no card; write one with moat eval"),
        (("good.json", "-o", "board.txt"), "board.txt must end in .html; a .json and a .md file are written beside it"),
        (("good.json", "-o", "good.html"), "good.json, written beside good.html, would replace a card; choose another"),
        (("good.json", "-o", "empty"), "empty is a folder; give a file, such as empty/leaderboard.html"),
    ],
)
def test_bad_input_gets_one_sentence(moat, alone, arguments, message):
    (alone / "empty").mkdir()
    (alone / "notes.txt").write_text("notes")
    write_json(alone / "other.json", {"rows": []})
    card = a_card("one", clean=0.7, aa=0.3)
    card.write(alone / "good.json")
    (alone / "newer.json").write_text(json.dumps({**json.loads((alone / "good.json").read_text()), "schema": 2}))
    card.results["aa"].accuracy = 0.9
    card.write(alone / "edited.json")
    forged = a_card("one", clean=0.7, aa=0.3)
    forged.broken_by["magic"] = forged.broken_by.pop("aa")
    forged.results["magic"] = forged.results.pop("aa")
    forged.write(alone / "forged.json")
    ended = moat("report", *arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert message in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert not list(alone.glob("*.html"))


def test_from_python_a_card_or_several(tmp_path):
    paths = ten_cards(tmp_path / "cards")
    assert write_leaderboard(str(paths[0]), tmp_path / "one.html") == [
        tmp_path / f"one.{kind}" for kind in ("html", "json", "md")
    ]
    write_leaderboard(tmp_path / "cards", tmp_path / "all.html")
    assert sum(len(table["rows"]) for table in read_json(tmp_path / "all.json")["tables"]) == 10
    with pytest.raises(UserError, match="give at least one card"):
        write_leaderboard([])
    assert Card.read(paths[0])  # unchanged
