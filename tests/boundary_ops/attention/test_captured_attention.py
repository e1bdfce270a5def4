"""`piecewise::attn_captured` in torch operators: the oracle's results, and padded rows left alone."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from attention_oracle import naive_attn_inplace

from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch, attn_captured
from boundary_ops.attention.captured import _CHUNK_ELEMENTS
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.errors.attention import WrongMetadata, WrongStepLimit
from runners.errors import CaptureError
from runners.tape.tape import TapeEngine

HEADS, KV_HEADS, DIM, PAGE, ROWS = 4, 2, 8, 4, 24
STEPS = (("abc", (7, 1, 9)), ("ca", (3, 5)), ("b", (20,)), ("d", (24,)), ("abcd", (1, 1, 1, 1)), ("a", (1,)))


def same(left, right):
    return torch.equal(left.nan_to_num(9.0), right.nan_to_num(9.0))


class Case:
    """A cache whose unwritten rows are NaN, the metadata, and padded rows of one call."""

    def __init__(self, padding, dtype=torch.float32, max_seq_len=40):
        self.cache = PagedKVCache(
            num_layers=1, num_blocks=40, block_size=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype
        )
        self.pools = self.cache.k[0], self.cache.v[0]
        for pool in self.pools:
            pool.fill_(float("nan"))
        self.step = StepBuffers(self.pools, max_num_seqs=5, max_num_tokens=ROWS, max_seq_len=max_seq_len)
        self.q, self.k, self.v = (torch.zeros(ROWS, n, DIM, dtype=dtype) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out, self.padding = torch.zeros_like(self.q), padding

    def fill(self, count):
        for tensor in (self.q, self.k, self.v):
            tensor[:count].normal_()
            tensor[count:] = self.padding
        self.out.fill_(7.0)

    def call(self, **options):
        attn_captured(self.q, self.k, self.v, self.out, *self.pools, **self.step.tensors, **options)

    def check(self, batch, tolerance=1e-5, **options):
        """After `fill`, runs `self.replay` on the batch and compares with the oracle."""
        count = batch.num_tokens
        rows = [tensor[:count] for tensor in (self.q, self.k, self.v)]
        expected, keys, values = naive_attn_inplace(batch, *rows, *self.pools, **options)
        with batch:
            assert self.step.mismatch(count) is None
            self.step.load()
        self.replay()
        torch.testing.assert_close(self.out[:count].double(), expected, rtol=tolerance, atol=tolerance)
        assert (self.out[count:] == 7).all()
        for pool, wanted in zip(self.pools, (keys, values), strict=True):
            assert same(pool, wanted)


@pytest.mark.parametrize("padding", [float("nan"), 1e4])
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"softcap": 0.7}, {"sinks": True}, {"window": 6, "softcap": 2.0}], ids=str
)
@pytest.mark.parametrize("chunk", [1, _CHUNK_ELEMENTS])
def test_I1_recorded_once_it_serves_every_step(monkeypatch, padding, options, chunk):
    monkeypatch.setattr("boundary_ops.attention.captured._CHUNK_ELEMENTS", chunk)
    case = Case(padding)
    options = {"scale": 0.4, **options}
    if options.get("sinks"):
        options["sinks"] = torch.randn(HEADS)
    engine = TapeEngine()
    pool = engine.new_pool(torch.device("cpu"))
    case.fill(0)
    before = [tensor.clone() for tensor in case.pools]
    graph = engine.capture(lambda: [case.call(**options)], pool=pool, segment="the op")
    # A recording runs the op once, on a step of zero sequences.
    assert (case.out == 7).all()
    assert all(map(same, before, case.pools))
    assert graph.num_ops == 1
    case.replay = graph.replay
    for names, lens in STEPS:
        batch = PrefillBatch.build(case.cache, names, lens)
        case.fill(batch.num_tokens)
        case.check(batch, **options)
    case.step.clear()
    case.fill(0)
    before = [tensor.clone() for tensor in case.pools]
    graph.replay()
    assert (case.out == 7).all()
    assert all(map(same, before, case.pools))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    case = Case(float("nan"), dtype)
    case.replay = lambda: case.call(scale=0.4)
    for names, lens in STEPS[:3]:
        batch = PrefillBatch.build(case.cache, names, lens)
        case.fill(batch.num_tokens)
        case.check(batch, tolerance=2e-2, scale=0.4)


def test_a_kernel_that_reads_metadata_back_could_not_be_recorded():
    """The tape looks into the op's kernel, so that the recordings above prove that nothing is read back."""
    case = Case(0.0)
    engine = TapeEngine()

    def reading():
        case.call(scale=0.4)
        return [case.q * case.step.cu_seqlens_q[-1].item()]

    with pytest.raises(CaptureError, match="read by the host"):
        engine.capture(reading, pool=engine.new_pool(torch.device("cpu")), segment="the op")


def test_metadata_that_does_not_fit_is_refused():
    case = Case(0.0)
    small = StepBuffers(case.pools, max_num_seqs=5, max_num_tokens=ROWS - 1, max_seq_len=40)
    rows = case.q, case.k, case.v, case.out, *case.pools
    with pytest.raises(WrongMetadata, match="argument 'slot_mapping'.*24 or more"):
        attn_captured(*rows, **small.tensors, scale=0.4)
    with pytest.raises(WrongMetadata, match="argument 'cu_seqlens_q'"):
        attn_captured(*rows, **{**case.step.tensors, "seq_lens": case.step.seq_lens[:2]}, scale=0.4)
    with pytest.raises(WrongStepLimit, match="pools"):
        StepBuffers([], max_num_seqs=1, max_num_tokens=1, max_seq_len=2)


def test_a_step_that_begins_is_packed_for_the_buffers_of_its_cache():
    case = Case(0.0)
    batch = PrefillBatch.build(case.cache, ["a"], [3])
    with batch:
        packed = batch.derived[case.step]
        case.step.load()
    assert packed is batch.derived[case.step]
    assert case.step.slot_mapping[:3].tolist() == batch.slot_mapping.tolist()
    assert case.step.seq_lens.tolist() == [3, 0, 0, 0, 0]
    # More tables were in use before than this step has: those are zeroed, too.
    with PrefillBatch.build(case.cache, ["b", "c"], [2, 2]):
        case.step.load()
    with batch:
        case.step.load()
    assert case.step.block_tables[1:].eq(0).all() and case.step.seq_lens.tolist() == [3, 0, 0, 0, 0]
    # What does not fit is not packed, and refused when it is loaded.
    with PrefillBatch.build(case.cache, ["d"], [ROWS + 1]) as large:
        assert case.step not in large.derived
        with pytest.raises(BoundaryOpError, match="max_num_tokens"):
            case.step.load()


def test_a_cache_forgets_buffers_that_are_gone_and_copies_have_none():
    case = Case(0.0)
    twin = copy.deepcopy(case.cache)
    with PrefillBatch.build(twin, ["a"], [3]) as batch:
        assert not batch.derived
    case.step = None
    gc.collect()
    with PrefillBatch.build(case.cache, ["a"], [3]) as batch:
        assert not batch.derived
