"""[I9]: one pool for all buckets and signatures, as large as the largest needs; it is given back whole."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from inspection import inspect
from state_models import BUCKETS, graph, new_model, serve, tokens

from runners.tape.arena import _MIN_CHUNK_BYTES


def weak(tensor):
    return torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage())


@pytest.fixture
def wide():
    """A model whose rows are large, so that a bucket takes many arena chunks."""

    def after(model, x):
        big = x.repeat(1, 4096)
        return (big * 2).view(x.shape[0], 4096, -1).sum(1)

    return lambda: new_model(after=after)


def test_I9_several_buckets_take_what_the_largest_takes(wide):
    alone = graph(wide(), buckets=(128,))
    together = graph(wide(), buckets=(8, 16, 32, 64, 128))
    small = graph(wide(), buckets=(8,))
    assert inspect(together).pool.allocated_bytes == inspect(alone).pool.allocated_bytes
    assert inspect(small).pool.allocated_bytes < inspect(alone).pool.allocated_bytes / 4
    assert inspect(alone).pool.allocated_bytes > 10 * _MIN_CHUNK_BYTES, "large enough to tell"
    grown = {bucket.bucket: bucket.grown_bytes for bucket in together.report().captures[0].buckets}
    assert grown[128] == inspect(together).pool.allocated_bytes and sum(grown.values()) == grown[128]


def test_I9_signatures_share_the_pool(wide):
    graphed = graph(wide(), buckets=(64, 128))
    before, pool = inspect(graphed).pool.allocated_bytes, inspect(graphed).pool
    graphed.capture(tokens(7).int())
    assert inspect(graphed).pool is pool and pool.allocated_bytes == before
    assert [serve(graphed, ids) for ids in (tokens(50), tokens(50).int(), tokens(50))] == ["replay"] * 3


def test_I9_buckets_share_static_buffers():
    alone, together = graph(new_model(), buckets=(16,)), graph(new_model())
    assert inspect(together).buffers.allocated_bytes == inspect(alone).buffers.allocated_bytes > 0


def test_I9_release_gives_everything_back(wide):
    graphed = graph(wide(), buckets=(64, 128))
    with torch.no_grad():
        result = graphed(tokens(50))
    kept = result.clone()
    chunks = [
        *map(weak, inspect(graphed).pool.arena._chunks),
        *map(weak, inspect(graphed).buffers._storages.values()),
    ]
    tapes = [weakref.ref(tape) for tape in inspect(graphed).pool.graphs]
    assert len(chunks) > 2 and tapes
    graphed.release()
    gc.collect()
    assert all(chunk.expired() for chunk in chunks)
    assert all(tape() is None for tape in tapes)
    assert inspect(graphed).pool is None and inspect(graphed).buffers.allocated_bytes == 0
    assert torch.equal(result, kept), "the caller owns results"
    assert serve(graphed, tokens(50)) == "released"


def test_I9_release_twice_and_of_nothing():
    graphed = graph(new_model(), captured=False)
    graphed.release()
    graphed.release()
    assert serve(graphed, tokens(3)) == "released"


def test_I9_dropping_the_graphed_module_gives_everything_back():
    model = new_model()
    graphed = graph(model)
    serve(graphed, tokens(5))
    gone = weakref.ref(graphed)
    storage = weak(inspect(graphed).pool.arena._chunks[0])
    del graphed
    gc.collect()
    assert gone() is None and storage.expired()


def test_I9_each_module_has_a_pool_of_its_own():
    one, other = graph(new_model()), graph(new_model())
    assert inspect(one).pool is not inspect(other).pool
    one.release()
    assert serve(other, tokens(5)) == "replay"


def test_I9_the_views_of_many_sizes_are_bounded():
    graphed = graph(new_model(), buckets=(256,))
    graphed.model.block.cache = torch.zeros(256, 8)
    graphed.refresh()
    steps = inspect(graphed).steps(256)
    with torch.no_grad():
        for size in range(1, 201):
            graphed(tokens(size))
    assert graphed.stats.replays == 200
    assert len(steps._bound) <= steps.max_bound == 64


def test_I7_results_of_earlier_calls_are_the_callers():
    graphed = graph(new_model())
    with torch.no_grad():
        first = graphed(tokens(5))
        kept = first.clone()
        for size in (5, 12, 3, 16):
            graphed(tokens(size, seed=size))
    assert torch.equal(first, kept)


def test_I7_views_are_handed_out_where_asked_for():
    graphed = graph(new_model(), outputs="view")
    with torch.no_grad():
        first = graphed(tokens(5))
        address = first.data_ptr()
        second = graphed(tokens(5, seed=1))
    assert second.data_ptr() == address
    assert torch.equal(first, second), "valid until the next call"
    with torch.no_grad():
        torch.testing.assert_close(second, graphed.model(tokens(5, seed=1)))


def test_I9_a_refresh_takes_as_much_as_the_capture():
    graphed = graph(new_model())
    before = inspect(graphed).pool.allocated_bytes, inspect(graphed).buffers.allocated_bytes
    for _ in range(3):
        graphed.refresh()
    assert (inspect(graphed).pool.allocated_bytes, inspect(graphed).buffers.allocated_bytes) == before
    assert graphed.stats.captured == BUCKETS
