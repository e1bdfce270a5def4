"""Which symbol is the token count: never "the first SymInt", never an argument's name; see docs/DESIGN.md."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping

import sympy
import torch
from torch import fx

import boundary_ops
from piecewise import torch_api
from piecewise.analysis.normalize import source_line, target_name
from piecewise.ir.effects import NodeFacts, fakes_of
from piecewise.ir.plan import InputRule
from piecewise.ir.tensors import bound_arguments, storage_of
from piecewise.trace.trace import Trace
from runners.errors import TokenDimError


@dataclasses.dataclass(frozen=True, slots=True)
class TokenSymbol:
    """The token count's symbol, its value in the example, the inputs that carry it, and the (leaf, dim) whose
    size is exactly the count."""

    symbol: sympy.Symbol
    example_num_tokens: int
    inputs: tuple[InputRule, ...]
    anchor: tuple[int, int]


def find_token_symbol(trace: Trace, facts: Mapping[fx.Node, NodeFacts]) -> TokenSymbol:
    """Returns the token symbol; specialises the other symbols of inputs that carry it to their example value.

    Raises:
        TokenDimError: no boundary op, or the symbol is absent, ambiguous or not a symbol of its own.
    """
    boundaries = [(node, fact) for node, fact in facts.items() if fact.boundary is not None]
    if not boundaries:
        raise TokenDimError(
            "the traced model calls no boundary op",
            expected="at least one registered in-place attention/KV op",
            got="none",
            rule="graphs are cut at boundary ops",
            fix="declare the op with boundary_ops.define or boundary_ops.register, and call it in forward; "
            "for a transformers model use boundary_ops.huggingface.attach(model, cache)",
        )
    outside = set(map(storage_of, fakes_of(placeholder.node for placeholder in trace.placeholders)))
    candidates: set[sympy.Symbol] | None = None
    for node, fact in boundaries:
        carried = _symbols_carried(node, fact, trace, outside)
        candidates = carried if candidates is None else candidates & carried or carried
        if candidates and len(candidates) == 1:
            break
    symbol = _only(candidates or set(), trace, boundaries[0][0])
    _make_the_rest_static(trace, symbol)
    inputs = _inputs_carrying(trace, symbol)
    anchor = next(((rule.leaf, rule.anchor_dim) for rule in inputs if rule.anchor_dim >= 0), None)
    if anchor is None:
        raise TokenDimError(
            f"no input has a dim of exactly the token count '{symbol}'",
            rule="the count is read from an input's shape on each call",
            fix="pass one tensor with a dim of num_tokens",
        )
    leaf, dim = anchor
    return TokenSymbol(symbol, int(trace.example.leaves[leaf].shape[dim]), inputs, anchor)


def _symbols_carried(node: fx.Node, fact: NodeFacts, trace: Trace, outside: set[int]) -> set[sympy.Symbol]:
    """Symbols that this boundary call's tokens may have: one where an argument's dim is declared."""
    assert fact.boundary is not None
    bound = bound_arguments(fact.boundary.overload, node.args, node.kwargs)
    for name, dim in (fact.boundary.token_args or {}).items():
        value = bound[name].meta.get("example_value") if isinstance(bound.get(name), fx.Node) else None
        if isinstance(value, torch.Tensor):
            return torch_api.free_symbols(value.shape[dim : dim + 1 or None], trace.shape_env)
    written = [_symbols_of(t, trace) for t in fakes_of(fact.writes) if storage_of(t) not in outside]
    if written:
        return set.intersection(*written)
    carried = [symbols for tensor in fakes_of(fact.reads) if (symbols := _symbols_of(tensor, trace))]
    return set.intersection(*carried) if carried else set()


def _symbols_of(tensor: torch.Tensor, trace: Trace) -> set[sympy.Symbol]:
    return torch_api.free_symbols(tensor.shape, trace.shape_env)


def _only(candidates: set[sympy.Symbol], trace: Trace, node: fx.Node) -> sympy.Symbol:
    where = _where(node)
    described = _describe_inputs(trace)
    if not candidates and any(_symbols_of(tensor, trace) for tensor in fakes_of(node.all_input_nodes)):
        raise TokenDimError(
            f"the arguments of {where} have no symbolic dim in common",
            expected="one token count in all of them",
            got=f"inputs: {described}",
            rule="the token dim is the symbol that the boundary ops' arguments carry",
            fix='declare it: boundary_ops.define(..., token_args={"q": 0, "out": 0})',
        )
    if not candidates:
        places = torch_api.specialisation_places(trace.shape_env)
        fixed = f"; fixed at {', '.join(places)}" if places else ""
        raise TokenDimError(
            f"the arguments of {where} have no symbolic dim",
            expected="a token count that stays symbolic",
            got=f"sizes fixed by the example; inputs: {described}{fixed}",
            rule="the token count must be traced as a symbol [I10]",
            fix="pass an example of two or more tokens, and remove what fixes the count (int(n), log(n), "
            "x.unbind(0), a slice of constant length)" + _ints_in_schema(node),
        )
    if len(candidates) > 1:
        names = ", ".join(sorted(map(str, candidates)))
        raise TokenDimError(
            f"the arguments of {where} carry several symbolic dims ({names})",
            expected="one token count",
            got=f"inputs: {described}",
            rule="the token dim is the symbol that the boundary ops' arguments carry",
            fix='declare it: boundary_ops.define(..., token_args={"q": 0, "out": 0}); '
            "a [batch, seq] pair must be packed to [1, n]",
        )
    return next(iter(candidates))


def _ints_in_schema(node: fx.Node) -> str:
    """What to do about `int` arguments of the op: a trace fixes them, and the count they are made of."""
    op = boundary_ops.lookup(node.target)
    arguments = op.overload._schema.arguments if op is not None else ()
    listed = ", ".join(repr(argument.name) for argument in arguments if str(argument.type) == "int")
    if not listed:
        return ""
    return f"; an int argument fixes what it is computed from: declare {listed} as SymInt in the op's schema"


def _where(node: fx.Node) -> str:
    """The op and the user's line that calls it; the frames of the op's own library are left out."""
    line = source_line(node, outside=os.path.dirname(boundary_ops.__file__))
    return f"'{target_name(node)}'" + (f" ({line})" if line else "")


def _describe_inputs(trace: Trace) -> str:
    parts = []
    for leaf, value in enumerate(trace.example.leaves):
        if isinstance(value, torch.Tensor):
            sizes = trace.symbols_of_leaf(leaf) or tuple(value.shape)
            parts.append(f"{trace.example.names[leaf]} [{', '.join(map(str, sizes))}]")
    return ", ".join(parts) or "no tensors"


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


def _make_the_rest_static(trace: Trace, symbol: sympy.Symbol) -> None:
    """Fixes the 3 of a [3, n] or the hidden size of [1, n, hidden]: only the token count varies beside
    tokens."""
    for placeholder in trace.placeholders:
        value = placeholder.node.meta.get("example_value")
        if not isinstance(value, torch.Tensor) or symbol not in _symbols_of(value, trace):
            continue
        for size, others in [(size, torch_api.free_symbols([size], trace.shape_env)) for size in value.shape]:
            if others and symbol not in others:
                int(size)  # adds Eq(other, hint) to the ShapeEnv; later `simplify` returns the constant
