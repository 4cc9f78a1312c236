"""The wheel, installed alone in a fresh environment, is all that a user needs."""

import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_its_types_and_its_data_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"moatlab/py.typed", "moatlab/data/mini/train.bin", "moatlab/data/mini/test.bin"} <= set(names)
    assert all(name.startswith(("moatlab/", "moatlab-")) for name in names)


def test_the_wheel_trains_and_plans_in_a_fresh_environment(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    bin_folder = tmp_path / "venv" / "bin"
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    pytorch = distribution("torch")  # it is large, and lent from this environment; everything else is installed
    for name in {file.parts[0] for file in pytorch.files} - {".."}:
        (packages / name).symlink_to(pytorch.locate_file(name))
    install = [bin_folder / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, capture_output=True, cwd=tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MOAT"))}

    def moat(*arguments):
        command = [bin_folder / "moat", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout

    assert json.loads(moat("plan", "imoat:2,5,8", "--epochs", "60", "--json"))["passes"] == 183
    record = json.loads(moat("train", "moat:2", "--max-steps", "2", "--json"))
    assert (record["status"], record["steps_done"]) == ("stopped", 2)
    assert (tmp_path / "runs" / "moat-2_mini_s0" / "model.safetensors").exists()
