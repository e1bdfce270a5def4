"""`piecewise::attn_captured`: paged attention whose lengths, pages and slots are tensors at fixed addresses.

The form in which `piecewise::attn_inplace` is captured. Nothing here depends on a host value of the step:
rows may be padded, the step's sequences may be fewer than there is room for, and which rows are real is read
from `cu_seqlens_q` on the device. A padded row is neither read nor written.

The implementation here is written in torch operators on all rows at once, with masks, so that it can be
recorded on any device; it costs room for `max_seq_len` keys per row, however long the sequences are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from boundary_ops.attention.checks import AttentionCall, attention_shares, check_arguments
from boundary_ops.attention.on_cuda import cuda_module, warm_up
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.declare.captured_form import CapturedForm, CaptureLimits
from boundary_ops.declare.registry import define
from boundary_ops.errors import BoundaryOpError

__all__ = ["FORM", "CapturedCall", "attend_captured", "attn_captured"]

NAME = "piecewise::attn_captured"
SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, "
    "Tensor slot_mapping, Tensor cu_seqlens_q, Tensor seq_lens, Tensor block_tables, "
    "float scale, int window=0, float softcap=0.0, Tensor? sinks=None) -> ()"
)
# Elements of the keys that are gathered at a time.
_CHUNK_ELEMENTS = 1 << 22


class CapturedCall(NamedTuple):
    """The arguments of `piecewise::attn_captured`, in the order of its schema.

    Attributes:
        q, k, v, out, k_cache, v_cache, scale, window, softcap, sinks: as in `AttentionCall`, with rows that
            may be padded.
        slot_mapping: int64 [rows or more]; entries of real rows are slots of the pools.
        cu_seqlens_q: int32 [max_num_seqs + 1]; entries beyond the step's sequences repeat its token count.
        seq_lens: int32 [max_num_seqs].
        block_tables: int32 [max_num_seqs, max_blocks]; every entry is a valid block.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slot_mapping: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, starts, lengths and block tables."""
        return self.slot_mapping, self.cu_seqlens_q, self.seq_lens, self.block_tables

    @property
    def layer(self) -> AttentionCall:
        """The same without the metadata."""
        return AttentionCall(*self[:6], *self[10:])  # type: ignore[arg-type]


def attend_captured(*args: Any, **kwargs: Any) -> None:
    """What `attend_inplace` does, for the leading `cu_seqlens_q[-1]` rows; all other rows stay as they are.

    Args:
        args, kwargs: those of a `CapturedCall`.

    Raises:
        BoundaryOpError: the arguments do not fit each other.
    """
    call = CapturedCall(*args, **kwargs)
    check_arguments(call.layer)
    check_metadata(call)
    q, k, v, out, k_cache, v_cache, slot_mapping, cu_seqlens_q, seq_lens, block_tables, *_ = call
    rows = q.shape[0]
    if not rows:
        return
    row = torch.arange(rows, device=q.device, dtype=torch.int32)
    ends = cu_seqlens_q[1:]
    is_real = row < ends[-1]
    sequence = torch.searchsorted(ends, row, right=True).clamp(max=len(ends) - 1)
    position = seq_lens[sequence] - ends[sequence] + row
    for pool, new in ((k_cache, k), (v_cache, v)):
        _write_rows(pool, new, slot_mapping[:rows], is_real)
    width = block_tables.shape[1] * k_cache.shape[1]
    step = max(1, _CHUNK_ELEMENTS // (width * k.shape[1] * k.shape[2]))
    key_position = torch.arange(width, device=q.device, dtype=torch.int32)
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        last = position[part].unsqueeze(1)
        seen = (key_position <= last) & is_real[part].unsqueeze(1)
        if call.window:
            seen &= key_position > last - call.window
        pages = block_tables[sequence[part]]
        # What nobody wrote may be NaN, and 0 * NaN is NaN.
        keys, values = (
            pool[pages].flatten(1, 2).float().masked_fill(~seen[..., None, None], 0.0)
            for pool in (k_cache, v_cache)
        )
        result = _attend_rows(q[part], keys, values, seen, call)
        out[part].copy_(torch.where(is_real[part, None, None], result.to(out.dtype), out[part]))


def _write_rows(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, is_real: torch.Tensor) -> None:
    """Real rows to their slots. The others repeat what the first row writes, which without any real row is
    what its slot holds already."""
    lines = pool.view(-1, *pool.shape[2:])
    first = torch.where(is_real[:1, None, None], rows[:1], lines[slots[:1]])
    lines.index_copy_(
        0, torch.where(is_real, slots, slots[:1]), torch.where(is_real[:, None, None], rows, first)
    )


def _attend_rows(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor, call: CapturedCall
) -> torch.Tensor:
    """Attention of each row over keys of its own, float32 [rows, heads, head_dim]; NaN where none is seen.

    keys and values are float32 [rows, width, kv_heads, head_dim], seen is [rows, width].
    """
    rows, heads, dim = q.shape
    kv_heads = keys.shape[2]
    queries = q.float().view(rows, kv_heads, heads // kv_heads, dim)
    products = torch.matmul(queries, keys.permute(0, 2, 3, 1))
    shares = attention_shares(call, products, seen[:, None, None], (1, kv_heads, heads // kv_heads, 1))
    return torch.matmul(shares, values.transpose(1, 2)).reshape(rows, heads, dim)


def check_metadata(call: CapturedCall) -> None:
    """Raises unless shapes, dtypes and devices of the metadata fit each other and the rows."""
    (slot_mapping, cu_seqlens_q, seq_lens, block_tables), device = call.metadata, call.q.device
    seqs, rows = seq_lens.shape[0], call.q.shape[0]
    wanted = (
        ("slot_mapping", slot_mapping, torch.int64, f"[{rows} or more]", slot_mapping.dim() == 1),
        ("cu_seqlens_q", cu_seqlens_q, torch.int32, f"[{seqs + 1}]", cu_seqlens_q.shape == (seqs + 1,)),
        ("seq_lens", seq_lens, torch.int32, "[max_num_seqs]", seq_lens.dim() == 1 and seqs > 0),
        ("block_tables", block_tables, torch.int32, f"[{seqs}, max_blocks]",
         block_tables.dim() == 2 and block_tables.shape[0] == seqs and block_tables.shape[1] > 0),
    )  # fmt: skip
    for name, tensor, dtype, shape, fits in wanted:
        enough = name != "slot_mapping" or tensor.shape[0] >= rows
        is_dense = tensor.is_contiguous()
        if not fits or not enough or not is_dense or tensor.dtype != dtype or tensor.device != device:
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise BoundaryOpError(
                f"op '{NAME}', argument '{name}'",
                expected=f"{dtype} {shape} on {device}, contiguous",
                got=found if is_dense else f"{found}, not contiguous",
                rule="a captured step is bounded when it is captured",
                fix="make the metadata as StepBuffers does, with max_num_tokens of the largest bucket",
            )


def attend_captured_on_cuda(*args: Any, **kwargs: Any) -> None:
    """`attend_captured` as one Triton program; as torch operators where there is no triton."""
    module = cuda_module()
    (attend_captured if module is None else module.attend_captured)(*args, **kwargs)


def _warm_up(num_tokens: int, *args: Any, **kwargs: Any) -> None:
    """The op itself compiles as it is warmed up; a step that is not captured still runs the eager one."""
    warm_up(num_tokens, *CapturedCall(*args, **kwargs).layer)


attn_captured = define(
    SCHEMA,
    {**dict.fromkeys(("cpu", "xpu", "mps"), attend_captured), "cuda": attend_captured_on_cuda},
    token_args={"q": 0, "k": 0, "v": 0, "out": 0},
    capture_safe=True,
    warm_up=_warm_up,
)


def _refusal(call: Mapping[str, Any]) -> str | None:
    """A captured op knows a step by its device metadata alone."""
    if call.get("implied_positions"):
        return "the model numbers the tokens itself; pass position_ids to have it captured"
    if not all(isinstance(call.get(name), torch.Tensor) for name in ("k_cache", "v_cache")):
        return "its pools are not tensors of the model"
    return None


def _metadata(limits: CaptureLimits, calls: Sequence[Mapping[str, Any]]) -> StepBuffers:
    pools = [call[name] for call in calls for name in ("k_cache", "v_cache")]
    return StepBuffers(pools, **dataclasses.asdict(limits))


FORM = CapturedForm(attn_captured, _metadata, _refusal)
