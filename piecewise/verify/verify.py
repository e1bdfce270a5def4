"""Compares replays with the model: each captured bucket at the sizes around its edge, with poisoned padding.

At each size the model, the plan on padded rows with graph segments' functions instead of graphs, and replays
with several paddings run from the same state, inputs and random numbers. docs/DESIGN.md says what is compared
and how faults are told apart. All state is restored afterwards, and no call is counted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from boundary_ops import PrefillBatch
from piecewise import torch_api
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.capture.call_router import preview
from piecewise.capture.captured_call import CapturedSignature, FoundCall
from piecewise.capture.store import GraphStore
from piecewise.prefill_case import PrefillCase
from piecewise.verify.differences import TensorDifference, Tolerance, compare_values
from piecewise.verify.locate_difference import SegmentWalk
from piecewise.verify.poison import AS_SERVED, WITHOUT_GRAPHS, Poison, overwrite_static_memory, poisons_for
from piecewise.verify.report import Difference, SizeCheck, VerifyReport
from runners.bound_steps import StateChanged, copy_elements
from runners.engines import native_engine
from runners.stats import FallbackReason
from runners.step_plan import StepPlan


def edge_sizes(buckets: Sequence[int], max_padding_ratio: float | None = None) -> list[int]:
    """Lists token counts at each bucket's edges: itself, one less, the smallest served and one more."""
    found: set[int] = set()
    below = 0
    for bucket in sorted(buckets):
        smallest = below + 1
        while max_padding_ratio is not None and bucket > max_padding_ratio * smallest:
            smallest += 1
        found |= {n for n in (bucket, bucket - 1, smallest, smallest + 1) if below < n <= bucket}
        below = bucket
    return sorted(found)


def verify(
    model: nn.Module, find: Callable[[Sequence[Any], Mapping[str, Any]], FoundCall], store: GraphStore,
    args: Sequence[Any], kwargs: Mapping[str, Any], make_inputs: Callable[..., Any] | None,
) -> VerifyReport:  # fmt: skip
    """Implements `GraphedModule.verify`, which holds its lock meanwhile; `find` says what serves a call."""

    def check(args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int = 0) -> SizeCheck:
        with torch.no_grad(), _uncounted_step():
            signatures, eager, *bound = find(args, kwargs)
            count, found = preview(store, signatures, *bound)
            if isinstance(found, FallbackReason):
                return SizeCheck(max(num_tokens, count), None, str(found))
            return _SizeVerifier(model, store, *found).run(eager)

    checks = [check(args, kwargs)] if args or kwargs or make_inputs is None else []
    if make_inputs is not None:
        case, config = PrefillCase(model, make_inputs), store.config
        for size in edge_sizes(config.buckets, config.max_padding_ratio):
            with case.inputs(size) as inputs:
                checks.append(check(*inputs, size))
    # Of two checks of one size, one that found a difference, else the later one.
    checks.sort(key=lambda each: (each.num_tokens, each.difference is not None))
    return VerifyReport(tuple({each.num_tokens: each for each in checks}.values()))


@dataclass(frozen=True, slots=True)
class RunResult:
    """Holds copies of a result's structure and leaves, and of the watched tensors by name. A tensor subclass
    counts as its class, in the structure, and its inner tensors, as leaves."""

    structure: tuple[Structure, tuple[tuple[type, int], ...]]
    leaves: list[Any]
    watched: dict[str, torch.Tensor]

    @classmethod
    def of(cls, call: Callable[[], Any], watched: Mapping[str, torch.Tensor]) -> RunResult:
        """Runs `call()`, and copies its result, which the next run may overwrite."""
        structure, leaves = flatten_structure(call())
        # A subclass defines its own comparisons, so all of its inner tensors are compared.
        plain = torch_api.plain_tensors
        opened = [list(plain(x)) if torch_api.is_wrapper(x) else [x] for x in leaves]
        pairs = zip(leaves, opened, strict=True)
        kinds = tuple((type(leaf), len(parts)) for leaf, parts in pairs if torch_api.is_wrapper(leaf))
        parts = itertools.chain.from_iterable(opened)
        leaves = [stored(part.detach()) if isinstance(part, torch.Tensor) else part for part in parts]
        return cls((structure, kinds), leaves, {name: stored(tensor) for name, tensor in watched.items()})

    def difference(
        self, found: RunResult, tolerance: Tolerance | None, before: Mapping[str, torch.Tensor] | None = None
    ) -> tuple[str, TensorDifference] | None:
        """Finds the name and kind of the first difference of `found`, results before watched tensors, which
        were `before` the call; without a tolerance bits must be equal."""
        if self.structure != found.structure:
            return "the result", TensorDifference(detail="its structure is not eager's")
        for index, (left, right) in enumerate(zip(self.leaves, found.leaves, strict=True)):
            if (difference := compare_values(left, right, tolerance)) is not None:
                return f"result leaf {index}", difference
        for name, tensor in self.watched.items():
            kept = before[name] if before is not None else None
            difference = compare_values(tensor, found.watched[name], tolerance, before=kept)
            if difference is not None:
                return name, difference
        return None


def stored(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor, to the host where the device has no room for four of it."""
    memory = native_engine(tensor.device).free_memory(tensor.device)
    has_room = memory is None or 4 * tensor.numel() * tensor.element_size() <= memory[0]
    return tensor.clone() if has_room else tensor.cpu()


def has_same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal bits; false for any NaN."""
    right = right.to(left.device)
    if not torch.equal(left, right):
        return False
    return not left.dtype.is_floating_point or torch.equal(left.signbit(), right.signbit())


class _Rehearsal(Exception):
    """Leaves a batch's block so that its tokens do not count as written."""


@contextmanager
def _uncounted_step() -> Iterator[None]:
    """Enters the current `PrefillBatch`, if any, without changing its cache's counts."""
    with suppress(_Rehearsal), PrefillBatch.peek() or nullcontext():
        yield
        raise _Rehearsal


class _SizeVerifier:
    def __init__(
        self, model: nn.Module, store: GraphStore,
        signature: CapturedSignature, steps: StepPlan, num_tokens: int, leaves: list[Any],
    ) -> None:  # fmt: skip
        self.model, self.store, self.signature, self.steps = model, store, signature, steps
        self.num_tokens, self.leaves, self.bucket = num_tokens, leaves, steps.padded_num_tokens
        served = signature.served[self.bucket]
        self.plan = served.plan
        self.device = leaves[self.plan.token_dim.leaf].device
        state = (value.state.get() for value in self.plan.values if value.state is not None)
        widths = [x.shape[-1] for x in state if isinstance(x, torch.Tensor) and x.dim() >= 2]
        has_tf32 = native_engine(self.device).has_tf32()
        num_graphs = len(self.plan.graph_segments())
        self.tolerance = Tolerance(max([num_tokens, *widths]), num_graphs, has_tf32)
        self.watched = self._find_watched()
        self.before = {name: stored(tensor) for name, tensor in self.watched.items()}
        self.walk = SegmentWalk(
            served, next(each for each in signature.assemblers if each.plan is self.plan),
            leaves=leaves, num_tokens=num_tokens, tolerance=self.tolerance,
        )  # fmt: skip

    def _find_watched(self) -> dict[str, torch.Tensor]:
        """Returns by name: inputs, state that the plan writes, and the model's tensors but its parameters."""
        names = self.signature.traced.trace.example.names
        leaves = enumerate(self.leaves)
        found = {f"input '{names.get(i, i)}'": leaf for i, leaf in leaves if isinstance(leaf, torch.Tensor)}
        written = {memory for segment in self.plan.segments for memory in segment.writes}
        for value in self.plan.values:
            if value.state is not None and value.memory in written:
                found[value.state.path] = value.state.get()
        for path, module in self.model.named_modules():
            for key, tensor in [*module._buffers.items(), *vars(module).items()]:
                if isinstance(tensor, torch.Tensor):
                    found[".".join(filter(None, ("model", path, key)))] = tensor
        unique: dict[Any, tuple[str, torch.Tensor]] = {}
        for name, tensor in found.items():
            for number, part in enumerate(torch_api.plain_tensors(tensor)):
                if part.layout is torch.strided:
                    key = part.data_ptr(), part.shape, part.stride(), part.dtype
                    full_name = f"{name}, part {number}" if torch_api.is_wrapper(tensor) else name
                    unique.setdefault(key, (full_name, part.detach()))
        return dict(unique.values())

    def run(self, forward: Callable[[], Any]) -> SizeCheck:
        assert self.store.engine is not None  # there is a plan
        is_padded = self.num_tokens < self.bucket
        runs = [WITHOUT_GRAPHS, *poisons_for(self.store.engine, is_padded=is_padded)]
        try:
            eager = self._result_of(forward)
            served, difference = self._compare_runs(runs, eager)
            identical = served is not None and eager.difference(served, None) is None
        except StateChanged as changed:
            return SizeCheck(self.num_tokens, self.bucket, changed.change.kind)
        finally:
            self._restore()
        dtypes = {x.dtype for x in [*eager.leaves, *eager.watched.values()] if isinstance(x, torch.Tensor)}
        floats = sorted((d for d in dtypes if d.is_floating_point or d.is_complex), key=str)
        return SizeCheck(
            self.num_tokens, self.bucket, "graph", tuple(run.name for run in runs),
            len(eager.leaves) + len(eager.watched), identical,
            {str(d).removeprefix("torch."): self.tolerance.relative(d) for d in floats}, difference,
        )  # fmt: skip

    def _compare_runs(
        self, runs: Sequence[Poison], eager: RunResult
    ) -> tuple[RunResult | None, Difference | None]:
        """Returns the served replay, None where none ran, and the first difference."""
        served: RunResult | None = None
        for run in runs:
            try:
                found = self._result(run)
            except StateChanged:
                raise
            except Exception as error:
                difference = TensorDifference(detail=f"{type(error).__name__}: {error}")
                return served, self._located(run, "the call", difference, eager=eager)
            wrong = eager.difference(found, self.tolerance, self.before)
            if wrong is not None:
                return served, self._located(run, *wrong, eager=eager)
            if served is None and run.uses_graphs:
                served = found
            elif served is not None and (bits := served.difference(found, None, self.before)) is not None:
                # Bits say nothing where an op sums in another order each time.
                if served.difference(self._result(AS_SERVED), None) is None:
                    return served, self._located(run, *bits)
        return served, None

    def _restore(self) -> None:
        for name, tensor in self.watched.items():
            if not has_same_bits(tensor, self.before[name]):
                copy_elements(tensor, self.before[name])

    def _prepare(self, poison: Poison) -> None:
        """Restores all but static memory, which is overwritten."""
        self._restore()
        overwrite_static_memory(self.steps, self.store.pool, poison)
        self._restore()  # an input may lie in static memory, where outputs="view"

    def _result(self, run: Poison) -> RunResult:
        def leaves() -> list[Any]:
            is_served = run is AS_SERVED
            return self.steps.replay(list(self.leaves), self.num_tokens) if is_served else self.walk.run(run)

        self._prepare(run)
        return self._result_of(lambda: self.signature.rebuild(leaves()))

    def _result_of(self, call: Callable[[], Any]) -> RunResult:
        with native_engine(self.device).fork_random_state(self.device):
            return RunResult.of(call, self.watched)

    def _located(
        self, run: Poison, what: str, difference: TensorDifference, *, eager: RunResult | None = None
    ) -> Difference:
        """Describes a difference and the segment where it begins, if one shows it alone. Without `eager` the
        run is right to rounding but differs in bits from the replay with other padding."""
        try:
            located = self.walk.first_difference(run, self._prepare, by_bits=eager is None)
        except Exception:
            if not math.isnan(difference.size):
                raise
            located = None  # the call raised an error, and so does the segment's own function
        details = [difference.detail]
        if eager is None:
            details = ["within rounding of eager, but it changes with what padded rows hold"]
        found: dict[str, Any] = {"tensor": what}
        if located is None:
            details.append("each segment alone agrees: the plan as a whole is not what the model computes")
        else:
            difference, segment = located.difference, located.segment
            details.append(difference.detail)
            found = dict(segment=segment.name, kind=segment.kind, op=located.op, tensor=located.tensor)
        found |= asdict(difference) | {"detail": "; ".join(filter(None, details))}
        return Difference(
            num_tokens=self.num_tokens, bucket=self.bucket, run=run.name, what=what,
            cause="plan" if eager is None else self._cause(run, eager), **found,
        )  # fmt: skip

    def _cause(self, run: Poison, eager: RunResult) -> str:
        """Returns "graphs" where the difference goes away without graphs, else "plan"."""
        if not run.uses_graphs:
            return "plan"
        try:
            found = self._result(replace(run, uses_graphs=False))
        except Exception:
            return "plan"
        return "graphs" if eager.difference(found, self.tolerance) is None else "plan"
