"""Ints of NumPy and torch, and arrays of them, wherever an int or a list of ints is asked for."""

from __future__ import annotations

import array
import json

import numpy as np
import pytest
import torch

import boundary_ops
import boundary_ops.whole_numbers
import runners.whole_numbers
from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.errors.step import NotTokenIds
from piecewise.capture.traffic_recorder import TrafficRecorder
from runners import TokenBuckets

FIVES = [
    5, np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor(5, dtype=torch.uint8),
]  # fmt: skip
NO_INTS = [
    True, np.bool_(True), np.array(True), torch.tensor(True), 5.0, np.float64(5), torch.tensor(5.0), "5",
    None, [5], np.array([5]), torch.tensor([5]), torch.empty((), dtype=torch.int64, device="meta"), 5 + 0j,
]  # fmt: skip
MODULES = [boundary_ops.whole_numbers, runners.whole_numbers]


def make(**changes):
    sizes = dict(num_layers=2, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8)
    return PagedKVCache(**{**sizes, "dtype": torch.float32, **changes})


@pytest.mark.parametrize("module", MODULES)
def test_an_int_of_any_integer_type_is_one_and_nothing_else_is(module):
    for value in FIVES:
        found = module.whole_number(value)
        assert found == 5 and type(found) is int
    for value in NO_INTS:
        assert module.whole_number(value) is None


@pytest.mark.parametrize("module", MODULES)
def test_a_list_may_be_an_array_or_a_tensor(module):
    for values in (
        [1, 2],
        (1, 2),
        range(1, 3),
        np.array([1, 2]),
        torch.tensor([1, 2]),
        array.array("i", [1, 2]),
    ):
        found = module.listed(values)
        assert list(found) == [1, 2] and {type(item) for item in found} == {int}


@pytest.mark.parametrize("values", [{1, 2}, "12", 12, np.array(12), np.array([[1, 2]]), None, iter([1, 2])])
def test_what_has_no_order_or_no_length_is_no_list_of_buckets(values):
    assert runners.whole_numbers.listed(values) is None


def test_buckets():
    for sizes in (np.array([8, 16]), torch.tensor([8, 16]), [np.int64(8), torch.tensor(16)]):
        buckets = TokenBuckets(sizes)
        assert buckets == TokenBuckets([8, 16]) and {type(size) for size in buckets.sizes} == {int}
        assert buckets.bucket_for(np.int64(9)) == 16 and buckets.range_for(np.int64(16)) == (9, 16)


def test_the_sizes_and_counts_of_a_cache():
    cache = make(num_layers=np.int64(2), num_blocks=torch.tensor(6), block_size=np.array(4))
    assert cache.k[0].shape == (6, 4, 2, 8)
    assert {type(size) for size in (cache.num_layers, cache.num_blocks, cache.block_size)} == {int}
    cache.allocate("a", np.int64(5))
    cache.append("a", torch.tensor(5))
    cache.truncate("a", np.uint8(4))
    assert (cache.room("a"), cache.context_len("a")) == (5, 4)
    assert type(cache.room("a")) is type(cache.context_len("a")) is int
    k, _ = cache.gather(np.int64(1), "a")
    assert k.shape[0] == 4
    for wrong in NO_INTS:
        with pytest.raises(BoundaryOpError, match="'num_blocks'"):
            make(num_blocks=wrong)
        with pytest.raises(BoundaryOpError, match="'num_tokens'"):
            cache.allocate("a", wrong)
        with pytest.raises(BoundaryOpError, match="0 to 4"):
            cache.truncate("a", wrong)
        with pytest.raises(BoundaryOpError, match="'layer'"):
            cache.gather(wrong, "a")


@pytest.mark.parametrize(
    "lens", [[3, 5], np.array([3, 5]), torch.tensor([3, 5]), (np.int32(3), torch.tensor(5))]
)
def test_the_lengths_of_a_batch(lens):
    cache = make()
    batch = PrefillBatch.build(cache, ["a", "b"], lens)
    assert batch.query_lens == (3, 5) and {type(each) for each in batch.query_lens} == {int}
    assert type(batch.max_seqlen_q) is type(batch.num_tokens) is int
    assert batch.cu_seqlens_q.tolist() == [0, 3, 8]
    with pytest.raises(BoundaryOpError, match="query length of request 'b'"):
        PrefillBatch.build(cache, ["a", "b"], [3, 5.0])


@pytest.mark.parametrize("ids", [np.array([7, 8]), torch.tensor([7, 8]), [np.int64(7), torch.tensor(8)]])
def test_ids_of_requests_that_are_numbers(ids):
    cache = make()
    for _ in range(2):  # the second time the same requests, and not two more
        with PrefillBatch.build(cache, ids, [2, 2]):
            PrefillBatch.current()
    assert cache.request_ids == (7, 8) and cache.context_len(torch.tensor(8)) == 4
    cache.free(torch.tensor(7))
    cache.free(np.int64(8))
    assert cache.request_ids == () and cache.num_free_blocks == 6


def test_prompts_are_ints_of_any_kind_and_nothing_else():
    cache = make()
    batch = PrefillBatch.build(cache, ["a", "b"], [3, 2])
    for prompts in (
        [np.array([1, 2, 3], np.uint16), range(4, 6)],
        [torch.tensor([[1, 2, 3]], dtype=torch.int32), (4, 5)],
        [[np.int64(1), np.int64(2), 3], array.array("q", [4, 5])],
    ):
        packed = batch.pack(prompts)
        assert packed.tolist() == [[1, 2, 3, 4, 5]] and packed.dtype == torch.int64
    for wrong in ([1.0, 2.0, 3.5], torch.ones(3), np.ones(3), [True, False, True]):
        with pytest.raises(NotTokenIds, match=r"(?s)prompt of request 'a'.*token ids.*Fix:"):
            batch.pack([wrong, [4, 5]])


def test_dims_and_bounds():
    op = boundary_ops.define(
        "whole_numbers::put(Tensor x, Tensor(a!) out) -> ()",
        lambda x, out: out.copy_(x),
        token_args={"x": np.int64(0), "out": torch.tensor(0)},
    )
    assert op.token_args == {"x": 0, "out": 0} and {type(dim) for dim in op.token_args.values()} == {int}
    torch.library.define("whole_numbers::norm", "(Tensor x) -> Tensor")
    said = boundary_ops.declare_rows(
        "whole_numbers::norm", token_args={"x": np.int64(0)}, token_results=(np.int8(0),)
    )
    assert said.token_args == {"x": 0} and said.token_results == (0,)
    with pytest.raises(BoundaryOpError, match="token_args 'x'"):
        boundary_ops.declare_rows("whole_numbers::norm", token_args={"x": 0.0})
    cache = make()
    buffers = StepBuffers(cache.k, max_num_seqs=np.int64(2), max_num_tokens=torch.tensor(8), max_seq_len=16)
    assert {type(bound) for bound in (buffers.max_num_seqs, buffers.max_num_tokens)} == {int}
    with pytest.raises(BoundaryOpError, match="'max_num_seqs'"):
        StepBuffers(cache.k, max_num_seqs=2.0, max_num_tokens=8, max_seq_len=16)


def test_recorded_traffic_is_saved_as_plain_numbers(tmp_path):
    recorder = TrafficRecorder()
    for count in (np.int64(5), 5, torch.tensor(5), np.int32(10_000)):
        recorder.record(count)
    recorder.save(tmp_path / "traffic.json")
    assert json.loads((tmp_path / "traffic.json").read_text())["counts"] == [[5, 3], [10016, 1]]
