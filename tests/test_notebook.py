"""A notebook, executed: progress, displays, silence, interrupt and resume. The example of examples/ is shortened."""

import asyncio
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

EXAMPLE = Path(__file__).parents[1] / "examples" / "first_contact.ipynb"
SHORTENED = [
    (r"\"mini\", method", "(images.train_x[:400], images.train_y[:400]), method"),
    (r"epochs=6", "epochs=3, width=8, batch_size=40, threads=1"),
    (r"\[:200\]", "[:20]"),
    (r"pgd50", "pgd7"),
]
MODEL = """import signal, time, torch

class Net(torch.nn.Sequential):
    def __init__(self, pause=0.0):
        torch.manual_seed(0)
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(768, 10))
        self.pause = pause

    def forward(self, x):
        time.sleep(self.pause)
        return super().forward(x)

data = images.train_x[:400], images.train_y[:400]
options = {"method": "moat:2", "epochs": 3, "batch_size": 40, "threads": 1}
"""
WHOLE = f'{MODEL}whole = moatlab.train(Net(), data, out="runs/whole", verbose=False, **options)'
STOPPED = 'moatlab.train(Net(pause=0.1), data, out="runs/stopped", **options)  # interrupted at the first steps'
RESUMED = """assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
resumed = moatlab.train(Net(), data, out="runs/stopped", resume=True, **options)
assert resumed.record.model == whole.record.model"""


class Client(NotebookClient):
    """Keeps the texts of all progress bars, and interrupts the cell that asks for it."""

    progress = ()
    interrupted = False

    def process_message(self, message, cell, cell_index):
        if message["msg_type"] == "update_display_data":
            shown = message["content"]["data"]["text/plain"]
            self.progress = (*self.progress, shown)
            if "interrupted at" in cell.source and " step 1" in shown and not self.interrupted:
                self.interrupted = True
                self.sending = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(message, cell, cell_index)


@pytest.fixture
def executed(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter"))
    notebook = nbformat.read(EXAMPLE, as_version=4)
    for cell in notebook.cells:
        for pattern, short in SHORTENED:
            cell.source = re.sub(pattern, short, cell.source)
    notebook.cells += [new_code_cell(source) for source in (WHOLE, STOPPED, RESUMED)]
    client = Client(notebook, timeout=120, allow_errors=True, resources={"metadata": {"path": str(alone)}})
    client.execute()
    return client


def outputs(cell, kind):
    """The representations of a cell's outputs, `text/html` or `text/plain`."""
    return [one["data"][kind] for one in cell.outputs if kind in one.get("data", {})]


def test_a_notebook_shows_progress_and_cards_is_silent_on_request_and_resumes_after_an_interrupt(executed, alone):
    training, evaluating, report, whole, stopped, resumed = (
        cell for cell in executed.nb.cells if cell.cell_type == "code"
    )
    for cell in (training, evaluating, report, whole, resumed):
        assert [one for one in cell.outputs if one.output_type == "error"] == []
    for cell in (training, evaluating):
        assert [one for one in cell.outputs if one.output_type == "stream"] == []  # stderr is red in a notebook
    assert any(re.search(r"epoch 1/3 mixup .*% .* step \d+/24 .* ETA", shown) for shown in executed.progress)
    rows = "".join(outputs(training, "text/plain"))
    assert all(part in rows for part in ("the run is in runs/notebook", "epoch stage", "    3 pgd:2"))
    assert "moat:2 on 40 test images" in outputs(training, "text/html")[-1]
    assert "20 images, L-inf eps 16/255" in outputs(evaluating, "text/html")[-1]
    assert re.search(r"attack +┃ accuracy %", "".join(one.get("text", "") for one in report.outputs))
    assert "runs/notebook/report.html" in outputs(report, "text/plain")[-1]
    assert (alone / "runs" / "notebook" / "report.html").exists()
    assert whole.outputs == []
    (error,) = [one for one in stopped.outputs if one.output_type == "error"]
    assert error.ename == "Interrupted"
    assert re.match(r"interrupted by SIGINT after step \d+ of \d+; nothing is lost; to continue", error.evalue)
    assert 'out="runs/stopped", resume=True' in error.evalue
