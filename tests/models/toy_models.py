"""Small models with a boundary op that can be computed by hand, and a check of graphed against eager calls.

`toy_models::mix` mixes tokens causally, as attention does: row i of `out` is ``q[i] + 0.1 * (v[0] + ... +
v[i])``, and row i of `cache` becomes ``k[i]``. `toy_models::pack` is the same over packed sequences that are
given by metadata. Both note what they were called with, and can leave poison in the rows behind the real
ones, as a kernel does that computes whole tiles.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import pickle

import torch
from inspection import inspect
from torch import nn

import boundary_ops
import piecewise
from runners.bound_steps import CopyInputs
from runners.rows import repeat_row_

HIDDEN, VOCAB, CACHE_ROWS = 16, 50, 64


@dataclasses.dataclass
class OpLog:
    """What the boundary ops saw; `poison` is what they leave in padded rows of `out`, None for nothing."""

    rows: list[int] = dataclasses.field(default_factory=list)
    dense: list[bool] = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    poison: float | None = None


log = OpLog()


def _note(q, out):
    log.rows.append(q.shape[0])
    log.dense.append(out.is_contiguous())


def _overwrite_padding(out, real_out):
    """Writes `real_out` into `out`, and poison into all else that its memory holds."""
    whole = out.numel() and out.storage_offset() == 0 and out.is_contiguous()
    if log.poison is not None and whole:
        num_bytes = out.untyped_storage().nbytes()
        out.as_strided((num_bytes // out.element_size(),), (1,)).fill_(log.poison)
    out.copy_(real_out)


def _mix(q, k, v, out, cache):
    _note(q, out)
    cache[: k.shape[0]] = k
    _overwrite_padding(out, q + 0.1 * v.cumsum(0))


def _pack(q, k, v, out, cache, slots, cu_seqlens, scale):
    _note(q, out)
    log.numbers.append(scale)
    cache[slots] = k
    bounds = cu_seqlens.tolist()
    assert bounds[-1] == q.shape[0], "metadata and rows disagree"
    parts = [v[begin:end].cumsum(0) for begin, end in zip(bounds, bounds[1:], strict=False)]
    _overwrite_padding(out, q + 0.1 * scale * torch.cat(parts))


def _shift(x, out):
    """Adds 1 to `x` in place and writes its double to `out`."""
    log.rows.append(x.shape[0])
    x.add_(1)
    out.copy_(x * 2)


mix = boundary_ops.define(
    "toy_models::mix(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) cache) -> ()", _mix
)
pack = boundary_ops.define(
    "toy_models::pack(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) cache, Tensor slots, "
    "Tensor cu_seqlens, int scale) -> ()",
    _pack,
    token_args={"q": 0, "k": 0, "v": 0, "out": 0},
)
shift = boundary_ops.define("toy_models::shift(Tensor(a!) x, Tensor(b!) out) -> ()", _shift)


def _scatter_rows(index, values, out):
    """Writes `values[i]` to row `index[i]` of `out`; other rows are left alone."""
    log.rows.append(index.shape[0])
    out[index] = values


scatter_rows = boundary_ops.define(
    "toy_models::scatter_rows(Tensor index, Tensor values, Tensor(a!) out) -> ()", _scatter_rows
)


class Block(nn.Module):
    """norm · qkv · mix · output projection, with a residual: two boundary-free halves around one op."""

    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm, self.qkv, self.o = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 3 * hidden),
            nn.Linear(hidden, hidden),
        )
        self.cache = torch.zeros(CACHE_ROWS, hidden)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        out = torch.empty_like(q)
        mix(q, k, v, out, self.cache)
        return x + self.o(out)


class Toy(nn.Module):
    """Embedding · `num_blocks` blocks · `head(model, x)` · projection (where `project`)."""

    def __init__(self, head=None, *, num_blocks=2, hidden=HIDDEN, project=True):
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, hidden), nn.Embedding(CACHE_ROWS, hidden)
        self.blocks = nn.ModuleList([Block(hidden) for _ in range(num_blocks)])
        self.projection = nn.Linear(hidden, VOCAB)
        self.head, self.project = head, project

    def forward(self, ids, positions=None):
        x = self.embedding(ids)
        if positions is not None:
            x = x + self.places(positions)
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            x = self.head(self, x)
        return self.projection(x) if self.project else x


def make_ids(n, *, seed=0):
    generator = torch.Generator().manual_seed(seed + 7 * n)
    return torch.randint(0, VOCAB, (n,), generator=generator)


def _through_torch_save(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


# Ways to copy a model, by name.
COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": _through_torch_save,
}


def state_of(model):
    """Copies of all that a call may write: parameters, buffers, and tensors kept as plain attributes."""
    found = {}
    for path, module in model.named_modules():
        tables = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for key, value in table.items():
                if isinstance(value, torch.Tensor):
                    found[f"{path}.{key}"] = value
    return {name: (tensor, tensor.detach().clone()) for name, tensor in found.items()}


def put_back(state):
    with torch.no_grad():
        for tensor, before in state.values():
            tensor.copy_(before)


def overwrite_static_memory(graphed):
    """Fills every static buffer with bytes that read as NaN or as numbers far out of range [I2]."""
    for storage in inspect(graphed).buffers._storages.values():
        storage.fill_(0x7F)


def poison_copies(graphed, value):
    """From now on, padded rows of float inputs and eager results hold `value` instead of a real row [I3]."""
    for signature in inspect(graphed).signatures:
        for served in signature.served.values():
            for bound in served.steps._bound.values():
                for step in bound.steps:
                    inputs = step if isinstance(step, CopyInputs) else getattr(step, "copies", None)
                    for copy_in in inputs.copies if inputs is not None else ():
                        if copy_in.rows.dtype.is_floating_point:
                            copy_in.pads = [(pad, torch.full_like(pad, value)) for pad, _ in copy_in.pads]


@contextlib.contextmanager
def padding_of_row(row):
    """In this block padded rows of inputs and eager results repeat this real row, not the first [I2]."""
    plain = CopyInputs.replay

    def replay(step, env):
        plain(step, env)
        for copy_in in step.copies:
            repeat_row_(copy_in.buffer, copy_in.rows.shape, copy_in.units, row=row)

    CopyInputs.replay = replay
    try:
        yield
    finally:
        CopyInputs.replay = plain


@contextlib.contextmanager
def op_poison(value):
    log.poison = value
    try:
        yield
    finally:
        log.poison = None


def leaves_of(value):
    """Tensors and plain values of a result, with the path to each."""
    if dataclasses.is_dataclass(value) and not isinstance(value, dict):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    elif isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, (tuple, list)):
        items = list(enumerate(value))
    else:
        return {(): value}
    return {(key, *path): leaf for key, item in items for path, leaf in leaves_of(item).items()}


def assert_same(got, want, *, exact, where, tolerance=2e-5):
    """Same classes, structure, shapes and dtypes; same bits where `exact`, else within `tolerance`, of each
    value or of one."""
    assert type(got) is type(want), where
    left, right = leaves_of(got), leaves_of(want)
    assert list(left) == list(right), where
    for path, expected in right.items():
        actual, place = left[path], f"{where}, leaf {path}"
        assert type(actual) is type(expected), place
        if not isinstance(expected, torch.Tensor):
            assert actual == expected, place
            continue
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, place
        if exact or not expected.dtype.is_floating_point:
            same = torch.equal(actual.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert same, f"{place}: differs by {_distance(actual, expected)}"
        else:
            torch.testing.assert_close(
                actual,
                expected,
                rtol=tolerance,
                atol=tolerance,
                equal_nan=True,
                msg=lambda text, p=place: f"{p}: {text}",
            )


def _distance(left, right):
    return (left.double() - right.double()).abs().max().item() if left.numel() else 0


def compare(graphed, model, arguments, *, exact, where, keywords=None, tolerance=2e-5):
    """One call of each, from the same state: results, model state and the inputs afterwards must agree, as
    `assert_same` does.

    Returns the two results.
    """
    before = state_of(model)
    keywords, how = keywords or {}, dict(exact=exact, tolerance=tolerance)
    overwrite_static_memory(graphed)
    eager_arguments, graphed_arguments = copy.deepcopy(arguments), copy.deepcopy(arguments)
    torch.manual_seed(11)
    want = model(*eager_arguments, **keywords)
    after = state_of(model)
    put_back(before)
    torch.manual_seed(11)
    got = graphed(*graphed_arguments, **keywords)
    for name, (tensor, _) in before.items():
        expected = after[name][1]
        assert_same(tensor.detach(), expected, where=f"{where}, state {name}", **how)
    for index, (mine, theirs) in enumerate(zip(graphed_arguments, eager_arguments, strict=True)):
        assert_same(mine, theirs, where=f"{where}, input {index} afterwards", **how)
    assert_same(got, want, where=where, **how)
    put_back(before)
    return got, want


def check_sizes(
    model,
    *,
    buckets=(8, 16),
    example=5,
    sizes=(1, 2, 7, 8, 9, 15, 16, 17),
    arguments=None,
    eager=(),
    poison=True,
    **config,
):
    """Captures at `example` tokens, compares at each size, and again with poisoned padding.

    Sizes in `eager` must fall back; others that a bucket holds must replay. Bitwise at bucket size.

    Returns:
        The graphed model.
    """
    arguments = arguments or (lambda n: (make_ids(n), torch.arange(n)))
    graphed = piecewise.compile(model, buckets=buckets, progress=False, **config)
    state = state_of(model)
    report = graphed.capture(*arguments(example))
    assert report.ok, report
    for name, (tensor, before) in state.items():
        assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0)), f"capture changed {name} [I8]"
    rounds = [None, float("nan"), 1e4] if poison else [None]
    with torch.no_grad():
        for value in rounds:
            if value is not None:
                poison_copies(graphed, value)
            with op_poison(value):
                for n in sizes:
                    replays = graphed.stats.replays
                    exact = n in buckets or n > max(buckets) or n in eager
                    compare(graphed, model, arguments(n), exact=exact, where=f"{n} tokens, poison {value}")
                    served = graphed.stats.replays > replays
                    assert served is (n <= max(buckets) and n not in eager and n > 0), (n, graphed.stats)
    return graphed


def kinds(graphed, position=0):
    """The kinds of the segments, such as "gbgbg"."""
    return "".join(segment.kind[0] for segment in graphed.report().plans[position].segments)


def reasons(graphed, position=0):
    return dict(graphed.report().plans[position].reasons())
