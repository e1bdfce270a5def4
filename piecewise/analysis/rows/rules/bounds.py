"""Bounds the integers that an op makes, indices among them; floats are not looked at."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecewise.analysis.rows.counts import Size
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, OpOnRows, Rows, bounds, fits, is_inexact

Ends = NDArray[Any]
# The largest bound of a sum, so that no int64 overflows.
_LARGEST = float(1 << 62)


def _of(call: OpOnRows, value: Any) -> Bounds:
    """Returns an operand's bounds (tensor or number) in the dtype in which the op computes."""
    found, own = UNBOUNDED, None
    if isinstance(value, Rows):
        found, own = value.bounds._replace(permutes=False), value.dtype
    elif isinstance(value, (int, Size)) or isinstance(value, float) and value.is_integer():
        found = Bounds(call.size(value), call.size(value))
    # Numbers, and tensors without dims, are cast to the type of the others, which may be a narrow one.
    for dtype in {rows.dtype for rows in call.tensors()} - {own, torch.bool}:
        if not (is_inexact(dtype) or all(side is not None and fits(side, dtype) for side in found[:2])):
            return UNBOUNDED
    return found


def _made(call: OpOnRows, low: Ends, high: Ends) -> Bounds:
    known = [np.broadcast_to(end, call.known.counts.shape) for end in (low, high)]
    sides = [call.known.interned(end.astype(np.int64)) if np.isfinite(end).all() else None for end in known]
    return Bounds(sides[0], sides[1])


def _ends(found: Bounds) -> tuple[Ends, Ends]:
    low, high = found[:2]
    return (low.values * 1.0 if low else np.array(-np.inf)), (high.values * 1.0 if high else np.array(np.inf))


def _pair(call: OpOnRows) -> tuple[Bounds, Bounds]:
    return _of(call, call["self"]), _of(call, call["other"])


def _is_known(found: Bounds) -> bool:
    return found.low is not None and found.high is not None


def _is_natural(found: Bounds) -> bool:
    return bool((_ends(found)[0] >= 0).all())


def _below(call: OpOnRows, size: Size) -> Bounds:
    return _made(call, 0.0 * size.values, np.maximum(size.values - 1.0, 0))


def _united(call: OpOnRows, *given: Bounds) -> Bounds:
    lows, highs = zip(*map(_ends, given), strict=True)
    return _made(call, functools.reduce(np.minimum, lows), functools.reduce(np.maximum, highs))


def _searched(call: OpOnRows, dim: int | None) -> Size:
    """Returns the number of elements that an index along `dim` chooses from."""
    sizes = call["self"].sizes
    if dim is not None:
        sizes = sizes[dim % len(sizes) :][:1] if sizes else ()
    return functools.reduce(call.known.product, sizes, call.known.constant(1))


def _corners(call: OpOnRows, function: Any, *operands: Bounds) -> Bounds:
    """Bounds a function that is monotonic in each operand by its values at the operands' ends."""
    ends = [function(*each) for each in itertools.product(*map(_ends, operands))]
    return _made(call, functools.reduce(np.minimum, ends), functools.reduce(np.maximum, ends))


_SIMPLE: dict[str, Any] = {
    "zeros zeros_like new_zeros zero": lambda call: _of(call, 0),
    "ones ones_like new_ones": lambda call: _of(call, 1),
    "full full_like new_full": lambda call: _of(call, call["fill_value"]),
    "fill": lambda call: _of(call, call["value"]),
    "scalar_tensor": lambda call: _of(call, call["s"]),
    "argmax argmin": lambda call: _below(call, _searched(call, call["dim"])),
    "searchsorted": lambda call: _made(call, np.zeros(1), call["sorted_sequence"].sizes[-1].values * 1.0),
    "bucketize": lambda call: _made(call, np.zeros(1), call["boundaries"].sizes[-1].values * 1.0),
    "view.dtype": lambda call: UNBOUNDED,
    "cat stack": lambda call: _united(call, *(rows.bounds for rows in call.tensors())),
    "where": lambda call: _united(call, *_pair(call)),
    "masked_fill constant_pad_nd": lambda call: _united(call, call["self"].bounds, _of(call, call["value"])),
    "tril triu": lambda call: _united(call, call["self"].bounds, _of(call, 0)),
    "maximum": lambda call: _corners(call, np.maximum, *_pair(call)),
    "minimum": lambda call: _corners(call, np.minimum, *_pair(call)),
}
for _names, _rule in _SIMPLE.items():
    bounds(_names)(_rule)


@bounds("max.dim min.dim topk sort kthvalue median.dim nanmedian.dim cummax cummin")
def value_and_position(call: OpOnRows) -> list[Bounds]:
    found = _below(call, _searched(call, call["dim"]))
    is_whole = call.name == "sort" and len(call["self"].sizes) == 1
    return [call["self"].bounds._replace(permutes=False), found._replace(permutes=is_whole)]


_KEEPING = "alias detach clone view _unsafe_view _to_copy copy"


@bounds(
    f"{_KEEPING} permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind "
    "unfold diagonal flip roll rot90 repeat index index_select gather take amax amin max min median"
)
def chosen(call: OpOnRows) -> Bounds:
    rows: Rows = call["src"] if call.name == "copy" else call["self"]
    keeps = call.name in _KEEPING.split() and call.sizes == rows.sizes
    return rows.bounds._replace(permutes=rows.bounds.permutes and keeps)


@bounds("arange")
def counted(call: OpOnRows) -> Bounds:
    start, step = call["start"] or 0, 1 if call["step"] is None else call["step"]
    if not isinstance(step, int) or not isinstance(start, (int, Size)):
        return UNBOUNDED
    first = call.size(start).values
    last = first + np.maximum(call.sizes[0].values * 1.0 - 1, 0) * step
    found = _made(call, np.minimum(first, last), np.maximum(first, last))
    return found._replace(permutes=isinstance(start, int) and start == 0 and step == 1)


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "rsub": lambda a, b: b - a, "mul": np.multiply}


@bounds("add sub rsub mul")
def arithmetic(call: OpOnRows) -> Bounds:
    if call["alpha"] not in (None, 1) or not all(map(_is_known, _pair(call))):
        return UNBOUNDED  # an unknown operand may wrap
    return _corners(call, _ARITHMETIC[call.name.partition(".")[0]], *_pair(call))


@bounds("clamp clamp_min clamp_max")
def clamped(call: OpOnRows) -> Bounds:
    found = _of(call, call["self"])
    for name, choose in (("min", np.maximum), ("max", np.minimum)):
        if call[name] is not None:
            found = _corners(call, choose, found, _of(call, call[name]))
    return found


@bounds("neg abs")
def mirrored(call: OpOnRows) -> Bounds:
    found = call["self"].bounds
    if not _is_known(found):
        return UNBOUNDED
    low, high = _ends(found)
    if call.name == "neg":
        return _made(call, -high, -low)
    return _made(call, 0.0 * low, np.maximum(-low, high))


@bounds("floor_divide div __rshift__ bitwise_right_shift remainder fmod")
def divided(call: OpOnRows) -> Bounds:
    bound, by = _pair(call)
    divisor = by.low.constant if by.low is not None and by.low is by.high else None
    truncates = call["rounding_mode"] == "trunc" or call.name == "fmod"
    if divisor is None or divisor < 0 or truncates and not _is_natural(bound):
        return UNBOUNDED
    divisor = 1 << min(divisor, 62) if "shift" in call.name else divisor
    if divisor and call.name in ("remainder", "fmod"):
        return _below(call, call.known.constant(divisor))
    return _corners(call, lambda end: np.floor(end / divisor), bound) if divisor else UNBOUNDED


@bounds("bitwise_and")
def masked(call: OpOnRows) -> Bounds:
    highs = [_ends(each)[1] for each in _pair(call) if _is_natural(each)]
    return _made(call, np.zeros(1), functools.reduce(np.minimum, highs)) if highs else UNBOUNDED


@bounds("lt le gt ge")
def compared(call: OpOnRows) -> Bounds:
    (a, b), (c, d) = map(_ends, _pair(call) if call.name in ("lt", "le") else reversed(_pair(call)))
    holds, fails = (b <= c, d < a) if call.name in ("le", "ge") else (b < c, d <= a)
    return _of(call, 1) if holds.all() else _of(call, 0) if fails.all() else UNBOUNDED


@bounds("all any")
def tested(call: OpOnRows) -> Bounds:
    low, high = _ends(call["self"].bounds)
    if call.name.startswith("all"):
        return _of(call, 1) if (low >= 1).all() else UNBOUNDED
    return UNBOUNDED if low.any() or high.any() else _of(call, 0)


@bounds("sum cumsum")
def summed(call: OpOnRows) -> Bounds:
    low, high = _ends(call["self"].bounds)
    dims = [call["dim"]] if call.name == "cumsum" else call["dim"] or range(len(call["self"].sizes))
    searched = [_searched(call, dim) for dim in dims]
    count = functools.reduce(call.known.product, searched, call.known.constant(1)).values
    if not (np.maximum(np.abs(low), np.abs(high)) * count <= _LARGEST).all():
        return UNBOUNDED
    if call.name == "cumsum":
        return _made(call, np.minimum(low * count, low), np.maximum(high * count, high))
    return _made(call, low * count, high * count)


@bounds("index_put scatter")
def put(call: OpOnRows) -> Bounds:
    """Bounds writes by index; a permutation writes each place, so that the old values do not count."""
    target: Rows = call["self"]
    if call["accumulate"] or call["reduce"]:
        return UNBOUNDED
    if call.name == "scatter":
        places, value = [call["index"]], call["src"] if call["src"] is not None else call["value"]
    else:
        places, value = [index for index in call["indices"] if index is not None], call["values"]
    is_one = len(target.sizes) == len(places) == 1 and places[0].sizes == target.sizes
    is_written_whole = not isinstance(value, Rows) or value.sizes == target.sizes
    is_whole = is_one and is_written_whole and places[0].bounds.permutes
    return _of(call, value) if is_whole else _united(call, target.bounds, _of(call, value))
