"""Inputs in one memory that the call writes: halves of a pool, one cache given twice, overlapping views.

`put` adds `x` to the leading rows of a cache, and gives the running sum of `x` and the cache's, so that what
one tensor is written is seen by whatever reads another one of the same memory.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import boundary_ops
import piecewise
from piecewise.errors.capture import InputsShareMemory
from piecewise.torch_backend import piecewise_backend

HIDDEN, ROWS, BUCKETS = 8, 64, (8, 16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def wide_numbers():
    """In float64 the rounding of a kernel, another one for other sizes, is far below what is compared."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def _put(x, cache, out):
    cache[: x.shape[0]] += x
    out.copy_(x.cumsum(0) + cache.sum(0))


boundary_ops.define(
    "shared_inputs::put(Tensor x, Tensor(a!) cache, Tensor(b!) out) -> ()",
    _put,
    token_args={"x": 0, "out": 0},
)


def put(x, cache):
    out = torch.empty_like(x)
    torch.ops.shared_inputs.put(x, cache, out)
    return out


class Model(nn.Module):
    """Two linears around what `body` does with x [num_tokens, HIDDEN], `k` and `v`."""

    def __init__(self, body):
        super().__init__()
        self.first, self.last, self.body = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), body
        self.cache = nn.Buffer(torch.zeros(ROWS, HIDDEN))

    def forward(self, x, k, v):
        return self.body(self, self.first(x), k, v)


def reads_after_the_write(model, x, k, v):
    return model.last(put(x, k)) + v[3] + v[9]


def reads_before_and_after(model, x, k, v):
    x = model.last(put(x + v[3], k)) + v[3]
    return model.last(put(x, v)) + k[4]


def keeps_a_view(model, x, k, v):
    view = v[2:4]
    return model.last(put(x, k)) + view.sum(0)


def writes_with_torchs_ops(model, x, k, v):
    k[:4].add_(1.0)
    x = put(x, v)
    v[5].mul_(2.0)
    return model.last(x) + k[5] + v[2]


def writes_both(model, x, k, v):
    return model.last(put(put(x, k), v)) + put(x, k)


def returns_them(model, x, k, v):
    return model.last(put(x, k)), v[:4], k


def pools(kind, device):
    """(k, v), [rows, HIDDEN] each, with values that depend on `kind` alone."""
    memory = torch.randn(2 * ROWS + 8, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
    halves = memory[: 2 * ROWS].view(2, ROWS, HIDDEN)
    interleaved = memory[: 2 * ROWS].view(ROWS, 2, HIDDEN)
    return {
        "apart": lambda: (halves[0].clone(), halves[1].clone()),
        "halves": lambda: (halves[0], halves[1]),
        "interleaved": lambda: (interleaved[:, 0], interleaved[:, 1]),
        "overlapping": lambda: (memory[:ROWS], memory[8 : ROWS + 8]),
        "two views": lambda: (memory[:ROWS], memory[:ROWS]),
        "one tensor": lambda: (halves[0],) * 2,
    }[kind]()


KINDS = ("apart", "halves", "interleaved", "overlapping", "two views", "one tensor")


def make(body, device="cpu", **settings):
    torch.manual_seed(0)
    model = Model(body).eval().to(device)
    return piecewise.compile(model, buckets=BUCKETS, progress=False, **settings)


def flat(result):
    return list(result) if isinstance(result, tuple) else [result]


def compare(graphed, kind, num_tokens, device="cpu", make_pools=pools):
    """Whether a call was replayed; its results, and what it writes, are eager's."""
    x = torch.randn(num_tokens, HIDDEN, device=device)
    before = graphed.stats.replays
    ours, theirs = make_pools(kind, device), make_pools(kind, device)
    with torch.no_grad():
        got = [*flat(graphed(x, *ours)), *ours]
        want = [*flat(graphed.model(x, *theirs)), *theirs]
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected)
    return graphed.stats.replays > before


BODIES = [reads_after_the_write, reads_before_and_after, keeps_a_view, writes_with_torchs_ops, writes_both,
          returns_them]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("body", BODIES)
def test_I2_inputs_that_share_memory_are_served_and_see_each_others_writes(body, device):
    for at_capture in KINDS:
        graphed = make(body, device)
        with torch.no_grad():
            graphed.capture(torch.randn(5, HIDDEN, device=device), *pools(at_capture, device))
        for kind in KINDS:
            for num_tokens in (1, 5, 8, 11):
                replayed = compare(graphed, kind, num_tokens, device)
                assert replayed or kind != at_capture, (at_capture, kind, num_tokens)
                # Memory that was apart is another kind of call, and so is one object.
                shares = {name: name != "apart" for name in KINDS}
                assert not replayed or shares[kind] == shares[at_capture]
        with torch.no_grad():
            assert graphed.verify(torch.randn(5, HIDDEN, device=device), *pools(at_capture, device)).ok


@pytest.mark.parametrize("settings", [{"outputs": "view"}, {"fusions": ("auto",)}, {"num_streams": 2}])
def test_I2_with_other_settings(settings):
    for at_capture in ("halves", "overlapping"):
        graphed = make(reads_before_and_after, **settings)
        graphed.capture(torch.randn(5, HIDDEN), *pools(at_capture, "cpu"))
        assert compare(graphed, at_capture, 5) and compare(graphed, at_capture, 8)


def test_I2_a_vector_that_graphs_copy_in_is_copied_again_after_each_write():
    """A row of the cache is no size that data tell, so graphs read it themselves."""

    def body(model, x, k, v):
        x = put(x + v, k) + v
        return model.last(put(x, k)) * v

    def rows(kind, device):
        memory = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
        return memory, {"apart": memory[2].clone(), "row": memory[2], "other row": memory[40]}[kind]

    for at_capture in ("apart", "row", "other row"):
        graphed = make(body)
        graphed.capture(torch.randn(5, HIDDEN), *rows(at_capture, "cpu"))
        assert graphed.report().coverage == 1.0
        for kind in ("apart", "row", "other row"):
            for num_tokens in (1, 5, 8):
                replayed = compare(graphed, kind, num_tokens, make_pools=rows)
                assert replayed is ((kind == "apart") == (at_capture == "apart"))


@pytest.mark.parametrize("at_capture", ["apart", "state"])
def test_I2_an_input_in_the_memory_of_state_which_the_call_writes(at_capture):
    """What graphs hold of the input would be out of date: it is copied again, or the call runs eagerly."""
    graphed = make(lambda model, x, k, v: model.last(put(x + v, model.cache)) + v)
    model = graphed.model

    def row(kind):
        model.cache.copy_(torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3)))
        return model.cache[2] if kind == "state" else model.cache[2].clone()

    graphed.capture(torch.randn(5, HIDDEN), torch.zeros(1), row(at_capture))
    for kind in ("apart", "state"):
        for num_tokens in (1, 5, 8):
            x, before = torch.randn(num_tokens, HIDDEN), graphed.stats.replays
            with torch.no_grad():
                found = graphed(x, torch.zeros(1), row(kind)), model.cache.clone()
                wanted = model(x, torch.zeros(1), row(kind)), model.cache.clone()
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want)
            is_new = kind == "state" and at_capture == "apart"
            assert graphed.stats.replays == before + (not is_new)
    # The pool may be replaced by another one, whose memory counts then.
    model.cache = nn.Buffer(torch.zeros(ROWS, HIDDEN))
    x = torch.randn(8, HIDDEN)
    with torch.no_grad():
        found = graphed(x, torch.zeros(1), row("state")), model.cache.clone()
        wanted = model(x, torch.zeros(1), row("state")), model.cache.clone()
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_pools_of_inference_mode_share_memory_too():
    graphed = make(reads_before_and_after)
    with torch.inference_mode():
        example = pools("halves", "cpu")
        graphed.capture(torch.randn(5, HIDDEN), *example)
        assert all(pool.is_inference() for pool in example)
        x = torch.randn(5, HIDDEN)
        ours, theirs = pools("halves", "cpu"), pools("halves", "cpu")
        torch.testing.assert_close(graphed(x, *ours), graphed.model(x, *theirs))
        torch.testing.assert_close(ours, theirs)
    assert graphed.stats.replays == 1


def test_many_caches_in_lists_are_told_apart_by_memory():
    def body(model, x, k, v):
        for one, other in zip(k, v, strict=True):
            x = model.last(put(put(x, one), other))
        return x

    def lists(kind, device):
        memory = torch.zeros(4, 2, ROWS, HIDDEN)
        if kind == "one pool":
            return list(memory[:, 0]), list(memory[:, 1])
        layers = [layer.clone() for layer in memory]
        if kind == "a pool each":
            return [layer[0] for layer in layers], [layer[1] for layer in layers]
        return [layer[0].clone() for layer in layers], [layer[1].clone() for layer in layers]

    kinds = ("one pool", "a pool each", "apart")
    for at_capture in kinds:
        graphed = make(body)
        graphed.capture(torch.randn(5, HIDDEN), *lists(at_capture, "cpu"))
        for kind in kinds:
            x = torch.randn(5, HIDDEN)
            ours, theirs = lists(kind, "cpu"), lists(kind, "cpu")
            with torch.no_grad():
                torch.testing.assert_close(graphed(x, *ours), graphed.model(x, *theirs))
            torch.testing.assert_close(ours, theirs)
        assert graphed.stats.replays == 1 and graphed.stats.reasons == {"unseen_signature": 2}


def test_memory_that_only_the_machine_shares_is_an_error_that_says_so():
    array = np.zeros((ROWS, HIDDEN), np.float64)
    graphed = make(reads_after_the_write)
    with pytest.raises(InputsShareMemory, match=r"(?s)'k'.*'v'.*share memory.*Fix:.*one torch tensor"):
        graphed.capture(torch.randn(5, HIDDEN), torch.from_numpy(array), torch.from_numpy(array))
    graphed.capture(torch.randn(5, HIDDEN), *pools("apart", "cpu"))

    def arrays(kind, device):
        array = np.ones((ROWS, HIDDEN), np.float64)
        return torch.from_numpy(array), torch.from_numpy(array)

    assert not compare(graphed, "arrays", 5, make_pools=arrays)


def test_tensors_without_elements_share_nothing():
    def body(model, x, k, v):
        k.add_(1.0)
        return model.last(put(x, model.cache)) + v.sum()

    def nothing(kind, device):
        return torch.zeros(0, HIDDEN), torch.zeros(0, HIDDEN)

    graphed = make(body)
    graphed.capture(torch.randn(5, HIDDEN), *nothing("", ""))
    with torch.no_grad():
        graphed(torch.randn(5, HIDDEN), *nothing("", ""))
    assert graphed.stats.replays == 1


def test_torch_compile_serves_them_too():
    for at_capture in ("apart", "row"):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model(lambda model, x, k, v: model.last(put(x + v, k)) + v).eval()
        compiled = torch.compile(
            model, backend=piecewise_backend, options={"buckets": np.array([8])}, dynamic=True
        )

        def rows(kind):
            memory = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
            return memory, memory[2] if kind == "row" else memory[2].clone()

        with torch.no_grad():
            with piecewise.capture_window():
                compiled(torch.randn(5, HIDDEN), *rows(at_capture))
            for kind in ("apart", "row", at_capture):
                x, ours, theirs = torch.randn(6, HIDDEN), rows(kind), rows(kind)
                torch.testing.assert_close(compiled(x, *ours), model(x, *theirs))
                torch.testing.assert_close(ours, theirs)
        assert piecewise.handle(compiled).stats.replays > 0
