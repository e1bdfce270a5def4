"""Computes the attention ops in one launch of a Triton program: attention, KV write and result.

A program owns one tile: consecutive new tokens of one sequence, times the query heads that share one K/V
head. The rows of a tile are (token, head) pairs, so a group of four query heads with a tile of 32 tokens
fills 128 rows, and K and V are read once for all four.

    context in the pages            new tokens in the arguments
    |  full blocks  |  rest  |      |  full blocks  |  diagonal  |  later tokens, not read
     no mask          masked         no mask          masked

The new K and V are read from the arguments by all programs, and written to their pages by exactly one: the
one whose tile holds the token. No program reads a slot that this launch writes, so there is nothing to wait
for.

Scores are kept in units of log2, so that the softmax needs `exp2` alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What a masked score becomes. Finite, so that a row whose first blocks are masked throughout has no
# `inf - inf`: what it added up there is scaled by exp2(-1e30 - x) = 0 once its first visible key comes.
MASKED_SCORE = tl.constexpr(-1.0e30)
LOG2_E = tl.constexpr(1.4426950408889634)
RECORD = tl.constexpr(8)


@triton.jit
def _load_rows(pointers, rows, dims, MASK_ROWS: tl.constexpr, MASK_DIMS: tl.constexpr):
    if MASK_ROWS:
        if MASK_DIMS:
            return tl.load(pointers, mask=rows[:, None] & dims[None, :], other=0.0)
        return tl.load(pointers, mask=rows[:, None], other=0.0)
    if MASK_DIMS:
        return tl.load(pointers, mask=dims[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def _attend_block(
    q, k, v, total, norm, peak, visible, scale, cap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one step of the running softmax: adds a block of keys to (total, norm, peak)."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP or MASKED:
        scores = scores * scale
        if SOFTCAP:
            # cap * tanh(x), as 1 - 2 / (1 + exp(2x)), which neither overflows nor cancels at large x; `scale`
            # carries 2 * log2(e) / softcap, and `cap` carries softcap * log2(e).
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
        if MASKED:
            scores = tl.where(visible, scores, MASKED_SCORE)
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
    else:
        # The scale is positive, so it can be left out of the comparison and folded into the exponent.
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    norm = norm * shrink + tl.sum(weights, 1)
    total = total * shrink[:, None]
    total = tl.dot(weights.to(v.dtype), v, total, input_precision=PRECISION)
    return total, norm, new_peak


@triton.jit
def _attend_keys(
    q, total, norm, peak,
    k, v, table, k_stride, v_stride, start, stop, limit, token, window, scale, cap,
    PAGE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends to tokens [start, stop) of a sequence's context, in pages of PAGE tokens, or with PAGE = 0 to
    its new ones, in the arguments; `limit` of them exist, and `token` are the rows' places among them.

    `k` and `v` point at the pools' first row of the K/V head, or at its first new token. Without MASKED, all
    of these tokens are visible to all rows and exist.
    """
    column = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, PADDED_DIM)
    k_offsets = column[:, None] * k_stride + dim[None, :]
    v_offsets = column[:, None] * v_stride + dim[None, :]
    for at in tl.range(start, stop, BLOCK_N):
        key = at + column
        exists = key < limit
        if PAGE == 0:
            k_pointers = k + tl.cast(at, tl.int64) * k_stride + k_offsets
            v_pointers = v + tl.cast(at, tl.int64) * v_stride + v_offsets
        elif PAGE % BLOCK_N == 0:
            # A block lies in one page. Its first token exists, so its page does.
            slot = tl.load(table + at // PAGE).to(tl.int64) * PAGE + at % PAGE
            k_pointers = k + slot * k_stride + k_offsets
            v_pointers = v + slot * v_stride + v_offsets
        else:
            if MASKED:
                page = tl.load(table + key // PAGE, mask=exists, other=0)
            else:
                page = tl.load(table + key // PAGE)
            slots = page.to(tl.int64) * PAGE + key % PAGE
            k_pointers = k + (slots * k_stride)[:, None] + dim[None, :]
            v_pointers = v + (slots * v_stride)[:, None] + dim[None, :]
        k_block = _load_rows(k_pointers, exists, dim < DIM, MASKED, PADDED_DIM > DIM)
        v_block = _load_rows(v_pointers, exists, dim < DIM, MASKED, PADDED_DIM > DIM)
        if PAGE == 0:
            visible = key[None, :] <= token[:, None]
        else:
            visible = exists[None, :]
        if WINDOW:
            visible = visible & (key[None, :] > token[:, None] - window)
        total, norm, peak = _attend_block(
            q, k_block, v_block, total, norm, peak, visible, scale, cap, MASKED, SOFTCAP, PRECISION
        )
    return total, norm, peak


@triton.jit
def _tile_in_lengths(starts, seq_lens, tile, tile_tokens, MAX_SEQS: tl.constexpr, SEQS: tl.constexpr):
    """Finds a tile from device lengths alone: (sequence, its first row, first token, new, context).

    Sequence `s` owns the tiles from `starts[s] // tile_tokens + s` on. That is never fewer than it needs, and
    depends on no other sequence's length, so that reading all starts decides. A tile that is not needed
    has a first token beyond its sequence's last one.
    """
    index = tl.arange(0, SEQS)
    begin = tl.load(starts + index, mask=index < MAX_SEQS, other=0) // tile_tokens + index
    sequence = tl.sum(((begin <= tile) & (index < MAX_SEQS)).to(tl.int32), 0) - 1
    row = tl.load(starts + sequence)
    new = tl.load(starts + sequence + 1) - row
    first = (tile - row // tile_tokens - sequence) * tile_tokens
    return sequence, row, first, new, tl.load(seq_lens + sequence) - new


@triton.jit(do_not_specialize=["table_stride", "num_rows", "window", "scale", "cap"])
def prefill_program(
    q, k, v, out, k_pool, v_pool, slots, tiles, seq_lens, tables, sinks, table_stride, num_rows,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    v_token_stride, v_head_stride, out_token_stride, out_head_stride,
    window, scale, cap,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr, WRITE_ROWS: tl.constexpr, CONTEXT: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, NEGATE: tl.constexpr, SPLIT_DIAGONAL: tl.constexpr,
    MAX_SEQS: tl.constexpr, SEQS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends for one tile and writes its K and V. Grid: (K/V heads * parts of a head group, tiles).

    With MAX_SEQS = 0, `tiles` holds one record of eight int32 per tile, heaviest first: sequence, its first
    row, the tile's first token in it, new tokens, context tokens. Otherwise `tiles` is `cu_seqlens_q`
    [MAX_SEQS + 1], and `seq_lens` [MAX_SEQS] is read too.
    """
    SPLITS: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    kv_head = tl.program_id(0) // SPLITS
    first_head = tl.program_id(0) % SPLITS * TILE_HEADS
    if MAX_SEQS > 0:
        # Later tiles of a sequence have more to read; they start first.
        tile = tl.num_programs(1) - 1 - tl.program_id(1)
        sequence, row, first, new, context = _tile_in_lengths(
            tiles, seq_lens, tile, TILE_TOKENS, MAX_SEQS, SEQS
        )
        # A step larger than the rows at hand is an error of the caller; it must not write beyond them.
        new = tl.minimum(new, num_rows - row)
        if first >= new:
            return
    else:
        record = tiles + tl.program_id(1) * RECORD
        sequence = tl.load(record)
        row = tl.load(record + 1)
        first = tl.load(record + 2)
        new = tl.load(record + 3)
        context = tl.load(record + 4)

    line = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    token = first + line // TILE_HEADS
    head = first_head + line % TILE_HEADS
    real = (line < TILE_TOKENS * TILE_HEADS) & (token < new)
    if SPLITS > 1:
        real = real & (head < GROUP)
    row_offset = row.to(tl.int64)
    first_row = row_offset + first
    q_rows = (line // TILE_HEADS)[:, None] * q_token_stride + head[:, None] * q_head_stride
    q_base = q + first_row * q_token_stride + (kv_head * GROUP).to(tl.int64) * q_head_stride
    query = _load_rows(q_base + q_rows + dim[None, :], real, dim < DIM, True, PADDED_DIM > DIM)

    # This tile's own tokens, from the arguments to their pages.
    k += kv_head.to(tl.int64) * k_head_stride
    v += kv_head.to(tl.int64) * v_head_stride
    k_pool += kv_head * DIM
    v_pool += kv_head * DIM
    POOL_ROW: tl.constexpr = KV_HEADS * DIM
    own = tl.arange(0, WRITE_ROWS)
    is_own = (own < TILE_TOKENS) & (first + own < new)
    if SPLITS > 1:
        # Of the programs that share these tokens, the first one writes.
        is_own = (own < tl.where(first_head == 0, TILE_TOKENS, 0)) & (first + own < new)
    slot = tl.load(slots + first_row + own, mask=is_own, other=0) * POOL_ROW
    mask = is_own[:, None] & (dim < DIM)[None, :]
    new_k = tl.load(k + first_row * k_token_stride + own[:, None] * k_token_stride + dim[None, :], mask=mask)
    new_v = tl.load(v + first_row * v_token_stride + own[:, None] * v_token_stride + dim[None, :], mask=mask)
    tl.store(k_pool + slot[:, None] + dim[None, :], new_k, mask=mask)
    tl.store(v_pool + slot[:, None] + dim[None, :], new_v, mask=mask)

    if NEGATE:
        query = -query
    if SINKS:
        peak = tl.load(sinks + kv_head * GROUP + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        norm = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        peak = tl.full([BLOCK_M], MASKED_SCORE, tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)

    if CONTEXT:
        table = tables + sequence.to(tl.int64) * table_stride
        start = 0
        full = context // BLOCK_N * BLOCK_N
        if WINDOW:
            # Blocks at both ends of the window need its mask; where it is short those are most of them.
            start = tl.maximum(context + first - window + 1, 0) // BLOCK_N * BLOCK_N
            full = start
        else:
            total, norm, peak = _attend_keys(
                query, total, norm, peak, k_pool, v_pool, table, POOL_ROW, POOL_ROW, start, full, context,
                context + token, window, scale, cap, PAGE, DIM, PADDED_DIM, BLOCK_N, False, False, SOFTCAP,
                PRECISION,
            )  # fmt: skip
        total, norm, peak = _attend_keys(
            query, total, norm, peak, k_pool, v_pool, table, POOL_ROW, POOL_ROW, full, context, context,
            context + token, window, scale, cap, PAGE, DIM, PADDED_DIM, BLOCK_N, True, WINDOW, SOFTCAP,
            PRECISION,
        )  # fmt: skip

    k += row_offset * k_token_stride
    v += row_offset * v_token_stride
    start = 0
    full = (first + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first + TILE_TOKENS, new)
    if WINDOW:
        start = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        full = start
    elif not SPLIT_DIAGONAL:
        full = start
    else:
        total, norm, peak = _attend_keys(
            query, total, norm, peak, k, v, tables, k_token_stride, v_token_stride, start, full, new, token,
            window, scale, cap, 0, DIM, PADDED_DIM, BLOCK_N, False, False, SOFTCAP, PRECISION,
        )  # fmt: skip
    total, norm, peak = _attend_keys(
        query, total, norm, peak, k, v, tables, k_token_stride, v_token_stride, full, stop, new, token,
        window, scale, cap, 0, DIM, PADDED_DIM, BLOCK_N, True, WINDOW, SOFTCAP, PRECISION,
    )  # fmt: skip

    out_rows = (line // TILE_HEADS)[:, None] * out_token_stride + head[:, None] * out_head_stride
    out_base = out + first_row * out_token_stride + (kv_head * GROUP).to(tl.int64) * out_head_stride
    result = (total / norm[:, None]).to(out.dtype.element_ty)
    tl.store(out_base + out_rows + dim[None, :], result, mask=real[:, None] & (dim < DIM)[None, :])
