"""Results that only boundary ops read which take any strides: no copy gives them eager's.

`gather` mixes tokens as `mix` does and declares `any_strides`; `dense_gather` is the same without. Both note
how their arguments lay in memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from inspection import inspect, ops_in_graphs
from torch import nn
from toy_models import HIDDEN, VOCAB, compare, make_ids

import boundary_ops
import piecewise
from boundary_ops.errors.declare import UnknownArgument
from piecewise.cut.split import with_free_strides
from piecewise.ir.graph_key import graph_key
from runners.stats import FallbackReason

SCHEMA = "free_strides::{}(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) cache) -> ()"
FREE = ("q", "k", "v")
seen: list[dict[str, tuple[int, ...]]] = []


def _gather(q, k, v, out, cache):
    seen.append({"q": q.stride(), "k": k.stride(), "v": v.stride()})
    cache[: k.shape[0]] = k
    out.copy_(q + 0.1 * v.cumsum(0) - k)


def declare(name, any_strides=()):
    return boundary_ops.define(SCHEMA.format(name), _gather, any_strides=any_strides)


OPS = {"gather": declare("gather", FREE), "dense_gather": declare("dense_gather")}


class Layer(nn.Module):
    """Packed q, k, v of one input; q and k go on, as through a rotation, v is what the projection gives."""

    def __init__(self, op, reader):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.norm, self.o = nn.RMSNorm(HIDDEN, eps=1e-6), nn.Linear(HIDDEN, HIDDEN)
        self.cache, self.op, self.reader = torch.zeros(64, HIDDEN), op, reader

    def forward(self, x):
        y = self.norm(x)
        q, k, v = self.q(y).cos(), self.k(y).sin(), self.v(y)
        out = torch.empty_like(q)
        self.op(q, k, v, out, self.cache)
        x = x + self.o(out)
        return x if self.reader is None else self.reader(x, v)


class Model(nn.Module):
    def __init__(self, name="gather", num_layers=3, reader=None, after=None):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.layers = nn.ModuleList([Layer(OPS[name], reader) for _ in range(num_layers)])
        self.after = after

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) if self.after is None else self.after(self, x)


def graphed(model, fusions=("pack_linears",), **settings):
    made = piecewise.compile(model.eval(), buckets=(8, 16), fusions=fusions, progress=False, **settings)
    report = made.capture(make_ids(5))
    assert report.ok, report
    assert all(lowering.kept_eager == () for lowering in report.lowerings), report
    return made


def check(made, sizes=(2, 5, 8, 13)):
    with torch.no_grad():
        for n in sizes:
            before = made.stats.replays
            compare(made, made.model, (make_ids(n),), exact=False, where=f"{n} tokens")
            assert made.stats.replays == before + 1
    verified = made.verify(make_ids(5))
    assert verified.ok, verified


def replayed_strides(made, n=5):
    with torch.no_grad():
        made(make_ids(n))
    seen.clear()
    with torch.no_grad():
        made(make_ids(n))
    return list(seen)


def num_copies(made):
    return ops_in_graphs(made).count("aten::copy_")


def free_values(made):
    return [value.name for value in inspect(made).plan.values if value.any_strides]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_part_of_a_packed_projection_goes_to_the_op_as_it_is(lowering):
    made = graphed(Model(), lowering=lowering)
    assert made.report().captures[0].fusions.matches[1] == ("pack_linears", 3)
    assert num_copies(made) == 0 and len(free_values(made)) == 9
    for strides in replayed_strides(made):
        assert strides["v"] == (3 * HIDDEN, 1)
    check(made)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_an_op_that_declares_nothing_gets_eagers_strides(lowering):
    made = graphed(Model("dense_gather"), lowering=lowering)
    assert num_copies(made) == 3 and free_values(made) == []
    for strides in replayed_strides(made):
        assert set(strides.values()) == {(HIDDEN, 1)}
    check(made)


def test_equal_layers_stay_equal_and_differ_from_those_that_are_read_otherwise():
    plan = inspect(graphed(Model(num_layers=4))).plan
    middle = plan.graph_segments()[1:-1]
    assert len({segment.lowering_key for segment in middle}) == 1
    assert len({graph_key(plan, segment) for segment in middle}) == 1
    other = inspect(graphed(Model("dense_gather", num_layers=4))).plan
    theirs = other.graph_segments()[1]
    assert theirs.lowering_key != middle[0].lowering_key
    assert graph_key(other, theirs) != graph_key(plan, middle[0])


def _add(x, v):
    return x + v


def _flipped(x, v):
    return x + v.flip(0)


def _written(x, v):
    return x + v.mul_(2)


@pytest.mark.parametrize("reader", [_add, _flipped, _written], ids=["graph", "eager", "written"])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_value_that_somebody_else_reads_or_writes_keeps_its_strides(reader, lowering):
    made = graphed(Model(num_layers=2, reader=reader), lowering=lowering)
    assert not any(name.startswith("v") or "linear_2" in name for name in free_values(made))
    assert all(strides["v"] == (HIDDEN, 1) for strides in replayed_strides(made))
    check(made)


def test_I7_a_value_that_the_caller_is_given_keeps_its_strides():
    class Both(Model):
        def forward(self, ids):
            x, layer = self.embedding(ids), self.layers[0]
            y = layer.norm(x)
            q, k, v = layer.q(y).cos(), layer.k(y).sin(), layer.v(y)
            out = torch.empty_like(q)
            layer.op(q, k, v, out, layer.cache)
            return layer.o(out), v

    made = graphed(Both(num_layers=1))
    with torch.no_grad():
        _, v = made(make_ids(5))
    assert v.stride() == (HIDDEN, 1) and num_copies(made) == 1
    check(made)


def test_parts_that_would_share_memory_are_told_apart():
    """q, k and v as they are projected: two are copied, and the plan's memories are those that there are."""

    class Bare(Layer):
        def forward(self, x):
            y = self.norm(x)
            q, k, v = self.q(y), self.k(y), self.v(y)
            out = torch.empty_like(q)
            self.op(q, k, v, out, self.cache)
            return x + self.o(out)

    model = Model(num_layers=0)
    model.layers.extend(Bare(OPS["gather"], None) for _ in range(2))
    made = graphed(model)
    assert num_copies(made) == 2 * 2
    check(made)


def test_views_of_a_projection_that_the_model_packs_keep_their_places():
    class Packed(Layer):
        def forward(self, x):
            weight = torch.cat([self.q.weight, self.k.weight, self.v.weight])
            q, k, v = (self.norm(x) @ weight.T).chunk(3, dim=-1)
            out = torch.empty_like(q)
            self.op(q, k, v, out, self.cache)
            return x + self.o(out)

    model = Model(num_layers=0)
    model.layers.extend(Packed(OPS["gather"], None) for _ in range(2))
    made = graphed(model)
    assert free_values(made) == [] and num_copies(made) == 0
    assert all(strides["v"] == (3 * HIDDEN, 1) for strides in replayed_strides(made))
    check(made)


def test_a_row_count_that_the_rewritten_graph_excludes_needs_no_dense_copy(monkeypatch):
    """The segment's own function has eager's strides there, and those are any strides, too."""
    from piecewise.passes import fuse as fusions

    original = fusions._where_valid

    def only_16(is_valid, fused, own):
        return original(lambda rows: rows == 16, fused, own)

    monkeypatch.setattr(fusions, "_where_valid", only_16)
    made = graphed(Model())
    assert all(strides["v"] == (HIDDEN, 1) for strides in replayed_strides(made, 5))
    assert all(strides["v"] == (3 * HIDDEN, 1) for strides in replayed_strides(made, 13))
    for served in inspect(made).signature.served.values():
        for bound in served.steps._bound.values():
            assert not any(getattr(step, "dense", ()) for step in bound.steps)
    check(made)


def test_I6_an_op_that_is_declared_anew_without_it_is_not_given_other_strides():
    made = graphed(Model(num_layers=1))
    ids = make_ids(5)
    with torch.no_grad():
        want = made(ids)
        try:
            declare("gather")
            seen.clear()
            torch.testing.assert_close(made(ids), want)
            assert made.stats.replays == 1 and seen[-1]["v"] == (HIDDEN, 1)
            assert sum(made.stats.reasons.values()) == 1
            assert FallbackReason.SHAPE_GUARD not in made.stats.reasons
            assert made.refresh().ok and free_values(made) == []
            assert all(strides["v"] == (HIDDEN, 1) for strides in replayed_strides(made))
        finally:
            declare("gather", FREE)


def test_the_names_must_be_arguments_that_are_read_alone():
    for wrong, shown in ((("out",), "'out'"), (("vv",), "did you mean"), ("q", "a string")):
        with pytest.raises(UnknownArgument, match="any_strides") as error:
            declare("gather", wrong)
        assert shown in str(error.value) and "Rule:" in str(error.value) and "Fix:" in str(error.value)
    assert boundary_ops.lookup("free_strides::gather").any_strides == FREE
    assert boundary_ops.lookup("piecewise::attn_inplace").any_strides == FREE


def test_a_call_that_computes_something_beside_counts_on_all_strides():
    """A boundary segment that is more than its op's call has a function, whose ops may want eager's."""
    plan = inspect(graphed(Model(num_layers=1), fusions=())).plan
    values = [
        replace(value, any_strides=False, strides=value.strides or (lambda n: (HIDDEN, 1)))
        for value in plan.values
    ]
    given = [index for index in plan.result_values if isinstance(index, int)]
    assert sum(value.any_strides for value in with_free_strides(values, plan.segments, given)) == 3
    others = [replace(segment, op_call=None) for segment in plan.segments]
    assert not any(value.any_strides for value in with_free_strides(values, others, given))
