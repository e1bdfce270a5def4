"""The tape: replays equal eager runs, on shared and poisoned memory, and a failed capture leaves nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tapes import assert_equal, record
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from runners.mode import capturing
from runners.tape.tape import TapeGraph

NOTES: list[float] = []

LIB = torch.library.Library("tape_test", "DEF")
LIB.define("doubled_and_count(Tensor x) -> (Tensor, int)")
LIB.impl("doubled_and_count", lambda x: (x * 2, 7), "CPU")
LIB.define("maybe(Tensor x, bool both) -> (Tensor, Tensor?)")
LIB.impl("maybe", lambda x, both: (x + 1, x + 2 if both else None), "CPU")
LIB.define("pieces(Tensor x) -> (Tensor, Tensor[])")
LIB.impl("pieces", lambda x: (x + 1, [x + 2, x * 3]), "CPU")
LIB.define("halves(Tensor x) -> (Tensor, Tensor)")
LIB.impl("halves", lambda x: (x + 1).chunk(2), "CPU")
LIB.define("repeated(Tensor x) -> Tensor")
LIB.impl("repeated", lambda x: x.sum(0, keepdim=True).expand(*x.shape), "CPU")
LIB.define("windows(Tensor x) -> Tensor")
LIB.impl("windows", lambda x: (x + 0).flatten().unfold(0, 4, 2), "CPU")
LIB.define("gram(Tensor x) -> Tensor")
LIB.impl("gram", lambda x: x @ x.t(), "CPU")
LIB.define("note(Tensor x) -> ()")
LIB.impl("note", lambda x: NOTES.append(float(x.sum().numpy())) if capturing() is None else None, "CPU")
LIB.define("same(Tensor x) -> Tensor")
LIB.impl("same", lambda x: x, "CPU")


def _accumulate(total: Tensor, x: Tensor) -> None:
    total.add_(x)


LIB.define("accumulate_(Tensor(a!) total, Tensor x) -> ()")
LIB.impl("accumulate_", _accumulate, "CPU")


def check_replays(fn: Callable[..., Sequence[Any]], *inputs: Tensor, num_ops: int | None = None) -> TapeGraph:
    """Captures, then replays on new values: each time bit for bit what eager gives."""
    graph = record(lambda: fn(*inputs))
    with torch.no_grad():
        assert_equal(graph.outputs, fn(*inputs))
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        for tensor in inputs:
            if tensor.is_floating_point():
                tensor.data.normal_(generator=generator)
            else:
                tensor.data.random_(0, 4, generator=generator)
        graph.replay()
        with torch.no_grad():
            assert_equal(graph.outputs, fn(*inputs))
    if num_ops is not None:
        assert graph.num_ops == num_ops
    return graph


def test_replay_equals_eager_on_new_input_values() -> None:
    weight = torch.nn.Parameter(torch.randn(16, 16))

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.nn.functional.linear(x, weight)
        return y, torch.softmax(y, -1), torch.cat([x, y], -1), y.sort(-1).values

    check_replays(fn, torch.randn(6, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_replay_equals_eager_in_each_float_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 8, dtype=dtype)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.nn.functional.silu(x @ weight) * x, torch.nn.functional.layer_norm(x, (8,))

    check_replays(fn, torch.randn(5, 8, dtype=dtype))


def test_replay_runs_no_model_python() -> None:
    runs = []

    def fn() -> tuple[Tensor]:
        runs.append(1)
        return (x + 1,)

    x = torch.zeros(3)
    graph = record(fn)
    graph.replay()
    graph.replay()
    assert len(runs) == 1


def test_views_are_not_replayed_and_show_the_new_values() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y.view(2, 6), y.t(), y[1:], y.unsqueeze(0).expand(2, 3, 4), *y.split(2, dim=1)

    check_replays(fn, torch.randn(3, 4), num_ops=1)


def test_a_segment_of_views_only_is_empty() -> None:
    x = torch.randn(4, 4)
    graph = record(lambda: (x.t(), x.view(-1), x, x.contiguous(), x.to(torch.float32)))
    assert graph.is_empty and graph.num_ops == 0
    graph.replay()
    assert graph.outputs[0].data_ptr() == x.data_ptr()
    assert graph.outputs[2] is x and graph.outputs[3] is x and graph.outputs[4] is x


def test_reshape_of_a_fresh_tensor_stays_one_memory() -> None:
    """`_unsafe_view` returns its argument's memory without a view schema."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        dense = x.t().reshape(-1)
        dense.add_(1)
        return (dense,)

    # clone, add_: the _unsafe_view between them is no op of its own.
    check_replays(fn, torch.randn(3, 4), num_ops=2)


def test_in_place_ops_and_out_arguments_run_again_on_the_recorded_tensor() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty(3, 4)
        torch.mul(x, 3, out=y)
        y[:, 1].add_(5)
        z = y.view(-1)
        z.mul_(2)
        return y, z

    graph = check_replays(fn, torch.randn(3, 4), num_ops=3)
    assert graph.outputs[0].data_ptr() == graph.outputs[1].data_ptr()


def test_bits_seen_as_another_type() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x.view(torch.int32) + 1, (x * 2).view(torch.int32) + 1, x.to(torch.bfloat16).view(torch.int16)

    check_replays(fn, torch.randn(6, 4))


def test_metadata_changed_in_place_is_not_repeated() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x + 1
        before = y * 2
        y.unsqueeze_(0).transpose_(1, 2)
        y.squeeze_(0)
        return before, y * 3, y

    check_replays(fn, torch.randn(3, 4), num_ops=3)


def test_a_rebound_model_tensor_does_not_change_earlier_ops() -> None:
    x = torch.randn(4)

    def fn() -> tuple[Tensor, ...]:
        y = x + 1
        z = y * 2
        y.data = torch.zeros(4)
        return z, y + 0

    graph = record(fn)
    x.fill_(4)
    graph.replay()
    assert graph.outputs[0].tolist() == [10.0] * 4 and graph.outputs[1].tolist() == [0.0] * 4


def test_factories_become_fills() -> None:
    def fn(x: Tensor) -> tuple[Any, ...]:
        return (
            *(
                torch.zeros(3),
                torch.ones(2, dtype=torch.int32),
                torch.full((2, 2), 2.5),
                torch.full((2,), True),
            ),
            *(torch.zeros_like(x), x.new_full((3,), -1.0), torch.arange(5), torch.arange(0.0, 1.0, 0.25)),
            *(torch.linspace(0, 1, 5), torch.eye(3), torch.tril(torch.ones(3, 3, dtype=torch.bool))),
            *(
                torch.full((2,), float("-inf")),
                torch.full((2,), 2**53 + 1),
                torch.full((1,), 0.1, dtype=torch.float64),
            ),
            *(torch.full((1,), 1 + 2j), torch.where(x > 0, x, 0.0), x.masked_fill(x > 0, -1e9)),
        )

    check_replays(fn, torch.randn(4))


def test_replay_does_not_see_later_defaults() -> None:
    graph = record(lambda: (torch.rand(64), torch.arange(0.0, 1.0, 0.1)))
    torch.manual_seed(5)
    expected = torch.rand(64), torch.arange(0.0, 1.0, 0.1)
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    try:
        graph.replay()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(graph.outputs, expected)


def test_numbers_written_by_index_are_fills() -> None:
    def fn(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[0] = 5.0
        y[rows] = -2.0
        y[y > 1] = 0.5
        y[:, 1] = x[:, 0]
        return (y,)

    check_replays(fn, torch.randn(4, 3), torch.tensor([1, 3]))


def test_empty_memory_is_garbage_in_capture_and_replay() -> None:
    graph = record(
        lambda: (torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.bool))
    )
    assert graph.num_ops == 0
    for _ in range(2):
        floats, integers, booleans = graph.outputs
        assert floats.isnan().all()
        assert (integers % 2 == 1).all() and (integers > 2**40).all()
        # Not any byte that counts as true: kernels rely on a bool being 0 or 1.
        assert booleans.view(torch.uint8).tolist() == [1, 1, 1]
        for output in graph.outputs:
            output.zero_()
        graph.replay()


@pytest.mark.parametrize("shape", [(0,), (0, 4), (1,), (3, 1, 5), ()])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    check_replays(lambda x: (x + 1, x > 0, (x * 2).sum()), torch.randn(shape))


def test_strides_are_kept() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (
            x.t() + 1,
            x.unsqueeze(0).permute(2, 0, 1) * 2,
            torch.empty_strided((2, 3), (1, 2)).copy_(x[:2, :3]),
        )

    check_replays(fn, torch.randn(3, 4))


def test_several_lists_none_and_numbers_as_outputs() -> None:
    op = torch.ops.tape_test

    def fn(x: Tensor) -> tuple[Any, ...]:
        doubled, count = op.doubled_and_count(x)
        first, (second, third) = op.pieces(doubled)
        alone, nothing = op.maybe(x, False)
        both = op.maybe(x, True)
        low, high = torch.aminmax(x, dim=-1)
        return doubled, count, first, second, third, alone, nothing, *both, low, high, None, 3, x.shape[0]

    check_replays(fn, torch.randn(4, 6))


def test_results_that_share_memory_still_do() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        low, high = torch.ops.tape_test.halves(x)
        assert low.untyped_storage().data_ptr() == high.untyped_storage().data_ptr()
        return low, high

    check_replays(fn, torch.randn(4, 6))


def test_results_that_overlap_themselves() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.tape_test.repeated(x), torch.ops.tape_test.windows(x)

    graph = check_replays(fn, torch.randn(4, 6))
    assert graph.outputs[0].stride() == (0, 1) and graph.outputs[1].stride() == (2, 1)


def test_an_op_that_returns_its_argument_is_not_copied() -> None:
    x = torch.randn(3)
    graph = record(lambda: (torch.ops.tape_test.same(x),))
    assert graph.outputs[0].data_ptr() == x.data_ptr()


def test_inputs_and_parameters_pass_through_untouched() -> None:
    x, weight = torch.randn(3), torch.nn.Parameter(torch.randn(3))
    graph = record(lambda: (x, weight, x[1:], None, 4, 2.5))
    assert graph.outputs[0] is x and graph.outputs[1] is weight and weight.requires_grad
    assert graph.outputs[2].data_ptr() == x[1:].data_ptr()
    assert graph.outputs[3:] == (None, 4, 2.5)


def test_a_custom_op_that_mutates_runs_again() -> None:
    total, x = torch.zeros(3), torch.ones(3)

    def fn() -> tuple[Tensor]:
        torch.ops.tape_test.accumulate_(total, x * 2)
        return (total + 0,)

    graph = record(fn)
    assert total.tolist() == [2.0] * 3
    x.fill_(5)
    graph.replay()
    assert total.tolist() == [12.0] * 3 and graph.outputs[0].tolist() == [12.0] * 3


def test_a_custom_op_that_returns_nothing_runs_again() -> None:
    x = torch.ones(3)
    graph = record(lambda: (torch.ops.tape_test.note(x), x)[1:])
    assert graph.num_ops == 1
    NOTES.clear()
    for value in (2.0, 4.0):
        x.fill_(value)
        graph.replay()
    assert NOTES == [6.0, 12.0]


def test_random_ops_draw_new_numbers_at_each_replay() -> None:
    x = torch.ones(64)
    graph = record(
        lambda: (
            torch.rand(64),
            torch.randn_like(x),
            torch.nn.functional.dropout(x, 0.5),
            x.clone().normal_(),
        )
    )
    seen = [[output.clone() for output in graph.outputs]]
    for _ in range(2):
        graph.replay()
        assert all(not torch.equal(new, old) for new, old in zip(graph.outputs, seen[-1], strict=True))
        seen.append([output.clone() for output in graph.outputs])
    torch.manual_seed(3)
    expected = torch.rand(64)
    torch.manual_seed(3)
    graph.replay()
    assert torch.equal(graph.outputs[0], expected)


def test_I8_capture_moves_the_rng_like_one_eager_run() -> None:
    half = torch.full((8,), 0.5)

    def fn() -> tuple[Tensor, ...]:
        drawn = torch.rand(8), torch.bernoulli(half), torch.normal(half, half), torch.multinomial(half, 3)
        return *drawn, torch.randperm(8), torch.nn.functional.dropout(half), half.clone().uniform_()

    torch.manual_seed(0)
    expected = fn()
    after = torch.get_rng_state()
    torch.manual_seed(0)
    graph = record(fn)
    assert_equal(graph.outputs, expected)
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(0)
    graph.replay()
    assert_equal(graph.outputs, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_capture_and_replay_under_any_caller_mode() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(2, 4)

    def fn() -> tuple[Tensor, ...]:
        y = x @ weight
        return y, y.reshape(-1).contiguous(), torch.ops.tape_test.gram(y)

    with torch.inference_mode():
        graph = record(fn)
        graph.replay()
    for output in graph.outputs:
        assert not output.is_inference() and not output.requires_grad
    x.normal_()
    with torch.enable_grad():
        graph.replay()
    assert_equal(graph.outputs, [output.detach() for output in fn()])
    assert not graph.outputs[0].requires_grad
    expected = [output.detach().clone() for output in fn()]
    with torch.autocast("cpu", torch.bfloat16):
        graph.replay()
    assert_equal(graph.outputs, expected)
    with torch.inference_mode():
        graph.replay()
    assert_equal(graph.outputs, expected)


def test_inference_tensors_can_be_read() -> None:
    with torch.inference_mode():
        x, weight = torch.randn(3, 4), torch.randn(5, 4)
    graph = record(
        lambda: (torch.nn.functional.linear(x, weight).reshape(-1), x.reshape(12), x.t().reshape(12))
    )
    graph.replay()
    with torch.no_grad():
        assert_equal(
            graph.outputs, (torch.nn.functional.linear(x, weight).reshape(-1), x.view(12), x.t().reshape(12))
        )


def test_autocast_inside_the_segment_is_recorded_as_casts() -> None:
    weight = torch.randn(8, 8)

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ weight,)

    assert check_replays(fn, torch.randn(3, 8)).outputs[0].dtype is torch.bfloat16


def test_a_replay_is_invisible_to_modes() -> None:
    seen: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class WatchCalls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    graph = record(lambda: (x + 1,))
    with torch.device("meta"), Watch(), WatchCalls():
        graph.replay()
    assert seen == [] and torch.equal(graph.outputs[0], x + 1)


class Scaled(Tensor):
    """A wrapper with a dispatch of its own, as quantized weights come."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [arg.inner * 3 if isinstance(arg, Scaled) else arg for arg in args]
        return func(*plain, **(kwargs or {}))


def test_a_subclass_takes_itself_apart_and_its_parts_are_recorded() -> None:
    inner, x = torch.randn(4, 4), torch.randn(2, 4)
    weight = Scaled(inner)
    graph = record(lambda: (torch.mm(x, weight),))
    assert graph.num_ops == 2
    inner.normal_()
    x.normal_()
    graph.replay()
    assert torch.equal(graph.outputs[0], x @ (inner * 3))
