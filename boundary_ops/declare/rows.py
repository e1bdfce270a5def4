"""How token rows go through an op of somebody's: declared, since nobody can look inside, and tested.

An op between the boundary ops stays in a graph only where it is known that padded rows do not reach real
ones. torch's own ops have rules for that. For any other op one says which dims carry tokens: the op treats
each row alone, so that real rows of its results are made of the same rows of its arguments, whatever padded
rows hold. What is known of ops of libraries is in `library_rows`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from boundary_ops.declare.library_rows import LIBRARY_ROWS
from boundary_ops.declare.schema import check_token_args, find_overload, near, qualified
from boundary_ops.declare.whole_numbers import whole_number
from boundary_ops.errors import BoundaryOpError

__all__ = ["RowsDeclaration", "check_rows", "declare_rows", "declared_rows", "token_dims"]


@dataclass(frozen=True, slots=True)
class RowsDeclaration:
    """What was said of one op.

    Where rows are is said by one dim, counted from the front, or by a word, for ops that take any number of
    dims: "leading" are all dims but the last, "all" are all of them, as of a scale per row. Rows are counted
    through these dims, whichever of them carries tokens: [1, n, h] has n. An operand of one row is for all.

    Attributes:
        token_args: argument → where its rows are; other arguments carry no tokens. Where it is empty, as for
            an op that unpacks weights, only calls without tokens are known.
        token_results: per result where its rows are, or None; of a result that is a list, per item.
        padded: "real" where each row is made of itself alone, so that a padded row that equals a real one
            gives that row's result, and an index made of it is in range; "anything" where a row may be made
            of those before it, too, which then must lie in their order.
        only: argument → the one value for which it holds; None for an argument that must not be given.
    """

    token_args: Mapping[str, int | str]
    token_results: tuple[int | str | None, ...] = (0,)
    padded: str = "real"
    only: Mapping[str, Any] = field(default_factory=dict)


# By "lib::op"; those of libraries that are not loaded wait here for their op.
_declared = {name: RowsDeclaration(*said) for name, said in LIBRARY_ROWS.items()}


def declare_rows(
    name: str,
    *,
    token_args: Mapping[str, int | str] | None,
    token_results: Sequence[int | str | None] = (0,),
    padded: str = "real",
    only: Mapping[str, Any] | None = None,
) -> RowsDeclaration | None:
    """Declares that an op treats each token row alone. It replaces what was said before, also by us.

    Args:
        name: "lib::op" or "lib::op.overload", of an op that torch knows by now.
        token_args: see `RowsDeclaration`, as for those below. None takes back what was said.
    Raises:
        BoundaryOpError: there is no such op, argument, result or way to treat padded rows; the op writes, or
            is torch's own.
    """
    for what, value, kinds in (
        ("the name", name, str),
        ("token_args", token_args, (Mapping, type(None))),
        ("token_results", token_results, (list, tuple)),
        ("only", only, (Mapping, type(None))),
    ):
        if not isinstance(value, kinds):
            raise BoundaryOpError(
                f"declare_rows, {what}",
                expected='"lib::op", token_args={name: dim}, token_results=(dim, ...), only={name: value}',
                got=repr(value)[:200],
                rule="an op is declared by its name and by names of its arguments",
                fix=f"correct {what}",
            )
    schema = find_overload(name)._schema
    full_name = qualified(schema.name, schema.overload_name)
    if token_args is None:
        _declared.pop(full_name, None)
        return None
    for argument, where in token_args.items():
        check_token_args(full_name, schema, {argument: 0 if isinstance(where, str) else where})
        _check_where(full_name, f"token_args {argument!r}", where)
    tokens = MappingProxyType({name: _plain_where(where) for name, where in token_args.items()})
    results = tuple(map(_plain_where, token_results))
    made = RowsDeclaration(tokens, results, padded, MappingProxyType(dict(only or {})))
    _check_op(full_name, schema, made)
    for at, found in enumerate(made.token_results):
        if found is not None:
            _check_where(full_name, f"token_results {at}", found)
    _declared[full_name] = made
    return made


def _check_op(name: str, schema: Any, said: RowsDeclaration) -> None:
    """Raises unless the op makes new results, as many as were said, and has the arguments that are named."""
    if name.partition("::")[0] in ("aten", "prim", "prims"):
        raise BoundaryOpError(
            f"op '{name}'",
            expected="an op of a library",
            got="one of torch's own",
            rule="torch's ops have rules, or run eagerly: a declaration would not be read",
            fix="declare an op of your own that calls it: torch.library.custom_op makes one",
        )
    if schema.is_mutable:
        raise BoundaryOpError(
            f"op '{name}'",
            expected="an op that writes into none of its arguments",
            got=str(schema),
            rule="rows are followed from arguments to new results",
            fix="call a form of it that returns its result, or make it a boundary op: boundary_ops.register",
        )
    kinds = [str(value.type) for value in schema.returns]
    is_list = any("List" in kind for kind in kinds)
    if (
        not all("Tensor" in kind for kind in kinds)
        or not said.token_results
        or (len(said.token_results) != len(schema.returns) and not is_list)
    ):
        raise BoundaryOpError(
            f"op '{name}', token_results",
            expected=f"one for each of {len(schema.returns)} results",
            got=repr(said.token_results),
            rule="each result carries tokens somewhere, or not at all",
            fix="for example (0,) for one result of [num_tokens, hidden], None for a result without tokens",
        )
    names = [argument.name for argument in schema.arguments]
    for argument in said.only:
        if argument not in names:
            raise BoundaryOpError(
                f"op '{name}', only {argument!r}",
                expected=f"one of the arguments {names}",
                got="no such argument",
                rule="a declaration holds for some values of the op's own arguments",
                fix=near(argument, names) or "use the argument names of the schema",
            )
    if said.padded not in ("real", "anything"):
        raise BoundaryOpError(
            f"op '{name}', padded",
            expected="'real' or 'anything'",
            got=repr(said.padded),
            rule="a padded row that equals a real one gives the real one's result, or nothing is known of it",
            fix="leave it out for an op without state between rows",
        )


def _plain_where(where: Any) -> Any:
    """A dim of whatever integer type as Python's; all else as it is, for the checks."""
    number = whole_number(where)
    return where if number is None else number


def _check_where(name: str, what: str, where: int | str) -> None:
    number = whole_number(where)
    if where in ("leading", "all") or (number is not None and number >= 0):
        return
    raise BoundaryOpError(
        f"op '{name}', {what}",
        expected="a dim counted from the front, 'leading' or 'all'",
        got=repr(where),
        rule="token rows are along one dim, along all but the last, or each element is a row",
        fix="for example 0 for [num_tokens, hidden], 'leading' for [..., hidden]",
    )


def declared_rows(op: OpOverload) -> RowsDeclaration | None:
    """What was declared of an op; None where nobody has, or where the op has no such arguments."""
    schema = op._schema
    found = _declared.get(qualified(schema.name, schema.overload_name))
    names = {argument.name for argument in schema.arguments}
    is_known = found is not None and names >= {*found.token_args, *found.only} and not schema.is_mutable
    return found if is_known else None


def is_shipped(op: OpOverload) -> bool:
    """Whether its rows are as declared here: of these ops none looks anything up by integers."""
    name = qualified(op._schema.name, op._schema.overload_name)
    return name in LIBRARY_ROWS and _declared.get(name) == RowsDeclaration(*LIBRARY_ROWS[name])


def token_dims(where: int | str | None, rank: int) -> tuple[int, ...]:
    """The dims of a tensor along which its rows are."""
    if isinstance(where, str):
        return tuple(range(rank if where == "all" else max(rank - 1, 0)))
    return () if where is None else (where,)


def check_rows(name: str, example: Sequence[Any] | Mapping[str, Any]) -> None:
    """Tests what was declared of an op on real tensors.

    The op is run on the example, and on its rows in other orders with others behind, before and between them,
    of several numbers. These hold NaN, infinite and large numbers and other real rows; of integers, which may
    be indices, other real rows alone. Real rows of the results must be equal, to rounding.

    Args:
        example: the op's arguments, in order or by name; two or more token rows.
    Raises:
        BoundaryOpError: nothing was declared, the example is no call of the op, a declared dim does not
            exist, or a real row changes.
    """
    overload = find_overload(name)
    declaration = declared_rows(overload)
    if declaration is None:
        raise BoundaryOpError(
            f"op '{name}': nothing was declared of its rows",
            rule="a declaration is tested, not an op",
            fix=near(name, list(_declared)) or f'call boundary_ops.declare_rows("{name}", ...) first',
        )
    given = _bound(name, overload, example)
    for key, wanted in declaration.only.items():
        if given[key] is not wanted and given[key] != wanted:
            raise _refuted(name, f"{key}={wanted!r}", repr(given[key]))
    rows = {
        key: _rows(name, f"'{key}'", given[key], where)
        for key, where in declaration.token_args.items()
        if isinstance(given.get(key), torch.Tensor)
    }
    count = max(map(len, rows.values()), default=0)
    for key, found in rows.items():
        if count < 2 or len(found) not in (1, count):
            raise _refuted(name, f"{max(count, 2)} rows in '{key}'", f"{len(found)}")
    with torch.no_grad():
        real = _results(name, declaration, overload, given)
        for what, picks, call in _calls(declaration, given, rows, count):
            padded = _results(name, declaration, overload, call)
            is_real, is_again = picks >= 0, what == _AGAIN and declaration.padded == "real"
            for at, where in enumerate(declaration.token_results):
                own, other = real[at], padded[at]
                if len(own) != (count if where is not None else 1):
                    raise _refuted(name, f"{count} rows in result {at}", f"{len(own)}")
                if where is not None and len(other) != len(picks):
                    raise _refuted(name, f"{len(picks)} rows in result {at}", f"{len(other)}")
                kept = (own[picks[is_real]], other[is_real]) if where is not None else (own, other)
                if not _is_equal(*kept):
                    raise _refuted(name, f"real rows of result {at} that do not depend on others", what)
                if is_again and where is not None:
                    if not _is_equal(own[:1].expand_as(other[~is_real]), other[~is_real]):
                        raise _refuted(name, f"row 0 of result {at} again (padded='real')", what)


def _bound(name: str, overload: OpOverload, example: Any) -> dict[str, Any]:
    """Argument name → what the example passes, or the default."""
    arguments = {argument.name: argument.default_value for argument in overload._schema.arguments}
    if not isinstance(example, (Mapping, list, tuple)) or len(example) > len(arguments):
        raise _refuted(name, f"an example of its arguments {list(arguments)}", repr(example)[:200])
    given = dict(example if isinstance(example, Mapping) else zip(arguments, example, strict=False))
    if unknown := [key for key in given if key not in arguments]:
        raise _refuted(name, f"arguments of {list(arguments)}", repr(unknown[0]))
    return arguments | given


def _rows(name: str, what: str, tensor: torch.Tensor, where: int | str | None) -> torch.Tensor:
    """A tensor with its rows along dim 0; without any, it is a row."""
    if where is None:
        return tensor[None]
    if isinstance(where, int) and where >= tensor.dim():
        raise _refuted(name, f"{what} with a dim {where}", f"shape {list(tensor.shape)}")
    if isinstance(where, int):
        return tensor.movedim(where, 0)
    return tensor.reshape(-1, *(tensor.shape[-1:] if where == "leading" else ()))


def _results(
    name: str, declaration: RowsDeclaration, overload: OpOverload, given: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The rows of what the op returns for copies of its tensors; of an optional result that is None, one."""
    copied = {key: each.clone() if isinstance(each, torch.Tensor) else each for key, each in given.items()}
    positional = [
        copied.pop(argument.name) for argument in overload._schema.arguments if not argument.kwarg_only
    ]
    try:
        made = overload(*positional, **copied)
    except Exception as error:
        told = f"{type(error).__name__}: {str(error)[:300]}"
        raise _refuted(name, "an op that runs on these rows, whatever others hold", told) from error
    made = [made] if isinstance(made, torch.Tensor) else list(made)
    if len(made) != len(declaration.token_results):
        raise _refuted(name, f"{len(declaration.token_results)} results", f"{len(made)}")
    made = [torch.empty(0) if each is None else each for each in made]
    said = zip(made, declaration.token_results, strict=True)
    return [_rows(name, f"result {at}", each, where) for at, (each, where) in enumerate(said)]


_AGAIN = "row 0 again"
_OTHERS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda rows: _filled(rows, float("nan")),
    "inf": lambda rows: _filled(rows, float("inf")),
    "-inf": lambda rows: _filled(rows, -float("inf")),
    "1e4": lambda rows: _filled(rows, 1e4),
    "-1e4": lambda rows: _filled(rows, -1e4),
    "other rows": lambda rows: rows.flip(0),
    _AGAIN: lambda rows: rows[:1].expand_as(rows),
}


def _filled(rows: torch.Tensor, number: float) -> torch.Tensor:
    if not rows.dtype.is_floating_point:
        return rows.flip(0)
    return torch.full_like(rows, number, dtype=torch.float32).to(rows.dtype)


def _arranged(count: int, *, is_alone: bool) -> Iterator[list[int]]:
    """Rows of a call: numbers of real ones, and −1 for others; in their order, or in any."""
    real = list(range(count))
    yield real[: count // 2] + [-1] * (count - count // 2)
    yield from (real + [-1] * number for number in (1, 3, count, 3 * count + 2, 257))
    yield from (real[:1], real[: count // 2])
    if is_alone:
        yield real[::-1]
        yield [-1, *real, -1, -1]
        yield [row for each in real for row in (-1, each)]


def _calls(
    declaration: RowsDeclaration, given: Mapping[str, Any], rows: Mapping[str, torch.Tensor], count: int
) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
    """(what other rows hold, per row which one of the example's it is or −1, the arguments with them)."""
    # Rows that several dims count come in whole multiples of the inner ones.
    units = [
        len(own) // given[key].shape[0] if isinstance(declaration.token_args[key], str) else 1
        for key, own in rows.items() if len(own) == count and given[key].dim()
    ]  # fmt: skip
    unit = math.lcm(*units)
    arrangements = list(_arranged(count, is_alone=declaration.padded == "real"))
    for (what, make), arranged in itertools.product(_OTHERS.items(), arrangements):
        picks = torch.tensor(arranged + [-1] * (-len(arranged) % unit))
        call = dict(given)
        for argument, own in rows.items():
            if len(own) != count:
                continue
            places = picks.to(own.device)
            others = make(own)[torch.arange(len(picks), device=own.device) % count]
            is_real = (places >= 0).view(-1, *[1] * (own.dim() - 1))
            joined = torch.where(is_real, own[places.clamp(min=0)], others)
            where, shape = declaration.token_args[argument], given[argument].shape
            made = joined.movedim(0, where) if isinstance(where, int) else joined.reshape(-1, *shape[1:])
            call[argument] = made.contiguous()
        yield what if -1 in arranged else "other rows or another order", picks, call


def _is_equal(real: torch.Tensor, found: torch.Tensor) -> bool:
    if real.shape != found.shape or not real.dtype.is_floating_point:
        return torch.equal(real, found)
    # Of half types a last bit is much; others sum in another order where there are more rows.
    tolerance = {1: 0.0, 2: 2.0}.get(real.dtype.itemsize, 16.0) * torch.finfo(real.dtype).eps
    real, found = real.double(), found.double()
    largest = float(real.nan_to_num(0, 0, 0).abs().max()) if real.numel() else 0.0
    return torch.allclose(found, real, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _refuted(name: str, expected: str, got: str) -> BoundaryOpError:
    return BoundaryOpError(
        f"op '{name}', as declared by declare_rows",
        expected=expected,
        got=got,
        rule="the op treats each token row alone",
        fix="correct the declaration, or take it back by token_args=None: the op then runs eagerly",
    )
