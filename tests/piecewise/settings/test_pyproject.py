"""`[tool.piecewise]` in `pyproject.toml`: where it is found, what wins over it, and how it is written."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import piecewise
from piecewise.errors.settings import UnreadableSettingsFile, WrongSettings
from piecewise.settings.config import PiecewiseConfig

TABLE = "[tool.piecewise.buckets]\nnum_tokens = [8, 24]\n[tool.piecewise.capture]\nwarmup_steps = 7\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder, with the working directory two folders below."""
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "package" / "part").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'served'\n" + TABLE)
    monkeypatch.chdir(tmp_path / "package" / "part")
    return tmp_path


def test_the_nearest_file_with_the_table_is_read(project, monkeypatch):
    told = []
    with monkeypatch.context() as patched:
        patched.setattr(
            logging.getLogger("piecewise.settings.sources"), "info", lambda *args: told.append(args)
        )
        assert PiecewiseConfig.from_any().buckets == (8, 24)
    assert told == [("settings come from %s", project / "pyproject.toml")]
    # One without the table is passed by, whatever it holds.
    for other in ("[project]\nname = 'part'\n", "[tool.ruff]\n", "piecewise = 3\n", "[[[ no TOML"):
        Path("pyproject.toml").write_text(other)
        assert PiecewiseConfig.from_any().warmup_steps == 7
    Path("pyproject.toml").unlink()
    Path("pyproject.toml").mkdir()
    assert PiecewiseConfig.from_any().warmup_steps == 7
    Path("../pyproject.toml").write_text("tool.piecewise.capture.warmup_steps = 5\n")
    assert PiecewiseConfig.from_any() == PiecewiseConfig(warmup_steps=5)
    monkeypatch.chdir(project)
    assert PiecewiseConfig.from_any().warmup_steps == 7


def test_argument_over_environment_over_file_over_default_and_a_given_file_stands_alone(project, monkeypatch):
    monkeypatch.setenv("PIECEWISE_WARMUP_STEPS", "9")
    found = PiecewiseConfig.from_any(max_signatures=2)
    assert found == PiecewiseConfig(buckets=(8, 24), warmup_steps=9, max_signatures=2)
    assert PiecewiseConfig.from_any(buckets=[5], warmup_steps=1) == PiecewiseConfig(
        buckets=[5], warmup_steps=1
    )
    path = project / "settings.toml"
    path.write_text("[limits]\nmax_signatures = 3\n")
    assert PiecewiseConfig.from_any(path) == PiecewiseConfig(warmup_steps=9, max_signatures=3)
    # These read no project's file.
    assert PiecewiseConfig() == PiecewiseConfig.from_any(PiecewiseConfig()) != found
    assert PiecewiseConfig.from_toml(path) == PiecewiseConfig(max_signatures=3)
    # A pyproject.toml may be the file that is given.
    assert PiecewiseConfig.from_toml(project / "pyproject.toml").warmup_steps == 7
    assert PiecewiseConfig.from_any("../../pyproject.toml").buckets == (8, 24)


def test_every_entry_point_uses_it(project):
    model = torch.nn.Linear(4, 4)
    assert piecewise.compile(model).piecewise_config.buckets == (8, 24)
    assert piecewise.enable(model).piecewise_config.buckets == (8, 24)
    piecewise.disable(model)
    (project / "pyproject.toml").write_text("[tool.piecewise.capture]\nwarm_up = 3\n")
    for entry in (
        lambda: piecewise.compile(model),
        lambda: piecewise.enable(model),
        lambda: piecewise.explain(model, torch.ones(4, 4)),
        lambda: piecewise.handle(torch.compile(model, backend="piecewise")),
    ):
        with pytest.raises(WrongSettings, match="the nearest is warmup_steps"):
            entry()


def test_every_problem_is_told_with_its_line(project):
    path = project / "pyproject.toml"
    path.write_text(
        "[project]\nname = 'x'\n[tool.piecewise]\ncolour = 3\n"
        "[tool.piecewise.buckets]\nnum_tokens = [\n 8,\n 8,\n]\n"
        "[tool.piecewise.limit]\nmax_seq_len = 4\n[tool.piecewise.capture]\nwarmup = 1\n"
    )
    with pytest.raises(WrongSettings, match="4 settings are wrong") as caught:
        PiecewiseConfig.from_any()
    for line, text in (
        (4, "[tool.piecewise.colour]: expected a known name"),
        (8, "[tool.piecewise.buckets] num_tokens[1]: expected more than 8"),
        (10, "[tool.piecewise.limit]: expected a known name"),
        (13, "[tool.piecewise.capture] warmup: expected a known name"),
    ):
        assert f"{path}:{line}: {text}" in str(caught.value)
    assert "the nearest is [tool.piecewise.limits]" in str(caught.value)
    assert "progress in [tool.piecewise.capture]; " in str(caught.value)
    for text in ("[tool]\npiecewise = 3\n", "[[tool.piecewise]]\n", "[tool.piecewise]\nbuckets = [8]\n"):
        path.write_text(text)
        with pytest.raises(WrongSettings, match=r"pyproject.toml:[12]: .*expected a table, \[tool.piecewise"):
            PiecewiseConfig.from_any()


def test_a_broken_file_that_names_us_is_an_error_and_a_strange_one_is_not(project):
    path = project / "pyproject.toml"
    path.write_text("[tool.piecewise\n")
    with pytest.raises(UnreadableSettingsFile, match="pyproject.toml"):
        PiecewiseConfig.from_any()
    path.write_text("[tool.piecewise]\n#" + "x" * 300_000)
    with pytest.raises(UnreadableSettingsFile, match="more than 262144 bytes"):
        PiecewiseConfig.from_any()
    path.write_text("# piecewise\ntool = 3\n")
    assert PiecewiseConfig.from_any() == PiecewiseConfig()
    path.unlink()
    path.symlink_to("pyproject.toml")
    assert PiecewiseConfig.from_any() == PiecewiseConfig()


def test_a_working_directory_that_is_gone_has_no_project(project):
    code = (
        "import os, tempfile, piecewise.settings.config as c\nfolder = tempfile.mkdtemp()\n"
        "os.chdir(folder); os.rmdir(folder); print(c.PiecewiseConfig.from_any().warmup_steps)"
    )
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert printed.stdout == "3\n", printed.stderr


def test_settings_are_written_into_the_table_and_the_rest_stays(project):
    path = project / "pyproject.toml"
    path.write_text(
        "# ours\n[project]\nname = 'served'  # so\n\n[tool.piecewise.limits]\nmax_batch_size = 4  # a\n"
    )
    config = PiecewiseConfig(buckets=[8], max_num_seqs=5)
    config.to_toml(path)
    text = path.read_text()
    for kept in ("# ours\n[project]\nname = 'served'  # so\n", "max_batch_size = 5  # a\n"):
        assert kept in text
    assert PiecewiseConfig.from_any() == config
    path.unlink()
    config.to_toml(path, only=["buckets"])
    assert path.read_text() == "[tool.piecewise.buckets]\nnum_tokens = [8]\n"
