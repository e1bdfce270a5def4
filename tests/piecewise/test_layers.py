"""The house's walls: which package may import which, read from the source, and what an import may pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("piecewise", "boundary_ops", "runners")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

FORBIDDEN = {
    "runners": ("piecewise", "boundary_ops", "torch.fx", "torch._dynamo"),
    "boundary_ops": ("piecewise", "runners"),
    "piecewise": (),
}


def imported_names(tree: ast.AST) -> set[str]:
    """Every dotted name that an import anywhere in the module can load; `from a import b` gives a.b."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def attribute_names(tree: ast.AST) -> set[str]:
    """Every dotted name read in the module, such as `torch._dynamo.reset`."""
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def is_below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def reads_environment(tree: ast.AST) -> bool:
    names = imported_names(tree) | attribute_names(tree)
    roots = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    return any(is_below(name, root) for name in names for root in roots)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_stays_in_its_layer(path):
    tree = ast.parse(path.read_text())
    package = path.relative_to(ROOT).parts[0]
    used = imported_names(tree) | {name for name in attribute_names(tree) if name.startswith("torch.")}
    crossed = sorted(name for name in used for wall in FORBIDDEN[package] if is_below(name, wall))
    assert not crossed, f"{path.name} reaches over the wall: {crossed}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_module_reads_the_environment(path):
    reads = reads_environment(ast.parse(path.read_text()))
    assert reads == (path == ROOT / "piecewise" / "settings" / "sources.py")


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "from os import environ",
        "import os\nos.getenv('A')",
        "from os import getenv as g",
    ],
)
def test_the_environment_check_sees_each_spelling(source):
    assert reads_environment(ast.parse(source))


@pytest.mark.parametrize(
    ("source", "wall"),
    [
        ("def f():\n    import torch.fx.passes", "torch.fx"),
        ("from torch import fx", "torch.fx"),
        ("from torch._dynamo.utils import x", "torch._dynamo"),
        ("import torch\ny = torch._dynamo.config.z", "torch._dynamo"),
    ],
)
def test_the_import_check_sees_each_spelling(source, wall):
    tree = ast.parse(source)
    assert any(is_below(name, wall) for name in imported_names(tree) | attribute_names(tree))
    assert not is_below("torch.fxx", "torch.fx")


def test_the_three_packages_were_found():
    assert {path.relative_to(ROOT).parts[0] for path in MODULES} == set(PACKAGES)
    assert ROOT / "piecewise" / "__init__.py" in MODULES
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").exists()


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_pulls_in_no_model_library(package):
    heavy = ("transformers", "triton", "matplotlib", "tomlkit", "gguf", "accelerate")
    # Torch itself may bring some of them where they are installed, so what it loads does not count.
    code = (
        f"import sys, torch; before = set(sys.modules); import {package};"
        f"print(*sorted(m for m in set(sys.modules) - before if m.split('.')[0] in {heavy!r}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == ""


def test_importing_piecewise_alone_needs_neither_dynamo_nor_inductor():
    # They take longer to load than torch itself; tracing loads them when it needs them.
    code = (
        "import sys, torch; before = set(sys.modules); import piecewise;"
        "heavy = ('torch._dynamo', 'torch._inductor');"
        "print(*sorted(m for m in set(sys.modules) - before if m.startswith(heavy)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == ""
