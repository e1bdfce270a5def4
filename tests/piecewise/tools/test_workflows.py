"""The workflows and the reusable action are what GitHub reads, and do what `make gate` does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize(
    ("schema", "paths"),
    [("vendor.github-workflows", WORKFLOWS), ("vendor.github-actions", [ROOT / "action.yml"])],
)
def test_each_file_follows_its_schema(schema: str, paths: list[Path]) -> None:
    command = Path(sys.executable).with_name("check-jsonschema")
    if not command.exists() and shutil.which("check-jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    assert paths
    found = subprocess.run(
        [command, "--builtin-schema", schema, *paths], capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_gpu_workflow_never_runs_a_forks_code_and_one_at_a_time() -> None:
    text = (ROOT / ".github" / "workflows" / "gpu.yml").read_text()
    assert "[self-hosted, gpu]" in text and "concurrency:" in text
    assert "github.event.pull_request.head.repo.full_name == github.repository" in text
    assert "pull_request_target" not in text


def test_the_action_and_make_run_the_same_commands() -> None:
    def commands(path: Path) -> list[tuple[str, tuple[str, ...]]]:
        lines = re.sub(r"\\\n\s*", " ", path.read_text()).splitlines()
        found = [re.search(r"-m piecewise (verify|bench|regress)\b(.*)", line) for line in lines]
        return [(m[1], tuple(sorted(re.findall(r"--[a-z]+(?= )", m[2])))) for m in found if m is not None]

    assert commands(ROOT / "action.yml") == commands(ROOT / "Makefile") != []


def test_no_value_of_an_input_is_pasted_into_a_script() -> None:
    """An expression inside `run` would let an input's text become commands."""
    script = (ROOT / "action.yml").read_text().split("run: |")[1].split("- name:")[0]
    assert "${{" not in script


def test_the_action_passes_paths_with_spaces_and_the_options_of_the_baseline(tmp_path: Path) -> None:
    script = textwrap.dedent((ROOT / "action.yml").read_text().split("run: |\n")[1].split("    - name:")[0])
    python = tmp_path / "a python"
    python.write_text('#!/bin/bash\nprintf "<%s>" "$@"; echo\n')
    python.chmod(0o755)
    inputs = {
        "SPEC": "a:b",
        "BASELINE": "a line.json",
        "CONFIG": "a $(b).toml",
        "PRESET": "quick",
        "BENCH": "--tokens 8,16",
        "PYTHON": str(python),
        "UPDATE": "true",
        "FOLDER": "a folder",
    }
    bash = ["bash", "--noprofile", "--norc", "-euo", "pipefail", "-c", script]
    found = subprocess.run(bash, env={**os.environ, **inputs}, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    verify, bench, regress = found.stdout.splitlines()
    assert "<verify><a:b><--config><a $(b).toml>" in verify
    assert "<--quick><--tokens><8,16><--out><a folder/bench.json>" in bench
    assert "<regress><a line.json><a folder/bench.json><--update>" in regress
