"""Makes a cut plan from one example call: traces, normalizes, finds the token symbol, classifies, cuts."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from piecewise import passes, torch_api
from piecewise.analysis.classify import Classifier, Verdict, kind_outside
from piecewise.analysis.normalize import normalized
from piecewise.analysis.rows.counts import KnownSizes, valid_counts
from piecewise.analysis.rows.judge import Judge
from piecewise.analysis.token_dim import TokenSymbol, find_token_symbol
from piecewise.calls.binder import describe_call
from piecewise.capture import captured_ops
from piecewise.capture.faults import LOWERING, MAX_CUTS, FaultFinder, SegmentFault
from piecewise.capture.placeholders import resize_leaf
from piecewise.cut.split import Splitter
from piecewise.errors.capture import SeveralDevices, StrictRefusal
from piecewise.ir.aten import AtenGraph
from piecewise.ir.effects import NodeFacts, find_facts, remove_dead_nodes
from piecewise.ir.nodes import fakes_of, module_path, source_line
from piecewise.ir.plan import SegmentPlan
from piecewise.lowering.lowering import Lowering
from piecewise.report.report import PlanReport
from piecewise.report.startup_times import StartupTimes
from piecewise.settings.config import PiecewiseConfig
from piecewise.streams.streams import StreamSchedules
from piecewise.trace.trace import ExampleCall, Trace, front_end

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class TracedModel:
    """Holds one trace that is ready to be cut: dead code is removed and the token symbol is known.

    Attributes:
        judge: tells how rows pass through ops, at the counts for which the trace is valid.
        forced: nodes that must run eagerly because of what warm-ups or captures showed, in `num_cuts` cuts.
        keeps_own: nodes whose segments keep the model's own kernels, and why.
        step_metadata: metadata loaded before each replay, for boundary ops with a captured form.
        graphs: the aten graphs of the segment functions that fusions made.
    """

    trace: Trace
    facts: dict[fx.Node, NodeFacts]
    token: TokenSymbol
    judge: Judge
    forced: dict[fx.Node, Verdict] = dataclasses.field(default_factory=dict)
    keeps_own: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    num_cuts: int = 0
    splitter: Splitter | None = None
    static_ints: tuple[int, ...] = ()
    captures_boundaries: bool = False
    step_metadata: tuple[captured_ops.MetadataMade, ...] = ()
    graphs: Mapping[Any, AtenGraph] = dataclasses.field(default_factory=dict)

    def cut(self, *, strict: bool = False) -> SegmentPlan:
        """Cuts the trace; with `strict`, raises CaptureError if an op lets padding reach real rows."""
        classifier = Classifier(
            self.trace, self.facts, self.token, judge=self.judge, forced=self.forced,
            captures=self.captures_boundaries,
        )  # fmt: skip
        self.splitter = Splitter(classifier, keeps_own=self.keeps_own)
        for node, verdict in self.splitter.verdicts.items() if strict else ():
            if verdict.code in _STRICT:
                where = f"{module_path(node) or 'forward'} ({source_line(node)})"
                raise StrictRefusal(op=node.name, where=where, detail=verdict.detail)
        plan = self.splitter.cut()
        for segment in plan.segments if _log.isEnabledFor(logging.DEBUG) else ():
            _log.debug("%s: %s, %d ops", segment.name, segment.kind, segment.num_ops)
            for reason in segment.reasons:
                _log.debug("not in a graph: %s", reason)
        return plan

    def is_the_models(self, fault: SegmentFault, plan: SegmentPlan) -> bool:
        """Whether a segment fails even on the real rows of its warm-up alone."""
        assert self.splitter is not None
        return FaultFinder(self.splitter, plan.values, fault).is_the_models()

    def heed(self, fault: SegmentFault, plan: SegmentPlan) -> bool:
        """Makes the next cut avoid the cause of a segment's fault; returns False if nothing can be done."""
        assert self.splitter is not None
        finder = FaultFinder(self.splitter, plan.values, fault)
        if finder.blames_lowering():
            self.keeps_own |= dict.fromkeys(finder.nodes, LOWERING)
            return True
        if finder.is_the_models():
            return False
        found = finder.first_wrong_node() if self.num_cuts < MAX_CUTS else None
        if found is not None:
            wrong = dict([found])
        elif fault.variant is not None:
            verdict = Verdict("eager", "mixes_tokens", f"{fault.error.what}: {fault.error.got}")
            wrong = dict.fromkeys(finder.nodes, verdict)
        else:
            return False
        for node, verdict in wrong.items():
            self.forced[node] = verdict._replace(kind=kind_outside(self.facts[node]))
        self.num_cuts += 1
        return True

    def planned(self, config: PiecewiseConfig, times: StartupTimes, *, move_weights: bool) -> SegmentPlan:
        """Cuts the plan and applies the fusions that the settings ask for; without `move_weights`, which lets
        weights be packed anew, the plan is for reading only."""
        with times.timed("trace"):
            plan = self.cut(strict=config.strict and move_weights)
        if not config.fusions:
            return plan
        with times.timed("lowering"):
            # Code for any count is compiled for the largest one.
            leaves = self.trace.example.leaves
            counts = [size for size in config.buckets if size > 1 and plan.holds_at(size, leaves)]
            num_rows = max(counts, default=self.token.example_num_tokens)
            plan, self.graphs = passes.fuse_segments(
                plan, config.fusions, lowering=config.lowering, num_rows=num_rows, move_weights=move_weights
            )
            return plan


# Reasons that `strict` does not let pass.
_STRICT = ("mixes_tokens", "unknown_op", "not_recordable")


def trace_model(
    model: nn.Module, example: ExampleCall, *, forward: Any, config: PiecewiseConfig
) -> TracedModel:
    """Traces the example and finds its token symbol.

    An int argument that decides on shapes or branches (`logits_to_keep`) is part of the signature: if the
    first trace shows one, a second takes it as a constant. An int that ops only compute with may change.

    Raises:
        TraceError, TokenDimError: as `trace` and `find_token_symbol` say.
        ConfigError: `config.boundary_ops` names an op that is not registered, or a captured op needs a limit
            that `config` leaves out.
    """
    _check_devices(model, example)
    _log.info("tracing %s%s", type(model).__name__, describe_call(example.args, example.kwargs))
    trace = front_end(config.frontend)
    traced = trace(model, example, forward=forward)
    static = dict.fromkeys(_ints_that_decide(traced), ())
    if static:
        traced = trace(model, example, forward=forward, static_dims=static)
    prepared = prepare(traced, config)
    prepared.static_ints = tuple(static)
    _log.info("traced %d ops; tokens are counted by %s", len(prepared.facts), prepared.token.symbol)
    return prepared


def _ints_that_decide(traced: Trace) -> list[int]:
    """Lists int arguments whose symbol is in a guard or in the shape of a tensor."""
    sizes = torch_api.symbolic_sizes(traced.shape_env)
    ints = [(expr, leaf) for (leaf, dim), expr in sizes.items() if dim < 0 and expr.is_Symbol]
    guards = torch_api.guard_expressions(traced.shape_env)
    seen: set[Any] = {symbol for guard in guards for symbol in guard.free_symbols}
    for tensor in fakes_of(traced.graph.graph.nodes) if ints else ():
        seen |= torch_api.free_symbols(tensor.shape, traced.shape_env)
    return sorted(leaf for symbol, leaf in ints if symbol in seen)


def prepare(traced: Trace, config: PiecewiseConfig) -> TracedModel:
    """Brings a traced graph into the form that is classified and cut."""
    traced = normalized(traced)
    metadata = captured_ops.write_captured_forms(traced, config)
    facts = living_facts(traced, config)
    token = find_token_symbol(traced, facts)
    is_captured = config.boundary == "captured"
    if is_captured:
        captured_ops.fix_metadata_inputs(traced, facts, token.symbol)
    counts = valid_counts(traced.shape_env, token.symbol, max(config.buckets))
    if not len(counts):  # no bucket can be served
        counts = np.array([token.example_num_tokens])
    judge = Judge(KnownSizes(counts, token.symbol, traced.shape_env))
    return TracedModel(traced, facts, token, judge, captures_boundaries=is_captured, step_metadata=metadata)


def living_facts(traced: Trace, config: PiecewiseConfig) -> dict[fx.Node, NodeFacts]:
    facts = find_facts(traced.graph.graph, enabled=captured_ops.enabled_ops(config))
    remove_dead_nodes(traced.graph.graph, facts)
    return facts


def example_of_size(traced: TracedModel, num_tokens: int) -> ExampleCall:
    leaves = list(traced.trace.example.leaves)
    for carried in traced.token.inputs:
        sizes = list(leaves[carried.leaf].shape)
        for dim, size in carried.dims.items():
            sizes[dim] = size(num_tokens)
        passed, resized = leaves[carried.leaf], resize_leaf(leaves[carried.leaf], sizes)
        leaves = [resized if leaf is passed else leaf for leaf in leaves]  # a tensor may be passed twice
    return dataclasses.replace(traced.trace.example, leaves=tuple(leaves))


def plan_report(traced: TracedModel, config: PiecewiseConfig) -> PlanReport:
    """Reports the plan of a trace and how it would be lowered; captures and changes nothing."""
    plan = traced.planned(config, StartupTimes(), move_weights=False)
    lowering = Lowering(config).preview(plan, config.buckets)
    num_rows = traced.token.example_num_tokens
    streams = StreamSchedules(plan, lowering, num_rows=num_rows, num_streams=config.num_streams)
    return PlanReport.of(plan, traced.trace.example.names, lowering, streams.report())


def _check_devices(model: nn.Module, example: ExampleCall) -> None:
    """Checks that inputs and weights are on one device; 0-dim CPU tensors may accompany them."""
    found: dict[torch.device, str] = {}
    for path, tensor in model.named_parameters():
        found.setdefault(tensor.device, f"parameter '{path}'")
    for index, leaf in enumerate(example.leaves):
        if isinstance(leaf, torch.Tensor) and not (leaf.device.type == "cpu" and leaf.dim() == 0):
            found.setdefault(leaf.device, f"input '{example.names[index]}'")
    if len(found) > 1:
        (first, one), (second, other), *_ = found.items()
        raise SeveralDevices(first=one, other=other, device=first, other_device=second)
