"""Finds out whether another trace is the captured program: one of one token, or one that Dynamo made anew."""

from __future__ import annotations

from typing import Any

from torch import nn

from piecewise.analysis.normalize import normalized
from piecewise.analysis.same_program import Program
from piecewise.capture.analyse import TracedModel, example_of_size, living_facts
from piecewise.capture.captured_ops import write_captured_forms
from piecewise.settings.config import PiecewiseConfig
from piecewise.trace.trace import Trace, front_end
from runners.errors import PiecewiseError
from runners.state.state_check import StateFacts

ANOTHER_PROGRAM = "the model runs another program with one token than with several"


def one_token_refusal(
    traced: TracedModel, model: nn.Module, *, forward: Any, config: PiecewiseConfig
) -> tuple[str, StateFacts]:
    """Finds why one token does not run the program of several, and which state decides this [I10].

    torch assumes two or more and records no guard for it, so `if n > 1`, `squeeze(0)` and broadcasts leave
    no mark. A second trace, at one token and static, is compared op by op.

    Returns:
        The reason, empty if the programs agree, and the state that only the trace of one token read, such as
        a flag in its branch.
    """
    ratio = config.max_padding_ratio
    if ratio is not None and config.buckets[0] > ratio:
        return (
            f"max_padding_ratio = {ratio:g} excludes it from the smallest bucket, {config.buckets[0]}",
            StateFacts(),
        )
    trace, example = front_end(config.frontend), example_of_size(traced, 1)
    static: dict[int, tuple[int, ...]] = {c.leaf: tuple(c.dims) for c in traced.token.inputs}
    static |= dict.fromkeys(traced.static_ints, ())
    try:
        single = trace(model, example, forward=forward, static_dims=static)
    except PiecewiseError as error:
        return f"it cannot be traced with one: {error.what}", StateFacts()
    is_same = runs_same_program(traced, single, config, num_tokens=1)
    refusal = "" if is_same else ANOTHER_PROGRAM
    return refusal, single.state_facts.beyond(traced.trace.state_facts)


def runs_same_program(
    traced: TracedModel, other: Trace, config: PiecewiseConfig, *, num_tokens: int | None = None
) -> bool:
    """Whether another trace is the same program op by op: at one count, for a trace of that count alone, or
    else as a function of the sizes."""
    other = normalized(other)
    write_captured_forms(other, config)
    symbol = traced.token.symbol if num_tokens is not None else None
    program = Program(traced.trace, traced.facts, symbol=symbol, num_tokens=num_tokens or 1)
    return program.difference(Program(other, living_facts(other, config))) is None
