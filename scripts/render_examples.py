"""Run the notebook-style examples and write their text, code, output and plots to docs/examples.

.venv/bin/python scripts/render_examples.py [NAME ...]        default: all; runs are written to runs/
"""

import contextlib
import datetime
import io
import re
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

from moatlab.runtime.environment import describe_environment

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "examples"
NAMES = ("watch_a_collapse", "robust_on_a_budget", "audit_a_claim")


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell: `# %% [markdown]` starts text in comments, `# %%` starts code."""
    pieces = re.split(r"^# %%( \[markdown\])?\n", source, flags=re.MULTILINE)[1:]
    return [
        ("text", re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE)) if mark else ("code", text.strip())
        for mark, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]


def render(name: str) -> None:
    facts = describe_environment()
    page, namespace, pictures = [], {"__name__": "__main__"}, 0
    for kind, text in cells((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")):
        if kind == "text":
            page.append(text)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, name, "exec"), namespace)
        page.append(f"```python\n{text}\n```")
        if printed.getvalue():
            page.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for number in plt.get_fignums():
            pictures += 1
            plt.figure(number).savefig(PAGES / f"{name}_{pictures}.png", dpi=100)
            page.append(f"![plot of the cell above]({name}_{pictures}.png)")
        plt.close("all")
    title, _, rest = page[0].partition("\n")
    note = (
        f"*Run on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} with {facts['cpu']}, {facts['cpus']} cores, torch "
        f"{facts['torch']}; the source is [examples/{name}.py](../../examples/{name}.py).*"
    )
    page[0] = f"{title}\n\n{note}\n\n{rest.strip()}"
    (PAGES / f"{name}.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or NAMES:
        render(chosen)
