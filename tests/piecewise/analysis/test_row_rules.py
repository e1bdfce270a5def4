"""[I3] Each rule of the table of rows: what it claims holds, whatever padded rows hold.

A case is a function and its inputs. It is judged on fakes, and each claim is tested on real tensors
(`row_cases.py`). `CLAIMED` tells the claim that is expected, `MIXING` the code of the refusal.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from row_cases import Input, anything, check_claims, check_eager, integers, judge, noted_rules, real

from piecewise.analysis.rows.rules.arithmetic import TAGGED, UNTAGGED
from piecewise.analysis.rows.table import BOUNDS, RULES, Entry

aten = torch.ops.aten
H = 4
F32, F64, BF16, F8 = torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn
BOOL, I8, U8, I32, I64 = torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64

X, XR, V, VR = anything("n", H), real("n", H), anything("n"), real("n")
W, W2 = anything(H, H), anything(9, H)
FLAT, LONG, SQUARE, SQUARE_R = anything("n*4"), anything("n+3", H), anything("n", "n"), real("n", "n")
HEADS, HEADS_R, MID, FRONT = anything("n", 2, 3), real("n", 2, 3), anything(2, "n", 3), anything(H, "n")
MASK, MASK_R, SETTLED_MASK = anything("n", H, dtype=BOOL), real("n", H, dtype=BOOL), anything(H, dtype=BOOL)
# Integers: of the caller, whose padded rows are anything or real; and bound by the op that made them.
IDS, IDS_R, IDS_B = integers("n", is_bound=False), integers("n", is_bound=False, is_real=True), integers("n")
NEGATIVE, NEGATIVE_R = integers("n", low=-2), integers("n", low=-2, is_bound=False, is_real=True)
PLACES, ORDER = integers("n", high="n-1"), integers("n", high="n-1", permutes=True)
TABLE_IDS = integers("n", H)
SMALL, SMALL_U, WIDE = integers("n", dtype=I8), integers("n", dtype=U8), integers("n", low=-300, high=300)
COMPLEX = anything("n", H, dtype=torch.complex128)
FIXED_IDS = integers(3, is_bound=False)


def filled(tensor, value):
    tensor[:] = value
    return tensor


def places(*numbers):
    return torch.tensor(numbers)


def written(write):
    """The function that writes into a copy of its first operand."""

    def function(x, *others):
        x = x.clone()
        write(x, *others)
        return x

    return function


def out_of(function, make):
    """The function that writes its result into memory of its own."""

    def call(*given):
        made = make(*given)
        function(*given, out=made)
        return made

    return call


# name: (function, inputs..., claim), the claim as `Judgement.text` tells it.
# fmt: off
CLAIMED = {
    # Factories.
    "zeros": (lambda x: torch.zeros(x.shape[0], 2, dtype=I64), X, "n,2 real 0..0"),
    "ones": (lambda x: torch.ones(2, x.shape[0], dtype=I64), X, "2,n real 1..1"),
    "full": (lambda x: torch.full((x.shape[0],), 7), X, "n real 7..7"),
    "full of small": (lambda x: torch.full((x.shape[0],), 7, dtype=I8), X, "n real 7..7"),
    "new zeros": (lambda x: x.new_zeros(x.shape[0] + 1, dtype=I64), X, "n+1 0..0"),
    "new ones": (lambda x: x.new_ones(x.shape[0] * 2, dtype=I64), XR, "2n real 1..1"),
    "new full": (lambda x: x.new_full((x.shape[0], 1), 5, dtype=I64), XR, "n,1 real 5..5"),
    "zeros like": (lambda i: torch.zeros_like(i), IDS_R, "n real 0..0"),
    "ones like": (lambda i: torch.ones_like(i), IDS, "n 1..1"),
    "full like": (lambda i: torch.full_like(i, 3), IDS, "n 3..3"),
    "like blocks": (lambda x: torch.zeros_like(torch.cat([x, x])), X, "2 of n,4"),
    "empty": (lambda x: torch.empty(x.shape[0], 2).fill_(1), X, "n,2"),
    "empty of integers": (lambda x: torch.empty(x.shape[0], dtype=I64).fill_(1), X, "n 1..1"),
    "empty strided": (lambda x: torch.empty_strided(x.shape, (H, 1)).zero_(), X, "n,4"),
    "new empty": (lambda x: x.new_empty(x.shape[0]).fill_(2), X, "n"),
    "empty like": (lambda x: torch.empty_like(x).copy_(x), X, "n,4"),
    "empty and written in parts": (lambda x: filled(torch.empty_like(x)[:, 2:], 1), XR, "n,2"),
    "arange": (lambda x: torch.arange(x.shape[0]), X, "n 0..n-1 permutes"),
    "arange from": (lambda x: torch.arange(3, x.shape[0] + 3), X, "n 3..n+2"),
    "arange from below": (lambda x: torch.arange(-3, x.shape[0]), X, "n+3 -3..n-1"),
    "arange in steps": (lambda x: torch.arange(0, x.shape[0] * 2, 2), X, "n 0..2n-2"),
    "arange of floats": (lambda x: torch.arange(0, x.shape[0], 0.5), X, "2n"),
    "arange of small": (lambda x: torch.arange(x.shape[0], dtype=I8), X, "n 0..n-1 permutes"),
    "arange down": (lambda x: torch.arange(0, -x.shape[0], -1), X, "n -n+1..0"),
    "arange of fixed": (lambda x: torch.arange(9, 0, -2), X, "5 1..9"),
    "eye": (lambda x: torch.eye(x.shape[0]), X, "n,n"),
    "eye of columns": (lambda x: torch.eye(x.shape[0], 3), X, "n,3"),
    "scalar tensor": (lambda i: torch.where(i > 1, i, 5), IDS_B, "n 0..5"),
    # Joins.
    "cat": (lambda x, y: torch.cat([x, y]), X, X, "2 of n,4"),
    "cat of copies": (lambda x, y: torch.cat([x, y, x * 2]), XR, XR, "3 of n,4 real"),
    "cat of blocks": (lambda x: torch.cat([torch.cat([x, x]), x]), X, "3 of n,4"),
    "cat of columns": (lambda x, y: torch.cat([x, y[:, :2]], -1), X, XR, "n,6"),
    "cat of one": (lambda x: torch.cat([x]), XR, "n,4 real"),
    "cat behind rows": (lambda x, w: torch.cat([w, x]), XR, W, "n+4,4"),
    "cat before rows": (lambda x, w: torch.cat([x, w]), X, W, "n+4~4,4"),
    "cat around": (lambda x, w: torch.cat([w, x, w[:2]])[:-2], X, W, "n+4,4"),
    "cat with nothing": (lambda x: torch.cat([x.new_zeros(0), x]), X, "n,4"),
    "cat with nothing of fixed": (
        lambda x, w: torch.cat([w.new_zeros(0), x, w.new_zeros(0, H)]), X, W, "n,4"),
    "cat of integers": (lambda i, j: torch.cat([i, j]), IDS_B, NEGATIVE, "2 of n -2..3"),
    "cat of fixed": (lambda i, x: torch.cat([i, i]) + 0 * x.shape[1], FIXED_IDS, X, "6"),
    "cat of pairs": (lambda s: torch.cat([s, s], 1), SQUARE_R, "n,2 of n real"),
    "stack": (lambda i, j: torch.stack([i, j]), IDS_B, NEGATIVE, "2,n -2..3"),
    "stack behind": (lambda x, y: torch.stack([x, y], -1), XR, XR, "n,4,2 real"),
    "repeat": (lambda x: x.repeat(3, 1), XR, "3 of n,4 real"),
    "repeat of flat": (lambda x: x.repeat(2), FLAT, "2 of 4n"),
    "repeat to count": (lambda x, w: w[0].repeat(x.shape[0], 1), X, W, "n,4 real"),
    "repeat behind one another": (lambda x, w: w[0].repeat(x.shape[0]), X, W, "4n real"),
    "repeat as often as there are rows": (lambda x: x.repeat(x.shape[0], 1), XR, "n.n,4 real"),
    "repeat of integers": (lambda i: i.repeat(2, 2), IDS_B, "2,2 of n 0..3"),
    "repeat of columns": (lambda x: x.repeat(1, 2), XR, "n,8 real"),
    "repeat interleaved": (lambda x: x.repeat_interleave(2, 0), XR, "2n,4 real"),
    "pad of columns": (lambda x: F.pad(x, (1, 2)), XR, "n,7 real"),
    "pad in front": (lambda x: F.pad(x, (0, 0, 2, 0)), XR, "n+2,4"),
    "pad behind": (lambda x: F.pad(x, (0, 0, 0, 2)), X, "n+2~2,4"),
    "pad behind and cut": (lambda x: F.pad(x, (0, 0, 1, 2))[:-2], X, "n+1,4"),
    "pad shifts rows": (lambda x: F.pad(x, (0, 0, 1, -1)), X, "n,4"),
    "pad that cuts": (lambda x: F.pad(x, (0, 0, 0, -1)), X, "n-1,4"),
    "pad of nothing": (
        lambda x: F.pad(x, (0, 0, 0, 0, 1, 0)), anything(2, "n", 3, is_real=True), "3,n,3 real"),
    "pad of integers": (lambda i: F.pad(i, (1, 0), value=9.0), IDS_B, "n+1 0..9"),
    "pad of many blocks by nothing": (lambda x: F.pad(torch.cat([x, x]), (1, 0)), X, "2 of n,5"),
    # Views.
    "alias": (lambda i: i[...], ORDER, "n 0..n-1 permutes"),
    "detach": (lambda i: i.detach(), ORDER, "n 0..n-1 permutes"),
    "view": (lambda x: x.view(-1), XR, "4n real"),
    "view into heads": (lambda x: x.view(-1, 2, 2), XR, "n,2,2 real"),
    "view of flat": (lambda x: x.view(-1, H), FLAT, "n,4"),
    "view in pairs": (lambda x: x.view(-1, 2, H), anything("2*n", H), "n,2,4"),
    "view of pairs of numbers": (lambda x: x.view(-1, 2), FLAT, "2n,2"),
    "view of blocks": (lambda x: torch.cat([x, x]).view(2, -1, H), XR, "2,n,4 real"),
    "view of four blocks": (lambda x: x.repeat(4, 1).view(2, -1, H), XR, "2,2 of n,4 real"),
    "view of table": (lambda x: x.view(-1).view(x.shape[0], -1), SQUARE_R, "n,n real"),
    "view of table and columns": (
        lambda x: (x[..., None] * torch.ones(2)).view(x.shape[0], -1), SQUARE, "n,2n"),
    "view with ones": (lambda x: x.view(1, -1, 1, H), XR, "1,n,1,4 real"),
    "view of one": (lambda x: x[:1].view(H), X, "4"),
    "view of a tail": (lambda x: F.pad(x, (0, 2)).view(1, -1, 1)[0, :-2], V, "n,1"),
    "view of integers": (lambda i: i.view(-1, 2), integers("n*4"), "2n,2 0..3"),
    "view that keeps": (lambda i: i.view(-1), ORDER, "n 0..n-1 permutes"),
    "view behind a shift": (lambda x: x[1:].view(-1, 2, 2), X, "n-1,2,2"),
    "heads first": (lambda x: x.view(-1, 2, 2).transpose(0, 1), XR, "2,n,2 real"),
    "heads first flat": (lambda x: x.T.reshape(-1), XR, "4 of n real"),
    "heads first and back": (lambda x: x.T.reshape(-1).view(H, -1).T, XR, "n,4 real"),
    "heads first halves": (lambda x: x.T.reshape(2, -1), XR, "2,2 of n real"),
    "unsafe view": (lambda i: i.t().reshape(-1), TABLE_IDS, "4 of n 0..3"),
    "unsafe view that keeps": (lambda i: aten._unsafe_view(i, [i.shape[0]]), ORDER, "n 0..n-1 permutes"),
    "bits": (lambda x: x.view(I64), XR, "n,4 real"),
    "bits of two": (lambda x: x.view(I64), anything("n", H, dtype=F32), "n,2"),
    "bits of integers": (lambda x: x.view(I64), integers("n", H, dtype=I32), "n,2"),
    "bits of halves": (lambda x: x.view(I32), integers("n", H), "n,8"),
    "parts of complex": (lambda x: torch.view_as_real(x), COMPLEX, "n,4,2"),
    "complex of parts": (lambda x: torch.view_as_complex(x.view(-1, 2, 2)), X, "n,2"),
    "conjugate": (lambda x: x.conj() * 2, COMPLEX, "n,4"),
    "imaginary of conjugate": (lambda x: x.conj().imag * 2, COMPLEX, "n,4"),
    "permute": (lambda i: i.permute(2, 0, 1), integers("n", 2, 3), "3,n,2 0..3"),
    "transpose": (lambda i: i.transpose(-1, 0), TABLE_IDS, "4,n 0..3"),
    "t": (lambda i: i.t(), TABLE_IDS, "4,n 0..3"),
    "t of one dim": (lambda x: x.t(), VR, "n real"),
    "unsqueeze": (lambda i: i.unsqueeze(-1), IDS_B, "n,1 0..3"),
    "unsqueeze in front": (lambda x: x[None], XR, "1,n,4 real"),
    "turned in place": (lambda x: x.clone().t_(), XR, "4,n real"),
    "squeezed in place": (lambda x: x.clone().squeeze_(0).mul_(2), anything(1, "n", 3), "n,3"),
    "a view turned in place": (
        lambda x: (y := x * 2, y[:, :2].unsqueeze_(0).transpose_(0, 1).add_(1))[0], XR, "n,4 real"),
    "squeeze": (lambda i: i.squeeze(), integers(1, "n", 1), "n 0..3"),
    "squeeze of one": (lambda x: x.squeeze(0), anything(1, "n", 1), "n,1"),
    "squeeze of some": (lambda x: x.squeeze((0, 1)), anything(1, "n", 1), "n,1"),
    "expand": (lambda i: i[:, None].expand(-1, 3), IDS_B, "n,3 0..3"),
    "expand to count": (lambda x, w: w[:1].expand(x.shape[0], -1), X, W, "n,4 real"),
    "expand to table": (lambda x: x[None].expand(x.shape[0], -1), VR, "n,n real"),
    "expand in front": (lambda x: x.expand(2, -1, -1), XR, "2,n,4 real"),
    "select": (lambda i: i[:, 1], TABLE_IDS, "n 0..3"),
    "select of row, for all": (lambda x, y: x + y[0], XR, X, "n,4 real"),
    "select of row": (lambda x: x[0], X, "4"),
    "select of row of table": (lambda x: x[0], SQUARE_R, "n real"),
    "select of later row": (lambda x: x[2], LONG, "4"),
    "select of last column": (lambda x: x[:, -1], XR, "n real"),
    "select of first block": (lambda x: torch.cat([x, x])[0], X, "4"),
    "slice": (lambda i: i[1:], IDS_B, "n-1 0..3"),
    "slice of end": (lambda x: x[:-1], XR, "n-1,4"),
    "slice of columns": (lambda x: x[:, 1:3], XR, "n,2 real"),
    "slice of last columns": (lambda x: x[:, -3:-1], XR, "n,2 real"),
    "slice of odd columns": (lambda x: x[:, 1::2], XR, "n,2 real"),
    "slice in steps": (lambda x: x[::2], XR, "f(n),4"),
    "slice in steps from": (lambda x: x[1::3], XR, "f(n),4"),
    "slice of flat in steps": (lambda x: x[::2], real("n*4"), "2n"),
    "slice of first": (lambda x: x[:3], LONG, "3,4"),
    "slice of first in steps": (lambda x: x[:3:2], LONG, "2,4"),
    "slice of front": (lambda x: x[: x.shape[0] // 2], X, "f(n),4"),
    "slice of all": (lambda x: x[: x.shape[0]], XR, "n,4 real"),
    "slice of table": (lambda x, w: w[: x.shape[0]], X, W2, "n,4"),
    "slice of table from": (lambda x, w: w[2 : x.shape[0] + 2], X, W2, "n,4"),
    "slice of table in steps": (lambda x, w: w[: x.shape[0] : 2], X, W2, "f(n),4"),
    "slice of block": (lambda x: torch.cat([x, 2 * x])[x.shape[0] :], XR, "n,4 real"),
    "slice of blocks": (lambda x: x.repeat(4, 1)[x.shape[0] : x.shape[0] * 3], XR, "2 of n,4 real"),
    "slice of tail": (lambda x: F.pad(x, (0, 3))[:-1], V, "n+2~2"),
    "slice of tail in steps": (lambda x: F.pad(x, (0, 3))[::2], V, "f(n)~2"),
    "slice of tail away": (lambda x: F.pad(x, (0, 3))[: x.shape[0]], V, "n"),
    "split": (lambda i: i.split(2, 1)[1], TABLE_IDS, "n,2 0..3"),
    "split of rows": (lambda x: x.split([2, x.shape[0] - 2])[1], real("n+3", H), "n+1,4"),
    "split in parts": (lambda i: i.split([1, 3], 1)[1], TABLE_IDS, "n,3 0..3"),
    "split of blocks": (lambda x: torch.cat([x, 2 * x]).chunk(2)[1], XR, "n,4 real"),
    "split of real": (lambda x: x.split([1, 3], -1)[0], XR, "n,1 real"),
    "unbind": (lambda i: i.unbind(1)[3], TABLE_IDS, "n 0..3"),
    "unfold": (lambda i: i.unfold(1, 2, 2), TABLE_IDS, "n,2,2 0..3"),
    "unfold of columns": (lambda x: x.unfold(1, 3, 1), XR, "n,2,3 real"),
    "unfold of rows": (lambda x: x.unfold(0, 3, 1), real("n+3", H), "n+1,4,3"),
    "diagonal": (lambda i: i.diagonal(), integers("n", "n"), "n 0..3"),
    "diagonal of real": (lambda x: x.diagonal(), SQUARE_R, "n real"),
    "diagonal beside": (lambda x: x.diagonal(1), real("n+3", "n+3"), "n+2"),
    "diagonal below": (lambda x: x.diagonal(-2), anything("n+3", "n"), "n"),
    "diagonal in rows": (lambda x: x.diagonal(1, 1, 2), HEADS_R, "n,2 real"),
    "diagonal of few columns": (lambda x: x.diagonal(), anything("n+3", 3), "3"),
    "tril": (lambda i: i.tril(), integers("n", H, low=1), "n,4 0..3"),
    "tril of table": (lambda x: x.tril(-1), SQUARE_R, "n,n"),
    "triu": (lambda i: i.triu(1), integers("n", "n", low=-2, high=-1), "n,n -2..0"),
    "triu in rows": (lambda x: x.triu(), HEADS_R, "n,2,3 real"),
    # Reductions.
    "sum": (lambda x: x.sum(-1), XR, "n real"),
    "sum of integers": (lambda i: i.sum(1), integers("n", H, low=-1, high=2), "n -4..8"),
    "sum of bools": (lambda m: m.sum(-1, keepdim=True), MASK, "n,1 0..4"),
    "sum of all fixed": (lambda i: i.sum(), integers(3, high=2), " 0..6"),
    "sum of many dims": (lambda x: x.sum((1, 2)), HEADS, "n"),
    "sum into small": (lambda i: i.sum(1, dtype=I8), integers("n", H, high=100), "n -128..127"),
    "mean": (lambda x: x.mean(1, keepdim=True), XR, "n,1 real"),
    "prod": (lambda x: x.prod(1), X, "n"),
    "amax": (lambda i: i.amax(1), TABLE_IDS, "n 0..3"),
    "amin": (lambda i: i.amin(1), TABLE_IDS, "n 0..3"),
    "argmax": (lambda x: x.argmax(-1), X, "n 0..3"),
    "argmin": (lambda x: x.argmin(0), FRONT, "n 0..3"),
    "argmax of fixed": (lambda w: w.argmax(), W, " 0..15"),
    "std": (lambda x: x.std(1), X, "n"),
    "var": (lambda x: x.var((1, 2)), HEADS, "n"),
    "std mean": (lambda x: torch.std_mean(x, 1), X, "n; n"),
    "var mean": (lambda x: torch.var_mean(x, 1, keepdim=True), XR, "n,1 real; n,1 real"),
    "nansum": (lambda x: x.nansum(1), X, "n"),
    "logsumexp": (lambda x: x.logsumexp(1), X, "n"),
    "norm": (lambda x: x.norm(dim=-1), X, "n"),
    "normalize": (lambda x: F.normalize(x), XR, "n,4 real"),
    "count nonzero": (lambda x: x.count_nonzero(1), X, "n"),
    "aminmax": (lambda x: x.aminmax(dim=1), X, "n; n"),
    "max": (lambda i: i.max(1), TABLE_IDS, "n 0..3; n 0..3"),
    "min": (lambda x: x.min(0), FRONT, "n; n 0..3"),
    "max of fixed": (lambda i: (i.max(), i.min(), i.median()), integers(3), " 0..3;  0..3;  0..3"),
    "median": (lambda i: i.median(1), TABLE_IDS, "n 0..3; n 0..3"),
    "nanmedian": (lambda x: x.nanmedian(1), X, "n; n 0..3"),
    "kthvalue": (lambda i: i.kthvalue(2, 1), TABLE_IDS, "n 0..3; n 0..3"),
    "all": (lambda m: m.all(1), MASK, "n 0..1"),
    "any": (lambda m: m.any(1), MASK_R, "n real 0..1"),
    "all of dims": (lambda x: (x > 0).all((1, 2)), HEADS, "n 0..1"),
    "any of dims": (lambda x: (x > 0).any((1, 2)), HEADS, "n 0..1"),
    "all over tokens": (lambda m: m.all(), MASK_R, "unknown"),
    "any over tokens": (lambda m: m.any(), MASK, "unknown"),
    "all that hold": (lambda i: ((i >= 0) & (i < 9)).all(1), TABLE_IDS, "n 0..1"),
    "all of ones": (lambda i: (i >= 0).all(1), TABLE_IDS, "n 1..1"),
    "any of none": (lambda i: (i < 0).any(1), TABLE_IDS, "n 0..0"),
    # Along fixed dims.
    "softmax": (lambda x: x.softmax(-1), XR, "n,4 real"),
    "softmax in columns": (lambda x: x.softmax(0), FRONT, "4,n"),
    "softmax in halves": (lambda x: F.softmax(x, -1, dtype=F32), anything("n", H, dtype=BF16), "n,4"),
    "log softmax": (lambda x: x.log_softmax(1), XR, "n,4 real"),
    "safe softmax": (lambda x: aten._safe_softmax(x, 1), X, "n,4"),
    "sort": (lambda x: x.sort(-1), X, "n,4; n,4 0..3"),
    "sort of integers": (lambda i: i.sort(1, descending=True), TABLE_IDS, "n,4 0..3; n,4 0..3"),
    "stable sort": (lambda i: torch.argsort(i, dim=1, stable=True), integers("n", 6), "n,6 0..5"),
    "sort of fixed": (lambda w: w[:, 0].argsort(), W, "4 0..3 permutes"),
    "order and some of it": (lambda w, i: w[:, 0].argsort()[i], W, integers(H), "4 0..3"),
    "topk": (lambda x: x.topk(2), X, "n,2; n,2 0..3"),
    "topk of integers": (lambda i: i.topk(2, 0), integers(H, "n"), "2,n 0..3; 2,n 0..3"),
    "flip": (lambda i: i.flip(1), TABLE_IDS, "n,4 0..3"),
    "roll": (lambda i: i.roll(1, -1), TABLE_IDS, "n,4 0..3"),
    "roll of fixed": (lambda w: w.roll(3), integers(3), "3 0..3"),
    "glu": (lambda x: F.glu(x), XR, "n,2 real"),
    "cumsum": (lambda x: x.cumsum(0), XR, "n,4"),
    "cumsum in rows": (lambda i: i.cumsum(1), integers("n", H, low=-1, high=2), "n,4 -4..8"),
    "cumsum of integers": (lambda i: i.cumsum(0), integers("n", low=0), "n 0..3n"),
    "cumsum of positive": (lambda i: i.cumsum(0), integers("n", low=1), "n 1..3n"),
    "cumsum of bools": (lambda m: m.cumsum(0) - 1, MASK, "n,4 -1..n-1"),
    "cumsum of flat": (lambda x: x.cumsum(0), FLAT, "4n"),
    "cumsum with a tail": (lambda x: F.pad(x, (0, 2)).cumsum(0), V, "n+2~2"),
    "cumprod": (lambda x: x.cumprod(0), X, "n,4"),
    "cummax": (lambda i: i.cummax(0), IDS_B, "n 0..3; n 0..n-1"),
    "cummin": (lambda i: i.cummin(0), IDS_B, "n 0..3; n 0..n-1"),
    "cummax in rows": (lambda x: x.cummax(1), X, "n,4; n,4 0..3"),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), X, "n,4"),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), X, "n,4"),
    "layer norm": (lambda x, w: F.layer_norm(x, (H,), w[0], w[1]), XR, W, "n,4 real"),
    "layer norm of two dims": (lambda x: F.layer_norm(x, (2, 3)), HEADS, "n,2,3"),
    "layer norm and what it keeps": (
        lambda x: aten.native_layer_norm(x, [H], None, None, 1e-5), X, "n,4; n,1; n,1"),
    "rms norm": (lambda x, w: F.rms_norm(x, (H,), w[0]), XR, W, "n,4 real"),
    "group norm": (lambda x: F.group_norm(x, 2), anything("n", H, 3), "n,4,3"),
    "batch norm": (lambda x, w: F.batch_norm(x, w[0], w[1].abs()), XR, W, "n,4 real"),
    "batch norm by channel": (
        lambda x, w: F.batch_norm(x, w[0], w[1].abs()), anything(2, H, "n"), W, "2,4,n"),
    "instance norm": (
        lambda x, w: F.instance_norm(x, weight=w[0], bias=w[1]), real("n", H, 3), W, "n,4,3 real"),
    # Products.
    "mm": (lambda x, w: x @ w, XR, W, "n,4 real"),
    "mm by rows": (lambda x, w: w @ x, FRONT, W, "4,n"),
    "mm to table": (lambda x: x @ x.T, XR, "n,n real"),
    "linear": (lambda x, w: F.linear(x, w, w[0]), XR, W, "n,4 real"),
    "linear of three dims": (lambda x, w: F.linear(x, w[:, :3], w[0]), MID, W, "2,n,4"),
    "bmm": (lambda x, y: x @ y.mT, HEADS_R, HEADS_R, "n,2,2 real"),
    "bmm of rows": (lambda x, y: x @ y.mT, MID, MID, "2,n,n"),
    "addmm": (lambda x, y, w: torch.addmm(y, x, w, beta=2), X, XR, W, "n,4"),
    "baddbmm": (lambda x, y: torch.baddbmm(x[:, :2, :2], x, y.mT), HEADS, HEADS, "n,2,2"),
    "mv": (lambda x, w: x @ w[0], XR, W, "n real"),
    "einsum": (lambda x, w: torch.einsum("nd,kd->kn", x, w), XR, W, "4,n real"),
    "outer": (lambda x, w: torch.outer(x, w[0]), VR, W, "n,4 real"),
    "cdist": (lambda x, w: torch.cdist(x, w), XR, W, "n,4 real"),
    "solved": (
        lambda x, y: torch.linalg.solve_triangular(x[..., :2].exp(), y[..., :2], upper=False), HEADS_R, HEADS,
        "n,2,2"),
    "int mm": (
        lambda x, w: torch._int_mm(x, w), integers("n", 16, dtype=I8), integers(16, 16, dtype=I8), "n,16"),
    "int8 weights": (
        lambda x, w: aten._weight_int8pack_mm(x, w, torch.ones(16, dtype=BF16)), real("n", 16, dtype=BF16),
        integers(16, 16, dtype=I8), "n,16 real"),
    "int4 weights for a CPU": (
        lambda x, w: aten._weight_int4pack_mm_for_cpu(x, w, 32, torch.ones(2, 16, 2, dtype=BF16)),
        anything("n", 64, dtype=BF16), integers(16, 32, dtype=U8), "n,16"),
    "scaled mm as a whole": (
        lambda x, w, b: torch._scaled_mm(x, w.t(), torch.ones(()), torch.ones(()), b, out_dtype=BF16),
        anything("n", 16, dtype=F8), anything(16, 16, dtype=F8), anything(16, dtype=BF16), "n,16"),
    "grouped mm": (
        lambda x, w, o: torch._grouped_mm(x, w, o), real("n", 16, dtype=BF16),
        anything(3, 16, 16, dtype=BF16),
        integers(3, low="n", high="n", dtype=I32, is_bound=False), "n,16"),
    "attention": (
        lambda q: F.scaled_dot_product_attention(q, q, q), real("n", 2, 8, 16, dtype=F32), "n,2,8,16 real"),
    "attention with a mask": (
        lambda q, m: F.scaled_dot_product_attention(q, q, q, m), anything("n", 2, 8, 16, dtype=F32),
        anything("n", 1, 8, 8, dtype=F32), "n,2,8,16"),
    "attention of queries": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k), anything(1, 2, "n", 16, dtype=F32),
        anything(1, 2, 8, 16, dtype=F32), "1,2,n,16"),
    "convolution": (lambda x, w: F.conv1d(x[None], w), real(H, "n+3"), anything(2, H, 3), "1,2,n+1"),
    "convolution of batch": (
        lambda x, w: F.conv1d(x, w, padding=2, stride=2), real("n", H, 5), anything(2, H, 3), "n,2,4 real"),
    "convolution with padding": (
        lambda x, w: F.conv1d(x[None], w, padding=1), FRONT, anything(2, H, 3), "1,2,n~1"),
    "convolution of far": (
        lambda x, w: F.conv1d(x[None], w, padding=4, dilation=2, groups=H), FRONT, anything(H, 1, 3),
        "1,4,n+4~4"),
    "causal convolution": (
        lambda x, w: F.conv1d(x.T[None], w, padding=2)[0].T[: x.shape[0]], X, anything(2, H, 3), "n,2"),
    "convolution transposed": (
        lambda x, w: F.conv_transpose1d(x, w), anything("n", H, 5), anything(H, 2, 3), "n,2,7"),
    # Lookups.
    "embedding": (lambda i, w: F.embedding(i, w), IDS_R, W, "n,4 real"),
    "embedding of bound": (lambda i, w: F.embedding(i, w), IDS_B, W, "n,4"),
    "embedding of argmax": (lambda x, w: F.embedding(x.argmax(-1), w), X, W, "n,4"),
    "index": (lambda i, w: w[i], NEGATIVE_R, W, "n,4 real"),
    "index wraps": (lambda i, w: w[i], NEGATIVE, W, "n,4"),
    "index of integers": (
        lambda i, w: w[i], IDS_B, integers(H), "n 0..3"),
    "index by position": (lambda x, w: w[torch.arange(x.shape[0])], X, W2, "n,4"),
    "index of columns": (lambda x, i: x[:, i], XR, FIXED_IDS, "n,3 real"),
    "index of columns by rows": (lambda i, w: w[:, i], IDS_B, W, "4,n"),
    "index of two": (lambda i, j, w: w[i, j], IDS_B, IDS_R, W, "n"),
    "index of two apart": (lambda i, j, x: x[i, :, j], IDS_B, NEGATIVE, anything(4, 2, 5), "n,2"),
    "index to table": (lambda i, w: w[i[:, None], places(0, 1)], IDS_B, W, "n,2"),
    "index between": (lambda i, x: x[:, i[:, None], i], IDS_B, anything(2, 4, 4, 3), "2,n,n,3"),
    "index of rows": (lambda x, i: x[i], XR, PLACES, "n,4"),
    "index of rows by row": (lambda x, i: x[i // 2], X, PLACES, "n,4"),
    "index of rows in order": (lambda x, i: x[i], X, ORDER, "n,4"),
    "index select": (lambda i, w: w.index_select(1, i), IDS_B, W, "4,n"),
    "index select of integers": (lambda i: i.index_select(1, places(2, 0)), TABLE_IDS, "n,2 0..3"),
    "index select of rows": (lambda x, i: x.index_select(0, i), X, PLACES, "n,4"),
    "gather": (lambda x, i: x.gather(1, i), XR, integers("n", H, is_bound=False, is_real=True), "n,4 real"),
    "gather of argmax": (lambda x: x.gather(1, x.argmax(-1, True)), X, "n,1"),
    "gather of integers": (lambda i, j: i.gather(1, j), TABLE_IDS, integers("n", 2), "n,2 0..3"),
    "gather of fewer": (lambda x, i: x.gather(2, i), HEADS, integers("n", 1, 2, high=2), "n,1,2"),
    "gather of rows": (lambda x, i: x.gather(0, i[:, None].expand(-1, H)), X, PLACES, "n,4"),
    "take": (lambda i: torch.take(i, places(0)), integers(3), "1 0..3"),
    "rot90": (lambda i: i.rot90(), integers(2, 3), "3,2 0..3"),
    "scatter": (lambda x, y: x.scatter(1, y.topk(2)[1], y), XR, X, "n,4"),
    "scatter of real": (
        lambda x, i: x.scatter(1, i, 1.0), XR, integers("n", 2, is_bound=False, is_real=True), "n,4 real"),
    "scatter of integers": (lambda i, j: i.scatter(1, j, j), TABLE_IDS, integers("n", 2, high=2), "n,4 0..3"),
    "scatter of a number": (lambda i, j: i.scatter(1, j, 7), TABLE_IDS, integers("n", 2), "n,4 0..7"),
    "scatter as product": (
        lambda i, j: i.scatter(1, j, 7, reduce="multiply"), TABLE_IDS, integers("n", 2), "n,4"),
    "scatter add": (lambda x, i: x.scatter_add(1, i, x), X, TABLE_IDS, "n,4"),
    "scatter reduce": (lambda x, i: x.scatter_reduce(1, i, x, "amax"), X, TABLE_IDS, "n,4"),
    "scatter of order": (
        lambda w: torch.full((4,), -9).scatter(0, w[:, 0].argsort(), torch.arange(4)), W, "4 0..3"),
    "searchsorted": (lambda x, w: torch.searchsorted(w[0].sort()[0], x), XR, W, "n,4 real 0..4"),
    "searchsorted in rows": (
        lambda x, y: torch.searchsorted(x.sort(-1)[0], y), X, anything("n", 2), "n,2 0..4"),
    "searchsorted of rows": (lambda x, w: torch.searchsorted(w.sort(-1)[0], x), FRONT, W, "4,n 0..4"),
    "bucketize": (lambda x, w: torch.bucketize(x, w[0].sort()[0]), X, W, "n,4 0..4"),
    "isin": (lambda i: torch.isin(i, places(1, 2)), IDS_R, "n real 0..1"),
    "isin one": (lambda i: torch.isin(i, 2), IDS, "n 0..1"),
    "index put": (lambda x, y: aten.index_put(x, [None, places(0, 2)], y[:, :2]), XR, XR, "n,4 real"),
    "index put of a number": (
        written(lambda x: x.__setitem__((slice(None), places(0, 2)), 0.0)), XR, "n,4 real"),
    "index put of fixed": (
        lambda i: i.index_put((places(0, 2),), torch.full((1,), 7)), integers(3), "3 0..7"),
    "index put added": (lambda i: i.index_put((places(0, 2),), places(7), accumulate=True), integers(3), "3"),
    "index add": (lambda x, y: x.index_add(1, places(0, 2), y[:, :2]), X, XR, "n,4"),
    "index copy": (lambda x, y: x.index_copy(1, places(0, 2), y[:, :2]), XR, XR, "n,4 real"),
    "index fill": (lambda x: x.index_fill(-1, places(0, 2), 3.0), XR, "n,4 real"),
    "assert of real": (lambda i: (aten._assert_async((i < 4).all()), i)[1], IDS_R, "n real"),
    "assert that holds": (lambda i: (aten._assert_async((i < 4).all()), i)[1], IDS_B, "n 0..3"),
    "index add to rows": (
        lambda x, i, y: x.index_add(0, i, y), XR, integers(2, high="n-1"), anything(2, H), "n,4"),
    "index put to rows": (
        lambda x, i, y: x.index_put((i,), y), XR, integers(2, high="n-1"), anything(H), "n,4"),
    "one hot": (lambda x: F.one_hot(x.argmax(-1), H), X, "n,4 0..1"),
    "one hot of real": (lambda i: F.one_hot(i, H), IDS_R, "n,4 real 0..1"),
    # Integers.
    "to bool": (lambda i: i.to(BOOL), ORDER, "n 0..1"),
    "to int8": (lambda i: i.to(I8), WIDE, "n -128..127"),
    "to uint8": (lambda i: i.to(U8), NEGATIVE, "n 0..255"),
    "to int32": (lambda i: i.to(I32), ORDER, "n 0..n-1 permutes"),
    "from floats": (lambda x: x.to(I64), X, "n,4"),
    "from floats to small": (lambda x: x.to(U8).long(), X, "n,4 0..255"),
    "copied": (lambda i, j: i.copy_(j), IDS, IDS_B, "n 0..3"),
    "copied to small": (lambda i, j: i.copy_(j), SMALL, WIDE, "n -128..127"),
    "copied order": (lambda i: torch.empty_like(i).copy_(i), ORDER, "n 0..n-1 permutes"),
    "copied to all": (
        lambda i, j: aten.copy(i, j), integers("n", H),
        integers(H), "n,4 0..3"),
    "added": (lambda i, j: i + j, IDS_B, NEGATIVE, "n -2..6"),
    "added twice": (lambda i, j: i.add(j, alpha=2), IDS_B, IDS_B, "n"),
    "added to one side": (lambda i: i.clamp(max=1) - 2, IDS, "n"),
    "negative of one side": (lambda i: -i.clamp(max=1), IDS, "n"),
    "one side in another type": (lambda i: i.clamp(max=1).to(I32), IDS, "n"),
    "one side in another type's memory": (
        lambda i, j: i.copy_(j.clamp(min=1)), integers("n", dtype=I32), IDS, "n"),
    "subtracted": (lambda i, j: i - j, IDS_B, NEGATIVE, "n -3..5"),
    "subtracted from": (lambda i: 5 - i, NEGATIVE, "n 2..7"),
    "rsub of tensors": (lambda i, j: torch.rsub(i, j), IDS_B, NEGATIVE, "n -5..3"),
    "multiplied": (lambda i, j: i * j, NEGATIVE, NEGATIVE, "n -6..9"),
    "multiplied by itself": (lambda i: i * -2, NEGATIVE, "n -6..4"),
    "added in small": (lambda i: i + 100 + 100, SMALL, "n -128..127"),
    "taken from small": (lambda i: i - 1, SMALL_U, "n 0..255"),
    "added to arange": (lambda x, i: torch.arange(x.shape[0]) + i, X, IDS_B, "n 0..n+2"),
    "negative": (lambda i: -i, NEGATIVE, "n -3..2"),
    "negative of unsigned": (lambda i: -i, SMALL_U, "n 0..255"),
    "absolute": (lambda i: i.abs(), integers("n", low=-5), "n 0..5"),
    "absolute of all int8": (lambda x: x.to(I8).abs(), X, "n,4 -128..127"),
    "divided": (lambda i: i // 2, NEGATIVE, "n -1..1"),
    "divided by": (lambda i: torch.div(i, 2, rounding_mode="floor"), NEGATIVE, "n -1..1"),
    "divided towards 0": (lambda i: torch.div(i, 2, rounding_mode="trunc"), IDS_B, "n 0..1"),
    "divided below towards 0": (lambda i: torch.div(i, 2, rounding_mode="trunc"), NEGATIVE, "n"),
    "divided by tensor": (lambda i: i // torch.full((), 2), NEGATIVE, "n -1..1"),
    "divided by below": (lambda i: i // -2, IDS_R, "n real"),
    "divided by rows": (
        lambda i, j: i // j, IDS_R, integers("n", low=1, is_bound=False, is_real=True), "n real"),
    "divided by positive rows": (lambda i, j: i // (j + 1), IDS, IDS_B, "n"),
    "divided by floats": (lambda i, x: i // x[:, 0], IDS, X, "n"),
    "small divided by large": (lambda i: i // 1000, SMALL, "n -128..127"),
    "shifted": (lambda i: i >> 1, NEGATIVE, "n -1..1"),
    "shifted far": (lambda i: aten.__rshift__(i, 70), NEGATIVE, "n -1..0"),
    "rest": (lambda i: i % 3, IDS, "n 0..2"),
    "rest of below": (lambda i: i % -3, IDS_R, "n real"),
    "rest of nothing": (lambda i: i % 1, IDS, "n 0..0"),
    "rest of small": (lambda i: i % 1000, SMALL, "n -128..127"),
    "fmod": (lambda i: i.fmod(3), IDS_B, "n 0..2"),
    "fmod of below": (lambda i: i.fmod(3), NEGATIVE, "n"),
    "rest of a number": (lambda i: torch.remainder(7, i + 1), IDS_B, "n"),
    "masked": (lambda i: i & 6, IDS, "n 0..6"),
    "masked both": (lambda i, j: i & j, IDS_B, integers("n", high=9), "n 0..3"),
    "masked by below": (lambda i: i & -2, IDS, "n"),
    "clamped": (lambda i: i.clamp(1, 2), IDS, "n 1..2"),
    "clamped below": (lambda i: i.clamp(min=1), IDS_B, "n 1..3"),
    "clamped above": (lambda i: i.clamp(max=1), IDS, "n ..1"),
    "clamped to nothing": (lambda i: i.clamp(5, 2), IDS, "n 2..2"),
    "clamp min": (lambda i: aten.clamp_min(i, 1), IDS_B, "n 1..3"),
    "clamp max": (lambda i: aten.clamp_max(i, 1), IDS_B, "n 0..1"),
    "clamped by tensors": (lambda i, j: i.clamp(j, j + 1), IDS, IDS_B, "n 0..4"),
    "small clamped by large": (lambda i: i.clamp(max=torch.full((), 1000)), SMALL, "n -128..127"),
    "maximum": (lambda i, j: torch.maximum(i, j), IDS, IDS_B, "n 0.."),
    "minimum": (lambda i, j: torch.minimum(i, j), IDS, IDS_B, "n ..3"),
    "minimum of both": (lambda i, j: torch.minimum(i, j), IDS_B, NEGATIVE, "n -2..3"),
    "small minimum of large": (lambda i: torch.minimum(i, torch.full((), 1000)), SMALL, "n -128..127"),
    "where": (lambda i, j: torch.where(i > 0, i, j), IDS_B, NEGATIVE, "n -2..3"),
    "where of numbers": (lambda i: torch.where(i > 0, 1, -1), IDS, "n -1..1"),
    "masked fill": (lambda i: i.masked_fill(i > 1, -1), IDS_B, "n -1..3"),
    "filled": (lambda i: i.fill_(2), IDS, "n 2..2"),
    "zeroed": (lambda i: i.zero_(), IDS_R, "n real 0..0"),
    "less": (lambda i: i < 4, IDS_B, "n 1..1"),
    "not less": (lambda i: i < 0, IDS_B, "n 0..0"),
    "at most": (lambda i: i <= 3, IDS_B, "n 1..1"),
    "greater": (lambda i: i > 3, IDS_B, "n 0..0"),
    "at least": (lambda i: i >= 0, IDS_B, "n 1..1"),
    "less perhaps": (lambda i: i < 3, IDS_B, "n 0..1"),
    "small less than large": (lambda i: i < 1000, SMALL, "n 0..1"),
    "small less than a large tensor": (lambda i: i < torch.full((), 1000), SMALL, "n 0..1"),
    "places less than later ones": (
        lambda i, x: i < torch.arange(x.shape[0]) + x.shape[1] * 9, IDS_B, X, "n 1..1"),
    "an index of ops": (lambda x, w: w[(x.argmax(-1) * 2 + 1).clamp(max=8) // 3], X, W, "n,4"),
    # Writes.
    "write of column": (written(lambda x, y: x[:, 0].copy_(y[:, 1])), XR, XR, "n,4 real"),
    "write of row": (written(lambda x, y: x[0].copy_(y[1])), real("n+3", H), real("n+3", H), "n+3,4"),
    "write of later rows": (written(lambda x, y: x[1:].copy_(y[1:])), XR, XR, "n,4"),
    "write of rows in steps": (written(lambda x: x[::2].mul_(2)), XR, "n,4"),
    "write of diagonal beside": (written(lambda x: x.diagonal(1).mul_(2)), anything("n+3", "n+3"), "n+3,n+3"),
    "write of diagonal": (written(lambda x: x.diagonal().mul_(2)), SQUARE_R, "n,n"),
    "write of row of table": (written(lambda x: x[0].mul_(2)), SQUARE_R, "n,n"),
    "write through views": (
        written(lambda x, y: x.view(-1, 2, 2).transpose(0, 1)[1].add_(y[:, :2])), XR, XR, "n,4 real"),
    "write of flat": (written(lambda x: x.view(-1).mul_(2)), XR, "n,4 real"),
    "write of block": (lambda x: filled(torch.cat([x, x])[x.shape[0] :], 2), XR, "n,4 real"),
    "write of integers": (written(lambda i, j: i[:, 0].copy_(j)), TABLE_IDS, WIDE, "n,4"),
    "write of small": (written(lambda i: i.add_(127)), SMALL, "n -128..127"),
    "write of operand": (lambda x: x.add_(1), X, "n,4"),
    "write of operand's row": (lambda x: (x[0].zero_(), x * 2)[1], XR, "n,4"),
    "out": (out_of(torch.add, lambda x, y: torch.empty_like(x)), X, X, "n,4"),
    "out of integers": (
        out_of(torch.max, lambda i, j: torch.full((3,), 0)), integers(3), integers(3, high=9), "3"),
    "out of dims": (
        out_of(lambda x, out: torch.max(x, 1, out=out), lambda x: (x.new_empty(2), x.new_empty(2))),
        integers(2, 3), "2; 2"),
    "state is written": (lambda x, w: (w.add_(1), x @ w)[1], X, W, "n,4"),
}
MIXES, COUNTS, UNKNOWN, DATA = "mixes_tokens", "token_count_as_value", "unknown_op", "data_dependent"
MIXING = {
    "sum over tokens": (lambda x: x.sum(0), X, MIXES),
    "sum of all": (lambda x: x.sum(), X, MIXES),
    "largest of all": (lambda x: x.max(), X, MIXES),
    "least of all": (lambda x: x.min(), X, MIXES),
    "median of all": (lambda x: x.median(), X, MIXES),
    "nanmedian of all": (lambda x: x.nanmedian(), X, MIXES),
    "all, as a value": (lambda m: m.all() & m[:, 0], MASK, MIXES),
    "any of all": (lambda m: m.any().logical_not() & m, MASK, MIXES),
    "any, as a value": (lambda m: m.any(0) & m, MASK, MIXES),
    "all into memory": (out_of(torch.all, lambda m: torch.empty((), dtype=BOOL)), MASK, MIXES),
    "softmax over tokens": (lambda x: x.softmax(0), X, MIXES),
    "sort over tokens": (lambda x: x.sort(0), X, MIXES),
    "flip": (lambda x: x.flip(0), X, MIXES),
    "roll": (lambda x: x.roll(1, 0), X, MIXES),
    "roll of all": (lambda x: x.roll(1), X, MIXES),
    "renorm": (lambda x: x.renorm(2, 1, 1.0), X, MIXES),
    "layer norm": (lambda x: F.layer_norm(x, x.shape), X, COUNTS),
    "cumsum over heads": (lambda x: x.T.reshape(-1).cumsum(0), X, MIXES),
    "cumsum over table": (lambda x: x.view(-1).cumsum(0), SQUARE, MIXES),
    "group norm": (lambda x: F.group_norm(x.T[None], 2), X, MIXES),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), X, MIXES),
    "gram": (lambda x: x.T @ x, X, MIXES),
    "gram in blocks": (lambda x: x.mT @ x, MID, MIXES),
    "mv": (lambda x: x.T @ x[:, 0], X, MIXES),
    "solved over tokens": (lambda x: torch.linalg.solve_triangular(x, x, upper=True), SQUARE, MIXES),
    "attention over tokens": (
        lambda q: F.scaled_dot_product_attention(q, q, q), anything(1, 2, "n", 16, dtype=F32), MIXES),
    "attention to tokens": (
        lambda q, k: F.scaled_dot_product_attention(k, q, q), anything(1, 2, "n", 16, dtype=F32),
        anything(1, 2, 8, 16, dtype=F32), MIXES),
    "causal attention": (
        lambda q, k: aten._scaled_dot_product_flash_attention_for_cpu(q, k, k, is_causal=True)[0],
        anything(1, 2, "n", 16, dtype=F32), anything(1, 2, 8, 16, dtype=F32), MIXES),
    "attention by itself": (
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        anything("n", 16, dtype=F32), MIXES),
    "attention with dropout": (
        lambda q: aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)[0],
        anything("n", 2, 8, 16, dtype=F32), MIXES),
    "groups that carry tokens": (
        lambda x, w, o: torch._grouped_mm(x, w, o), anything("n", 16, dtype=BF16),
        anything("n", 16, 16, dtype=BF16), integers("n", dtype=I32), MIXES),
    "groups of blocks": (
        lambda x, w, o: torch._grouped_mm(torch.cat([x, x]), w, o), anything("n", 16, dtype=BF16),
        anything(3, 16, 16, dtype=BF16), integers(3, dtype=I32), MIXES),
    "weights of rows": (
        lambda x: aten._weight_int8pack_mm(x, x.to(I8), torch.ones(x.shape[0], dtype=BF16)),
        anything("n", 16, dtype=BF16), MIXES),
    "kernel of rows": (lambda x, w: F.conv1d(w[None], x[:, :, None]), X, W, MIXES),
    "convolution in strides": (
        lambda x, w: F.conv1d(x[None], w, stride=2), anything(H, "n+3"), anything(2, H, 3), MIXES),
    "convolution transposed": (lambda x, w: F.conv_transpose1d(x[None], w), FRONT, anything(H, 2, 3), MIXES),
    "scale of other rows": (
        lambda x, w, s: torch._scaled_mm(x, w.t(), torch.cat([s, s]), torch.ones(1, 16), out_dtype=BF16),
        anything("2*n", 16, dtype=F8), anything(16, 16, dtype=F8), anything("n", 1, dtype=F32), MIXES),
    "groups of tokens": (
        lambda x: torch._grouped_mm(x.T, x, places(1).int()), anything("n", 16, dtype=BF16), MIXES),
    "cat of others": (lambda x: torch.cat([x[1:], x]), X, MIXES),
    "cat behind blocks": (lambda x, w: torch.cat([w, torch.cat([x, x])]), X, W, MIXES),
    "cat of tails": (lambda x: torch.cat([F.pad(x, (0, 1))] * 2), V, MIXES),
    "repeat of a tail": (lambda x: F.pad(x, (0, 1)).repeat(2), V, MIXES),
    "repeat ever fewer times": (lambda x: x.repeat(30 - x.shape[0], 1), X, MIXES),
    "blocks as often as rows": (lambda x: torch.cat([x, x]).repeat(x.shape[0], 1), X, MIXES),
    "pad before blocks": (lambda x: F.pad(torch.cat([x, x]), (0, 0, 1, 0)), X, MIXES),
    "pad that cuts in front": (lambda x: F.pad(x, (0, 0, -1, 0)), LONG, MIXES),
    "pad to a multiple": (lambda x: F.pad(x, (0, 0, 0, 8 - x.shape[0] % 8)), X, COUNTS),
    "view in parts": (lambda x: x.view(4, -1), FLAT, MIXES),
    "view of rows as columns": (lambda x: x.view(4, -1), X, MIXES),
    "view of half": (lambda x: x.view(x.shape[0] // 2, -1), X, MIXES),
    "view of table in others": (lambda x: x.view(-1, 2), anything("2*n", "n"), MIXES),
    "blocks cut": (lambda x: x.repeat(3, 1).view(x.shape[0], 3, H), X, MIXES),
    "view of a tail in parts": (lambda x: F.pad(x, (0, 4)).view(-1, 4), FLAT, MIXES),
    "bits over rows": (lambda x: x.T.contiguous().view(F64), anything("2*n", H, dtype=F32), MIXES),
    "bits of rows": (lambda x: x.view(I64), anything(H, "2*n", dtype=F32), MIXES),
    "last": (lambda x: x[-1], X, MIXES),
    "last rows": (lambda x: x[-2:], LONG, MIXES),
    "row in a tail": (lambda x: F.pad(x, (0, 4))[3], V, MIXES),
    "row in blocks": (lambda x: torch.cat([x, x])[1], LONG, MIXES),
    "row of the count": (lambda x, w: w.select(0, x.shape[0]), X, W2, COUNTS),
    "from the count": (lambda x, w: w[x.shape[0] :], X, W2, MIXES),
    "from half": (lambda x: x[x.shape[0] // 2 :], X, MIXES),
    "first of blocks": (lambda x: torch.cat([x, x])[:3], LONG, MIXES),
    "rows in a tail": (lambda x: F.pad(x, (0, 4))[:3], V, MIXES),
    "all but the count": (lambda x, w: w[: 9 - x.shape[0]], X, W2, MIXES),
    "steps through blocks": (lambda x: torch.cat([x, x])[::2], X, MIXES),
    "split of rows": (lambda x: x.split(x.shape[0] // 2), anything("2*n", H), MIXES),
    "unfold of blocks": (lambda x: torch.cat([x, x]).unfold(0, 2, 1), X, MIXES),
    "unfold of a tail": (lambda x: F.pad(x, (0, 4)).unfold(0, 2, 1), V, MIXES),
    "diagonal of blocks": (lambda x: torch.cat([x, x]).diagonal(), SQUARE, MIXES),
    "tril of blocks": (lambda x: torch.cat([x, x]).tril(), SQUARE, MIXES),
    "other places meet": (lambda x: x[1:] + x[:-1].T.reshape(-1).view(-1, H), X, MIXES),
    "blocks meet rows": (lambda x: torch.cat([x, x]) + x.repeat_interleave(2, 0), X, MIXES),
    "index of anything": (lambda i, w: w[i], IDS, W, MIXES),
    "index bound below": (lambda i, w: w[i.clamp(min=0)], IDS, W, MIXES),
    "index too large": (lambda i, w: w[i + 9], IDS_B, W, MIXES),
    "index below": (lambda i, w: F.embedding(i, w), NEGATIVE, W, MIXES),
    "index of a cast": (lambda x, w: w[(x[:, 0].sigmoid() * 3).long()], X, W, MIXES),
    "index of real rows": (lambda x, i: x[i], X, IDS_R, MIXES),
    "index of rows before": (lambda x: x[torch.arange(x.shape[0]) - 1], X, MIXES),
    "index of rows behind": (lambda x, i: x[i + 1], X, PLACES, MIXES),
    "index of blocks": (lambda x, i: torch.cat([x, x])[i], X, PLACES, MIXES),
    "index of a tail": (lambda x, i: F.pad(x, (0, 0, 0, 2))[i + 1], X, PLACES, MIXES),
    "index of a mask": (lambda x: x[x > 0], V, DATA),
    "fixed mask": (lambda x, m: x[:, m], X, SETTLED_MASK, DATA),
    "put by a mask": (
        lambda x, m: aten.index_put(x, [None, m], torch.zeros((), dtype=F64)), X, SETTLED_MASK, DATA),
    "gather of other rows": (lambda x, i: x.gather(1, i), LONG, TABLE_IDS, MIXES),
    "gather over tokens": (lambda x, i: x.gather(0, i), X, TABLE_IDS, MIXES),
    "index select of anything": (lambda i, w: w.index_select(0, i), IDS, W, MIXES),
    "scatter of anything": (lambda x, i: x.scatter(1, i, x), X, integers("n", H, is_bound=False), MIXES),
    "scatter to a row": (lambda x, w: x.scatter(0, torch.zeros(1, H, dtype=I64), w[:1]), XR, W, MIXES),
    "scatter over tokens": (lambda x, i: x.scatter(0, i, x), X, TABLE_IDS, MIXES),
    "scatter of other rows": (lambda x, y, i: x.scatter(1, i, y), X, LONG, TABLE_IDS, MIXES),
    "scatter onto a table": (lambda w, i, y: w.scatter_add(0, i, y), W2, integers("n", H, high=8), X, MIXES),
    "put at places": (lambda x, i: x.index_put((i,), x), X, PLACES, MIXES),
    "put of rows": (lambda x, y: x.index_put((places(0, 1),), y[:2]), LONG, LONG, MIXES),
    "put of other rows": (
        lambda x, y: aten.index_put(x.T, [places(0, 1)], torch.cat([y, y])[:, :2].T), anything("2*n", H), X,
        MIXES),
    "put of a tail": (
        lambda x, y: aten.index_put(y, [None, places(0)], F.pad(x, (0, 1))[:, None]),
        V, anything("n+1", 2), MIXES),
    "put behind rows": (lambda x, i, y: x.index_put((i,), y), X, integers(2, high="n"), anything(H), MIXES),
    "add at places": (lambda x, i: x.index_add(0, i, x), X, PLACES, MIXES),
    "add of other rows": (
        lambda x, y: x.index_add(1, places(0), torch.cat([y, y])[:, :1]), anything("2*n", H), X, MIXES),
    "masked scatter": (lambda x, m: x.masked_scatter(m, x), X, MASK, MIXES),
    "search over tokens": (lambda x: torch.searchsorted(x, x), V, MIXES),
    "search in other rows": (
        lambda x, y: torch.searchsorted(x, torch.cat([y, y])), anything("2*n", H), X, MIXES),
    "isin over tokens": (lambda i: torch.isin(i, i), IDS, MIXES),
    "sorter of rows": (lambda w, x: torch.searchsorted(w, x, sorter=x.argsort(-1)), X, X, MIXES),
    "divided by zero": (lambda i, j: i // j, IDS_B, integers("n", low=1, is_bound=False), MIXES),
    "rest by zero": (lambda i, j: i % j, IDS_B, IDS_B, MIXES),
    "least divided": (lambda x: x.long() // -1, X, MIXES),
    "assert": (lambda i: (aten._assert_async((i < 4).all()), i)[1], IDS, MIXES),
    "one hot of any": (lambda i: F.one_hot(i, H), IDS, MIXES),
    "assert of small": (lambda i: (aten._assert_async((i < 1000).all()), i)[1], SMALL, MIXES),
    "times count": (lambda x: x * x.shape[0], X, COUNTS),
    "full of count": (lambda x: torch.full((x.shape[0],), x.shape[0]), X, COUNTS),
    "arange down": (lambda x: torch.arange(x.shape[0], 0, -1), X, COUNTS),
    "arange from count": (lambda x: torch.arange(x.shape[0], 2 * x.shape[0]), X, COUNTS),
    "half of count": (lambda x: x * (x.shape[0] / 2), X, COUNTS),
    "linspace": (lambda x: torch.full((x.shape[0] * 2,), 1.0).cumsum(0) / x.shape[0], X, COUNTS),
    "count as a tensor": (lambda x: x * torch.scalar_tensor(x.shape[0]), X, COUNTS),
    "unknown": (lambda x: torch.fft.fft(x), X, UNKNOWN),
    "as strided": (lambda x: x[0].as_strided((2, H), (H, 1)) * 1, X, UNKNOWN),
    "resized": (lambda x: x[0].resize_(8), X, UNKNOWN),
    "histogram": (lambda x: x.histc(4), X, MIXES),
    "write of other rows": (written(lambda x: x[1:].copy_(x[:-1].flip(0))), X, MIXES),
    "write to a workspace": (lambda x, w: filled(w[: x.shape[0]], 0), X, W2, MIXES),
    "write of all but the last": (written(lambda x: x[:-1].mul_(2)), X, MIXES),
    "write of the last": (written(lambda x: x[-1].mul_(2)), X, MIXES),
    "write of a part": (written(lambda x: x.split([1, x.shape[0] - 3, 2])[1].mul_(2)), LONG, MIXES),
    "write of one for all": (lambda x, w: filled(w[:1].expand(x.shape[0], -1), 0), X, W, MIXES),
    "write of half": (lambda x: filled(x.new_zeros(2 * x.shape[0])[x.shape[0] :], 1), X, MIXES),
    "write of windows": (written(lambda x: x.unfold(0, 1, 1).mul_(2)), X, MIXES),
    "write of blocks to rows": (lambda x: x.new_zeros(2 * x.shape[0], H).copy_(torch.cat([x, x])), X, MIXES),
    "out in another shape": (out_of(torch.neg, lambda x: torch.empty(0, dtype=F64)), X, UNKNOWN),
    "turned in place": (lambda x: x.t_(), X, UNKNOWN),
}
# fmt: on

# No CPU kernel, or none in each release: claims are tested where there is a CUDA device, layouts everywhere.
QUERY = anything("n", 2, 8, 64, dtype=BF16)
# fmt: off
ON_CUDA = {
    "scaled mm": (
        lambda x, w, s: torch._scaled_mm(x, w.t(), s, torch.ones(1, 16), out_dtype=BF16),
        anything("n", 16, dtype=F8), anything(16, 16, dtype=F8), anything("n", 1, dtype=F32), "n,16"),
    "flash attention": (lambda q: aten._scaled_dot_product_flash_attention(q, q, q)[0], QUERY, "n,2,8,64"),
    "efficient attention": (
        lambda q, m: aten._scaled_dot_product_efficient_attention(q, q, q, m, False)[0], QUERY,
        anything("n", 2, 8, 8, dtype=BF16), "n,2,8,64"),
    "cudnn attention": (
        lambda q: aten._scaled_dot_product_cudnn_attention(q, q, q, None, False)[0], QUERY, "n,2,8,64"),
    "int4 weights": (
        lambda x, w, s: aten._weight_int4pack_mm(x, w, 32, s), anything("n", 128, dtype=BF16),
        integers(2, 1, 32, 4, dtype=I32), anything(4, 16, 2, dtype=BF16), "n,16"),
}
# fmt: on
# These have no CUDA kernel, or one for more rows.
NOT_ON_CUDA = frozenset(["int mm", "int4 weights for a CPU", "int8 weights"])
# Of all elements, or of elements in an order over all: they refuse where one of them is a token's.
ONLY_REFUSE = frozenset("max min median nanmedian masked_scatter histc".split())
# Without its kernel it comes as other ops; "rms norm" is a claim of it on a CUDA device.
NEEDS_KERNEL = frozenset(["_fused_rms_norm"])


def kernels_of(name):
    """The functional overloads of an aten op that a traced call may come to, or the one that is named."""
    base, _, overload = name.partition(".")
    packet = getattr(aten, base, None)
    found = [getattr(packet, each) for each in packet.overloads()] if packet is not None else []
    return [
        op for op in found
        if overload in ("", op._overloadname) and torch._C._dispatch_has_kernel(op.name())
        and not any(argument.is_out or "Dimname" in str(argument.type) for argument in op._schema.arguments)
        and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    ]  # fmt: skip


def made_argument(argument, number, **settings):
    """A value for an argument by its type; an `Input` for a tensor."""
    kind = str(argument.type)
    if kind == "Tensor" or (kind == "Optional[Tensor]" and argument.name in ("min", "max")):
        if argument.name in ("condition", "mask"):
            return anything("n", H, dtype=BOOL)
        # The second is broadcast; a value is one number.
        shape = () if argument.name == "value" else (("n", H), ("n", 1), (H,))[number % 3]
        return anything(*shape, low=1, **settings)
    if argument.name == "rounding_mode":
        return "floor"
    if argument.has_default_value() and argument.name not in ("min", "max", "eps", "dtype"):
        return argument.default_value
    numbers = {"number": 2, "Optional[number]": 1, "float": 0.25, "Optional[float]": 0.25, "int": 1}
    return numbers.get(kind, F32 if argument.name == "dtype" else argument.default_value)


def calls_of(op):
    """(function, inputs) of the op, for each of some types that it takes."""
    arguments = op._schema.arguments
    is_write = any(argument.alias_info is not None and argument.alias_info.is_write for argument in arguments)
    for dtype in (F64, BF16, I8, torch.complex128):
        tensors = itertools.count()
        # Integers are divided by real ones alone.
        is_real = any(word in op.name() for word in ("div", "fmod", "remainder"))
        made = [
            made_argument(
                each, next(tensors) if "Tensor" in str(each.type) else 0, dtype=dtype, is_real=is_real
            )
            for each in arguments
        ]
        inputs = tuple(each for each in made if isinstance(each, Input))

        def function(*given, made=made, is_write=is_write):
            rest = iter(given)
            values = [next(rest) if isinstance(each, Input) else each for each in made]
            values[0] = values[0].clone() if is_write else values[0]
            positional = [value for value, each in zip(values, arguments, strict=True) if not each.kwarg_only]
            named = {
                each.name: value for value, each in zip(values, arguments, strict=True) if each.kwarg_only
            }
            return op(*positional, **named)

        given = [each.values(3, torch.Generator()) for each in inputs]
        try:
            function(*given)
            function(*(tensor.to("meta") for tensor in given))
        except (RuntimeError, ValueError, NotImplementedError):
            continue  # not of this type
        yield function, inputs


def pointwise_cases(name):
    """Cases of a pointwise op: of each overload, and of the one that writes."""
    for op in kernels_of(name):
        writing = getattr(aten, f"{name.partition('.')[0]}_", None)
        twin = getattr(writing, op._overloadname, None)
        for each in (op, twin) if twin is not None else (op,):
            yield from calls_of(each)


POINTWISE = (TAGGED + UNTAGGED).split()


@pytest.mark.parametrize("name", CLAIMED)
def test_I3_what_is_claimed_holds_whatever_padded_rows_hold(name):
    function, *inputs, claim = CLAIMED[name]
    found = judge(function, tuple(inputs))
    assert found.judged.mixes is None, found.judged.mixes.detail
    assert found.text() == claim
    assert check_claims(function, tuple(inputs), found, where=name) >= 3


@pytest.mark.parametrize("name", MIXING)
def test_I3_what_padding_may_reach_is_in_no_graph(name):
    function, *inputs, code = MIXING[name]
    found = judge(function, tuple(inputs))
    mixes = found.judged.mixes
    assert mixes is not None and mixes.code == code, mixes and mixes.detail
    check_eager(function, tuple(inputs), found, where=name)


@pytest.mark.parametrize("name", POINTWISE)
def test_I3_what_works_element_by_element_keeps_rows(name):
    cases = list(pointwise_cases(name))
    assert cases or not kernels_of(name)
    for function, inputs in cases:
        found = judge(function, inputs)
        assert found.judged.mixes is None, found.judged.mixes.detail
        assert found.text().startswith("n,4")
        assert check_claims(function, inputs, found, where=f"{name} {inputs}", pairs=((2, 5), (5, 8)))


@pytest.mark.gpu
def test_I3_what_is_claimed_holds_on_a_cuda_device():
    for name, (function, *inputs, claim) in (CLAIMED | ON_CUDA).items():
        if name not in NOT_ON_CUDA:
            found = judge(function, tuple(inputs), device="cuda")
            assert (name, found.judged.mixes, found.text()) == (name, None, claim)
            assert check_claims(function, tuple(inputs), found, where=name, device="cuda") >= 3


def test_I3_each_rule_is_exercised_and_none_fails(monkeypatch):
    firsts = [next(calls_of(op), None) for name in POINTWISE for op in kernels_of(name)]
    cases = [case for case in firsts if case is not None]
    cases += [(function, tuple(inputs)) for function, *inputs, _ in CLAIMED.values()]
    with noted_rules(monkeypatch) as (used, failures):
        for function, *inputs, claim in ON_CUDA.values():
            assert judge(function, tuple(inputs)).text() == claim
        for function, inputs in cases:
            assert judge(function, inputs).judged.mixes is None
        claimed = set(used)
        for function, *inputs, _ in MIXING.values():
            judge(function, tuple(inputs))
    assert failures == []
    absent = {name for name in POINTWISE if not kernels_of(name)}
    assert RULES.keys() - claimed - absent - NEEDS_KERNEL == ONLY_REFUSE
    assert {f"bounds {name}" for name in BOUNDS} - claimed == {"bounds view.dtype"}


@pytest.mark.parametrize(
    "name, table, wrong, function, given, found",
    [
        (
            "flip",
            RULES,
            Entry(lambda call: call.layout(), frozenset()),
            lambda x: x.flip(0),
            X,
            "other values",
        ),
        (
            "cumsum",
            RULES,
            Entry(lambda call: call.layout(), frozenset()),
            lambda x: x.cumsum(0),
            XR,
            "not real",
        ),
        ("argmax", BOUNDS, BOUNDS["zeros"], lambda x: x.argmax(-1), X, "above its bound"),
    ],
)
def test_a_wrong_rule_is_found(name, table, wrong, function, given, found, monkeypatch):
    monkeypatch.setitem(table, name, wrong)
    with pytest.raises(AssertionError, match=found):
        check_claims(function, (given,), judge(function, (given,)), where=name)


def test_torch_tags_what_is_listed_as_tagged():
    """Other releases may lack a name: 2.13 has them all. Some were tagged in it first."""
    tagged = {name: [torch.Tag.pointwise in op.tags for op in kernels_of(name)] for name in POINTWISE}
    release = [int(number) for number in torch.__version__.split(".")[:2]]
    late = {"_conj_physical", "leaky_relu"} if release < [2, 13] else set()
    assert [name for name in TAGGED.split() if not all(tagged[name]) and name not in late] == []
    assert [name for name in UNTAGGED.split() if any(tagged[name])] == []
    assert release != [2, 13] or all(tagged.values())
