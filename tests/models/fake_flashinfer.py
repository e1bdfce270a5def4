"""A placeholder for FlashInfer, on the CPU: it computes from exactly the arguments that the real one
gets, row by row, so that a wrong argument gives a wrong result. What the real one checks, it asserts.

Signatures are those of FlashInfer's documentation.
"""

from __future__ import annotations

import sys
import types

import torch
from attention_oracle import naive_attention

from boundary_ops.backends import flashinfer


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
    """Puts it in place of the library, and lets the CPU pass for a device that it has."""
    FakeWrapper.made.clear()
    module = types.ModuleType("flashinfer")
    module.__version__ = "0.6.1"
    module.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "DEVICE_TYPES", devices)
    return module
