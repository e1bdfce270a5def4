"""Compiled code on the tape: one step, on recorded memory, whatever it does inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from runners.opaque_call import OpaqueCall
from runners.tape.tape import TapeEngine, TapeGraph, TapePool

CPU = torch.device("cpu")


def record(function: Callable[[], Sequence[Any]], pool: TapePool | None = None) -> TapeGraph:
    engine = TapeEngine()
    return engine.capture(function, pool=pool or engine.new_pool(CPU), segment="segment 1")


def test_outside_a_recording_it_is_its_function() -> None:
    assert OpaqueCall(lambda rows, x: (x * rows,))(3, torch.ones(2))[0].tolist() == [3.0, 3.0]


def test_many_ops_are_one_step_that_reads_the_recorded_addresses() -> None:
    calls: list[int] = []

    def compiled(rows: int, x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(rows)
        return (x * 2 + 1).relu(), x.sum(0)

    x = torch.arange(6.0).reshape(3, 2)
    graph = record(lambda: OpaqueCall(compiled)(3, x))
    assert graph.num_ops == 1 and calls == [3]
    addresses = [output.data_ptr() for output in graph.outputs]
    for value in (1.0, -4.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(graph.outputs[0], (x * 2 + 1).relu()) and torch.equal(graph.outputs[1], x.sum(0))
        assert addresses == [output.data_ptr() for output in graph.outputs]
    assert calls == [3, 3, 3]


def test_its_results_are_garbage_before_it_has_run_again() -> None:
    """A result that some path leaves unwritten must not survive from the call before."""
    seen: list[Tensor] = []
    memory = torch.zeros(4)

    def compiled(x: Tensor) -> tuple[Tensor]:
        seen.append(graph.outputs[0].clone()) if graph is not None else None
        return (x + 1,)

    graph: TapeGraph | None = None
    graph = record(lambda: OpaqueCall(compiled)(memory))
    graph.replay()
    assert not torch.equal(seen[0], torch.ones(4)) and torch.equal(graph.outputs[0], torch.ones(4))


def test_what_it_writes_and_views_of_arguments_stay_where_they_are() -> None:
    x = torch.zeros(4, 2)

    def compiled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.add_(1)
        whole = torch.ones(4, 2) * x
        return x[1:], whole, whole[:, 1]

    graph = record(lambda: OpaqueCall(compiled)(x))
    view, whole, column = graph.outputs
    assert view.data_ptr() == x[1:].data_ptr()
    assert column.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert column.storage_offset() == whole.storage_offset() + 1 and column.stride() == (2,)
    graph.replay()
    assert torch.equal(x, torch.full((4, 2), 2.0)) and torch.equal(whole, x) and torch.equal(column, x[:, 1])


def test_ops_around_it_are_recorded_as_ever() -> None:
    x = torch.ones(3)

    def segment() -> tuple[Tensor]:
        (doubled,) = OpaqueCall(lambda x: (x * 2,))(x + 1)
        return (doubled - 1,)

    graph = record(segment)
    assert graph.num_ops == 3
    x.fill_(4.0)
    graph.replay()
    assert torch.equal(graph.outputs[0], torch.full((3,), 9.0))


def test_reading_back_inside_is_the_compilers_business_but_not_beside_it() -> None:
    from runners.errors import CaptureError

    record(lambda: OpaqueCall(lambda x: (x * float(x.sum()),))(torch.ones(2)))
    with pytest.raises(CaptureError, match="item|read|scalar"):
        record(lambda: (OpaqueCall(lambda x: (x,))(torch.ones(2))[0] * float(torch.ones(1).sum()),))


def test_an_error_inside_leaves_no_mode_and_no_memory() -> None:
    pool = TapeEngine().new_pool(CPU)

    def broken(x: Tensor) -> tuple[Tensor]:
        raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        record(lambda: OpaqueCall(broken)(torch.ones(2)), pool)
    x = torch.ones(2)
    graph = record(lambda: OpaqueCall(lambda x: (x + 1,))(x), pool)
    assert graph.num_ops == 1
