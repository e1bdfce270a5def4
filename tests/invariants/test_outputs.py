"""[I6, I7] What a call returns: the eager structure, the eager aliasing, memory that the caller owns."""

from __future__ import annotations

import collections
import dataclasses
import enum
import typing

import pytest
import torch
import torch.nn.functional as F
from toy_models import (
    HIDDEN,
    Toy,
    assert_same,
    check_sizes,
    compare,
    kinds,
    make_ids,
    shift,
)

import piecewise
from piecewise.errors.trace import OpaqueResult, ResultWithoutSource, StoresState
from runners.stats import FallbackReason


class Pair(typing.NamedTuple):
    first: torch.Tensor
    second: typing.Any


@dataclasses.dataclass
class Plain:
    hidden: torch.Tensor
    rest: typing.Any = None


@dataclasses.dataclass(frozen=True)
class Counted:
    hidden: torch.Tensor
    made: int = dataclasses.field(default=0)

    def __post_init__(self):
        # A result is rebuilt as forward left it: running this again would count twice.
        object.__setattr__(self, "made", self.made + 1)


@dataclasses.dataclass
class Registered:
    hidden: torch.Tensor
    count: int


torch.utils._pytree.register_dataclass(Registered)


class Color(enum.Enum):
    RED = 1


class Returning(Toy):
    """Returns `pack(x, ids, positions, self)` of the last hidden states x."""

    def __init__(self, result):
        super().__init__(num_blocks=1, project=False)
        self.result = result

    def forward(self, ids, positions=None):
        return self.result(super().forward(ids, positions), ids, positions, self)


def returning(result):
    return Returning(result).eval()


STRUCTURES = {
    "tensor": lambda x, ids, positions, m: x,
    "tuple": lambda x, ids, positions, m: (x, x * 2),
    "tuple_of_one": lambda x, ids, positions, m: (x,),
    "list": lambda x, ids, positions, m: [x, [x + 1, (x + 2,)], []],
    "dict": lambda x, ids, positions, m: {"a": x, 3: {"b": x.sum(-1)}, "empty": {}},
    "namedtuple": lambda x, ids, positions, m: Pair(x, [x + 1, None]),
    "dataclass": lambda x, ids, positions, m: Plain(x, Plain(x * 2)),
    "frozen_dataclass": lambda x, ids, positions, m: Counted(x),
    "registered_dataclass": lambda x, ids, positions, m: Registered(x, 4),
    "constants": lambda x, ids, positions, m: (x, None, True, "name", 3, 2.5, torch.float16),
    "count": lambda x, ids, positions, m: (x, x.shape[0], 2 * x.shape[0] + 1, [x.shape[0]]),
    "shape": lambda x, ids, positions, m: {"shape": tuple(x.shape), "x": x},
    "float_of_count": lambda x, ids, positions, m: (x, x.shape[0] / 4, x.shape[0] ** 0.5),
    "float_and_int_of_data": lambda x, ids, positions, m: (x, ids.sum().item(), (ids * 0.5).sum().item()),
    "input_back": lambda x, ids, positions, m: (x, ids),
    "nested_input_back": lambda x, ids, positions, m: {"p": [positions], "x": x},
    "view_of_input": lambda x, ids, positions, m: (x, ids.view(1, -1), ids[:-1]),
    "parameter_back": lambda x, ids, positions, m: (x, m.projection.weight),
    "same_tensor_twice": lambda x, ids, positions, m: (x, [x]),
    "aliases": lambda x, ids, positions, m: (x, x[:, :4], x.view(-1)),
    "eager_and_graph": lambda x, ids, positions, m: (x.flip(0), x, x.mean(0), x[-1]),
    "no_token_dim": lambda x, ids, positions, m: x.mean(),
    "bools": lambda x, ids, positions, m: x > 0,
    "half": lambda x, ids, positions, m: (x.half(), x.to(torch.bfloat16), x.double()),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_I7_structure_and_values_are_the_eager_ones(name):
    check_sizes(returning(STRUCTURES[name]), sizes=(2, 7, 8, 9, 17))


def test_I7_model_output_of_transformers():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    model = returning(lambda x, ids, p, m: outputs.CausalLMOutputWithPast(logits=x, hidden_states=(x, x + 1)))
    graphed = check_sizes(model, sizes=(2, 7, 8, 9, 17))
    with torch.no_grad():
        result = graphed(make_ids(5), torch.arange(5))
    assert list(result.keys()) == ["logits", "hidden_states"] and result[0] is result.logits


def test_I7_an_enum_and_a_shared_constant_keep_their_identity():
    graphed = check_sizes(returning(lambda x, ids, p, m: (x, Color.RED)), sizes=(2, 7, 8))
    with torch.no_grad():
        assert graphed(make_ids(5), torch.arange(5))[1] is Color.RED


def test_I7_an_ordered_dict_stays_one():
    check_sizes(returning(lambda x, ids, p, m: collections.OrderedDict(b=x, a=x + 1)), sizes=(2, 7, 8))


def call(graphed, n=5, **keywords):
    with torch.no_grad():
        result = graphed(make_ids(n), torch.arange(n), **keywords)
    assert graphed.stats.replays > 0 and graphed.stats.eager_calls == 0
    return result


def capture(model, **config):
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False, **config)
    assert graphed.capture(make_ids(5), torch.arange(5)).ok
    return graphed


def test_I7_an_input_comes_back_as_the_callers_own_object():
    graphed = capture(returning(lambda x, ids, positions, m: (x, positions, [ids])))
    ids, positions = make_ids(5), torch.arange(5)
    with torch.no_grad():
        _, same, (other,) = graphed(ids, positions)
    assert same is positions and other is ids


def test_I7_a_view_of_an_input_shares_the_callers_memory():
    graphed = capture(returning(lambda x, ids, positions, m: (x, ids[:-1])))
    ids = make_ids(5)
    with torch.no_grad():
        _, view = graphed(ids, torch.arange(5))
    ids[0] = 49
    assert view[0] == 49 and view.data_ptr() == ids.data_ptr()


def test_I7_a_parameter_comes_back_as_itself():
    graphed = capture(returning(lambda x, ids, positions, m: (x, m.projection.weight)))
    assert call(graphed)[1] is graphed.model.projection.weight


def test_I7_one_tensor_returned_twice_is_one_tensor():
    first, second = call(capture(returning(lambda x, ids, positions, m: (x, [x]))))
    assert first is second[0]


@pytest.mark.parametrize(
    "result",
    [
        lambda x, ids, positions, m: (x, x[:, :4], x.view(-1)),
        lambda x, ids, positions, m: (x.view(-1)[3:], x),
        lambda x, ids, positions, m: (x.T, x.view(1, -1, HIDDEN)),
        lambda x, ids, positions, m: (x[-1], x),
        lambda x, ids, positions, m: (x.flip(0)[1:], [x[0], x[-2:]], x),
    ],
)
def test_I7_results_that_alias_each_other_do_so_again(result):
    graphed = capture(returning(result))
    with torch.no_grad():
        want = graphed.model(make_ids(5), torch.arange(5))
    got = call(graphed)
    for tensors in (want, got):
        flat = [t for item in tensors for t in (item if isinstance(item, list) else [item])]
        flat[-1].fill_(3)
    assert_same(got, want, exact=False, where="after a write to one of them")


def test_I7_the_next_call_does_not_touch_results_of_the_last():
    graphed = capture(returning(lambda x, ids, positions, m: (x, x[:, :4], x[-1], x.flip(0)[:2], x.T)))
    first = call(graphed, 5)
    kept = [tensor.clone() for tensor in first]
    call(graphed, 6)
    call(graphed, 12)
    assert all(map(torch.equal, first, kept))


def test_I7_what_the_caller_writes_into_a_result_reaches_no_later_call():
    graphed = capture(returning(lambda x, ids, positions, m: (x, x[-1], x.mean(0))))
    with torch.no_grad():
        want = graphed.model(make_ids(5), torch.arange(5))
    for tensor in call(graphed, 5):
        tensor.fill_(float("nan"))
    assert_same(call(graphed, 5), want, exact=False, where="second call")


def test_I7_views_are_handed_out_where_asked_for():
    graphed = capture(returning(lambda x, ids, positions, m: (x, x[:, :4])), outputs="view")
    first = call(graphed, 5)[0]
    address = first.data_ptr()
    assert call(graphed, 6)[0].data_ptr() == address
    with torch.no_grad():
        want = graphed.model(make_ids(6), torch.arange(6))
    assert_same(call(graphed, 6), want, exact=False, where="a view")


@pytest.mark.parametrize(
    "result",
    [
        lambda x, ids, positions, m: [x, x * 2],
        lambda x, ids, positions, m: [(x * 2).T, x @ x.T],
        lambda x, ids, positions, m: [x.view(-1, 4, 4).transpose(0, 1)],
        lambda x, ids, positions, m: [x[:, :4]],
        lambda x, ids, positions, m: [(x * 2)[None].expand(3, -1, -1), x[:, :1].expand(-1, 5)],
        lambda x, ids, positions, m: [(x @ x.T).T, (x @ x.T)[:, None]],
        lambda x, ids, positions, m: [x.T[2:], x[:, 1::2]],
    ],
)
def test_I7_results_have_the_strides_of_eager_ones(result):
    graphed = capture(returning(result))
    with torch.no_grad():
        want = graphed.model(make_ids(5), torch.arange(5))
    got = call(graphed)
    assert_same(got, want, exact=False, where="strided")
    assert [tensor.stride() for tensor in got] == [tensor.stride() for tensor in want]


def test_I7_results_of_an_inference_mode_call_and_of_a_no_grad_call():
    graphed = capture(returning(lambda x, ids, positions, m: (x, x[-1])))
    call(graphed)[0].add_(1)
    with torch.inference_mode():
        result = graphed(make_ids(5), torch.arange(5))
        want = graphed.model(make_ids(5), torch.arange(5))
    assert_same(result, want, exact=False, where="inference mode")
    assert not result[0].requires_grad and graphed.stats.replays == 2


# Inputs that the model writes.


class Writing(torch.nn.Module):
    """Changes its input `x [n, h]` in one way or another, around a boundary op."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = torch.nn.Linear(HIDDEN, HIDDEN), how

    def forward(self, x):
        return self.how(self, x)


def _write_before(m, x):
    x.mul_(2)
    out = torch.empty_like(x)
    shift(m.linear(x), out)
    return out + x


def _write_after(m, x):
    out = torch.empty_like(x)
    shift(m.linear(x), out)
    x.add_(out)
    return out * x


def _write_view(m, x):
    left = x[:, :4]
    out = torch.empty_like(x)
    shift(m.linear(x), out)
    left.mul_(3)
    return out + x


def _write_last_row(m, x):
    x[-1] = 0
    out = torch.empty_like(x)
    shift(m.linear(x), out)
    return out + x


def _boundary_writes_input(m, x):
    y = m.linear(x)
    out = torch.empty_like(x)
    shift(x, out)
    return y + m.linear(x) + out


def _written_input_comes_back(m, x):
    out = torch.empty_like(x)
    shift(m.linear(x), out)
    x.add_(out)
    return out, x, x[:, :2]


@pytest.mark.parametrize(
    "how",
    [
        _write_before,
        _write_after,
        _write_view,
        _write_last_row,
        _boundary_writes_input,
        _written_input_comes_back,
    ],
)
def test_I7_an_input_that_the_model_writes_is_written_for_the_caller(how):
    model = Writing(how).eval()
    check_sizes(
        model, arguments=lambda n: (torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n)),)
    )


def test_I7_inputs_that_share_memory_are_not_taken_for_two():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, y):
            out = torch.empty_like(x)
            shift(self.linear(x), out)
            x.add_(1)
            return out + x * y

    model = Two().eval()
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    graphed.capture(torch.randn(5, HIDDEN), torch.randn(5, HIDDEN))
    with torch.no_grad():
        x = torch.randn(5, HIDDEN)
        compare(graphed, model, (x, torch.randn(5, HIDDEN)), exact=False, where="two tensors")
        compare(graphed, model, (x, x), exact=True, where="one tensor")
        compare(graphed, model, (x, x[:]), exact=True, where="views of one memory")
    assert graphed.stats.replays == 1
    assert graphed.stats.reasons == {FallbackReason.UNSEEN_SIGNATURE: 2}


# What cannot be replayed is refused, never stale.


def test_I8_a_result_kept_in_an_attribute_is_refused():
    def keep(x, ids, positions, m):
        m.last = x
        return x

    model = returning(keep)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with pytest.raises(StoresState, match="last"):
        graphed.capture(make_ids(5), torch.arange(5))
    assert not hasattr(model, "last")


def test_I7_an_object_with_state_of_its_own_is_refused():
    class Box:
        def __init__(self, x):
            self.x = x

    graphed = piecewise.compile(returning(lambda x, ids, p, m: Box(x)), buckets=(8,), progress=False)
    with pytest.raises(OpaqueResult, match="Fix:"):
        graphed.capture(make_ids(5), torch.arange(5))


def test_I7_a_tensor_that_is_no_buffer_is_refused():
    model = returning(lambda x, ids, p, m: (x, m.held))
    model.held = torch.ones(3)
    graphed = piecewise.compile(model, buckets=(8,), progress=False)
    with pytest.raises(ResultWithoutSource, match="(?s)neither computed.*register it as a buffer"):
        graphed.capture(make_ids(5), torch.arange(5))


def test_I6_each_way_of_falling_back_gives_the_eager_result():
    graphed = capture(returning(lambda x, ids, positions, m: (x, x.shape[0])))
    arguments = make_ids(5), torch.arange(5)
    want = graphed.model(*arguments)
    with torch.no_grad():
        with piecewise.eager_only():
            assert_same(graphed(*arguments), want, exact=True, where="eager_only")
        graphed(make_ids(0), torch.arange(0))
        graphed(make_ids(40), torch.arange(40))
        graphed(make_ids(5), positions=torch.arange(5).float().long()[None].squeeze(0))
        graphed(make_ids(5))
        graphed(make_ids(5), torch.arange(5, dtype=torch.int32))
        with pytest.raises(RuntimeError):
            graphed(make_ids(5), torch.arange(4))
    assert_same(graphed(*arguments), want, exact=True, where="with grad")
    assert graphed(*arguments)[0].requires_grad
    assert dict(graphed.stats.reasons) == {
        FallbackReason.EAGER_ONLY: 1,
        FallbackReason.ZERO_TOKENS: 1,
        FallbackReason.ABOVE_LARGEST_BUCKET: 1,
        FallbackReason.UNSEEN_SIGNATURE: 2,
        FallbackReason.TOKEN_COUNT_MISMATCH: 1,
        FallbackReason.GRAD_ENABLED: 2,
    }
    assert graphed.stats.replays == 1 and kinds(graphed) == "gbg"


def test_I7_a_dropout_that_drops_nothing_returns_what_it_was_given():
    """As eager's does; torch's fake of it is a copy."""
    model = Toy(lambda m, x: (x, F.dropout(x, 0.2, m.training), F.dropout(x, 0.0, True)), project=False)
    graphed = check_sizes(model.eval(), sizes=(1, 5, 8))
    with torch.no_grad():
        first, second, third = graphed(make_ids(5), torch.arange(5))
        first.add_(1)
    assert torch.equal(first, second) and torch.equal(first, third)
    assert graphed.report().coverage == 1.0


@pytest.mark.parametrize(
    "result",
    [
        lambda m, x: (F.dropout(x, 0.2, False).view(-1, 4, 4), x[0], x),
        lambda m, x: (F.dropout(x[:, ::2], 0.2, False).unbind(1)[3], x),
        lambda m, x: (F.dropout(x.T, 0.2, False).mul_(2), x),
        lambda m, x: (F.dropout(x.flip(0), p=0.2, training=False, inplace=True)[-1].add_(1), x),
    ],
)
def test_I7_views_of_a_dropout_that_drops_nothing_are_views_of_what_it_was_given(result):
    graphed = check_sizes(Toy(result, project=False).eval(), sizes=(2, 5, 8))
    with torch.no_grad():
        pairs = graphed(make_ids(5), torch.arange(5)), graphed.model(make_ids(5), torch.arange(5))
    for tensors in pairs:
        tensors[-1].fill_(3)
    assert_same(*pairs, exact=False, where="after a write to one of them")


@pytest.mark.parametrize("is_read_later", [False, True])
def test_I7_a_result_of_one_row_that_is_no_copy_is_not_static_memory(is_read_later):
    """The sum over one row is that row's own tensor, which graphs use again."""

    def head(model, x):
        total = x.sum_to_size(1, HIDDEN)
        for layer in range(3 * is_read_later):
            x = torch.tanh(x * (layer + 2))
            shift(x, again := torch.empty_like(x))
            x = again * 0.5
        return total * 1 if is_read_later else total, x * 1

    graphed = check_sizes(Toy(head, num_blocks=1, project=False).eval(), sizes=(1, 2, 8))
    with torch.no_grad():
        total, _ = graphed(make_ids(1), torch.arange(1))
        kept = total.clone()
        graphed(make_ids(1) + 1, torch.arange(1))
        graphed(make_ids(8), torch.arange(8))
    assert torch.equal(total, kept) and graphed.stats.eager_calls == 0


def test_I6_no_tokens_are_told_as_such_where_the_call_writes_an_input():
    """Tensors without elements share the address 0, and no memory."""

    class Writing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x, y):
            x = self.linear(x.mul_(2))
            shift(x, out := torch.empty_like(x))
            return out + y

    graphed = piecewise.compile(Writing().eval(), buckets=(8,), progress=False)
    graphed.capture(torch.ones(5, HIDDEN), torch.ones(5, HIDDEN))
    with torch.no_grad():
        assert graphed(torch.ones(0, HIDDEN), torch.ones(0, HIDDEN)).shape == (0, HIDDEN)
    assert graphed.stats.reasons == {FallbackReason.ZERO_TOKENS: 1}
