"""What `moatlab.train` returns or raises in Python."""

import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import moatlab
from moatlab.runtime.errors import Interrupted

OPTIONS = {"method": "moat:2", "epochs": 3, "batch_size": 8, "augment": False, "threads": 1}


def data():
    torch.manual_seed(0)
    return torch.randint(256, (40, 8, 8, 3), dtype=torch.uint8), torch.arange(40) % 4


class Interrupting(nn.Sequential):
    """Sends ctrl-C to this process at one of its calls."""

    def __init__(self, at=None):
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(192, 4))
        self.calls, self.at = 0, at

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


def test_ctrl_c_is_a_keyboard_interrupt_that_shows_how_to_resume_to_the_same_bits(alone):
    whole = moatlab.train(Interrupting(), data(), out="whole", **OPTIONS)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        moatlab.train(Interrupting(at=12), data(), out="run", **OPTIONS)
    assert isinstance(caught.value, Interrupted)
    assert signal.getsignal(signal.SIGINT) is handler
    assert str(caught.value).startswith("interrupted by SIGINT after step ")
    assert str(caught.value).endswith('to continue, call moatlab.train again with out="run", resume=True')
    resumed = moatlab.train(Interrupting(), data(), out="run", resume=True, **OPTIONS)
    assert resumed.record.model == whole.record.model
    assert (alone / "run" / "model.safetensors").exists()


@pytest.mark.usefixtures("alone")
def test_a_run_prints_the_last_lines_of_the_command_and_displays_as_a_card():
    run = moatlab.train(Interrupting(), data(), out="<b>run", **OPTIONS)
    first, second = str(run).splitlines()
    assert first.startswith(f"moat:2 on {run.record.final['images']} test images: clean ")
    assert second == "6 passes; training 0 s, monitor 0 s; the run is in <b>run"
    assert repr(run) == "TrainedRun('<b>run', moat:2, finished)"
    html = run._repr_html_()
    assert "&lt;b&gt;run" in html
    assert "<b>" not in html
    assert all(part in html for part in ("pgd7", "95 %", "3 epochs", "eps 8/255"))
    run.record.outcome, run.record.collapsed_at = "collapsed", 2
    assert "COLLAPSED at epoch 2" in str(run)
    assert "COLLAPSED at epoch 2" in run._repr_html_()
    for outcome, text in (
        ("overfitted", "lost slowly"),
        ("untrained", "above chance"),
        ("undecided", "outcome undecided"),
    ):
        run.record.outcome = outcome
        assert text in str(run)
    run.record.outcome, run.record.recovered = "robust", [[3, 5], [7, 7]]
    assert "recovered after epoch 3 to 5, 7" in str(run)


@pytest.mark.usefixtures("alone")
def test_an_unfinished_run_shows_how_far_it_is():
    run = moatlab.train(Interrupting(), data(), out="run", max_steps=2, **OPTIONS)
    total = 3 * run.record.steps_per_epoch
    assert str(run).splitlines()[0] == f"moat:2: stopped after step 2 of {total}"
    assert f"stopped after step 2 of {total}" in run._repr_html_()


@pytest.mark.usefixtures("alone")
def test_the_report_of_a_run_in_memory_needs_no_file_of_its_model_and_images(monkeypatch):
    monkeypatch.setattr("moatlab.report.portrait.STEPS", 2)
    run = moatlab.train(Interrupting(), data(), out="run", **OPTIONS)
    with torch.no_grad():
        run.model[1].weight.zero_()  # the page shows the run's own weights
    page = moatlab.write_report(run)
    assert page == Path("run/report.html")
    text = page.read_text()
    assert "Robustness by radius" in text
    assert "trust_model_code" not in text
    assert (run.model[1].weight == 0).all()
