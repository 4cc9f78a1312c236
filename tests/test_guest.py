"""A library is a guest: it prints nothing unless it is asked to, and leaves the process as it was."""

import subprocess
import sys

CODE = """
import logging, os, signal, sys, threading, warnings

def loggers():
    named = logging.root.manager.loggerDict
    return {name: logger.level for name, logger in named.items() if isinstance(logger, logging.Logger)}

def state():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    return dict(os.environ), list(sys.path), threading.active_count(), handlers, list(warnings.filters)

import torch
import moatlab

torch.set_num_threads(1)
threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
before, levels = state(), loggers()
torch.manual_seed(0)
x, y = torch.randint(256, (60, 8, 8, 3), dtype=torch.uint8), torch.arange(60) % 4
random = torch.get_rng_state()
options = {"method": "moat:2", "epochs": 3, "batch_size": 16, "width": 8, "lr": 0.05}
run = moatlab.train("preact_resnet18", (x, y), out=sys.argv[1], threads=threads + 1, VERBOSE **options)
result = moatlab.evaluate(run.model, x, y, attacks="fgsm,pgd50,apgd-t", eps="8/255", VERBOSE)
moatlab.measure(run.model, x, y, eps="8/255", seed=0)
assert run.record.status == "finished"
assert set(result.accuracy) == {"clean", "fgsm", "pgd50", "apgd-t"}
assert state() == before
assert {name: level for name, level in loggers().items() if name in levels} == levels
assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, precision)
assert torch.equal(torch.get_rng_state(), random)
"""


def run(folder, verbose):
    code = CODE.replace("VERBOSE", verbose)
    return subprocess.run([sys.executable, "-c", code, str(folder)], check=False, capture_output=True, text=True)


def test_a_silent_run_prints_nothing_and_leaves_the_process_as_it_was(tmp_path):
    ended = run(tmp_path / "run", "verbose=False,")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_nothing_is_printed_where_nobody_watches(tmp_path):
    ended = run(tmp_path / "run", "")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_progress_goes_to_stderr_where_it_is_asked_for(tmp_path):
    ended = run(tmp_path / "run", "verbose=True,")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "epoch stage" in ended.stderr


def test_importing_the_package_imports_no_torch_and_prints_nothing():
    code = "import sys, moatlab, moatlab.cli.main; assert 'torch' not in sys.modules; dir(moatlab)"
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
