"""What is published is whole: a source archive has its own tests, and the metadata say what is true."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import piecewise
from piecewise.settings.toml_file import read_tables

ROOT = Path(__file__).resolve().parents[1]
PROJECT = read_tables(ROOT / "pyproject.toml")[0]["project"]


def test_a_source_archive_has_every_file_of_the_repository(tmp_path):
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("only a checkout knows which files belong to the repository")
    pytest.importorskip("setuptools", minversion="77", reason="the build backend is not installed")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    copy = tmp_path / "copy"
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    code = "import setuptools.build_meta as backend; print(backend.build_sdist('made'))"
    built = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (archive,) = (copy / "made").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {member.name.partition("/")[2] for member in opened.getmembers()}
    assert tracked - packed <= {".gitignore"}


def test_the_licence_is_there():
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    assert "Apache License\n                           Version 2.0" in (ROOT / "LICENSE").read_text()


def test_classifiers_name_the_pythons_that_ci_runs():
    classified = set(re.findall(r" :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE))
    ci = set(re.findall(r'python: "(3\.\d+)"', (ROOT / ".github" / "workflows" / "ci.yml").read_text()))
    assert classified == ci and PROJECT["requires-python"] == f">={min(ci)}"


def test_the_changelog_has_this_version():
    assert f"\n## {piecewise.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
