"""Random programs of a few lines, to be judged by the table of rows.

A line is Python that makes or writes one tensor from `v`, the values before it, and `n`, the count. It is
drawn from `LINES` and kept where it runs at two counts.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from row_cases import (
    FunctionRaises,
    Input,
    Judgement,
    anything,
    check_claims,
    check_eager,
    integers,
    judge,
    prefix_of,
)
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from piecewise.ir.effects import OpRecorder

PAIRS = ((1, 3), (2, 5), (4, 7), (6, 16))
_TRIED_AT = (5, 8)


def _kernel(*shape: int) -> torch.Tensor:
    """Weights of which no two sums are alike but for rounding."""
    return torch.linspace(1, 3, math.prod(shape), dtype=torch.float64).pow(1.5).view(shape)


_NAMES = {"torch": torch, "F": F, "F64": torch.float64, "I64": torch.int64, "kernel": _kernel}

# x, y are any values, f, g floats, i, j integers, b, c bools; the rest are numbers, see `_Drawing`.
LINES = [line.strip() for line in """
    {x}.transpose({d}, {d})
    {x}.mT
    {x}.unsqueeze({d})
    {x}.squeeze({d})
    {x}.flatten({k}, {d})
    {x}.reshape(-1)
    {x}.reshape(-1, {q})
    {x}.reshape({q}, -1)
    {x}.reshape({n}, -1)
    {x}.reshape({q}, -1, {q})
    {x}.unflatten({d}, (-1, {q}))
    {x}.unflatten({d}, ({q}, -1))
    {x}.movedim({d}, {d})
    {x}[{s}:]
    {x}[:{s}]
    {x}[{s}:{s}]
    {x}[{k}::{p}]
    {x}[:, {s}:]
    {x}[..., :{s}]
    {x}[..., {k}::{p}]
    {x}[:{n}]
    {x}[{n}:]
    {x}[{n}:{n}]
    {x}[..., :{n}]
    {x}[:, {n}:]
    {x}[{s}]
    {x}.select({d}, {s})
    {x}.narrow({d}, {k}, {n})
    {x}.split({q}, {d})[{m}]
    {x}.split({n}, {d})[{m}]
    {x}.split([{k}, {x}.shape[0] - {k}])[{m}]
    {x}.chunk({q}, {d})[{m}]
    {x}.unbind({d})[{m}]
    {x}.unfold({d}, {q}, {p})
    {x}.diagonal({s})
    {x}.repeat({q}, 1)
    {x}.repeat({q})
    {x}.repeat(1, {q})
    {x}.repeat({n}, 1)
    {x}.repeat({n})
    {x}.repeat_interleave({q}, {d})
    {x}.expand({q}, -1)
    {x}.expand({q}, -1, -1)
    {x}.expand({n}, -1)
    {x}[None].expand({n}, *{x}.shape)
    {x}.unsqueeze({d}).expand_as({y})
    {x}.clone()
    {x}.contiguous()
    {x}.tril({s})
    {x}.triu({s})
    {x}.flip({d})
    {x}.roll({s}, {d})
    {x}.roll({s})
    torch.cat([{x}, {y}], {d})
    torch.cat([{x}, {x}], {d})
    torch.cat([{x}, {y}, {x}], {d})
    torch.cat([{x}[:1], {x}[:-1]])
    torch.stack([{x}, {y}], {d})
    torch.stack([{x}, {x}], {d})
    F.pad({x}, ({k}, {k}))
    F.pad({x}, ({s}, {s}))
    F.pad({x}, (0, 0, {s}, {s}))
    {f} * {g}
    {f} + {g}
    {f} - {g}
    {f} * 2
    {f}.sigmoid()
    {f}.nan_to_num(1.0)
    torch.maximum({f}, {g})
    torch.where({b}, {f}, {g})
    {f}.masked_fill({b}, 0.5)
    {f} > {g}
    {f} > 0
    ~{b}
    {b} & {c}
    {b}.long()
    {f}.sigmoid().mul(4).long()
    {f}.sum({d})
    {f}.sum({d}, keepdim=True)
    {f}.amax({d})
    {f}.argmax({d})
    {f}.argmax({d}, keepdim=True)
    {f}.max({d})[{m}]
    {f}.logsumexp({d})
    {f}.mean()
    {i}.sum({d})
    {i}.amax({d})
    {b}.any({d})
    {b}.all()
    {b}.sum({d})
    {f}.softmax({d})
    {f}.cumsum({d})
    {i}.cumsum({d})
    {b}.cumsum({d})
    {f}.cummax({d})[{m}]
    {f}.sort({d})[{m}]
    {f}.topk({q}, {d})[{m}]
    {i}.sort({d}, stable=True)[{m}]
    {i}.topk({q}, {d})[0]
    F.layer_norm({f}, {f}.shape[-1:])
    F.glu({f}, {d})
    F.group_norm({f}, 2)
    F.instance_norm({f})
    {f}.renorm(2, {d}, 1.0)
    {f}.diff(dim={d})
    {f} @ {g}
    {f} @ {g}.mT
    torch.addmm({x}, {f}, {g})
    torch.linalg.solve_triangular({f}.exp(), {g}, upper=True)
    {f} @ {f}.mT
    F.linear({f}, {g})
    torch.cdist({f}, {g})
    F.conv1d({f}.mT[None], kernel(2, {f}.shape[-1], {q}), padding={k}, dilation={p})[0].mT
    F.conv1d({f}[:, None], kernel(2, 1, {q}), padding={k})
    F.conv1d({f}.mT[None], kernel(2, {f}.shape[-1], 3), padding=2)[0].mT[:{f}.shape[0]]
    {x}[{i}]
    {x}[..., {i}]
    {x}[{i}, {j}]
    {x}[:, {i}]
    {x}[{i}, :, {j}]
    F.embedding({i}, {f})
    {x}.index_select({d}, {i})
    {x}.gather({d}, {i})
    {f}.gather({d}, {f}.argmax({d}, keepdim=True))
    {x}[{f}.argmax({d})]
    {x}.take_along_dim({f}.argsort({d}), {d})
    torch.searchsorted({f}, {g})
    torch.bucketize({f}, {g})
    torch.isin({i}, {j})
    F.one_hot({i}, {q})
    F.one_hot({i} % {q}, {q})
    {f}.scatter({d}, {i}, {g})
    {f}.scatter({d}, {i}, 2.0)
    {f}.scatter_add({d}, {i}, {g})
    {f}.scatter_reduce({d}, {i}, {g}, "amax")
    {i}.scatter({d}, {j}, 1)
    torch.zeros_like({f}).scatter({d}, {f}.topk({q}, {d})[1], 1.0)
    {f}.index_add({d}, {i}, {g})
    {f}.index_copy({d}, {i}, {g})
    {f}.index_fill({d}, {i}, 0.0)
    {f}.index_put(({i},), {g})
    {f}.index_put((torch.tensor([0, 1]),), {g})
    torch.ops.aten.index_put({f}, [None, torch.tensor([0, 1])], {g})
    {i} + {s}
    {i} * {q}
    {i} % {q}
    {i} // {q}
    {i} // {j}
    {i} % {j}
    {i}.fmod({q})
    torch.div({i}, {j}, rounding_mode="trunc")
    {i} - {j}
    {i} * {j}
    -{i}
    {i}.abs()
    {i}.clamp(0, {q})
    {i}.clamp(min={s})
    {i}.clamp(max={q})
    {i} & {q}
    {i} >> 1
    torch.minimum({i}, {j})
    torch.maximum({i}, {j})
    torch.where({b}, {i}, {j})
    {i}.masked_fill({b}, {s})
    {i} < {j}
    {i} < {s}
    {i}.to(torch.int8)
    {i}.to(torch.int32)
    {i}.argmax({d})
    {i}.prod({d})
    {i}.float().long()
    {i}.to(torch.uint8)
    {i}.long()
    {i}.bool()
    torch.arange({n})
    torch.arange({k}, {n} + {k})
    torch.arange({n})[:, None] >= torch.arange({n})
    torch.zeros({n}, {q}, dtype=F64)
    torch.zeros_like({x})
    torch.ones({n}, dtype=I64)
    torch.full(({n},), {s})
    torch.eye({n}, dtype=F64)
    {x}.new_zeros({n})
    torch.empty_like({f}).copy_({g})
    torch.zeros_like({i}).copy_({j})
    {f}.copy_({g})
    {f}.add_({g})
    {f}.mul_(2)
    {f}.fill_(0.5)
    {x}.zero_()
    {i}.add_({s})
    {i}.copy_({j})
    {f}.masked_fill_({b}, 1.0)
    {f}[{s}:].copy_({g}[{s}:])
    {f}[{s}:].mul_(2)
    {f}[:{s}].mul_(2)
    {f}[{s}].fill_(1.0)
    {f}[{k}::{p}].mul_(3)
    {f}[:, {s}:].copy_({g}[:, {s}:])
    {f}[..., {s}].copy_({g})
    {f}.select({d}, {s}).add_(1)
    {f}.diagonal().mul_(2)
    {f}.scatter_({d}, {i}, {g})
    {f}.index_fill_({d}, torch.tensor([0]), 0.0)
    {f}.transpose({d}, {d}).copy_({g})
    {f}.view(-1).mul_(2)
    {f}.expand({q}, -1, -1)[0].mul_(2)
    torch.mul({f}, 2, out={g})
    torch.add({i}, {j}, out={i})
""".splitlines() if line.strip()]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """Some lines.

    Attributes:
        inputs: the first of `n` rows.
        ends: after how many calls each line ended, where they were recorded.
    """

    inputs: tuple[Input, ...]
    lines: tuple[str, ...]
    ends: list[int] = dataclasses.field(default_factory=list)

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """What each line makes."""
        values = list(given)
        recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, OpRecorder)]
        for line in self.lines:
            values.append(_run(line, values))
            self.ends.extend(len(recorder.recording([]).calls) for recorder in recorders)
        return values[len(given) :]

    def check(self, where: str) -> tuple[int, int]:
        """Tests the claims of as many lines as can be in graphs.

        Returns: how many those are, and at how many counts they were tested.
        """
        try:
            found, lines = self.judged()
        except FunctionRaises:
            return 0, 0
        text = "\n".join([where, *map(str, self.inputs), *self.lines])
        check_eager(self, self.inputs, found, where=text)
        if not lines:
            return 0, 0
        found, program = self.first(found, lines), Program(self.inputs, self.lines[:lines])
        return lines, check_claims(program, self.inputs, found, where=text, pairs=PAIRS, may_raise=True)

    def judged(self) -> tuple[Judgement, int]:
        """The judgement, and how many lines can be in graphs."""
        found = judge(self, self.inputs)
        numbers = range(len(self.lines), 0, -1)
        return found, next((lines for lines in numbers if self.first(found, lines).judged.mixes is None), 0)

    def first(self, found: Judgement, lines: int) -> Judgement:
        """The judgement of the first lines alone."""
        return prefix_of(found, results=lines, calls=self.ends[lines - 1])


def _run(line: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    return eval(line, _NAMES | {"v": values, "n": values[0].shape[0]})


class _Drawing:
    """Draws lines over values that are known at two counts."""

    def __init__(self, rng: random.Random, inputs: tuple[Input, ...]) -> None:
        self.rng = rng
        generators = [torch.Generator().manual_seed(count) for count in _TRIED_AT]
        self.values = [
            [each.values(count, generator) for each in inputs]
            for count, generator in zip(_TRIED_AT, generators, strict=True)
        ]

    def line(self) -> str | None:
        """A line that runs, whose value is now known; None where none was found."""
        for _ in range(60):
            chosen: dict[str, str] = {}
            line = self.rng.choice(LINES)
            for letter in re.findall(r"\{(\w)\}", line):
                line = line.replace(f"{{{letter}}}", self._filling(letter, chosen), 1)
            if "!" in line:
                continue
            try:
                # What it writes is written in copies, until it is known to run.
                copies = [_copied(values) for values in self.values]
                made = [_run(line, values) for values in copies]
            except Exception:
                continue
            is_small = all(isinstance(tensor, torch.Tensor) and tensor.numel() < 4000 for tensor in made)
            if is_small and _shapes(copies) == _shapes(self.values):
                for values in self.values:
                    values.append(_run(line, values))
                return line
        return None

    def _filling(self, letter: str, chosen: dict[str, str]) -> str:
        rng = self.rng
        if letter in _NUMBERS:
            return str(rng.randint(*_NUMBERS[letter]))
        if letter == "n":
            return rng.choice(["n", "n", "n", "n + 1", "2 * n", "n // 2", "n - 1", "4 * n"])
        if letter not in chosen:
            fitting = [at for at, value in enumerate(self.values[0]) if _kind(value) in _KINDS[letter]]
            # Later values are drawn more often, so that lines build on each other.
            chosen[letter] = f"v[{max(rng.choice(fitting), rng.choice(fitting))}]" if fitting else "!"
        return chosen[letter]


_NUMBERS = {"d": (-2, 2), "s": (-3, 4), "k": (0, 3), "q": (1, 4), "p": (1, 3), "m": (0, 1)}
_KINDS = {"x": "fib", "y": "fib", "f": "f", "g": "f", "i": "i", "j": "i", "b": "b", "c": "b"}


def _kind(value: torch.Tensor) -> str:
    return "f" if value.dtype.is_floating_point else "b" if value.dtype is torch.bool else "i"


def _shapes(values: list[list[torch.Tensor]]) -> list[list[torch.Size]]:
    return [[value.shape for value in each] for each in values]


def _copied(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory as the values do."""
    copies: dict[int, torch.Tensor] = {}
    made = []
    for value in values:
        storage = value.untyped_storage()
        base = copies.setdefault(storage._cdata, torch.empty(0, dtype=value.dtype).set_(storage.clone()))
        made.append(
            torch.empty(0, dtype=value.dtype).set_(
                base.untyped_storage(), value.storage_offset(), value.shape, value.stride()
            )
        )
    return made


def _inputs(rng: random.Random) -> tuple[Input, ...]:
    def floats(*sizes: int | str) -> Input:
        return anything(*sizes, is_real=rng.random() < 0.5)

    def ids(*sizes: int | str, dtype: torch.dtype = torch.int64) -> Input:
        low, high = rng.choice([(0, 3), (0, 1), (-1, 2), (0, 8), (-2, -1)])
        kind = rng.choice(["anything", "real", "bound", "bound"])
        return integers(
            *sizes, dtype=dtype, low=low, high=high, is_bound=kind == "bound", is_real=kind == "real"
        )

    pool = [
        *(floats("n"), floats("n*4"), floats("n+3", 4), floats("n", "n"), floats(2, "n", 3), floats(4, "n")),
        *(floats("n", 2, 2), floats("2*n", 4), floats(4, 4), floats(30, 4), floats(4)),
        *(ids("n"), ids("n"), ids("n", 4), ids("n", 1), ids("n", dtype=torch.int8), ids(3), ids(4, "n")),
        integers("n", high="n-1", permutes=rng.random() < 0.5),
        *(anything("n", 4, dtype=torch.bool, is_real=rng.random() < 0.5), anything("n", dtype=torch.bool)),
    ]
    return (floats("n", 4), *rng.sample(pool, rng.randint(2, 4)))


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    inputs = _inputs(rng)
    drawing = _Drawing(rng, inputs)
    lines = [drawing.line() for _ in range(rng.randint(2, 6))]
    return Program(inputs, tuple(line for line in lines if line is not None))
