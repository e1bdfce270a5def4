"""`piecewise config`: each setting, its value and where it came from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from piecewise.settings.config import FIELDS, PiecewiseConfig
from piecewise.tools import cli

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path


def printed(capsys, *argv) -> tuple[str, dict[str, list[str]]]:
    assert cli.main(["config", *map(str, argv)]) == 0
    head, _, titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.split() == ["setting", "from", "value"]
    return head, {name: rest for name, *rest in (re.split("  +", row) for row in rows)}


def test_without_a_source_all_are_defaults(capsys):
    head, rows = printed(capsys)
    assert head == "Settings file: none, and no pyproject.toml with a table [tool.piecewise]"
    assert list(rows) == list(FIELDS) and {origin for origin, _ in rows.values()} == {"default"}
    assert rows["warmup_steps"] == ["default", "3"] and rows["max_seq_len"] == ["default", "none"]
    assert rows["buckets"][1].startswith("[16, 32, 48, ") and rows["fusions"][1] == "[]"
    assert rows["strict"][1] == "false" and rows["engine"][1] == '"auto"'


def test_each_source_is_named(capsys, folder, monkeypatch):
    project = folder / "pyproject.toml"
    project.write_text(
        "[tool.piecewise.limits]\nmax_batch_size = 4\nmax_num_tokens = 100\n"
        "[tool.piecewise]\ncapture.warmup_steps = 5\n"
    )
    monkeypatch.setenv("PIECEWISE_STRICT", "1")
    monkeypatch.setenv("PIECEWISE_WARMUP_STEPS", "2")
    head, rows = printed(capsys)
    assert head == f"Settings file: {project}"
    assert rows["max_num_seqs"] == ["pyproject.toml:2: [tool.piecewise.limits] max_batch_size", "4"]
    assert rows["strict"] == ["PIECEWISE_STRICT", "true"] and rows["warmup_steps"] == [
        "PIECEWISE_WARMUP_STEPS",
        "2",
    ]
    assert rows["buckets"] == ["default, up to max_num_tokens", "[16, 32, 48, 64, 96]"]
    given = folder / "settings.toml"
    given.write_text("[buckets]\n\ngrid = 'sglang'\n[compile]\nboundary_ops = ['a::b']\n")
    head, rows = printed(capsys, given)
    assert head == f"Settings file: {given}" and rows["max_num_seqs"] == ["default", "none"]
    assert rows["buckets"][0] == "settings.toml:3: [buckets] grid"
    assert json.loads(rows["buckets"][1]) == list(PiecewiseConfig(buckets="sglang").buckets)
    assert rows["boundary_ops"] == ["settings.toml:5: [compile] boundary_ops", '["a::b"]']


def test_json_has_every_value_that_compile_would_use(capsys, folder, monkeypatch):
    given = folder / "settings.toml"
    given.write_text("[buckets]\ngrid = 'sglang'\n")
    monkeypatch.setenv("PIECEWISE_STRICT", "1")
    assert cli.main(["config", str(given), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(given)
    values = {name: each["value"] for name, each in found["settings"].items()}
    assert PiecewiseConfig(**values) == PiecewiseConfig.from_any(given)
    assert found["settings"]["buckets"]["from"] == f"{given}:2: [buckets] grid"
    assert cli.main(["config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] is None


def test_what_is_wrong_ends_with_2_and_all_its_places(capsys, folder, monkeypatch):
    (folder / "pyproject.toml").write_text("[tool.piecewise.limits]\nmax_seq = 4\n")
    monkeypatch.setenv("PIECEWISE_STRICT", "maybe")
    assert cli.main(["config"]) == 2
    captured = capsys.readouterr()
    assert not captured.out and "Traceback" not in captured.err
    assert (
        "pyproject.toml:2: [tool.piecewise.limits] max_seq" in captured.err
        and "PIECEWISE_STRICT" in captured.err
    )
    assert cli.main(["config", "missing.toml"]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["config"], ["config", "--json"], ["buckets", "show", "FILE"]])
def test_it_needs_no_torch(folder, argv):
    (folder / "settings.toml").write_text("")
    argv = [str(folder / "settings.toml") if part == "FILE" else part for part in argv]
    code = (
        f"import sys; from piecewise.tools import cli; cli.main({argv!r})\n"
        "print(*{'torch', 'numpy', 'tomlkit'} & set(sys.modules), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert told.stdout and told.stderr.strip() == ""
