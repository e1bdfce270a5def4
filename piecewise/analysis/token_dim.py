"""Finds the token count's symbol, never as "the first SymInt" or by argument name; see docs/DESIGN.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

import boundary_ops
from piecewise import torch_api
from piecewise.errors import analysis as errors
from piecewise.ir.effects import Facts, NodeFacts
from piecewise.ir.nodes import fakes_of, module_path, source_line, storages_of, target_name, value_of
from piecewise.ir.plan import InputRule
from piecewise.ir.tensors import bound_arguments, storage_of
from piecewise.trace.trace import Trace


class TokenSymbol(NamedTuple):
    """Holds the token count's symbol, its example value, the inputs that carry it, and the (leaf, dim) whose
    size is exactly the count."""

    symbol: sympy.Symbol
    example_num_tokens: int
    inputs: tuple[InputRule, ...]
    anchor: tuple[int, int]


def find_token_symbol(trace: Trace, facts: Facts) -> TokenSymbol:
    """Returns the token symbol; specialises the other symbols of inputs that carry it to their example value.

    Raises:
        SplitError: two calls of a boundary op write the same pages.
        TokenDimError: no boundary op, or the symbol is absent, ambiguous or not a symbol of its own.
    """
    boundaries = [(node, fact) for node, fact in facts.items() if fact.boundary is not None]
    if not boundaries:
        raise errors.NoBoundaryOp
    outside = storages_of(placeholder.node for placeholder in trace.placeholders)
    _check_pools(boundaries, outside)
    candidates: set[sympy.Symbol] = set()
    for node, fact in boundaries:
        carried = _symbols_carried(node, fact, trace, outside)
        candidates = candidates & carried or carried
        if len(candidates) == 1:
            break
    symbol = _only(candidates, trace, boundaries[0][0])
    # The 3 of a [3, n] or the hidden size of [1, n, hidden] becomes static; the token count stays dynamic.
    for fake in fakes_of(placeholder.node for placeholder in trace.placeholders):
        symbols = [torch_api.free_symbols([size], trace.shape_env) for size in fake.shape]
        for size, others in zip(fake.shape, symbols, strict=True):
            if others and symbol not in others and symbol in set[Any]().union(*symbols):
                int(size)  # adds Eq(other, hint) to the ShapeEnv; later `simplify` returns the constant
    inputs = _inputs_carrying(trace, symbol)
    anchor = next(((rule.leaf, rule.anchor_dim) for rule in inputs if rule.anchor_dim >= 0), None)
    if anchor is None:
        raise errors.NoAnchorInput(symbol=symbol)
    leaf, dim = anchor
    return TokenSymbol(symbol, int(trace.example.leaves[leaf].shape[dim]), inputs, anchor)


def _check_pools(boundaries: Sequence[tuple[fx.Node, NodeFacts]], outside: set[int]) -> None:
    """Checks that no two calls of a forward leave their rows at the same places."""
    # Memory → the call that writes it; one call with a tensor subclass is several below the subclass.
    written: dict[int, str] = {}
    for node, fact in boundaries:
        if fact.boundary is not None and fact.boundary.repeatable:
            call = node.meta.get("below", node.name)
            for memory in storages_of(fact.writes) & outside:
                if written.setdefault(memory, call) != call:
                    raise errors.WritesTwice(op=target_name(node), place=module_path(node))


def _symbols_carried(node: fx.Node, fact: NodeFacts, trace: Trace, outside: set[int]) -> set[sympy.Symbol]:
    """Returns the symbols that may count this boundary call's tokens: one where a dim is declared."""
    assert fact.boundary is not None
    bound = bound_arguments(fact.boundary.overload, node.args, node.kwargs)
    for name, dim in (fact.boundary.token_args or {}).items():
        value = value_of(bound[name]) if isinstance(bound.get(name), fx.Node) else None
        if isinstance(value, torch.Tensor):
            return torch_api.free_symbols(value.shape[dim : dim + 1 or None], trace.shape_env)
    written = [_symbols_of(t, trace) for t in fakes_of(fact.writes) if storage_of(t) not in outside]
    carried = written or [found for tensor in fakes_of(fact.reads) if (found := _symbols_of(tensor, trace))]
    return set.intersection(*carried) if carried else set()


def _symbols_of(tensor: torch.Tensor, trace: Trace) -> set[sympy.Symbol]:
    return torch_api.free_symbols(tensor.shape, trace.shape_env)


def _only(candidates: set[sympy.Symbol], trace: Trace, node: fx.Node) -> sympy.Symbol:
    if len(candidates) == 1:
        return next(iter(candidates))
    # The user's line that calls the op; the frames of the op's own library are left out.
    line = source_line(node, outside=os.path.dirname(boundary_ops.__file__))
    inputs = [
        f"{trace.example.names[leaf]} [{', '.join(map(str, trace.symbols_of_leaf(leaf) or value.shape))}]"
        for leaf, value in enumerate(trace.example.leaves)
        if isinstance(value, torch.Tensor)
    ]
    where = f"'{target_name(node)}'" + (f" ({line})" if line else "")
    about = dict(where=where, inputs=", ".join(inputs) or "no tensors")
    if candidates:
        raise errors.SeveralDims(names=", ".join(sorted(map(str, candidates))), **about)
    if any(_symbols_of(tensor, trace) for tensor in fakes_of(node.all_input_nodes)):
        raise errors.NoCommonDim(**about)
    places = torch_api.specialisation_places(trace.shape_env)
    fixed = f"; fixed at {', '.join(places)}" if places else ""
    raise errors.FixedTokenCount(fixed=fixed, ints=_ints_in_schema(node), **about)


def _ints_in_schema(node: fx.Node) -> str:
    """Returns a hint on the op's `int` arguments: a trace specialises the sizes they are computed from."""
    op = boundary_ops.lookup(node.target)
    arguments = op.overload._schema.arguments if op is not None else ()
    listed = ", ".join(repr(argument.name) for argument in arguments if str(argument.type) == "int")
    if not listed:
        return ""
    return f"; an int argument fixes what it is computed from: declare {listed} as SymInt in the op's schema"


def _inputs_carrying(trace: Trace, symbol: sympy.Symbol) -> tuple[InputRule, ...]:
    def size(expr: sympy.Expr) -> Callable[[int], int]:
        function = torch_api.compile_expressions([expr], [symbol])
        return lambda rows: function(rows)[0]

    found = []
    for leaf in (placeholder.leaf for placeholder in trace.placeholders if placeholder.kind == "input"):
        exprs = trace.symbols_of_leaf(leaf)
        dims = {dim: size(expr) for dim, expr in enumerate(exprs) if symbol in expr.free_symbols}
        if dims:
            found.append(InputRule(leaf, dims, exprs.index(symbol) if symbol in exprs else -1))
    return tuple(found)
