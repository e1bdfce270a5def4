"""The `torch.compile` backend "piecewise": Dynamo traces, guards and binds the arguments, graphs serve the
calls.

    compiled = torch.compile(model, backend="piecewise", options={"buckets": [64, 128]})

Compared with `piecewise.compile`, Dynamo's guards run on each call (they cost 90 µs and more), and the
token count has no symbol before Dynamo saw two sizes or a `mark_dynamic`. A graph that cannot be graphed
runs as Dynamo gave it. Buckets are captured after their third call, or all at once at the first call
inside `piecewise.capture_window()`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from piecewise.capture_limits import capturable
from piecewise.config import PiecewiseConfig
from piecewise.report import CaptureReport, PlanReport, Report
from piecewise.traffic_recorder import TrafficRecorder
from runners.bound_steps import StateChanged
from runners.buckets import TokenBuckets
from runners.buffers import StaticBuffers
from runners.engine import GraphEngine, GraphPool, engine_for
from runners.errors import ConfigError, PiecewiseError, StateError
from runners.mode import in_capture_window, is_eager_only
from runners.stats import CallStats, FallbackReason

if TYPE_CHECKING:
    from torch import fx

    from piecewise.compiler import TracedModel
    from piecewise.signatures import CaptureContext, CapturedSignature
    from piecewise.trace import ExampleCall, Trace

# The model or code that Dynamo compiles → its handle; dies with it.
_handles: weakref.WeakKeyDictionary[Any, BackendHandle] = weakref.WeakKeyDictionary()
_LAZY_CALLS = 3


class BackendHandle:
    """Report and counters of one compiled model, over all graphs that Dynamo made of it."""

    def __init__(self, config: PiecewiseConfig) -> None:
        self.asked_for = config
        self.piecewise_config, self._left_out = capturable(config)
        self.stats = CallStats()
        self.traffic = TrafficRecorder()
        self.buffers = StaticBuffers()
        self.graphs: list[CompiledGraph] = []
        self.notes: dict[str, int] = {}
        self.lock = threading.Lock()
        self._engine: GraphEngine | None = None
        self._pool: GraphPool | None = None

    def context(self, device: torch.device) -> CaptureContext:
        """What a capture needs; engine and pool are made by the first one."""
        from piecewise.signatures import CaptureContext

        if self._engine is None:
            self._engine = engine_for(self.piecewise_config.engine, device)
        if self._pool is None:
            self._pool = self._engine.new_pool(device)
        return CaptureContext(self.piecewise_config, self._engine, self._pool, self.buffers)

    def report(self) -> Report:
        """Plans, captures and calls so far; a graph that could not be planned is listed with its reason."""
        ready = [graph for graph in self.graphs if graph.signature is not None]
        plans = tuple(PlanReport.of(graph.signature.plan, graph.names) for graph in ready if graph.signature)
        reports = tuple(graph.report for graph in ready)
        engine = self._engine.name if self._engine is not None else "none yet"
        return Report(plans, reports, self.stats.snapshot(), dict(self.notes), (), engine, self._left_out)

    def release(self) -> None:
        """Gives all graph memory back; later calls run eagerly or capture again, as configured."""
        with self.lock:
            for graph in self.graphs:
                graph.reset()
            if self._pool is not None:
                self._pool.release()
            self._pool = None
            self.buffers = StaticBuffers()
            self.stats.captured = ()


def piecewise_backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """The backend's entry point, found by torch through the entry point group `torch_dynamo_backends`.

    Args:
        options: fields of `PiecewiseConfig` by name; see there.
    Raises:
        ConfigError: an option is unknown or wrong; the message lists the valid ones.
    """
    if unknown:
        raise ConfigError(
            f"torch.compile argument {', '.join(map(repr, unknown))}",
            expected="none beside 'options'",
            rule="the backend is configured by options alone",
            fix='torch.compile(model, backend="piecewise", options={"buckets": [64, 128]})',
        )
    config = PiecewiseConfig.from_any(None, **dict(options or {}))
    from piecewise import torch_internals as internals

    owner = internals.compiled_object()
    found = _handles.get(owner) if owner is not None else None
    if found is None or found.asked_for != config:
        found = BackendHandle(config)
        if owner is not None:
            _handles[owner] = found
    compiled = CompiledGraph(graph, found)
    found.graphs.append(compiled)
    return compiled


def handle(compiled: Any) -> BackendHandle:
    """The report and counters behind a `torch.compile(..., backend="piecewise")` result.

    Raises:
        StateError: it was not compiled by this backend, or not called yet.
    """
    inner = getattr(compiled, "_orig_mod", compiled)
    candidates = [inner, getattr(inner, "__code__", None), getattr(inner, "__wrapped__", None)]
    original = getattr(compiled, "_torchdynamo_orig_callable", None)
    candidates += [original, getattr(original, "__code__", None)]
    if isinstance(inner, torch.nn.Module):
        candidates += list(inner.modules())
    for candidate in candidates:
        try:
            if candidate is not None and candidate in _handles:
                return _handles[candidate]
        except TypeError:
            continue  # neither hashable nor weakly referable, so never an owner
    raise StateError(
        f"no handle for {type(compiled).__name__}",
        expected='the result of torch.compile(model, backend="piecewise"), after its first call',
        rule="Dynamo calls the backend at the first call",
        fix="call it once, then ask again",
    )


class CompiledGraph:
    """One graph from Dynamo: replays where a bucket is captured, runs the graph itself everywhere else."""

    def __init__(self, graph: fx.GraphModule, owner: BackendHandle) -> None:
        from piecewise import torch_internals as internals

        self._eager = graph
        self._owner = owner
        self._buckets = TokenBuckets(owner.piecewise_config.buckets)
        self._arguments: list[Any] = []
        self._waiting: dict[int, int] = {}
        self.signature: CapturedSignature | None = None
        self.report = CaptureReport((), False, 0, 0)
        self.names: dict[int, str] = {}
        self._refused: FallbackReason | None = None
        nodes = graph.graph.find_nodes(op="placeholder")
        self._sources = [internals.source_name(node) or node.name for node in nodes]
        self._fakes = [node.meta.get("example_value") for node in nodes]
        self._inputs: list[int] = []

    def __call__(self, *args: Any) -> Any:
        owner = self._owner
        with owner.lock:
            found = self._find_plan(args)
            if not isinstance(found, FallbackReason):
                signature, steps, num_tokens, leaves = found
                try:
                    result = signature.rebuild(steps.replay(leaves, num_tokens))
                except StateChanged:
                    found = FallbackReason.MOVED_ADDRESS
                else:
                    owner.stats.count_replay(steps.padded_num_tokens)
                    return result
            owner.stats.count_eager(found)
        return self._eager(*args)

    def reset(self) -> None:
        """Drops the graphs of every bucket; the plan stays."""
        self._waiting.clear()
        if self.signature is not None:
            self.signature.reset()

    def _find_plan(self, args: tuple[Any, ...]) -> Any:
        if is_eager_only():
            return FallbackReason.EAGER_ONLY
        if torch.is_grad_enabled():
            return FallbackReason.GRAD_ENABLED
        if self._refused is not None:
            return self._refused
        self._arguments[:] = args
        if self.signature is None and (refused := self._analyse(args)) is not None:
            return refused
        assert self.signature is not None
        matched = self.signature.match((tuple(args[position] for position in self._inputs),))
        if matched is None:
            return FallbackReason.UNSEEN_SIGNATURE
        num_tokens, leaves = matched
        self._owner.traffic.record(num_tokens)
        bucket = self._buckets.bucket_for(max(num_tokens, 0))
        if bucket is None:
            return FallbackReason.ZERO_TOKENS if num_tokens <= 0 else FallbackReason.ABOVE_LARGEST_BUCKET
        ratio = self._owner.piecewise_config.max_padding_ratio
        if ratio is not None and bucket > ratio * num_tokens:
            return FallbackReason.PADDING_RATIO
        served = self.signature.served.get(bucket) or self._capture_when_due(bucket)
        if served is None:
            return self.signature.refused.get(bucket, (FallbackReason.NOT_CAPTURED, ""))[0]
        if not self.signature.is_valid(served, num_tokens, leaves):
            return FallbackReason.SHAPE_GUARD
        return self.signature, served.steps, num_tokens, leaves

    def _capture_when_due(self, bucket: int) -> Any:
        from piecewise.signatures import capture_bucket

        assert self.signature is not None
        if bucket in self.signature.refused:
            return None
        self._waiting[bucket] = self._waiting.get(bucket, 0) + 1
        if not in_capture_window() and self._waiting[bucket] < _LAZY_CALLS:
            return None
        due = sorted(self._buckets.sizes, reverse=True) if in_capture_window() else [bucket]
        device = self.signature.traced.trace.example.leaves[self.signature.plan.token_dim.leaf].device
        context = self._owner.context(device)
        for size in due:
            if size not in self.signature.served and size not in self.signature.refused:
                capture_bucket(context, self.signature, size)
        buckets = tuple(
            self.signature.bucket_reports[b] for b in sorted(self.signature.bucket_reports, reverse=True)
        )
        sizes = context.pool.allocated_bytes, self._owner.buffers.allocated_bytes
        self.report = CaptureReport(buckets, False, *sizes)
        captured = {b for g in self._owner.graphs if g.signature is not None for b in g.signature.served}
        self._owner.stats.captured = tuple(sorted(captured))
        return self.signature.served.get(bucket)

    def _analyse(self, args: tuple[Any, ...]) -> FallbackReason | None:
        """Plans the graph with the first call's arguments; a graph that cannot be planned stays eager for
        good."""
        from piecewise.compiler import prepare
        from piecewise.signatures import signature_of

        config = self._owner.piecewise_config
        try:
            traced = prepare(self._trace(args), config)
            traced.probe(config.buckets, strict=config.strict)

            def retrace(bucket: int) -> TracedModel:
                raise StateError(
                    f"bucket {bucket}: Dynamo's guards exclude it",
                    rule="Dynamo alone decides when to trace again",
                    fix="use piecewise.compile, which traces such buckets at their own size",
                )

            # One token is another graph: Dynamo specialises sizes of 0 and 1.
            self.signature = signature_of(traced, serves_one=False, retrace=retrace)
        except PiecewiseError as error:
            if config.strict:
                raise
            self._owner.notes[str(error).splitlines()[0]] = self._owner.notes.get(str(error), 0) + 1
            self._refused = FallbackReason.DISABLED
            return self._refused
        return None

    def _trace(self, args: tuple[Any, ...]) -> Trace:
        from piecewise import torch_internals as internals
        from piecewise.plan import ResultLeaf
        from piecewise.state import readable_path
        from piecewise.structure import Structure, flatten_structure
        from piecewise.trace import Placeholder, Trace
        from runners.state_check import StateFacts, StateRef

        graph = _copy_graph(self._eager)
        nodes = graph.graph.find_nodes(op="placeholder")
        placeholders = []
        for position, (node, source, value) in enumerate(zip(nodes, self._sources, args, strict=True)):
            if isinstance(value, torch.Tensor) and _is_state(source, value):
                state = StateRef(self._arguments, position, readable_path(source))
                placeholders.append(Placeholder(node, "state", state=state))
            else:
                self.names[len(self._inputs)] = readable_path(source)
                placeholders.append(Placeholder(node, "input", leaf=len(self._inputs)))
                self._inputs.append(position)
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        children = tuple(Structure("tensor", index=index) for index in range(len(outputs)))
        leaves = tuple(ResultLeaf("output", index) for index in range(len(outputs)))
        structure, flat = flatten_structure((tuple(args[position] for position in self._inputs),))
        example = _example(structure, flat, self.names)
        shape_env = internals.shape_env_of(self._fakes)
        result = Structure("tuple", children=children)
        # No facts: Dynamo's guards compare the module's state before each call.
        return Trace(graph, tuple(placeholders), result, leaves, shape_env, StateFacts(), example)


def _copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes can be rewritten: the original still serves the eager calls."""
    from torch import fx

    copied = fx.Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    return fx.GraphModule(graph, copied)


def _is_state(source: str, value: torch.Tensor) -> bool:
    """Whether a tensor belongs to the model and not to the call."""
    return isinstance(value, torch.nn.Parameter) or any(
        table in source for table in ("._parameters[", "._buffers[", "._modules[")
    )


def _example(structure: Any, leaves: Sequence[Any], names: Mapping[int, str]) -> ExampleCall:
    from piecewise.signature import CallBinder
    from piecewise.trace import ExampleCall

    return ExampleCall(CallBinder(lambda *args: None), structure, tuple(leaves), dict(names))
