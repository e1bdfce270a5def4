"""Reads the source of the three packages for the rules of the house; ``python tests/models/house.py`` prints
what breaks them, and how many lines there are.

`import-linter` (pyproject.toml) says which room may import which. These rules are beside it: no circle of
modules, no import inside of a function, no engine that knows another one, private torch and the name of a
device in their own places only, and one class of a name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("piecewise", "boundary_ops", "runners")
# The whole may only fall, except with a feature of its own; 26,500 is what it is to come to.
MAX_LINES, MAX_HALL_LINES = 32_470, 8_000

# The eight stops of docs/DESIGN.md, "An evening's walk": all that a reader of the main story needs.
HALL = {
    "compile": ("piecewise/api.py", "piecewise/settings/config.py"),
    "trace": (
        "piecewise/trace/trace.py",
        "piecewise/trace/dynamo/front_end.py",
        "piecewise/trace/dynamo/run.py",
        "piecewise/trace/dynamo/result.py",
    ),
    "analysis": (
        "piecewise/analysis/classify.py",
        "piecewise/analysis/token_dim.py",
        "piecewise/analysis/rows/judge.py",
        "piecewise/analysis/rows/layout.py",
        "piecewise/analysis/rows/table.py",
    ),
    "cut": ("piecewise/cut/split.py", "piecewise/cut/segment_writer.py", "piecewise/ir/plan.py"),
    "lowering": ("piecewise/lowering/lowering.py",),
    "capture": (
        "piecewise/capture/analyse.py",
        "piecewise/capture/model_calls.py",
        "piecewise/capture/captured_call.py",
        "piecewise/capture/bucket_capture.py",
        "piecewise/capture/store.py",
        "piecewise/capture/build_plan.py",
        "piecewise/capture/warm_up.py",
        "runners/piecewise_runner.py",
        "runners/buckets.py",
        "runners/buffers.py",
    ),
    "graphs": ("runners/engine.py", "runners/cuda/graph.py", "runners/cuda/pool.py"),
    "call": (
        "piecewise/calls/binder.py",
        "piecewise/calls/structure.py",
        "piecewise/capture/call_router.py",
        "runners/step_plan.py",
        "runners/bound_steps.py",
        "runners/rows.py",
    ),
}

# Where private torch may be used, and where a device may be told by its name.
PRIVATE_TORCH = ("piecewise/torch_api/", "runners/_torch.py", "boundary_ops/_torch.py")
DEVICE_BY_NAME = (
    "runners/engines.py",
    "boundary_ops/declare/",
    "boundary_ops/attention/",
    "piecewise/passes/kernels/",
    "piecewise/tools/bench/",
)
# First-party modules that need an optional library, and so are loaded when they are used.
OPTIONAL = (
    "boundary_ops.attention.triton",
    "boundary_ops.backends.flashinfer",
    "piecewise.passes.kernels",
)
# What resolves names on first use, and the command line, whose sub-commands are loaded when they run.
LAZY_PLACES = ("/__init__.py", "piecewise/__main__.py", "piecewise/tools/cli.py")

# The public roots: each refusal is a subclass of one of them.
ERROR_ROOTS = frozenset(
    (
        "PiecewiseError",
        "ConfigError",
        "TraceError",
        "TokenDimError",
        "SplitError",
        "CaptureError",
        "StateError",
    )
    + ("BoundaryOpError",)
)

_PRIVATE = re.compile(r"torch\.(?!ops\.)(\w+\.)*?_(?!_)")


@cache
def sources() -> dict[str, ast.Module]:
    """The parsed modules of the three packages by their paths."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in found}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(tree: ast.AST, names: frozenset[str]) -> Iterator[tuple[str, ast.stmt]]:
    """The modules among `names` that imports anywhere under `tree` load, each with its statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                target = full if full in names else node.module
                if target in names:
                    yield target, node


def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in sources())


def circles() -> list[str]:
    """Modules that import each other, type checking included; one line for each circle."""
    edges = {
        module_name(path): {name for name, _ in imports(tree, modules())} for path, tree in sources().items()
    }
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for target in sorted(edges[name]):
                visit(target)
            order.append(name)

    for name in sorted(edges):
        visit(name)
    importers = defaultdict(set)
    for name, targets in edges.items():
        for target in targets:
            importers[target].add(name)
    found, done = [], set()
    for name in reversed(order):
        together, waiting = [], [name]
        while waiting:
            each = waiting.pop()
            if each not in done:
                done.add(each)
                together.append(each)
                waiting += importers[each] - done
        if len(together) > 1:
            found.append("these import each other: " + ", ".join(sorted(together)))
    return found


def late_imports() -> list[str]:
    """Imports of the packages' own modules inside of functions."""
    found = []
    for path, tree in sources().items():
        if path.endswith(LAZY_PLACES) or path in LAZY_PLACES:
            continue
        functions = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        late = {(name, stmt.lineno) for node in functions for name, stmt in imports(node, modules())}
        found += [
            f"{path}:{line} imports {name} inside of a function"
            for name, line in sorted(late)
            if not name.startswith(OPTIONAL)
        ]
    return found


def private_torch() -> list[str]:
    """Uses of private names of torch outside of their places."""
    found = []
    for path, tree in sources().items():
        if path.startswith(PRIVATE_TORCH):
            continue
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            found += [f"{path}:{node.lineno} uses {name}" for name in names if _PRIVATE.match(name)]
    return found


@cache
def engines() -> dict[str, str | None]:
    """The folder of each graph engine, and the kind of device that it is for, None for any."""
    found: dict[str, str | None] = {}
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and "GraphEngine" in map(ast.unparse, node.bases):
                room = path.rpartition("/")[0]
                found.setdefault(room, None)
                for stmt in node.body:
                    if isinstance(stmt, ast.Assign) and "device_type" in map(ast.unparse, stmt.targets):
                        found[room] = getattr(stmt.value, "value", None)
    return found


def engines_apart() -> list[str]:
    """Imports of one engine's modules in another one."""
    found = []
    for path, tree in sources().items():
        own = path.rpartition("/")[0]
        for name, stmt in imports(tree, modules()) if own in engines() else ():
            room = name.replace(".", "/")
            if any(f"{room}/".startswith(f"{other}/") for other in engines() if other != own):
                found.append(f"{path}:{stmt.lineno} imports {name}, of another engine")
    return found


def devices_by_name() -> list[str]:
    """Comparisons with the name of an engine's kind of device outside of their places."""
    found = []
    kinds = {kind for kind in engines().values() if kind is not None}
    places = (*DEVICE_BY_NAME, *(f"{room}/" for room in engines()))
    for path, tree in sources().items():
        if path.startswith(places):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
                found += [f'{path}:{node.lineno} tests for "{kind}"' for kind in kinds & {*texts}]
    return found


def classes_of_one_name() -> list[str]:
    """Names that two classes have."""
    places = defaultdict(list)
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return [
        f"{len(found)} classes are called {name}: {', '.join(found)}"
        for name, found in sorted(places.items())
        if len(found) > 1
    ]


def errors_in_place() -> list[str]:
    """Refusals that are not a class of a catalogue: a root of the errors raised with a text of its own."""
    found = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ERROR_ROOTS:
                found.append(
                    f"{path}:{node.lineno} raises {ast.unparse(node.func)}, not a refusal of its own"
                )
    return found


def num_lines(paths: list[str]) -> int:
    return sum(len((ROOT / path).read_text().splitlines()) for path in paths)


def lines() -> tuple[int, int]:
    """Raw lines of the three packages, and of the hall."""
    return num_lines(list(sources())), num_lines([path for stop in HALL.values() for path in stop])


RULES = (
    circles,
    late_imports,
    engines_apart,
    private_torch,
    devices_by_name,
    classes_of_one_name,
    errors_in_place,
)


def main() -> int:
    """Prints what breaks a rule and both counts of lines; 1 where a rule is broken or a count is too high."""
    broken = [line for rule in RULES for line in rule()]
    print("\n".join(broken), end="\n" if broken else "")
    whole, hall = lines()
    print(f"lines of the three packages: {whole:,}, at most {MAX_LINES:,}")
    print(f"lines of the hall: {hall:,}, at most {MAX_HALL_LINES:,}")
    return int(bool(broken) or whole > MAX_LINES or hall > MAX_HALL_LINES)


if __name__ == "__main__":
    sys.exit(main())
