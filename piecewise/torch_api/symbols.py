"""Reads symbolic sizes: expressions, guards, and the sources of symbols."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch._dynamo.source import LocalSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

from piecewise.torch_api.fakes import einsums_from_the_left, fake_mode_of

_TORCH = os.path.dirname(torch.__file__)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """Finds the ShapeEnv of the first fake tensor among `values`."""
    return getattr(fake_mode_of(values), "shape_env", None)


def name_of(source: Any) -> Any:
    """Writes a source as Python source: a method in some versions of torch, a property in others."""
    name = getattr(source, "name", None)
    return name() if callable(name) else name


def expression(value: Any, shape_env: ShapeEnv | None) -> sympy.Expr | None:
    """Simplifies the expression of an int, float or symbolic scalar; None for anything else. `example_value`
    keeps the symbol at recording; symbols are unified later, so always simplify."""
    if isinstance(value, SYMBOLIC):
        expr = value.node.expr
        return shape_env.simplify(expr) if shape_env is not None and isinstance(expr, sympy.Expr) else expr
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)


def free_symbols(values: Iterable[Any], shape_env: ShapeEnv | None) -> set[sympy.Symbol]:
    """Finds the symbols in the simplified expressions of sizes and other numbers."""
    exprs = [expression(value, shape_env) for value in values]
    return {symbol for expr in exprs if expr is not None for symbol in expr.free_symbols}  # type: ignore[misc]


def is_unbacked(expr: sympy.Basic) -> bool:
    """Whether the expression has a data-dependent symbol (`u0`, `zuf0`)."""
    return any(symbol.name.startswith(("u", "zu")) for symbol in expr.free_symbols)  # type: ignore[attr-defined]


def compile_expressions(
    expressions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[..., tuple]:
    """Compiles one plain Python function of `symbols`: 0.1 µs an expression, not sympy's 40."""
    import math

    names = {symbol: f"a{position}" for position, symbol in enumerate(symbols)}
    printer = PythonPrinter()
    parts = []
    for expr in expressions:
        renamed = expr.xreplace({symbol: sympy.Symbol(name, integer=True) for symbol, name in names.items()})
        parts.append(printer.doprint(renamed))
    source = f"lambda {', '.join(names.values())}: ({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return eval(source, {"math": math, "torch": torch})  # the printer's own output, not user text


def guard_expressions(shape_env: ShapeEnv | None) -> list[sympy.Basic]:
    """Lists the trace's simplified conditions on symbols, without true ones."""
    if shape_env is None:
        return []
    exprs = dict.fromkeys(shape_env.simplify(guard.expr) for guard in shape_env.guards)
    return [expr for expr in exprs if expr != sympy.true]


def holds_as_guard(shape_env: ShapeEnv | None, condition: sympy.Basic) -> bool:
    """Whether a condition holds for the symbols' hints; adds the condition as a guard."""
    if condition in (sympy.true, sympy.false) or shape_env is None:
        return bool(condition)
    return bool(shape_env.evaluate_expr(condition))


@contextmanager
def asked_of_sizes(shape_env: ShapeEnv | None) -> Iterator[set[sympy.Basic]]:
    """Collects what code in this block asks of sizes, answered for the example; adds no guard or symbol."""
    asked: set[sympy.Basic] = set()
    if shape_env is None:
        yield asked
        return
    answer = shape_env.evaluate_expr

    def noted(expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        asked.add(expr)
        return answer(expr, *args, **kwargs)

    shape_env.evaluate_expr = noted  # type: ignore[assignment, method-assign]
    try:
        quiet, fresh = shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols()
        with quiet, fresh, einsums_from_the_left():
            yield asked
    finally:
        del shape_env.evaluate_expr


def specialisation_places(shape_env: ShapeEnv | None) -> list[str]:
    """Lists ``"file.py", line 42, in forward: code`` of each place where the model fixed a size, if known."""
    found = []
    for stack in getattr(shape_env, "specialization_stacks", {}).values():
        theirs = [frame for frame in stack or () if not frame.filename.startswith(_TORCH)]
        if theirs:
            frame = theirs[-1]
            found.append(f'"{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}')
    return list(dict.fromkeys(found))


def symbol_source(shape_env: ShapeEnv | None, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """Finds (leaf, dim) of the traced function's argument that defines `symbol`; dim −1 for an int."""
    for source in shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ():
        found = re.fullmatch(r"L\['t(\d+)'\]\.size\(\)\[(\d+)\]|L\['i(\d+)'\]", name_of(source))
        if found:
            tensor, dim, number = found.groups()
            return (int(tensor), int(dim)) if number is None else (int(number), -1)
    return None


def source_of_symbol(shape_env: ShapeEnv | None, symbol: sympy.Basic) -> str | None:
    """Finds the Python source of a value that the symbol stands for."""
    sources = shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ()
    return name_of(sources[0]) if sources else None


def symbolic_sizes(shape_env: ShapeEnv | None) -> dict[tuple[int, int], sympy.Expr]:
    """Maps (leaf, dim) to the expression of each symbolic size, read or not; dim −1 for an int."""
    found: dict[tuple[int, int], sympy.Expr] = {}
    for symbol in list(shape_env.var_to_sources) if shape_env is not None else []:
        source = symbol_source(shape_env, symbol)
        if source is not None:
            found[source] = shape_env.simplify(symbol)  # type: ignore[union-attr]
    return found


def symbolic_count(fake_mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """Makes an int symbol, 2 or more, whose name follows from `name` alone; `hint` is its example value."""
    source, shape_env = LocalSource(name), fake_mode.shape_env
    assert shape_env is not None
    symbol = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def size_hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[arg-type]


def row_condition(fake_mode: FakeTensorMode, rows: Any) -> Callable[[int], bool]:
    """Makes a predicate: whether a count may stand for `rows`, under the symbols' guards and range."""
    if isinstance(rows, int):
        return lambda count: count == rows
    symbol, shape_env = rows.node.expr, fake_mode.shape_env
    assert shape_env is not None
    if not symbol.is_Symbol or shape_env.simplify(symbol) != symbol:
        known = int(shape_env.simplify(symbol))
        return lambda count: count == known
    bounds = shape_env.var_to_range[symbol]
    # Plain ints also compare with symbols, since a function that asks may be traced in its turn.
    low, high = int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else sys.maxsize
    conditions = compile_expressions(guard_expressions(shape_env), [symbol])
    return lambda count: low <= count <= high and all(conditions(count))
