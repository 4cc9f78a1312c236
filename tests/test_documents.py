"""The commands and Python blocks of the documents run, most of them shortened.

`REPLACED` lists the commands that are not run as written: another command runs in their place, and the comment names
the test of the original, or the reason. `SHORTENED` lists those that run with fewer epochs, steps, images or attacks. A
command that no rule matches runs as written. `PYTHON` and `EXAMPLES` shorten the Python blocks.
"""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from render_examples import NAMES, cells

import moatlab
from images_for_tests import tiny_images
from moatlab.reproduce.space import read_space

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

REPLACED = [
    (r"^make (\S+)", r"make --dry-run \1"),  # prints the recipes; make test runs this very test
    (r"^(pipx?|pre-commit) .*", "moat --version"),  # tests/test_wheel.py installs the package
    (r"^\.venv/bin/python (\S+).*", r"python \1 --help"),  # scripts that download and write
    (r"^torchrun .* -m moatlab", "moat"),  # one process; tests/runtime/test_distributed.py starts several
    (r"^moat tune .*", "moat tune --show-space"),  # tests/reproduce/test_tune.py searches
    (r"--recipe runs/tune_\S+", "moat:2"),  # the result of a search
    (r" --on (\d+|ray(:\S+)?)", ""),  # one after another; tests/reproduce/test_pool.py has both
    (r"hf_hub:USER/NAME --data photos", "runs/moat-2_mini_s0"),  # tests/models/test_foreign.py has hub folders
    (r"^(moat eval .*)--data cifar10", r"\1--data mini"),  # tests download nothing; ten classes, as mynet's weights
    (r"--data cifar100?\b", "--data photos"),  # tests download nothing
    (r" --track (wandb|mlflow)", ""),  # tests/training/test_tracking_services.py has both
    (r" --push \S+", ""),  # tests/sharing/test_hub.py pushes to a server of its own
    (r"--format robustbench", "--format safetensors"),  # tests/sharing/test_export.py has a model of that size
    (r"^moat demo$", "moat compare fgsm moat:2"),  # what the demo does, in a folder of its own
    (r"^(moat compare (?!.*--data).*)", r"\1 --data photos"),  # smaller than mini
    (r"--attacks (aa-rand|aa|all)\b", "--attacks apgd-ce"),  # tests/cli/test_eval.py runs AutoAttack
    (r"^(moat eval (?!.*--attacks).*)", r"\1 --attacks fgsm,pgd7"),  # tests/evaluation/test_evaluator.py runs each
    (r"^(moat reproduce .*?)( --plan)?$", r"\1 --plan"),  # tests/reproduce/test_sweep.py runs sweeps
]
SMALL = "--width 8 --threads 1"
SHORTENED = [
    (r"^(moat train .*?)( --max-steps \d+)?$", rf"\1 --max-steps 2 {SMALL}"),
    (r"^(moat compare .*)", rf"\1 --epochs 1 --batch-size 40 {SMALL}"),
    (r"^(moat (?:train|compare) (?!.*--out).*)", r"\1 --out runs/new"),  # emptied after each command
    (r"^(moat eval .*?)( --n \d+)?$", r"\1 --n 8"),
]
COMMANDS = [*REPLACED, *SHORTENED]
PYTHON = [
    (r"epochs=(9|21|30)\b", "epochs=3, max_steps=2"),
    (r"\[:200\]", "[:8]"),
    (r"\"aa\"", '"apgd-ce"'),
    (r"\"pgd50\"", '"pgd7"'),
]
EXAMPLES = [
    (r"epochs=(6|21)\b", "epochs=1, width=8, batch_size=40"),
    *PYTHON,
    (r"\[:500\]", "[:8]"),
    (r"steps=(20|50)\b", "steps=2"),
    (r"\"mini\"", '"photos"'),
    (r"epochs=epochs\[spec\]", "epochs=epochs[spec], max_steps=3, batch_size=40"),
    (r"holdout=500", "holdout=20"),
]


def blocks(document):
    return [(match[1], match[2]) for match in FENCE.finditer(document.read_text(encoding="utf-8"))]


def shortened(text, table):
    for pattern, replacement in table:
        text = re.sub(pattern, replacement, text)
    return text


def commands(block):
    """The commands of a block: without comments, continued lines joined, `a && b` as two."""
    joined = block.replace("\\\n", " ")
    lines = (re.sub(r"\s+#.*$", "", line).strip() for line in joined.splitlines())
    return [command.strip() for line in lines if line and not line.startswith("#") for command in line.split(" && ")]


RUNNABLE = [path for path in DOCUMENTS if any(tag in ("sh", "python") for tag, _ in blocks(path))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A whole run of three epochs on mini, in seconds."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    moatlab.train("preact_resnet18", "mini", epochs=3, batch_size=2500, holdout=100, width=8, threads=1, out=folder)
    return folder


@pytest.fixture
def world(alone, trained, monkeypatch):
    """What the documents speak of: images, a network and its weights, runs that were trained before."""
    tiny_images(alone / "photos", ("night", "dusk", "dawn", "day"))
    network = dict(blocks(ROOT / "docs" / "index.md"))['python title="mynet.py"']
    (alone / "mynet.py").write_text(f"{network}\n\ndef trained():\n    return build(10)\n")
    monkeypatch.syspath_prepend(str(alone))
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace = {}
    exec(network, namespace)
    torch.save(namespace["build"](10).state_dict(), "weights.pt")
    for name in ("moat-2_mini_s0", "moat-2_cifar10_s0", "imoat-2-5-8_cifar10_s0", "fgsm_mini_s0", "demo_s0"):
        shutil.copytree(trained, alone / "runs" / name)
    yield alone
    sys.modules.pop("mynet", None)


@pytest.mark.parametrize("document", RUNNABLE, ids=lambda path: path.stem)
def test_the_commands_and_python_blocks_of_a_document_work(document, moat, world):
    namespace = {"__name__": "document"}
    for tag, block in blocks(document):
        if tag == "python" and document.name != "README.md":  # see the next test
            table = EXAMPLES if document.parent.name == "examples" else PYTHON
            exec(compile(shortened(block, table), str(document), "exec"), namespace)
        for command in commands(block) if tag == "sh" else []:
            program, *arguments = shlex.split(shortened(command, COMMANDS))
            if program == "moat":
                ended = moat(*arguments)
                assert ended.code == 0, f"{command}\n{ended.err}"
                shutil.rmtree(world / "runs" / "new", ignore_errors=True)
            else:
                path = {"make": "/usr/bin/make", "python": sys.executable}[program]
                subprocess.run([path, *arguments], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.usefixtures("alone")
def test_the_first_python_example_of_the_readme_trains_a_robust_model_and_writes_a_page(capsys):
    """As written: the one test of this file that shortens nothing."""
    (example,) = [block for tag, block in blocks(ROOT / "README.md") if tag == "python"]
    namespace = {}
    exec(example, namespace)
    assert namespace["result"].accuracy["pgd50"] > 0.1
    assert namespace["result"].flags == []
    *table, page = capsys.readouterr().out.splitlines()
    assert "\n".join(table) == str(namespace["result"])
    assert Path(page).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_every_rule_changes_a_command_or_a_block():
    """So the tables list what is shortened, and nothing else."""
    shell = [command for path in DOCUMENTS for tag, block in blocks(path) if tag == "sh" for command in commands(block)]
    python = [(path, block) for path in DOCUMENTS for tag, block in blocks(path) if tag == "python"]
    examples = [block for path, block in python if path.parent.name == "examples"]
    others = [block for path, block in python if path.parent.name != "examples" and path.name != "README.md"]
    own = [rule for rule in EXAMPLES if rule not in PYTHON]
    for table, texts in ((COMMANDS, shell), (PYTHON, others), (own, examples)):
        for number, (pattern, _) in enumerate(table):
            assert any(re.search(pattern, shortened(text, table[:number])) for text in texts), pattern


def test_the_tests_that_cover_a_replaced_command_exist():
    source = Path(__file__).read_text(encoding="utf-8")
    named = re.findall(r"# .*?(tests/[\w/]+\.py)", source)
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def prose_words(name):
    """Words of a document, code blocks aside."""
    return len(FENCE.sub("", (ROOT / name).read_text(encoding="utf-8")).split())


def test_the_readme_is_read_in_a_minute_and_the_architecture_in_one_sitting():
    assert prose_words("README.md") < 700
    assert prose_words("docs/architecture.md") < 1500


def test_every_link_of_the_readme_leads_to_a_file_and_a_heading():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert len(links) > 15
    for link in links:
        name, _, place = link.partition("#")
        assert (ROOT / name).exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)$", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
            assert place in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, link


def test_every_file_that_the_architecture_names_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", text.replace("`stages/`", ""))
    assert {"training/trainer.py", "training/collapse.py", "attacks/square_attack.py"} <= set(named)
    assert {"methods/language.py", "evaluation/card.py"} <= set(named)
    for name in named:
        assert (ROOT / "src" / "moatlab" / name).exists() or (ROOT / name).exists(), name
    picture = (ROOT / "docs" / "pictures" / "rooms.svg").read_text(encoding="utf-8")
    for name in re.findall(r"\w+\.py", picture):
        assert list((ROOT / "src" / "moatlab").glob(f"*/{name}")), name


def test_every_block_says_what_it_is():
    for document in DOCUMENTS:
        for tag, block in blocks(document):
            assert tag in {"sh", "python", 'python title="mynet.py"', "text", "toml", "math"}, (document.name, block)


def test_the_search_space_of_the_documents_can_be_searched(tmp_path):
    (space,) = [block for document in DOCUMENTS for tag, block in blocks(document) if tag == "toml"]
    (tmp_path / "space.toml").write_text(space)
    assert "eps_warmup" in read_space(tmp_path / "space.toml").choices


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_an_example_shows_its_source_as_it_is(name):
    source = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    page = blocks(ROOT / "docs" / "examples" / f"{name}.md")
    assert [text for kind, text in cells(source) if kind == "code"] == [b.strip() for tag, b in page if tag == "python"]
