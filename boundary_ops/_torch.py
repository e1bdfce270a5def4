"""Reaches the private parts of torch that this package needs, so that one file follows torch's changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# Half the price of what torch.cuda offers, and absent from builds without CUDA.
raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
raw_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def parse_schema(text: str) -> Any:
    """Returns torch's object for the text of a schema; raises RuntimeError or TypeError where it is none."""
    return torch._C.parse_schema(text)


def op_names() -> set[str]:
    """Returns the names of all ops that torch's dispatcher knows, with their overloads."""
    return set(torch._C._dispatch_get_all_op_names())


def check(condition: Any, message: Callable[[], str]) -> None:
    """Raises unless the condition holds; in a trace, states that it does, which makes symbols one."""
    torch._check(condition, message)  # type: ignore[no-untyped-call, unused-ignore]
