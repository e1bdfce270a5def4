"""Between which bounds integers lie that an op makes, whatever the floats are, and with them its indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from piecewise.analysis.rows.counts import Counts, Size
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, Call, Rows, bounds, fits

# Where sums over all elements end, so that they do not overflow.
_LARGEST = float(1 << 62)


def _of(call: Call, value: Any) -> Bounds:
    """The bounds of an operand, tensor or number, in the type in which the op computes."""
    found, own = UNBOUNDED, None
    if isinstance(value, Rows):
        found, own = value.bounds._replace(permutes=False), value.dtype
    elif isinstance(value, (bool, int)):
        found = Bounds(call.known.constant(int(value)), call.known.constant(int(value)))
    elif isinstance(value, Size):
        found = Bounds(value, value)
    # Numbers, and tensors without dims, are cast to the type of the others, which may be a narrow one.
    for dtype in {rows.dtype for rows in call.tensors()} - {own, torch.bool}:
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        if is_integer and not all(side is not None and fits(side, dtype) for side in found[:2]):
            return UNBOUNDED
    return found


def _made(call: Call, low: Counts | None, high: Counts | None) -> Bounds:
    known = call.known
    return Bounds(
        known.interned(low.astype(np.int64)) if low is not None else None,
        known.interned(high.astype(np.int64)) if high is not None else None,
    )


def _values(found: Bounds) -> tuple[Counts | None, Counts | None]:
    return (found.low.values if found.low else None), (found.high.values if found.high else None)


def _below(call: Call, size: Size) -> Bounds:
    """0 .. size-1."""
    return _made(call, np.zeros_like(size.values), np.maximum(size.values - 1, 0))


def _united(call: Call, given: list[Bounds]) -> Bounds:
    lows, highs = [each.low for each in given], [each.high for each in given]
    return _made(
        call,
        np.minimum.reduce([low.values for low in lows if low]) if all(lows) else None,
        np.maximum.reduce([high.values for high in highs if high]) if all(highs) else None,
    )


def _searched(call: Call, dim: int | None) -> Size:
    """How many elements there are to choose from."""
    sizes = call.tensor().sizes
    if dim is not None:
        return sizes[dim % len(sizes)] if sizes else call.known.constant(1)
    count = call.known.constant(1)
    for size in sizes:
        count = call.known.product(count, size)
    return count


@bounds("argmax argmin")
def position(call: Call) -> Bounds:
    return _below(call, _searched(call, call["dim"]))


@bounds("max.dim min.dim topk sort kthvalue median.dim nanmedian.dim cummax cummin")
def value_and_position(call: Call) -> list[Bounds]:
    found = _below(call, _searched(call, call["dim"]))
    is_whole = call.name == "sort" and len(call.tensor().sizes) == 1
    return [call.tensor().bounds._replace(permutes=False), found._replace(permutes=is_whole)]


_KEEPING = "alias detach clone view _unsafe_view"


@bounds(
    f"{_KEEPING} permute transpose t unsqueeze squeeze expand slice select split split_with_sizes unbind "
    "unfold diagonal flip roll rot90 repeat index index_select gather take amax amin max min median"
)
def chosen(call: Call) -> Bounds:
    """Some of the elements, or all of them in their order."""
    rows = call.tensor()
    keeps = call.name in _KEEPING.split() and call.results[0][0] == rows.sizes
    return rows.bounds._replace(permutes=rows.bounds.permutes and keeps)


@bounds("view.dtype")
def bits(call: Call) -> Bounds:
    return UNBOUNDED


@bounds("_to_copy copy")
def converted(call: Call) -> Bounds:
    rows = call.tensor("src" if call["src"] is not None else "self")
    return rows.bounds._replace(permutes=rows.bounds.permutes and rows.sizes == call.results[0][0])


@bounds("cat stack")
def joined(call: Call) -> Bounds:
    return _united(call, [rows.bounds for rows in call.tensors()])


@bounds("where")
def either(call: Call) -> Bounds:
    return _united(call, [_of(call, call["self"]), _of(call, call["other"])])


@bounds("masked_fill constant_pad_nd")
def filled(call: Call) -> Bounds:
    value = call["value"]
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return _united(call, [call.tensor().bounds, _of(call, whole)])


@bounds("tril triu")
def with_zeros(call: Call) -> Bounds:
    return _united(call, [call.tensor().bounds, _of(call, 0)])


@bounds("zeros zeros_like new_zeros zero")
def zeros(call: Call) -> Bounds:
    return _of(call, 0)


@bounds("ones ones_like new_ones")
def ones(call: Call) -> Bounds:
    return _of(call, 1)


@bounds("full full_like new_full fill scalar_tensor")
def full(call: Call) -> Bounds:
    name = {"fill": "value", "scalar_tensor": "s"}.get(call.name, "fill_value")
    return _of(call, call[name])


@bounds("arange")
def counted(call: Call) -> Bounds:
    start, step = call["start"] or 0, 1 if call["step"] is None else call["step"]
    count = call.results[0][0][0].values
    if not isinstance(step, int) or not isinstance(start, (int, Size)):
        return UNBOUNDED
    first = call.size(start).values
    last = first + np.maximum(count - 1, 0) * step
    found = _made(call, np.minimum(first, last), np.maximum(first, last))
    return found._replace(permutes=isinstance(start, int) and start == 0 and step == 1)


def _pair(call: Call) -> tuple[Bounds, Bounds]:
    return _of(call, call["self"]), _of(call, call["other"])


@bounds("add sub rsub mul")
def arithmetic(call: Call) -> Bounds:
    left, right = _pair(call)
    if call["alpha"] not in (None, 1):
        return UNBOUNDED
    if call.name.startswith("rsub"):
        left, right = right, left
    (a, b), (c, d) = _values(left), _values(right)
    if a is None or b is None or c is None or d is None:  # what is not known may wrap
        return UNBOUNDED
    if call.name == "mul":
        ends = [a * c, a * d, b * c, b * d]
        return _made(call, np.minimum.reduce(ends), np.maximum.reduce(ends))
    return _made(call, a + c, b + d) if call.name == "add" else _made(call, a - d, b - c)


def _each(function: Callable[..., Any], left: Counts | None, right: Counts | None) -> Counts | None:
    return function(left, right) if left is not None and right is not None else None


def _either(function: Callable[..., Any], left: Counts | None, right: Counts | None) -> Counts | None:
    """The side of a maximum or minimum for which one operand is enough."""
    return (
        function(left, right) if left is not None and right is not None else left if right is None else right
    )


@bounds("maximum minimum")
def extreme(call: Call) -> Bounds:
    (a, b), (c, d) = map(_values, _pair(call))
    return _larger(call, (a, b), (c, d)) if call.name == "maximum" else _smaller(call, (a, b), (c, d))


_Sides = tuple["Counts | None", "Counts | None"]


def _larger(call: Call, left: _Sides, right: _Sides) -> Bounds:
    return _made(call, _either(np.maximum, left[0], right[0]), _each(np.maximum, left[1], right[1]))


def _smaller(call: Call, left: _Sides, right: _Sides) -> Bounds:
    return _made(call, _each(np.minimum, left[0], right[0]), _either(np.minimum, left[1], right[1]))


@bounds("clamp clamp_min clamp_max")
def clamped(call: Call) -> Bounds:
    found = _of(call, call["self"])
    if call["min"] is not None:
        found = _larger(call, _values(found), _values(_of(call, call["min"])))
    if call["max"] is not None:
        found = _smaller(call, _values(found), _values(_of(call, call["max"])))
    return found


@bounds("neg")
def negated(call: Call) -> Bounds:
    low, high = _values(call.tensor().bounds)
    return UNBOUNDED if low is None or high is None else _made(call, -high, -low)


@bounds("abs")
def absolute(call: Call) -> Bounds:
    low, high = _values(call.tensor().bounds)
    if low is None or high is None:
        return UNBOUNDED
    return _made(call, np.zeros_like(low), np.maximum(np.abs(low), np.abs(high)))


@bounds("floor_divide div __rshift__ bitwise_right_shift")
def divided(call: Call) -> Bounds:
    bound, by = _pair(call)
    divisor = by.low.constant if by.low is not None and by.low is by.high else None
    if divisor is None or divisor < 0 or call["rounding_mode"] == "trunc" and not _is_natural(bound):
        return UNBOUNDED
    divisor = 1 << min(divisor, 62) if "shift" in call.name else divisor
    low, high = _values(bound)
    if not divisor:
        return UNBOUNDED
    return _made(
        call, low // divisor if low is not None else None, high // divisor if high is not None else None
    )


def _is_natural(found: Bounds) -> bool:
    return found.low is not None and bool((found.low.values >= 0).all())


@bounds("remainder fmod")
def remainder(call: Call) -> Bounds:
    bound, by = _pair(call)
    divisor = by.low.constant if by.low is not None and by.low is by.high else None
    if not divisor or divisor < 0 or call.name == "fmod" and not _is_natural(bound):
        return UNBOUNDED
    return _below(call, call.known.constant(divisor))


@bounds("bitwise_and")
def masked(call: Call) -> Bounds:
    natural = [each for each in _pair(call) if _is_natural(each)]
    highs = [each.high.values for each in natural if each.high is not None]
    if not natural:
        return UNBOUNDED
    return _made(call, np.zeros_like(call.known.counts), np.minimum.reduce(highs) if highs else None)


def _less(left: Size | None, right: Size | None, *, equal: bool = False) -> bool:
    if left is None or right is None:
        return False
    return bool((left.values <= right.values).all() if equal else (left.values < right.values).all())


@bounds("lt le gt ge")
def compared(call: Call) -> Bounds:
    left, right = _pair(call)
    if call.name in ("gt", "ge"):
        left, right = right, left
    equal = call.name in ("le", "ge")
    holds, fails = _less(left.high, right.low, equal=equal), _less(right.high, left.low, equal=not equal)
    return _of(call, 1) if holds else _of(call, 0) if fails else UNBOUNDED


@bounds("all any")
def tested(call: Call) -> Bounds:
    low, high = _values(call.tensor().bounds)
    if call.name.startswith("all"):
        return _of(call, 1) if low is not None and (low >= 1).all() else UNBOUNDED
    is_zero = low is not None and high is not None and not low.any() and not high.any()
    return _of(call, 0) if is_zero else UNBOUNDED


@bounds("sum cumsum")
def summed(call: Call) -> Bounds:
    low, high = _values(call.tensor().bounds)
    if low is None or high is None:
        return UNBOUNDED
    dims = [call["dim"]] if call.name == "cumsum" else call["dim"] or range(len(call.tensor().sizes))
    count = np.ones_like(low)
    for dim in dims:
        count = count * _searched(call, dim).values
    if (np.maximum(np.abs(low), np.abs(high)) * count.astype(float) > _LARGEST).any():
        return UNBOUNDED
    if call.name == "cumsum":
        return _made(call, np.minimum(low * count, low), np.maximum(high * count, high))
    return _made(call, low * count, high * count)


@bounds("searchsorted bucketize")
def searched(call: Call) -> Bounds:
    table = call["sorted_sequence"] if call["sorted_sequence"] is not None else call["boundaries"]
    return _made(call, np.zeros_like(call.known.counts), table.sizes[-1].values)


@bounds("index_put scatter")
def put(call: Call) -> Bounds:
    """Where a permutation says the places, each is written: the memory may have held anything."""
    target = call.tensor()
    if call["accumulate"] or call["reduce"]:
        return UNBOUNDED
    if call.name == "scatter":
        places, value = [call["index"]], call["src"] if call["src"] is not None else call["value"]
    else:
        places, value = [index for index in call["indices"] if index is not None], call["values"]
    is_whole = (
        len(target.sizes) == len(places) == 1
        and places[0].bounds.permutes
        and places[0].sizes == target.sizes
        and (not isinstance(value, Rows) or value.sizes == target.sizes)
    )
    return _of(call, value) if is_whole else _united(call, [target.bounds, _of(call, value)])
