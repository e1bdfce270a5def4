"""Stand-ins for the attention libraries, on the CPU: they compute from exactly the arguments that the real
ones get, row by row, so that a wrong argument gives a wrong result. What the real ones check, they assert.

Signatures are those of torch 2.13's `varlen_attn_out` and of FlashInfer's documentation.
"""

from __future__ import annotations

import inspect
import sys
import types

import pytest
import torch
from torch.nn.attention import varlen

from boundary_ops.backends import library
from boundary_ops.reference import naive_attention


def fake_varlen_attn_out(
    out, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *,
    return_aux=None, scale=None, window_size=(-1, -1), enable_gqa=False,
    seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """Flash attention 2 over pages, as torch calls it."""
    num_seqs, page = len(cu_seq_q) - 1, key.shape[1]
    assert query.dtype in (torch.float16, torch.bfloat16) and page % 256 == 0 and query.shape[-1] % 8 == 0
    for tensor in (cu_seq_q, cu_seq_k, seqused_k, block_table):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert cu_seq_k.shape == cu_seq_q.shape and seqused_k.shape == (num_seqs,)
    assert block_table.shape[0] == num_seqs and out.stride(-1) == query.stride(-1) == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert cu_seq_k.tolist() == [0, *torch.cumsum(seqused_k, 0).tolist()]
    assert type(window_size) is tuple and return_aux is None and scale is not None
    left, right = window_size
    assert right == 0, "causal"
    for at in range(num_seqs):
        rows = slice(int(cu_seq_q[at]), int(cu_seq_q[at + 1]))
        # Rows and keys beyond the announced maxima are never reached.
        rows = slice(rows.start, min(rows.stop, rows.start + max_q))
        length = min(int(seqused_k[at]), max_k)
        k, v = (pool[block_table[at].long()].flatten(0, 1)[:length] for pool in (key, value))
        out[rows] = naive_attention(query[rows], k, v, scale=scale, window=left + 1).to(out.dtype)
    calls = fake_varlen_attn_out.calls
    calls.append({"window_size": window_size, "num_splits": num_splits, "enable_gqa": enable_gqa})
    return torch.empty(0)


fake_varlen_attn_out.calls = []


class FakeWrapper:
    """FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`; `made` lists all of them."""

    made: list[FakeWrapper] = []

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD" and not use_cuda_graph
        self.workspace, self.plans, self.runs, self.planned = float_workspace_buffer, [], 0, None
        FakeWrapper.made.append(self)

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len,
        num_qo_heads, num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE", use_fp16_qk_reduction=False,
        sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None,
        q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        lists = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(tensor.dtype == torch.int32 and tensor.dim() == 1 for tensor in lists)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1] and causal
        assert all(1 <= int(tokens) <= page_size for tokens in paged_kv_last_page_len)
        # The real one copies them to the device.
        self.planned = dict(
            lists=tuple(tensor.clone() for tensor in lists),
            heads=(num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            scale=sm_scale,
            window=window_left + 1,
            softcap=logits_soft_cap,
            dtypes=(q_data_type, kv_data_type),
        )
        self.plans.append(self.planned)

    def run(self, q, paged_kv_cache, *args, out=None):
        plan, (k_pool, v_pool) = self.planned, paged_kv_cache
        assert not args and out.shape == q.shape and out.is_contiguous() and q.stride(-1) == 1
        assert (q.shape[1], k_pool.shape[2], q.shape[2], k_pool.shape[1]) == plan["heads"]
        assert (q.dtype, k_pool.dtype) == plan["dtypes"] and q.shape[0] == plan["lists"][0][-1]
        starts, begins, pages, last = (tensor.tolist() for tensor in plan["lists"])
        for at, tokens in enumerate(last):
            held = pages[begins[at] : begins[at + 1]]
            length = (len(held) - 1) * plan["heads"][3] + tokens
            k, v = (pool[held].flatten(0, 1)[:length] for pool in (k_pool, v_pool))
            rows = slice(starts[at], starts[at + 1])
            options = {name: plan[name] for name in ("scale", "window", "softcap")}
            out[rows] = naive_attention(q[rows], k, v, **options).to(out.dtype)
        self.runs += 1
        return out


def install(monkeypatch, *, devices=("cuda", "cpu")):
    """Puts both in place of the libraries, and lets the CPU pass for a device that they have."""
    fake_varlen_attn_out.calls.clear()
    FakeWrapper.made.clear()
    monkeypatch.setattr(varlen, "varlen_attn_out", fake_varlen_attn_out, raising=False)
    module = types.ModuleType("flashinfer")
    module.__version__ = "0.6.1"
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(library, "DEVICE_TYPES", devices)
    return module


def check_signature_of_the_real_one():
    """The stand-in for torch's function takes what the real one takes, in the same order."""
    real = getattr(varlen, "varlen_attn_out", None)
    if real is None:
        pytest.skip(f"torch {torch.__version__} has no varlen_attn_out")
    mine = inspect.signature(fake_varlen_attn_out).parameters.values()
    theirs = inspect.signature(real).parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
