"""Declares how token rows go through an op that nobody can look into, and tests such declarations.

An op between the boundary ops stays in a graph only where padded rows are known not to reach real ones.
torch's own ops have rules for that. Of any other op one says which dims carry tokens: it makes each row of
its results of the same rows of its arguments alone. `library_rows` says so of ops of libraries.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from boundary_ops._torch import OpOverload
from boundary_ops.declare.library_rows import LIBRARY_ROWS
from boundary_ops.declare.schema import OpSchema, find_overload, near, qualified
from boundary_ops.errors import declare as errors


@dataclass(frozen=True, slots=True)
class RowsDeclaration:
    """Says how token rows go through one op.

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
        BoundaryOpError: the op is not there, writes or is torch's own, or the declaration does not fit it.
    """
    for what, value, kinds in (
        ("the name", name, str),
        ("token_args", token_args, (Mapping, type(None))),
        ("token_results", token_results, (list, tuple)),
        ("only", only, (Mapping, type(None))),
    ):
        if not isinstance(value, kinds):
            raise errors.WrongRowsArgument(argument=what, got=repr(value)[:200])
    schema = OpSchema(find_overload(name)._schema)
    if token_args is None:
        _declared.pop(schema.name, None)
        return None
    tokens = schema.check_places(token_args, "leading", "all")
    _check_op(schema, token_results, padded, only or {})
    results = tuple(
        None if where is None else schema.check_dim(f"token_results {at}", where, "leading", "all")
        for at, where in enumerate(token_results)
    )
    made = RowsDeclaration(tokens, results, padded, MappingProxyType(dict(only or {})))
    _declared[schema.name] = made
    return made


def _check_op(schema: OpSchema, results: Sequence[Any], padded: str, only: Mapping[str, Any]) -> None:
    """Raises unless the op makes new results, as many as were said, and has the arguments that are named."""
    name, parsed = schema.name, schema.parsed
    if name.partition("::")[0] in ("aten", "prim", "prims"):
        raise errors.RowsOfTorchOp(op=name)
    if parsed.is_mutable:
        raise errors.RowsOfWritingOp(op=name, got=str(parsed))
    kinds = [str(value.type) for value in parsed.returns]
    counts_agree = len(results) == len(kinds) or any("List" in kind for kind in kinds)
    if not results or not counts_agree or not all("Tensor" in kind for kind in kinds):
        raise errors.WrongTokenResults(op=name, count=len(kinds), got=repr(tuple(results)))
    for argument in only:
        schema.check_argument("only", argument, schema.arguments, "arguments")
    if padded not in ("real", "anything"):
        raise errors.WrongPadded(op=name, got=repr(padded))


def declared_rows(op: OpOverload) -> RowsDeclaration | None:
    """Returns what was declared of an op; None where nobody has, or where the op has no such arguments."""
    schema = op._schema
    found = _declared.get(qualified(schema.name, schema.overload_name))
    names = {argument.name for argument in schema.arguments}
    is_known = found is not None and names >= {*found.token_args, *found.only} and not schema.is_mutable
    return found if is_known else None


def is_shipped(op: OpOverload) -> bool:
    """Whether an op's rows are as shipped here: none of these ops looks anything up by integers."""
    name = qualified(op._schema.name, op._schema.overload_name)
    return name in LIBRARY_ROWS and _declared.get(name) == RowsDeclaration(*LIBRARY_ROWS[name])


def token_dims(where: int | str | None, rank: int) -> tuple[int, ...]:
    """Returns the dims of a tensor along which its rows are."""
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
        RowsRefuted: the example is no call of the op, a declared dim does not exist, or a real row changes.
    """
    overload = find_overload(name)
    declaration = declared_rows(overload)
    if declaration is None:
        raise errors.RowsNotDeclared(op=name, fix=near(name, list(_declared)))
    _RowsTest(name, overload, declaration).run(example)


@dataclass(frozen=True, slots=True)
class _RowsTest:
    """Runs one op on rows of an example, and compares."""

    name: str
    overload: OpOverload
    said: RowsDeclaration

    def refuted(self, expected: str, got: str) -> errors.RowsRefuted:
        return errors.RowsRefuted(op=self.name, expected=expected, got=got)

    def run(self, example: Any) -> None:
        given = self.bound(example)
        rows = {
            key: self.rows(f"'{key}'", given[key], where)
            for key, where in self.said.token_args.items()
            if isinstance(given.get(key), Tensor)
        }
        count = max(map(len, rows.values()), default=0)
        for key, found in rows.items():
            if count < 2 or len(found) not in (1, count):
                raise self.refuted(f"{max(count, 2)} rows in '{key}'", f"{len(found)}")
        with torch.no_grad():
            real = self.results(given)
            for what, picks, call in _calls(self.said, given, rows, count):
                for at, results in enumerate(zip(real, self.results(call), strict=True)):
                    self.compare(at, *results, what, picks, count)

    def compare(self, at: int, own: Tensor, other: Tensor, what: str, picks: Tensor, count: int) -> None:
        """Raises unless a result's real rows, among others, are those of the example alone."""
        has_tokens, is_real = self.said.token_results[at] is not None, picks >= 0
        if len(own) != (count if has_tokens else 1):
            raise self.refuted(f"{count} rows in result {at}", f"{len(own)}")
        if has_tokens and len(other) != len(picks):
            raise self.refuted(f"{len(picks)} rows in result {at}", f"{len(other)}")
        kept = (own[picks[is_real]], other[is_real]) if has_tokens else (own, other)
        if not _is_equal(*kept):
            raise self.refuted(f"real rows of result {at} that do not depend on others", what)
        if has_tokens and what == _AGAIN and self.said.padded == "real":
            if not _is_equal(own[:1].expand_as(other[~is_real]), other[~is_real]):
                raise self.refuted(f"row 0 of result {at} again (padded='real')", what)

    def bound(self, example: Any) -> dict[str, Any]:
        """Returns argument name → what the example passes, or the default."""
        arguments = {argument.name: argument.default_value for argument in self.overload._schema.arguments}
        if not isinstance(example, (Mapping, list, tuple)) or len(example) > len(arguments):
            raise self.refuted(f"an example of its arguments {list(arguments)}", repr(example)[:200])
        given = dict(example if isinstance(example, Mapping) else zip(arguments, example, strict=False))
        if unknown := [key for key in given if key not in arguments]:
            raise self.refuted(f"arguments of {list(arguments)}", repr(unknown[0]))
        given = arguments | given
        for key, wanted in self.said.only.items():
            if given[key] is not wanted and given[key] != wanted:
                raise self.refuted(f"{key}={wanted!r}", repr(given[key]))
        return given

    def rows(self, what: str, tensor: Tensor, where: int | str | None) -> Tensor:
        """Returns a tensor with its rows along dim 0; without any, it is a row."""
        if where is None:
            return tensor[None]
        if isinstance(where, str):
            return tensor.reshape(-1, *(tensor.shape[-1:] if where == "leading" else ()))
        if where >= tensor.dim():
            raise self.refuted(f"{what} with a dim {where}", f"shape {list(tensor.shape)}")
        return tensor.movedim(where, 0)

    def results(self, given: Mapping[str, Any]) -> list[Tensor]:
        """Returns the rows of each result for copies of the tensors; one row for a result that is None."""
        copied = {k: each.clone() if isinstance(each, Tensor) else each for k, each in given.items()}
        arguments = self.overload._schema.arguments
        positional = [copied.pop(argument.name) for argument in arguments if not argument.kwarg_only]
        try:
            made = self.overload(*positional, **copied)
        except Exception as error:
            told = f"{type(error).__name__}: {str(error)[:300]}"
            raise self.refuted("an op that runs on these rows, whatever others hold", told) from error
        made = [made] if isinstance(made, Tensor) else list(made)
        if len(made) != len(self.said.token_results):
            raise self.refuted(f"{len(self.said.token_results)} results", f"{len(made)}")
        given_back = [torch.empty(0) if each is None else each for each in made]
        said = zip(given_back, self.said.token_results, strict=True)
        return [self.rows(f"result {at}", each, where) for at, (each, where) in enumerate(said)]


def _filled(rows: Tensor, number: float) -> Tensor:
    if not rows.dtype.is_floating_point:
        return rows.flip(0)
    return torch.full_like(rows, number, dtype=torch.float32).to(rows.dtype)


_AGAIN = "row 0 again"
_OTHERS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **{text: partial(_filled, number=float(text)) for text in ("NaN", "inf", "-inf", "1e4", "-1e4")},
    "other rows": lambda rows: rows.flip(0),
    _AGAIN: lambda rows: rows[:1].expand_as(rows),
}


def _arranged(count: int, *, is_alone: bool) -> Iterator[list[int]]:
    """Returns the rows of a call: numbers of real ones, and −1 for others; in their order, or in any."""
    real = list(range(count))
    yield real[: count // 2] + [-1] * (count - count // 2)
    yield from (real + [-1] * number for number in (1, 3, count, 3 * count + 2, 257))
    yield from (real[:1], real[: count // 2])
    if is_alone:
        yield real[::-1]
        yield [-1, *real, -1, -1]
        yield [row for each in real for row in (-1, each)]


def _calls(
    declaration: RowsDeclaration, given: Mapping[str, Any], rows: Mapping[str, Tensor], count: int
) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yields (what other rows hold, per row its number in the example or −1, the arguments with them)."""
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


def _is_equal(real: Tensor, found: Tensor) -> bool:
    if real.shape != found.shape or not real.dtype.is_floating_point:
        return torch.equal(real, found)
    # Of half types a last bit is much; others sum in another order where there are more rows.
    tolerance = {1: 0.0, 2: 2.0}.get(real.dtype.itemsize, 16.0) * torch.finfo(real.dtype).eps
    real, found = real.double(), found.double()
    largest = float(real.nan_to_num(0, 0, 0).abs().max()) if real.numel() else 0.0
    return torch.allclose(found, real, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
