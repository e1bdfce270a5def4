"""Is graphed what eager is? Each captured bucket at the sizes around its edge, with poison where padding is.

For each size the model itself, the plan on padded rows with a call of each graph segment's function in place
of its graph, and replays with several paddings run from the same state, inputs and random numbers.
docs/DESIGN.md says what is compared and how a fault is told from another. All is put back afterwards, and no
call is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from boundary_ops import PrefillBatch
from piecewise import torch_api
from piecewise.capture.poison import AS_SERVED, WITHOUT_GRAPHS, Poison, poisons_for, spoil_static_memory
from piecewise.ir.placeholders import unchanged_random_state
from piecewise.ir.plan import SegmentPlan
from piecewise.trace.subclasses.kinds import plain_tensors
from piecewise.verify.differences import (
    Outcome,
    TensorDifference,
    Tolerance,
    has_same_bits,
    stored,
)
from piecewise.verify.locate_difference import Located, SegmentWalk
from piecewise.verify.report import Difference, SizeCheck, VerifyReport
from runners.bound_steps import StateChanged, copy_elements
from runners.stats import FallbackReason

if TYPE_CHECKING:
    from piecewise.api import GraphedModule
    from piecewise.capture.captured_call import CapturedSignature, ServedBucket
    from piecewise.prefill_case import PrefillCase
    from piecewise.settings.config import PiecewiseConfig

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


def verify_case(case: PrefillCase, config: PiecewiseConfig) -> VerifyReport:
    """Captures a case, and compares it at the sizes around each bucket's edge.

    Raises:
        ConfigError, TraceError, TokenDimError: as `GraphedModule.capture`.
        Exception: what the model raises by itself.
    """
    import piecewise
    from piecewise.prefill_case import unless_the_model_raises

    graphed = piecewise.compile(case.model, config)
    size = max(2, min(32, max(config.buckets)))

    def compared() -> VerifyReport:
        args, kwargs = case.inputs(size)
        with torch.no_grad():
            graphed.capture(*args, **kwargs)
            return graphed.verify(make_inputs=case.make_inputs)

    report = unless_the_model_raises(case, size, compared)
    if not report.num_compared:
        case.run(size)  # a model that raises is no reason to look for another one
    return report


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
    signature, matched = graphs.signatures.matching(args, kwargs, current=True)
    if signature is None:
        signature, matched = graphs.signatures.matching(args, kwargs)
    if signature is None:
        return 0, FallbackReason.UNSEEN_SIGNATURE
    return matched[0], graphs.choose_plan(signature, *matched, may_capture=False)


class _Rehearsal(Exception):
    """Leaves a batch's block in such a way that its tokens do not count as written."""


@contextmanager
def _uncounted_step() -> Iterator[None]:
    """A block of the current `PrefillBatch`, if there is one, that leaves its cache's counts alone."""
    with suppress(_Rehearsal), PrefillBatch.peek() or nullcontext():
        yield
        raise _Rehearsal


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
        self.before = {name: stored(tensor) for name, tensor in self.watched.items()}

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
        found = {
            f"{name}{f', part {number}' * torch_api.is_wrapper(tensor)}": part
            for name, tensor in found.items()
            for number, part in enumerate(plain_tensors(tensor))
        }
        unique: dict[Any, str] = {}
        for name, tensor in found.items():
            if tensor.layout is torch.strided:
                unique.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), name)
        return {name: found[name].detach() for name in unique.values()}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> SizeCheck:
        engine = self.graphed._graphs.engine_name
        poisons = poisons_for(engine, is_padded=self.num_tokens < self.bucket)
        runs = [WITHOUT_GRAPHS, *poisons]
        try:
            eager = self._outcome_of(lambda: self.graphed._forward(*args, **kwargs))
            served, difference = self._compare_runs(runs, eager)
            identical = served is not None and not eager.differing(served, None)
        except StateChanged as changed:
            return SizeCheck(self.num_tokens, self.bucket, changed.change.kind)
        finally:
            self.restore()
        dtypes = {x.dtype for x in [*eager.leaves, *eager.watched.values()] if isinstance(x, torch.Tensor)}
        floats = sorted((d for d in dtypes if d.is_floating_point or d.is_complex), key=str)
        return SizeCheck(
            self.num_tokens, self.bucket, "graph", tuple(run.name for run in runs),
            len(eager.leaves) + len(eager.watched), identical,
            tuple((str(d).removeprefix("torch."), self.tolerance.relative(d)) for d in floats), difference,
        )  # fmt: skip

    def _compare_runs(
        self, runs: Sequence[Poison], eager: Outcome
    ) -> tuple[Outcome | None, Difference | None]:
        """The replay as it is served, where it came so far, and the first difference."""
        served: Outcome | None = None
        for run in runs:
            try:
                found = self._outcome(run)
            except StateChanged:
                raise
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                return served, self._explained(run, eager, "the call", detail)
            difference = self._compare(run, eager, found)
            if difference is None and served is not None:
                difference = self._compare_bits(run, served, found)
            served = found if run.uses_graphs and served is None else served
            if difference is not None:
                return served, difference
        return served, None

    def restore(self) -> None:
        """Puts inputs and state back to what they were; random numbers are, after each run."""
        for name, tensor in self.watched.items():
            if not has_same_bits(tensor, self.before[name]):
                copy_elements(tensor, self.before[name])

    def _prepare(self, poison: Poison) -> None:
        """Makes all as before the call, but for static memory, which is overwritten."""
        self.restore()
        spoil_static_memory(self.served.steps, self.graphed._graphs.pool, poison)
        self.restore()  # an input may lie in static memory, where outputs="view"

    def _outcome(self, run: Poison) -> Outcome:
        self._prepare(run)
        return self._outcome_of(lambda: self.signature.rebuild(self._leaves(run)))

    def _outcome_of(self, call: Callable[[], Any]) -> Outcome:
        with unchanged_random_state(self.device):
            return Outcome.of(call, self.watched)

    def _leaves(self, run: Poison) -> list[Any]:
        if run is AS_SERVED:
            return self.served.steps.replay(list(self.leaves), self.num_tokens)
        return self._walk().result(run)

    def _compare(self, run: Poison, eager: Outcome, found: Outcome) -> Difference | None:
        if eager.structure != found.structure:
            return self._explained(run, eager, "the result", "its structure is not eager's")
        wrong = eager.differing(found, self.tolerance, before=self.before)
        if not wrong:
            return None
        what, difference = wrong[0]
        return self._explained(run, eager, what, difference.detail, difference)

    def _compare_bits(self, run: Poison, served: Outcome, found: Outcome) -> Difference | None:
        wrong = served.differing(found, None, before=self.before)
        if not wrong or served.differing(self._outcome(AS_SERVED), None):
            return None  # nothing, or an op that sums in another order each time: bits say nothing
        what, difference = wrong[0]
        located = self._walk().beside_unpoisoned(run, partial(self._prepare, run))
        detail = "within rounding of eager, but it changes with what padded rows hold"
        return self._difference(run, what, difference, located, detail, "plan")

    def _explained(
        self,
        run: Poison,
        eager: Outcome,
        what: str,
        detail: str,
        difference: TensorDifference | None = None,
    ) -> Difference:
        """A difference, or what went wrong where it is no number, with where it begins, if a segment shows
        that."""
        try:
            located = self._walk().beside_functions(run, partial(self._prepare, run))
        except Exception:  # the segment's own function fails in the same way
            if difference is not None:
                raise
            located = None
        return self._difference(run, what, difference, located, detail, self._cause(run, eager))

    def _cause(self, run: Poison, eager: Outcome) -> str:
        """Whether the run's difference shows without graphs, too."""
        if not run.uses_graphs:
            return "plan"
        try:
            found = self._outcome(replace(run, uses_graphs=False))
        except Exception:
            return "plan"
        is_right = eager.structure == found.structure and not eager.differing(found, self.tolerance)
        return "graphs" if is_right else "plan"

    def _walk(self) -> SegmentWalk:
        assembler = next(a for a in self.signature.assemblers if a.plan is self.served.plan)
        return SegmentWalk(
            self.served, assembler, leaves=self.leaves, num_tokens=self.num_tokens, tolerance=self.tolerance
        )

    def _difference(
        self,
        run: Poison,
        what: str,
        difference: TensorDifference | None,
        located: Located | None,
        detail: str,
        cause: str,
    ) -> Difference:
        found: dict[str, Any] = {"tensor": what}
        more = "each segment alone agrees: the plan as a whole is not what the model computes"
        if located is not None:
            difference, more = located.difference, located.detail
            segment = located.segment
            found = dict(segment=segment.name, kind=segment.kind, op=located.op, tensor=located.tensor)
        numbers = asdict(difference) if difference is not None else {}
        numbers["detail"] = "; ".join(filter(None, (detail, more)))
        return Difference(
            num_tokens=self.num_tokens, bucket=self.bucket, run=run.name, what=what, cause=cause,
            **found, **numbers,
        )  # fmt: skip


def _tolerance_for(plan: SegmentPlan, num_tokens: int, device: torch.device) -> Tolerance:
    state = (value.state.get() for value in plan.values if value.state is not None)
    widths = [x.shape[-1] for x in state if isinstance(x, torch.Tensor) and x.dim() >= 2]
    has_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    segments = len(plan.graph_segments())
    return Tolerance(max([num_tokens, *widths]), segments, has_tf32)
