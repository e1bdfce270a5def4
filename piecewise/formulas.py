"""Size expressions as ops of an FX graph; torch's own reference does not take proxies for all of them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils._sympy.reference import PythonReferenceAnalysis


def _floor(value: float) -> float:
    return float(math.floor(value))


def _ceil(value: float) -> float:
    return float(math.ceil(value))


def _recorded(function: Callable[..., Any], num_arguments: int) -> Any:
    """`function` on its first arguments (the rest is a dtype), noted as one call where one is a proxy."""

    def apply(*arguments: Any) -> Any:
        taken = arguments[:num_arguments]
        proxy = next((item for item in taken if isinstance(item, fx.Proxy)), None)
        if proxy is None:
            return function(*taken)
        return proxy.tracer.create_proxy("call_function", function, taken, {})

    return staticmethod(apply)


class RowFormulas(PythonReferenceAnalysis):
    """Interprets a sympy expression over numbers or FX proxies."""

    truediv = int_truediv = _recorded(operator.truediv, 2)
    floor_to_int, ceil_to_int = _recorded(math.floor, 1), _recorded(math.ceil, 1)
    trunc_to_int, round_to_int = _recorded(math.trunc, 1), _recorded(round, 1)
    floor, ceil = _recorded(_floor, 1), _recorded(_ceil, 1)
    round_decimal = _recorded(round, 2)
    exp, log, log2, sqrt = (_recorded(function, 1) for function in (math.exp, math.log, math.log2, math.sqrt))
