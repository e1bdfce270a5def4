"""The examples of CONTRIBUTING.md are whole: their files, put together, pass their own tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE)[1:]
EXAMPLES = [section for section in SECTIONS if "```python" in section]


@pytest.mark.parametrize("section", EXAMPLES, ids=lambda section: section.splitlines()[0])
def test_an_example_passes_its_own_test(section, tmp_path):
    files = re.findall(r"^```python\n(# \S+\n.*?)^```$", section, re.DOTALL | re.MULTILINE)
    lines = [line for text in files for line in text.splitlines() if not line.startswith("from __future__")]
    path = tmp_path / "test_example.py"
    path.write_text("\n".join(["from __future__ import annotations", *lines, ""]))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(path),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^[1-9]\d* passed", ran.stdout, re.MULTILINE)


def test_two_examples_are_shown():
    assert {"A boundary op", "A fusion pass"} <= {section.splitlines()[0] for section in EXAMPLES}
