"""[I2, I3] Memory of `empty*` that others write is filled only where somebody looks at padded rows.

A block's attention writes the real rows of `out = torch.empty(...)`; what stands in its padded rows is read
by the next segment, and reaches no real row. The ops that the segments' functions run tell whether a fill is
among them.
"""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from inspection import ops_in_graphs
from paged_models import Paged, capture, kinds, new_cache, serve_step
from toy_models import HIDDEN, Toy, check_sizes, compare, make_ids, mix, reasons, scatter_rows

import boundary_ops
import piecewise
from boundary_ops.declare.rows import _declared

BUCKETS = (8, 16)


FILLS = ("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::zero_")


def num_fills(graphed):
    return sum(name in FILLS for name in ops_in_graphs(graphed))


def fills_of(graphed):
    """(how many are needless, the reasons of those that are kept)."""
    fills = Counter(graphed.report().plans[0].fills)
    return fills.pop("needless", 0), sorted(fills.elements())


class Made(torch.nn.Module):
    """x · `how(model, x, out)`, where `mix` has written `out`, made by `make(x)`."""

    def __init__(self, how, make=torch.empty_like):
        super().__init__()
        self.embedding, self.table = torch.nn.Embedding(50, HIDDEN), torch.nn.Embedding(50, HIDDEN)
        self.cache = torch.zeros(64, HIDDEN)
        self.how, self.make = how, make

    def forward(self, ids):
        x = self.embedding(ids)
        out = self.make(x)
        mix(x, x, x, out, self.cache)
        return self.how(self, x, out)


def served(how, make=torch.empty_like, **config):
    sizes = (2, 7, 8, 9, 16, 17)
    return check_sizes(
        Made(how, make).eval(), buckets=BUCKETS, sizes=sizes, arguments=lambda n: (make_ids(n),), **config
    )


def test_I2_the_outputs_of_attention_are_not_filled():
    graphed = check_sizes(Toy(num_blocks=3).eval(), buckets=BUCKETS)
    assert fills_of(graphed) == (3, []) and num_fills(graphed) == 0
    assert ops_in_graphs(graphed).count("aten::empty_like") == 3
    verified = graphed.verify(make_ids(5), torch.arange(5))
    assert verified.ok, verified
    assert "zero-fills of empty memory: 3 needless" in graphed.report().to_text(full=True)
    assert "3 needless" in graphed.report().to_markdown()


@pytest.mark.parametrize("make", [
    lambda x: torch.empty(x.shape[0], HIDDEN),
    lambda x: x.new_empty(x.shape),
    lambda x: torch.empty_strided(x.shape, (HIDDEN, 1)),
], ids=["empty", "new_empty", "empty_strided"])  # fmt: skip
def test_every_way_to_make_empty_memory(make):
    graphed = served(lambda m, x, out: x + out.relu(), make)
    assert fills_of(graphed) == (1, []) and num_fills(graphed) == 0
    with doubling() as double:
        graphed = served(lambda m, x, out: x + double(out), make)
        assert fills_of(graphed)[0] == 0 and num_fills(graphed) == 1


def _by_conversion(m, x, out):
    # Right for all poison there is, and out of range for other garbage: 5000, say.
    size = torch.nan_to_num(out).abs()
    return m.table(torch.where(size >= 1e4, 0.0, size).long()).sum(1)


def _by_topk(m, x, out):
    weights, experts = out.softmax(-1).topk(2, -1)
    return (m.table(experts) * weights[..., None]).sum(1)


def _by_comparison(m, x, out):
    return m.table((x > out).sum(-1))


def _in_place(m, x, out):
    numbers = torch.ones(x.shape, dtype=torch.int64)
    numbers.copy_(out.nan_to_num(0).clamp(0, 9))
    return m.table(numbers).sum(1)


def _through_a_residual(m, x, out):
    x = x + out @ out.new_ones(HIDDEN, HIDDEN)
    y = F.layer_norm(x, (HIDDEN,))
    return x + m.table(y.argmax(-1))


@pytest.mark.parametrize(
    "how, is_bound",
    [(_by_conversion, 0), (_by_topk, 1), (_by_comparison, 1), (_in_place, 0), (_through_a_residual, 1)],
)
def test_I2_an_index_made_of_garbage_is_bound_by_its_op_or_made_of_real_rows(how, is_bound):
    graphed = served(how)
    assert fills_of(graphed) == (1, []) and num_fills(graphed) == 0
    assert (reasons(graphed) == {}) is bool(is_bound)
    assert graphed.verify(make_ids(5)).ok


def test_masks_and_float_ops_are_no_danger():
    def how(m, x, out):
        return torch.where(out > 0.5, x, out.masked_fill(out.isnan(), 0.0)).to(torch.bfloat16).float()

    assert fills_of(served(how)) == (1, [])


@contextlib.contextmanager
def doubling(*, is_declared=True):
    with torch.library._scoped_library("zero_fills", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("zero_fills::double", lambda x: torch.empty_like(x), lib=library)
        if is_declared:
            boundary_ops.declare_rows("zero_fills::double", token_args={"x": 0})
        else:
            _declared.pop("zero_fills::double", None)
        yield torch.ops.zero_fills.double


def test_I2_memory_that_a_kernel_of_somebody_else_reads_is_filled():
    with doubling() as double:
        graphed = served(lambda m, x, out: double(out) + x)
        needless, (reason,) = fills_of(graphed)
        assert needless == 0 and num_fills(graphed) == 1 and "no op of torch" in reason
        assert reason in str(graphed.report())
    with doubling(is_declared=False) as double:
        graphed = served(lambda m, x, out: double(out) + x)
        assert reasons(graphed) == {"unknown_op": 1} and fills_of(graphed) == (1, [])


def test_I3_an_op_that_mixes_rows_is_eager_and_gets_real_rows_without_a_fill():
    graphed = served(lambda m, x, out: x + out.flip(0))
    assert reasons(graphed) == {"mixes_tokens": 1}
    assert fills_of(graphed) == (1, []) and num_fills(graphed) == 0


def test_an_eager_op_may_make_indices_of_real_rows():
    graphed = served(lambda m, x, out: x + m.table(out.flip(0).argsort(0)[:, 0]))
    assert "mixes_tokens" in reasons(graphed)
    assert fills_of(graphed) == (1, [])


def test_I2_memory_that_its_own_segment_writes_in_part_is_filled():
    def make(x):
        both = torch.empty(x.shape[0], 2 * HIDDEN)
        both[:, HIDDEN:] = x
        return both[:, :HIDDEN]

    graphed = served(lambda m, x, out: x + out, make)
    assert fills_of(graphed) == (0, ["ops of its own segment write a part of it"]) and num_fills(graphed) == 1


def test_I2_memory_of_integers_is_filled():
    def how(m, x, out):
        inverse = torch.empty_like(x[:, 0].argsort())
        scatter_rows(x[:, 0].argsort(), torch.arange(x.shape[0]), inverse)
        return x[inverse] + out

    graphed = served(how)
    assert fills_of(graphed) == (1, ["it holds integers, which may be indices"]) and num_fills(graphed) == 1


def test_I2_memory_without_rows_is_not_filled():
    def how(m, x, out):
        scratch = torch.empty(64, HIDDEN)
        mix(x, x, x, torch.empty_like(x), scratch)
        return x + out + scratch[0]

    graphed = served(how)
    assert fills_of(graphed) == (3, []) and num_fills(graphed) == 0


def test_zeros_that_the_model_asks_for_stay():
    graphed = served(lambda m, x, out: x + out, torch.zeros_like)
    assert fills_of(graphed) == (0, []) and num_fills(graphed) == 1


def test_rows_that_a_boundary_op_leaves_unwritten_stop_no_warm_up():
    """They hold garbage, as eager's do: what a segment hands on unwritten is not compared."""

    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(50, HIDDEN)

        def forward(self, ids):
            x = self.embedding(ids)
            picked = torch.empty_like(x)
            scatter_rows(ids * 0, x, picked)  # row 0 alone
            return picked + 1

    graphed = piecewise.compile(Partly().eval(), buckets=(8,), progress=False)
    assert graphed.capture(make_ids(5)).ok
    with torch.no_grad():
        found = graphed(make_ids(6))
        want = graphed.model.embedding(make_ids(6)) + 1
    assert graphed.stats.replays == 1 and fills_of(graphed) == (1, [])
    torch.testing.assert_close(found[0], want[-1])


@pytest.mark.parametrize(
    "lowering, fusions", [("inductor", ()), ("inductor", ("auto",)), ("eager", ("auto",))]
)
def test_lowered_and_rewritten_segments_have_no_fill_either(lowering, fusions):
    toy = Toy(num_blocks=2).eval()
    graphed = piecewise.compile(toy, buckets=(8,), lowering=lowering, fusions=fusions, progress=False)
    assert graphed.capture(make_ids(5), torch.arange(5)).ok
    assert fills_of(graphed) == (2, []) and num_fills(graphed) == 0
    with torch.no_grad():
        for n in (2, 5, 8):
            compare(graphed, toy, (make_ids(n), torch.arange(n)), exact=False, where=f"{n} tokens")
    verified = graphed.verify(make_ids(5), torch.arange(5))
    assert verified.ok, verified


# --- captured boundary ops ----------------------------------------------------------------------------------


def test_I2_captured_attention_needs_no_fill():
    graphed = capture(Paged(new_cache()).eval())
    assert kinds(graphed) == ("g", 2)
    assert fills_of(graphed) == (2, [])
    for n in (1, 3, 7, 8, 11):
        assert serve_step(graphed, "a", (n,)) == "replay"
        graphed.model.cache.free("a")


def test_I2_captured_attention_whose_padding_could_become_an_index_is_not_filled():
    table = torch.randn(50, 32)

    def between(x):
        size = torch.nan_to_num(x).abs()
        return x + table[torch.where(size >= 1e4, 0.0, size).clamp(max=49).long()].sum(1)

    graphed = capture(Paged(new_cache(), between=between).eval())
    assert kinds(graphed)[1] == 2 and fills_of(graphed) == (2, [])
    for n in (1, 3, 7, 8, 11):
        assert serve_step(graphed, "a", (n,)) == "replay"
        graphed.model.cache.free("a")
