"""The content of a leaderboard: the models of many cards, in tables of those that were measured in the same way.

A table has one data set, number of images, threat and precision, so that its numbers can be compared, and its clean
accuracies are those of the attacked images.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from moatlab.attacks.catalog import CATALOG
from moatlab.attacks.norms import NORM_NAMES
from moatlab.evaluation.card import Card
from moatlab.evaluation.red_flags import Flag
from moatlab.evaluation.verify import inconsistency
from moatlab.report.views import is_run
from moatlab.runtime.console import counted
from moatlab.runtime.errors import UserError
from moatlab.runtime.files import RunFile
from moatlab.training.run_folder import RunFolder

CARDS = ("eval.json", "eval_best.json", "eval_average.json", "eval_aa.json", "eval_best_aa.json", "*.eval.json")
CHOSEN = (RunFile.BEST_MODEL, RunFile.AVERAGE_MODEL)  # their checksums are not in the record of their run


class Measured(BaseModel, extra="forbid"):
    accuracy: float
    interval: list[float]


class Row(BaseModel, extra="forbid"):
    """A model. `rank` is None without the table's main attack; passes and FLOPs of its training are None if unknown."""

    rank: int | None = None
    name: str
    model: str
    sha256: str
    results: dict[str, Measured]
    passes: float | None
    flops: float | None
    flags: list[Flag]
    unfinished: str | None
    cards: list[str]


class Table(BaseModel, extra="forbid"):
    """Models measured in the same way. `attack` ranks them; `attacks` are all that any of them has, that one first."""

    data: str
    data_sha256: str
    images: int
    threat: str
    precision: str
    attack: str | None
    attacks: list[str]
    warnings: list[str]
    rows: list[Row]

    @property
    def title(self) -> str:
        precision = "" if self.precision == "fp32" else f", in {self.precision}"
        return f"{self.data}, {self.threat}, {counted(self.images, 'test image')}{precision}"


class Board(BaseModel, extra="forbid"):
    warnings: list[str]
    tables: list[Table]


def is_about_cards(paths: Sequence[Path]) -> bool:
    """Whether these are cards or folders of cards, rather than runs."""
    if any(path.is_file() or path.suffix == ".json" for path in paths):
        return True
    folders = [inside for path in paths if path.is_dir() for inside in (path, *path.iterdir())]
    return not any(is_run(folder) for folder in folders) and any(_cards_in(path) for path in paths)


def find_cards(paths: Sequence[Path]) -> list[Path]:
    """The cards among `paths`, and those in folders and one level below."""
    found = []
    for path in paths:
        inside = _cards_in(path) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path} contains no card; write one with moat eval")
        found += inside
    return list({path.resolve(): path for path in found}.values())


def _cards_in(folder: Path) -> list[Path]:
    return sorted(path for name in CARDS for place in (name, f"*/{name}") for path in folder.glob(place))


def read_card(path: Path) -> Card:
    """A card whose numbers follow from its verdicts."""
    card = Card.read(path)
    if unknown := [name for name in card.results if name not in CATALOG]:
        raise UserError(f"{path} is not a card that moat eval wrote: there is no attack '{unknown[0]}'")
    if reason := inconsistency(card):
        raise UserError(f"{path} can't be listed: {reason}")
    return card


def make_board(paths: Sequence[Path]) -> Board:
    groups: dict[object, dict[object, list[tuple[Path, Card]]]] = {}
    for path in paths:
        card = read_card(path)
        setting = (card.data.sha256, card.data.images, card.settings.threat, card.settings.precision)
        models = groups.setdefault(setting, {})
        models.setdefault((card.subject.sha256, card.subject.model), []).append((path, card))
    tables = [_table(list(models.values())) for models in groups.values()]
    tables.sort(key=lambda table: (-len(table.rows), table.title))
    names = Counter(name for name, _ in {(table.data, table.data_sha256) for table in tables})
    for table in tables:
        if names[table.data] > 1:
            table.data += f" (checksum {table.data_sha256[:8]})"
    return Board(warnings=_differences(tables), tables=tables)


def _differences(tables: list[Table]) -> list[str]:
    values = {
        "data": [table.data for table in tables],
        "threat": [table.threat for table in tables],
        "number of images": [f"{images:,}" for images in sorted(table.images for table in tables)],
        "precision": [table.precision for table in tables],
    }
    differ = [f"{what} ({', '.join(found)})" for what, all_ in values.items() if len(found := dict.fromkeys(all_)) > 1]
    return [f"The cards differ in {', '.join(differ)}: models in different tables can't be compared."] if differ else []


def _table(models: list[list[tuple[Path, Card]]]) -> Table:
    rows = [_row(cards) for cards in models]
    _name(rows)
    counts = Counter(name for row in rows for name in row.results if name != "clean")

    def strength(name: str) -> tuple[bool, int, bool, int]:
        """The strongest attack that most models have is the main one."""
        return 2 * counts[name] > len(rows), CATALOG[name].rank, CATALOG[name].thorough, counts[name]

    attacks = sorted(counts, key=lambda name: (*strength(name)[1:3], -list(CATALOG).index(name)), reverse=True)
    main = max(attacks, key=strength, default=None)
    attacks.sort(key=lambda name: name != main)
    robust = [row.results[main].accuracy for row in rows if main in row.results] if main else []
    for row in rows:
        if main in row.results:
            row.rank = 1 + sum(other > row.results[main].accuracy for other in robust)
    rows.sort(key=lambda row: (row.rank is None, row.rank, -row.results["clean"].accuracy, row.name))
    first = models[0][0][1]
    table = Table(
        data=first.data.name,
        data_sha256=first.data.sha256,
        images=first.data.images,
        threat=f"{NORM_NAMES[first.settings.norm]} eps {first.settings.threat.text}",
        precision=first.settings.precision,
        attack=main,
        attacks=attacks,
        warnings=[],
        rows=rows,
    )
    table.warnings = _cautions(table)
    return table


def _cautions(table: Table) -> list[str]:
    """What weakens the ranks of a table."""
    main, found = table.attack, []
    if main is None:
        return ["These models were not attacked."]
    if note := CATALOG[main].note:
        found.append(f"{main} is {note}.")
    if not CATALOG[main].thorough:
        found.append(f"{main} alone is no evidence of robustness; evaluate with aa.")
    if unranked := [row.name for row in table.rows if row.rank is None]:
        found.append(f"Without a rank, because {main} was not run: {', '.join(unranked)}.")
    found += [f"{row.name} is of an unfinished run: {row.unfinished}." for row in table.rows if row.unfinished]
    return found


def _row(cards: list[tuple[Path, Card]]) -> Row:
    """The model of these cards. If two have an attack, the lower accuracy is the tighter bound."""
    results: dict[str, Measured] = {}
    for _, card in cards:
        for name, result in card.results.items():
            if name not in results or result.accuracy < results[name].accuracy:
                results[name] = Measured(accuracy=result.accuracy, interval=result.interval)
    path, card = cards[0]
    passes, flops = _cost(path, card)
    return Row(
        name=card.subject.name,
        model=card.subject.model,
        sha256=card.subject.sha256,
        results=results,
        passes=passes,
        flops=flops,
        flags=list({flag.name: flag for _, one in cards for flag in one.flags}.values()),
        unfinished=card.subject.unfinished,
        cards=[str(path) for path, _ in cards],
    )


def _cost(path: Path, card: Card) -> tuple[float | None, float | None]:
    """Passes and FLOPs of the training, if the card is in the folder of the model's run."""
    try:
        record = RunFolder(path.parent).read_record()
    except UserError:
        return None, None
    own = card.subject.weights is not None and card.subject.weights == record.model
    return (record.counted.get("passes"), record.flops) if own or card.subject.file in CHOSEN else (None, None)


def _name(rows: list[Row]) -> None:
    """Shorten names to the last part of their paths where these differ; equal names are followed by their cards."""
    whole = [row.name for row in rows]
    short = [Path(name).name or name for name in whole]
    for row, name in zip(rows, short, strict=True):
        if short.count(name) == 1:
            row.name = name
        elif whole.count(row.name) > 1:
            row.name += f": {row.cards[0]}"
