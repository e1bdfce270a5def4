"""Is graphed what eager is? Each captured bucket at the sizes around its edge, with poison where padding is.

For each size, from the same state, inputs and random numbers:

    eager     the model itself
    replays   as served; then with NaN (tape), +1e4 and -1e4 in every padded row; before each of them all
              static memory is overwritten

Compared are the results, and every tensor that boundary ops or eager segments write, inputs and model
state, in full: rows in use and rows that are not. Real rows must be eager's to rounding (`differences.py`),
and the same bits whatever padded rows hold. What differs is then looked for segment by segment
(`locate.py`). All is put back afterwards, and no call is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from boundary_ops import PrefillBatch
from piecewise.differences import (
    TensorDifference,
    Tolerance,
    compare_tensors,
    reduction_length,
)
from piecewise.locate import Located, SegmentWalk, random_state, set_random_state
from piecewise.plan import SegmentPlan
from piecewise.poison import AS_SERVED, Poison, poisons_for, replay_with, spoil_static_memory
from piecewise.row_samples import unchanged_random_state
from piecewise.structure import Structure, flatten_structure
from piecewise.verify_report import Difference, SizeCheck, VerifyReport
from runners.bound_steps import StateChanged, copy_elements
from runners.stats import FallbackReason

if TYPE_CHECKING:
    from piecewise.api import GraphedModule
    from piecewise.config import PiecewiseConfig
    from piecewise.signatures import CapturedSignature, ServedBucket

MakeInputs = Callable[[int], tuple[Sequence[Any], Mapping[str, Any]]]


def edge_sizes(buckets: Sequence[int], max_padding_ratio: float | None = None) -> list[int]:
    """Token counts around the edges of each bucket: itself, one less, the smallest that it serves and one
    more than that."""
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
    graphed: GraphedModule, args: Sequence[Any], kwargs: Mapping[str, Any], make_inputs: MakeInputs | None
) -> VerifyReport:
    """See `GraphedModule.verify`, which holds the module's lock around this."""
    checks = {}
    if args or kwargs or make_inputs is None:
        check = _verified(graphed, args, kwargs)
        checks[check.num_tokens] = check
    if make_inputs is not None:
        from piecewise.prefill_case import PrefillCase

        case = PrefillCase(graphed.model, make_inputs)
        config = graphed.piecewise_config
        for size in edge_sizes(config.buckets, config.max_padding_ratio):
            check = _verified(graphed, *case.inputs(size), num_tokens=size)
            known = checks.get(size)
            if known is None or known.difference is None:
                checks[size] = check
    return VerifyReport(tuple(checks[size] for size in sorted(checks)))


def verify_case(spec: str, config: PiecewiseConfig) -> VerifyReport:
    """Captures the case that a spec names, and compares it at the sizes around each bucket's edge.

    Raises:
        ConfigError, TraceError, TokenDimError: as `load_case` and `GraphedModule.capture`.
    """
    import piecewise
    from piecewise.prefill_case import load_case

    case = load_case(spec)
    graphed = piecewise.compile(case.model, config)
    args, kwargs = case.inputs(max(2, min(32, max(config.buckets))))
    with torch.no_grad():
        graphed.capture(*args, **kwargs)
        return graphed.verify(make_inputs=case.make_inputs)


def _verified(
    graphed: GraphedModule, args: Sequence[Any], kwargs: Mapping[str, Any], *, num_tokens: int = 0
) -> SizeCheck:
    with torch.no_grad(), _uncounted_step():
        count, found = _find_plan(graphed, args, kwargs)
        if isinstance(found, FallbackReason):
            return SizeCheck(max(num_tokens, count), None, str(found))
        signature, steps, num_tokens, leaves = found
        served = signature.served[steps.padded_num_tokens]
        return _SizeVerifier(graphed, signature, served, num_tokens, leaves).run(args, kwargs)


def _find_plan(graphed: GraphedModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, Any]:
    """The call's token count, 0 where it is not known, and the decision that it takes, without counters and
    captures."""
    graphs = graphed._graphs
    if not graphs.signatures:
        return 0, FallbackReason.RELEASED if graphs.is_released else FallbackReason.NOT_CAPTURED
    position, matched = graphed._matching(graphed._bind(tuple(args), dict(kwargs)))
    if matched is None:
        return 0, FallbackReason.UNSEEN_SIGNATURE
    return matched[0], graphs.choose_plan(graphs.signatures[position], *matched, may_capture=False)


class _Rehearsal(Exception):
    """Leaves a batch's block in such a way that its tokens do not count as written."""


@contextmanager
def _uncounted_step() -> Iterator[None]:
    """A block of the current `PrefillBatch`, if there is one, that leaves its cache's counts alone."""
    batch = PrefillBatch.peek()
    if batch is None:
        yield
        return
    batch.__enter__()
    try:
        yield
    finally:
        batch.__exit__(_Rehearsal, None, None)


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one run left: the result's structure and leaves, and copies of the watched tensors."""

    structure: Structure
    leaves: list[Any]
    watched: dict[str, torch.Tensor]


class _SizeVerifier:
    """One call, compared."""

    def __init__(
        self,
        graphed: GraphedModule,
        signature: CapturedSignature,
        served: ServedBucket,
        num_tokens: int,
        leaves: list[Any],
    ) -> None:
        self.graphed, self.signature, self.served = graphed, signature, served
        self.num_tokens, self.leaves = num_tokens, leaves
        self.bucket = served.steps.padded_num_tokens
        self.device = leaves[served.plan.token_dim.leaf].device
        self.tolerance = _tolerance_for(served.plan, num_tokens, self.device)
        self.watched = self._find_watched()
        self.before = {name: _stored(tensor) for name, tensor in self.watched.items()}
        self._random = random_state(self.device)

    def _find_watched(self) -> dict[str, torch.Tensor]:
        """By name: inputs, state that the plan writes, and all tensors of the model but its parameters."""
        names = self.signature.traced.trace.example.names
        found = {
            f"input '{names.get(index, index)}'": leaf
            for index, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        }
        plan = self.served.plan
        written = {memory for segment in plan.segments for memory in segment.writes}
        for value in plan.values:
            if value.state is not None and value.memory in written:
                found[value.state.path] = value.state.get()
        for path, module in self.graphed.model.named_modules():
            for key, tensor in [*module._buffers.items(), *vars(module).items()]:
                if isinstance(tensor, torch.Tensor):
                    found[".".join(filter(None, ("model", path, key)))] = tensor
        unique: dict[Any, str] = {}
        for name, tensor in found.items():
            if tensor.layout is torch.strided:
                unique.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        return {name: found[name].detach() for name in unique.values()}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SizeCheck:
        engine = self.graphed._graphs.engine_name
        poisons = poisons_for(engine, is_padded=self.num_tokens < self.bucket)
        with unchanged_random_state(self.device):
            try:
                eager = self._seen(lambda: self.graphed._forward(*args, **kwargs))
                served: _Seen | None = None
                difference = None
                for poison in poisons:
                    self._prepare(poison)
                    try:
                        seen = self._seen(lambda p=poison: self._replay(p))  # type: ignore[misc]
                    except StateChanged as changed:
                        return SizeCheck(self.num_tokens, self.bucket, changed.change.kind)
                    except Exception as error:
                        difference = self._explained(poison, "the call", f"{type(error).__name__}: {error}")
                        break
                    difference = self._compare(poison, eager, seen)
                    if difference is None and served is not None:
                        difference = self._compare_bits(poison, served, seen)
                    served = served if served is not None else seen
                    if difference is not None:
                        break
                identical = served is not None and not _differing(eager, served, None)
            finally:
                self.restore()
        dtypes = {x.dtype for x in [*eager.leaves, *eager.watched.values()] if isinstance(x, torch.Tensor)}
        floats = sorted((d for d in dtypes if d.is_floating_point or d.is_complex), key=str)
        return SizeCheck(
            self.num_tokens, self.bucket, "graph", tuple(poison.name for poison in poisons),
            len(eager.leaves) + len(eager.watched), identical,
            tuple((str(d).removeprefix("torch."), self.tolerance.relative(d)) for d in floats), difference,
        )  # fmt: skip

    def restore(self) -> None:
        """Puts inputs, state and random numbers back to what they were."""
        for name, tensor in self.watched.items():
            if not _same_bits(tensor, self.before[name]):
                copy_elements(tensor, self.before[name])
        set_random_state(self.device, self._random)

    def _prepare(self, poison: Poison) -> None:
        """Makes all as before the call, but for static memory, which is overwritten."""
        self.restore()
        spoil_static_memory(self.served.steps, self.graphed._graphs.pool, poison)
        self.restore()  # an input may lie in static memory, where outputs="view"

    def _replay(self, poison: Poison) -> Any:
        steps = self.served.steps
        if poison is AS_SERVED:
            leaves = steps.replay(list(self.leaves), self.num_tokens)
        else:
            leaves = replay_with(steps, list(self.leaves), self.num_tokens, poison)
        return self.signature.rebuild(leaves)

    def _seen(self, call: Callable[[], Any]) -> _Seen:
        structure, leaves = flatten_structure(call())
        # Copies: the next run may overwrite what a result is a view of.
        leaves = [_stored(x.detach()) if isinstance(x, torch.Tensor) else x for x in leaves]
        return _Seen(structure, leaves, {name: _stored(t) for name, t in self.watched.items()})

    def _compare(self, poison: Poison, eager: _Seen, seen: _Seen) -> Difference | None:
        if eager.structure != seen.structure:
            return self._explained(poison, "the result", "its structure is not eager's")
        wrong = _differing(eager, seen, self.tolerance)
        if not wrong:
            return None
        what, difference = wrong[0]
        detail = difference.detail
        if what in self.before and _is_alone(self.before[what], eager.watched[what], difference):
            detail = detail or "eager leaves the first of these rows as they were"
        self._prepare(poison)
        located = self._walk().beside_functions(poison, lambda: self._prepare(poison))
        return self._difference(poison, what, difference, located, detail)

    def _compare_bits(self, poison: Poison, served: _Seen, seen: _Seen) -> Difference | None:
        wrong = _differing(served, seen, None)
        if not wrong:
            return None
        self._prepare(poison)
        if _differing(served, self._seen(lambda: self._replay(AS_SERVED)), None):
            return None  # an op that sums in another order each time: bits say nothing
        what, difference = wrong[0]
        self._prepare(poison)
        located = self._walk().beside_unpoisoned(poison, lambda: self._prepare(poison))
        detail = "within rounding of eager, but it changes with what padded rows hold"
        return self._difference(poison, what, difference, located, detail)

    def _explained(self, poison: Poison, what: str, detail: str) -> Difference:
        """A difference that is no number: where it begins, if a segment shows it."""
        self._prepare(poison)
        try:
            located = self._walk().beside_functions(poison, lambda: self._prepare(poison))
        except Exception:  # the segment's own function fails in the same way
            located = None
        return self._difference(poison, what, None, located, detail)

    def _walk(self) -> SegmentWalk:
        assembler = next(a for a in self.signature.assemblers if a.plan is self.served.plan)
        return SegmentWalk(
            self.served, assembler, leaves=self.leaves, num_tokens=self.num_tokens, tolerance=self.tolerance
        )

    def _difference(
        self,
        poison: Poison,
        what: str,
        difference: TensorDifference | None,
        located: Located | None,
        detail: str,
    ) -> Difference:
        call = self.num_tokens, self.bucket, poison.name, what
        if located is None:
            missing = "each segment alone agrees: the plan as a whole is not what the model computes"
            detail = "; ".join(filter(None, (detail, missing)))
            return Difference(*call, detail=detail, **_numbers(difference, what))
        segment = located.segment
        return Difference(
            *call, segment=segment.name, kind=segment.kind, op=located.op,
            detail="; ".join(filter(None, (detail, located.detail))),
            **_numbers(located.difference, located.tensor),
        )  # fmt: skip


def _numbers(difference: TensorDifference | None, tensor: str) -> dict[str, Any]:
    if difference is None:
        return {"tensor": tensor}
    return dict(
        tensor=tensor, dim=difference.dim, rows=difference.rows, num_rows=difference.num_rows,
        position=difference.position, size=difference.size, allowed=difference.allowed,
    )  # fmt: skip


def _differing(
    wanted: _Seen, found: _Seen, tolerance: Tolerance | None
) -> list[tuple[str, TensorDifference]]:
    """What differs, results first, by name."""
    pairs = [
        (f"result leaf {i}", a, b) for i, (a, b) in enumerate(zip(wanted.leaves, found.leaves, strict=True))
    ]
    pairs += [(name, tensor, found.watched[name]) for name, tensor in wanted.watched.items()]
    wrong = []
    for name, left, right in pairs:
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            difference = compare_tensors(left, right, tolerance)
        elif left == right or (left != left and right != right):
            difference = None
        else:
            difference = TensorDifference(
                0, (), 0, (), float("inf"), 0.0, f"{right!r} where eager has {left!r}"
            )
        if difference is not None:
            wrong.append((name, difference))
    return wrong


def _is_alone(before: torch.Tensor, after: torch.Tensor, difference: TensorDifference) -> bool:
    """Whether eager did not write the first row that differs."""
    if not difference.rows:
        return False
    row = difference.rows[0]
    kept, now = before.select(difference.dim, row), after.select(difference.dim, row)
    return compare_tensors(kept, now, None) is None


def _tolerance_for(plan: SegmentPlan, num_tokens: int, device: torch.device) -> Tolerance:
    weights = [
        tensor
        for v in plan.values
        if v.state is not None and isinstance(tensor := v.state.get(), torch.Tensor)
    ]
    has_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    segments = len(plan.graph_segments())
    return Tolerance(reduction_length(weights, num_tokens), segments, has_tf32)


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    """A copy; on the host where the device has too little room left for three of it."""
    if tensor.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(tensor.device)
        if 3 * tensor.numel() * tensor.element_size() > free:
            return tensor.cpu()
    return tensor.clone()


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    right = right.to(left.device)
    if not torch.equal(left, right):
        return False
    return not left.dtype.is_floating_point or torch.equal(left.signbit(), right.signbit())
