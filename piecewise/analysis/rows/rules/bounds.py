"""Between which bounds integers lie that an op makes, whatever the floats are, and with them its indices."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from piecewise.analysis.rows.counts import Size
from piecewise.analysis.rows.table import UNBOUNDED, Bounds, Call, Rows, bounds, fits

Ends = NDArray[Any]
# Where sums over all elements end, so that they do not overflow.
_LARGEST = float(1 << 62)


def _of(call: Call, value: Any) -> Bounds:
    """The bounds of an operand, tensor or number, in the type in which the op computes."""
    found, own = UNBOUNDED, None
    if isinstance(value, Rows):
        found, own = value.bounds._replace(permutes=False), value.dtype
    elif isinstance(value, (int, Size)):
        found = Bounds(call.size(value), call.size(value))
    # Numbers, and tensors without dims, are cast to the type of the others, which may be a narrow one.
    for dtype in {rows.dtype for rows in call.tensors()} - {own, torch.bool}:
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        if is_integer and not all(side is not None and fits(side, dtype) for side in found[:2]):
            return UNBOUNDED
    return found


def _made(call: Call, low: Ends, high: Ends) -> Bounds:
    """Bounds of these ends, as far as they are finite."""
    known = [np.broadcast_to(end, call.known.counts.shape) for end in (low, high)]
    sides = [call.known.interned(end.astype(np.int64)) if np.isfinite(end).all() else None for end in known]
    return Bounds(sides[0], sides[1])


def _ends(found: Bounds) -> tuple[Ends, Ends]:
    """The least and the largest integer at each count; infinite where they are not known."""
    low, high = found[:2]
    return (low.values * 1.0 if low else np.array(-np.inf)), (high.values * 1.0 if high else np.array(np.inf))


def _is_known(found: Bounds) -> bool:
    return found.low is not None and found.high is not None


def _below(call: Call, size: Size) -> Bounds:
    """0 .. size-1."""
    return _made(call, 0.0 * size.values, np.maximum(size.values - 1.0, 0))


def _united(call: Call, given: list[Bounds]) -> Bounds:
    lows, highs = zip(*map(_ends, given), strict=True)
    return _made(call, functools.reduce(np.minimum, lows), functools.reduce(np.maximum, highs))


def _searched(call: Call, dim: int | None) -> Size:
    """How many elements there are to choose from."""
    sizes = call.tensor().sizes
    if dim is not None:
        sizes = sizes[dim % len(sizes) :][:1] if sizes else ()
    return functools.reduce(call.known.product, sizes, call.known.constant(1))


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
    count = call.results[0][0][0].values * 1.0
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
    if call["alpha"] not in (None, 1) or not (_is_known(left) and _is_known(right)):
        return UNBOUNDED  # what is not known may wrap
    if call.name.startswith("rsub"):
        left, right = right, left
    (a, b), (c, d) = _ends(left), _ends(right)
    if call.name == "mul":
        ends = [a * c, a * d, b * c, b * d]
        return _made(call, np.minimum.reduce(ends), np.maximum.reduce(ends))
    return _made(call, a + c, b + d) if call.name == "add" else _made(call, a - d, b - c)


def _limited(call: Call, choose: Any, left: Bounds, right: Bounds) -> Bounds:
    """Of the larger, or the smaller, of two: one operand is enough for one side."""
    (a, b), (c, d) = _ends(left), _ends(right)
    return _made(call, choose(a, c), choose(b, d))


@bounds("maximum minimum")
def extreme(call: Call) -> Bounds:
    return _limited(call, getattr(np, call.name), *_pair(call))


@bounds("clamp clamp_min clamp_max")
def clamped(call: Call) -> Bounds:
    found = _of(call, call["self"])
    for name, choose in (("min", np.maximum), ("max", np.minimum)):
        if call[name] is not None:
            found = _limited(call, choose, found, _of(call, call[name]))
    return found


@bounds("neg abs")
def mirrored(call: Call) -> Bounds:
    found = call.tensor().bounds
    low, high = _ends(found)
    if not _is_known(found):
        return UNBOUNDED
    if call.name == "neg":
        return _made(call, -high, -low)
    return _made(call, 0.0 * low, np.maximum(np.abs(low), np.abs(high)))


@bounds("floor_divide div __rshift__ bitwise_right_shift")
def divided(call: Call) -> Bounds:
    bound, by = _pair(call)
    divisor = _constant(by)
    if divisor is None or divisor < 0 or call["rounding_mode"] == "trunc" and not _is_natural(bound):
        return UNBOUNDED
    divisor = 1 << min(divisor, 62) if "shift" in call.name else divisor
    low, high = _ends(bound)
    return _made(call, np.floor(low / divisor), np.floor(high / divisor)) if divisor else UNBOUNDED


def _constant(found: Bounds) -> int | None:
    return found.low.constant if found.low is not None and found.low is found.high else None


def _is_natural(found: Bounds) -> bool:
    return bool((_ends(found)[0] >= 0).all())


@bounds("remainder fmod")
def remainder(call: Call) -> Bounds:
    bound, by = _pair(call)
    divisor = _constant(by)
    if not divisor or divisor < 0 or call.name == "fmod" and not _is_natural(bound):
        return UNBOUNDED
    return _below(call, call.known.constant(divisor))


@bounds("bitwise_and")
def masked(call: Call) -> Bounds:
    highs = [_ends(each)[1] for each in _pair(call) if _is_natural(each)]
    return _made(call, np.zeros(1), functools.reduce(np.minimum, highs)) if highs else UNBOUNDED


@bounds("lt le gt ge")
def compared(call: Call) -> Bounds:
    left, right = _pair(call)
    if call.name in ("gt", "ge"):
        left, right = right, left
    (a, b), (c, d) = _ends(left), _ends(right)
    holds, fails = (b <= c, d < a) if call.name in ("le", "ge") else (b < c, d <= a)
    return _of(call, 1) if holds.all() else _of(call, 0) if fails.all() else UNBOUNDED


@bounds("all any")
def tested(call: Call) -> Bounds:
    low, high = _ends(call.tensor().bounds)
    if call.name.startswith("all"):
        return _of(call, 1) if (low >= 1).all() else UNBOUNDED
    return UNBOUNDED if low.any() or high.any() else _of(call, 0)


@bounds("sum cumsum")
def summed(call: Call) -> Bounds:
    low, high = _ends(call.tensor().bounds)
    dims = [call["dim"]] if call.name == "cumsum" else call["dim"] or range(len(call.tensor().sizes))
    count = functools.reduce(
        call.known.product, [_searched(call, dim) for dim in dims], call.known.constant(1)
    )
    least, most = low * count.values, high * count.values
    if not (np.maximum(np.abs(low), np.abs(high)) * count.values <= _LARGEST).all():
        return UNBOUNDED
    if call.name == "cumsum":
        return _made(call, np.minimum(least, low), np.maximum(most, high))
    return _made(call, least, most)


@bounds("searchsorted bucketize")
def searched(call: Call) -> Bounds:
    table = call["sorted_sequence"] if call["sorted_sequence"] is not None else call["boundaries"]
    return _made(call, np.zeros(1), table.sizes[-1].values * 1.0)


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
