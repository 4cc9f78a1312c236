"""A tag is released only if it is the version, and the files for it agree with each other."""

import re
import shutil
import tomllib
from pathlib import Path

import check_tag
import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The files of a release of this version, with a dated changelog."""
    for name in ("pyproject.toml", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{PROJECT['version']}] - 2031-05-07\n\n- New.\n")
    monkeypatch.setattr(check_tag, "ROOT", tmp_path)
    return tmp_path


def test_the_tag_of_a_release_is_its_version(release):
    version = PROJECT["version"]
    assert check_tag.problem(f"v{version}") is None
    assert check_tag.problem(version) == (
        f"the tag is {version}, but the version in pyproject.toml is {version}; it needs the tag v{version}"
    )
    assert "but the version in pyproject.toml" in check_tag.problem("v99.0")
    (release / "CHANGELOG.md").write_text(f"## [{version}] - Unreleased\n")
    assert check_tag.problem(f"v{version}") == f"CHANGELOG.md has no dated entry for version {version}"


def test_the_wheel_is_tested_on_every_version_of_python_that_it_names():
    named = [match[1] for line in PROJECT["classifiers"] if (match := re.fullmatch(r".*Python :: (3\.\d+)", line))]
    assert RELEASE["jobs"]["wheel"]["strategy"]["matrix"]["python"] == named
    assert len(named) == 3


def test_only_a_tag_whose_wheel_was_tested_is_published():
    publish, steps = RELEASE["jobs"]["publish"], RELEASE["jobs"]["build"]["steps"]
    assert publish["needs"] == ["build", "wheel"]
    assert publish["if"] == "github.ref_type == 'tag'"
    assert [step["run"] for step in steps if "check_tag" in step.get("run", "")]
    permissions = {name: job.get("permissions") for name, job in RELEASE["jobs"].items()}
    assert permissions == {"build": None, "wheel": None, "publish": {"id-token": "write"}}
    assert RELEASE["permissions"] == {"contents": "read"}


def test_the_image_gets_the_files_that_it_copies_and_no_others():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if line.startswith("COPY") and "--from" not in line]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {f"!{name}" for names in copied for name in names} == {line for line in ignored if line[0] == "!"}
    assert ignored[0] == "*"
    assert all((ROOT / name).exists() for names in copied for name in names)
    assert [line for line in lines if line.startswith("USER")] == ["USER 1000"]
