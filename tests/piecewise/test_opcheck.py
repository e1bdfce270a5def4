"""Every op that the packages register keeps torch's contract for ops: all checks of `torch.library.opcheck`.

Namely: the schema says what is written, no gradient is recorded behind autograd's back, fakes have the
results' sizes and strides, and a compiled call does what an eager one does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_map_only

from boundary_ops import PagedKVCache, PrefillBatch, registered
from boundary_ops.attention.attention import attn_inplace
from boundary_ops.attention.captured import attn_captured
from boundary_ops.huggingface import sequence_heads
from piecewise.passes.fusions import add_rms_norm, add_rms_norm_quant, rms_norm, rotary, silu_and_mul
from piecewise.passes.int8_matmul import int8_matmul
from piecewise.tools.bench import host_overhead

TESTS = Path(__file__).resolve().parents[1]
HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 4, 2, 8, 4, 16
LENS = (3, 5)
TOKENS = sum(LENS)
CHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


def floats(*sizes, dtype=torch.float32):
    return torch.randn(sizes, dtype=dtype, requires_grad=True)


def strided(*sizes):
    """Rows that are part of wider ones, as those of packed projections."""
    return floats(*sizes[:-1], sizes[-1] + 8)[..., : sizes[-1]].detach().requires_grad_()


def norm(make=floats, *, dtype=torch.float32):
    return make(TOKENS, WIDTH), floats(WIDTH, dtype=dtype), 1e-6, 0.0, False


def summed(x, *rest):
    return x, floats(*x.shape), *rest


def quantised(arguments, scale=None):
    return *arguments, scale, 1e-12, 0.0


def layer(make=floats):
    heads = [make(TOKENS, HEADS, DIM), make(TOKENS, KV_HEADS, DIM), make(TOKENS, KV_HEADS, DIM)]
    pools = [torch.randn(8, BLOCK, KV_HEADS, DIM) for _ in range(2)]
    return *heads, torch.zeros(TOKENS, HEADS, DIM), *pools


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def step():
    """Slots, starts, lengths and block tables of a captured step, with room for one more sequence."""
    slots = ints(*range(LENS[0]), *range(2 * BLOCK, 2 * BLOCK + LENS[1]), dtype=torch.int64)
    return slots, ints(0, LENS[0], TOKENS, TOKENS), ints(*LENS, 0), ints([0, 1], [2, 3], [0, 0])


def rotated(make=floats):
    return [make(TOKENS, HEADS, DIM), make(TOKENS, KV_HEADS, DIM)], *torch.randn(2, TOKENS, 1, DIM)


def bytes_of(*sizes):
    return torch.randint(-127, 128, sizes, dtype=torch.int8)


def scores(pad):
    """Of every token, and their ids, some of them padding."""
    return floats(1, TOKENS, WIDTH), torch.randint(0, 4, (1, TOKENS)), pad


LAST_TOKENS = getattr(torch.ops.piecewise, sequence_heads.NAME.partition("::")[2]).default
CASES = {
    "rms_norm": (rms_norm.op, norm),
    "rms_norm of rows that lie apart": (rms_norm.op, lambda: norm(strided)),
    "rms_norm with a weight of another dtype": (rms_norm.op, lambda: norm(dtype=torch.bfloat16)),
    "add_rms_norm": (add_rms_norm.op, lambda: summed(*norm())),
    "rms_norm_quant per row": (add_rms_norm_quant.op, lambda: quantised(norm())),
    "rms_norm_quant by a scale": (add_rms_norm_quant.op, lambda: quantised(norm(), torch.tensor(0.5))),
    "add_rms_norm_quant per row": (add_rms_norm_quant.sum_op, lambda: quantised(summed(*norm()))),
    "add_rms_norm_quant by a scale": (
        add_rms_norm_quant.sum_op,
        lambda: quantised(summed(*norm()), torch.tensor(0.5)),
    ),
    "silu_and_mul": (silu_and_mul.op, lambda: (floats(TOKENS, WIDTH), floats(TOKENS, WIDTH))),
    "silu_and_mul of rows that lie apart": (
        silu_and_mul.op,
        lambda: (strided(TOKENS, WIDTH), strided(TOKENS, WIDTH)),
    ),
    "rotate": (rotary.op, rotated),
    "rotate of rows that lie apart": (rotary.op, lambda: rotated(strided)),
    "attn_inplace": (attn_inplace.overload, lambda: (*layer(), DIM**-0.5)),
    "attn_inplace with all that a layer can ask for": (
        attn_inplace.overload,
        lambda: (*layer(strided), DIM**-0.5, 3, 20.0, floats(HEADS)),
    ),
    "attn_captured": (attn_captured.overload, lambda: (*layer(), *step(), DIM**-0.5)),
    "attn_captured with all that a layer can ask for": (
        attn_captured.overload,
        lambda: (*layer(strided), *step(), DIM**-0.5, 3, 20.0, floats(HEADS)),
    ),
    "last_tokens": (LAST_TOKENS, lambda: scores(0)),
    "last_tokens without a pad token": (LAST_TOKENS, lambda: scores(None)),
    "int8_matmul": (int8_matmul, lambda: (bytes_of(TOKENS, 32), bytes_of(16, 32).t())),
    "bench's op": (
        host_overhead._nothing.overload,
        lambda: (floats(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)),
    ),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def running_step(monkeypatch, device):
    """A step of two sequences, whose cache takes other pools of its geometry: the checks call with copies."""
    cache = PagedKVCache(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, num_blocks=8, block_size=BLOCK,
        dtype=torch.float32, device=device,
    )  # fmt: skip
    monkeypatch.setattr(PagedKVCache, "owns_pool", lambda self, pool: pool.shape == self.k[0].shape)
    with PrefillBatch.build(cache, ["a", "b"], LENS):
        yield


# The ops are for inference: of one without a formula torch warns where somebody differentiates.
@pytest.mark.filterwarnings("ignore:.*autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case, check, device, running_step):
    op, make = CASES[case]
    with torch.device(device):
        arguments = make()
    if check == "test_aot_dispatch_dynamic" and "quant" in case:
        # The check sums up what requires grad, which torch cannot do in float8.
        arguments = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
    assert torch.library.opcheck(op, arguments, test_utils=check) == {check: "SUCCESS"}


def test_each_registered_op_is_checked_here_or_in_a_test_of_its_name():
    own = ("piecewise::", "piecewise_bench::")
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(own)}
    known |= {op.name for op in registered() if op.name.startswith(own)}
    here = {op.name() for op, _ in CASES.values()}
    assert here <= known
    for name in known - here:
        paths = list(TESTS.rglob(f"test_{name.partition('::')[2]}.py"))
        assert any("opcheck(" in path.read_text() for path in paths), name
