"""The examples of CONTRIBUTING.md are whole: their files are put in their places, and no other changes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)[1:]
EXAMPLES = [section for section in SECTIONS if "```python" in section]
COPIED = ("piecewise", "runners", "boundary_ops", "tests/models", "tests/conftest.py", "pyproject.toml")
BROKEN = "import house; print(*(line for rule in house.RULES for line in rule()), sep='\\n')"


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the examples need, to put their files into."""
    for name in COPIED:
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return tmp_path


def output_of(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(cwd), str(cwd / "tests/models")))}
    ran = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.parametrize("section", EXAMPLES, ids=lambda section: section.splitlines()[0])
def test_an_example_passes_its_own_test_in_its_places(section, checkout):
    files = dict(re.findall(r"^```python\n# (\S+)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE))
    tests = [path for path in files if path.startswith("tests/")]
    assert len(tests) == 1 and all(f"`{path}`" in section for path in files)
    for path, text in files.items():
        assert not (checkout / path).exists()
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        (checkout / path).write_text(text)
    ran = output_of("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=checkout)
    assert re.search(r"^[1-9]\d* passed", ran, re.MULTILINE)
    output_of("-m", "ruff", "check", "--no-cache", *files, cwd=checkout)
    output_of("-m", "ruff", "format", "--no-cache", "--check", *files, cwd=checkout)
    broken = output_of("-c", BROKEN, cwd=checkout)
    assert not [line for line in broken.splitlines() if any(path in line for path in files)]


ENGINE = """from runners.engine import GraphEngine
from runners.tape.tape import TapeEngine


class PretendEngine(GraphEngine):
    name = "pretend"

    def new_pool(self, device):
        return TapeEngine().new_pool(device)

    def capture(self, fn, *, pool, segment):
        return TapeEngine().capture(fn, pool=pool, segment=segment)
"""
FRONT_END = """from piecewise.trace.dynamo.front_end import trace_with_dynamo


def record(model, example, *, forward, static_dims={}):
    model.num_records += 1
    return trace_with_dynamo(model, example, forward=forward, static_dims=static_dims)
"""
USE = """import torch
from toy_models import Toy, make_ids

import piecewise

model = Toy(num_blocks=1).eval()
model.num_records = 0
graphed = piecewise.compile(model, buckets=[4, 8], progress=False, engine="pretend", frontend="recorded")
arguments = make_ids(5), torch.arange(5)
with torch.no_grad():
    assert graphed.capture(*arguments).ok
    graphed(*arguments)
    assert graphed.stats.replays == 1 and model.num_records == 1
    found = graphed.verify(*arguments)
assert found.ok and "padding of nan" in found.checks[0].runs
assert str(graphed.report()).startswith("engine: pretend; captured")
"""


def test_an_engine_and_a_front_end_are_a_folder_and_one_entry_each(checkout):
    """Both work by their names in settings, captures, replays, verify and the report."""
    for path, entries, entry, text in (
        ("runners/pretend", "runners/engines.py", '("runners.pretend.room", "PretendEngine", None)', ENGINE),
        (
            "piecewise/trace/recorded",
            "piecewise/settings/front_ends.py",
            '"piecewise.trace.recorded.room:record"',
            FRONT_END,
        ),
    ):
        (checkout / path).mkdir()
        (checkout / path / "__init__.py").touch()
        (checkout / path / "room.py").write_text(text)
        table = checkout / entries
        name = path.rpartition("/")[2]
        changed, count = re.subn(
            r"^(_HOMES|FRONT_ENDS) = \{", rf'\g<0>"{name}": {entry}, ', table.read_text(), flags=re.MULTILINE
        )
        assert count == 1
        table.write_text(changed)
    output_of("-c", USE, cwd=checkout)
    broken = output_of("-c", BROKEN, cwd=checkout).split("\n")
    assert [line.partition(":")[0] for line in broken if line] == ["runners/pretend/room.py"]
    assert any("imports runners.tape.tape, of another engine" in line for line in broken)


def test_two_examples_are_shown():
    assert {"A boundary op", "A fusion pass"} <= {section.splitlines()[0] for section in EXAMPLES}
