"""The `torch.compile` backend "piecewise": Dynamo traces, guards and binds the arguments, graphs serve the
calls.

    compiled = torch.compile(model, backend="piecewise", options={"buckets": [64, 128]})

Compared with `piecewise.compile`, Dynamo's guards run on each call (they cost 90 µs and more), and the
token count has no symbol before Dynamo saw two sizes, a `mark_dynamic` or `dynamic=True`. A graph that
cannot be graphed runs as Dynamo gave it. Buckets are captured after their third call, or all at once at
the first call inside `piecewise.capture_window()`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from boundary_ops.declare.registry import lookup
from piecewise.capture.call_router import CallRouter
from piecewise.capture.store import GraphStore
from piecewise.errors.report import CoverageError
from piecewise.ir.array_places import array_source
from piecewise.report.report import Report
from piecewise.report.startup_times import StartupTimes
from piecewise.settings.config import PiecewiseConfig
from runners.collector import paused_collector
from runners.errors import ConfigError, PiecewiseError, StateError
from runners.stats import FallbackReason

if TYPE_CHECKING:
    from torch import fx

    from piecewise.capture.analyse import TracedModel
    from piecewise.capture.captured_call import CapturedSignature
    from piecewise.trace.trace import Trace

# The model or code that Dynamo compiles → its handle; dies with it.
_handles: weakref.WeakKeyDictionary[Any, BackendHandle] = weakref.WeakKeyDictionary()


class BackendHandle:
    """Report and counters of one compiled model, over all graphs that Dynamo made of it."""

    def __init__(self, config: PiecewiseConfig) -> None:
        self.asked_for = config
        self.store = GraphStore(config)
        self.piecewise_config = self.store.config
        self.stats, self.traffic = self.store.stats, self.store.traffic
        self.graphs: list[CompiledGraph] = []
        self.notes: dict[str, int] = {}
        self.router = CallRouter(self.store)

    def report(self) -> Report:
        """Plans, captures and calls so far; a graph that could not be planned is listed with its reason."""
        return self.store.report(self.notes)

    def suspend(self) -> None:
        """Gives all graph memory back and keeps the plans; calls run eagerly until `resume()`."""
        with self.router.exclusive("suspend"):
            self.store.suspend()
            for graph in self.graphs:
                graph.let_go()

    def resume(self) -> None:
        """Lets each graph capture the buckets again that it had, at its next call: the weights come with the
        call's arguments.

        Raises:
            StateError: it is not suspended.
        """
        with self.router.exclusive("resume"):
            self.store.resume(None)

    def release(self) -> None:
        """Gives all graph memory back and forgets the plans; buckets that are called again are captured anew,
        from the weights of then."""
        with self.router.exclusive("release"):
            self.store.drop_graphs()
            for graph in self.graphs:
                graph.forget()


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
    odd = [key for key in options or {} if not isinstance(key, str)]
    if odd:
        raise ConfigError(
            f"option {odd[0]!r}",
            expected="the name of a setting",
            got=type(odd[0]).__name__,
            rule="options are fields of PiecewiseConfig by name",
            fix='options={"buckets": [64, 128]}',
        )
    config = PiecewiseConfig.from_any(None, **dict(options or {}))
    from piecewise import torch_api

    owner = torch_api.compiled_object()
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
        from piecewise import torch_api

        self._eager = graph
        self._owner = owner
        self._arguments: list[Any] = []
        self._signature: CapturedSignature | None = None
        self._refused: FallbackReason | None = None
        nodes = graph.graph.find_nodes(op="placeholder")
        self._sources = [torch_api.source_name(node) or node.name for node in nodes]
        self._fakes = [node.meta.get("example_value") for node in nodes]
        # Dynamo passes float attributes as tensors and does not guard their values: position → value seen.
        self._numbers = {
            index: math.nan
            for index, (node, source) in enumerate(zip(nodes, self._sources, strict=True))
            if torch_api.wraps_number(node) and array_source(source) is None
        }
        self._inputs: list[int] = []

    def __call__(self, *args: Any) -> Any:
        return self._owner.router.serve(self._find_plan, self._eager, args, {})

    def forget(self) -> None:
        """Drops the plan; the next call makes one again."""
        self._signature = self._refused = None
        self._inputs.clear()

    def let_go(self) -> None:
        """Holds no argument of the last call any more, weights among them."""
        self._arguments[:] = [None] * len(self._arguments)

    def _find_plan(self, args: tuple[Any, ...], _: dict[str, Any]) -> Any:
        if self._refused is not None:
            return self._refused
        if self._owner.store.is_suspended:
            return FallbackReason.SUSPENDED
        self._arguments[:] = args
        if self._signature is None and (refused := self._analyse(args)) is not None:
            return refused
        assert self._signature is not None
        if any(args[position].item() != value for position, value in self._numbers.items()):
            return FallbackReason.UNSEEN_SIGNATURE
        matched = self._signature.match((tuple(args[position] for position in self._inputs),))
        if matched is None:
            return FallbackReason.UNSEEN_SIGNATURE
        return self._owner.store.plan_for(self._signature, *matched, may_capture=True)

    @paused_collector()
    def _analyse(self, args: tuple[Any, ...]) -> FallbackReason | None:
        """Plans the graph with the first call's arguments; a graph that cannot be planned stays eager for
        good."""
        from piecewise.capture.analyse import prepare
        from piecewise.capture.captured_call import CapturedSignature, Cut

        config = self._owner.piecewise_config
        times = StartupTimes()
        try:
            with times.timed("trace"):
                traced = prepare(self._trace(args), config)

            def retrace(bucket: int) -> TracedModel:
                raise StateError(
                    f"bucket {bucket}: Dynamo's guards exclude it",
                    rule="Dynamo alone decides when to trace again",
                    fix="use piecewise.compile, which traces such buckets at their own size",
                )

            # One token is another graph: Dynamo specialises sizes of 0 and 1.
            one_token = "Dynamo makes a graph of its own for one token"
            cut = Cut(traced, traced.planned(config, times, move_weights=True))
            self._signature = self._owner.store.add(CapturedSignature([cut], one_token, retrace, times))
        except PiecewiseError as error:
            note = str(error).splitlines()[0]
            self._owner.notes[note] = self._owner.notes.get(note, 0) + 1
            self._refused = self._refusal(error)
            if config.strict or self._refused is FallbackReason.LOW_COVERAGE:
                raise
            return self._refused
        return None

    def _refusal(self, error: PiecewiseError) -> FallbackReason:
        """The reason under which calls of a graph that cannot be planned are counted."""
        if isinstance(error, CoverageError):
            return FallbackReason.LOW_COVERAGE
        targets = [node.target for node in self._eager.graph.nodes if node.op == "call_function"]
        if not any(lookup(target) is not None for target in targets):
            return FallbackReason.DISABLED  # what a graph break left beside the boundary ops
        sizes = [size for fake in self._fakes if isinstance(fake, torch.Tensor) for size in fake.shape]
        is_static = not any(isinstance(size, torch.SymInt) for size in (*sizes, *self._fakes))
        return FallbackReason.STATIC_TOKEN_COUNT if is_static else FallbackReason.CAPTURE_FAILED

    def _trace(self, args: tuple[Any, ...]) -> Trace:
        from piecewise import torch_api
        from piecewise.calls.binder import CallBinder
        from piecewise.calls.structure import Structure, flatten_structure
        from piecewise.ir.plan import ResultLeaf
        from piecewise.trace.dynamo.sources import readable_path
        from piecewise.trace.trace import ExampleCall, Placeholder, Trace
        from runners.state.state_check import StateFacts, StateRef

        graph = _copy_graph(self._eager)
        nodes = graph.graph.find_nodes(op="placeholder")
        placeholders = []
        names: dict[int, str] = {}
        for position, (node, source, value) in enumerate(zip(nodes, self._sources, args, strict=True)):
            if position in self._numbers:
                self._numbers[position] = value.item()
                _fix_number(node)
                placeholders.append(Placeholder(node, "symbol"))
            elif isinstance(value, torch.Tensor) and _is_state(source, value):
                state = StateRef(self._arguments, position, readable_path(source))
                placeholders.append(Placeholder(node, "state", state=state))
            else:
                names[len(self._inputs)] = readable_path(source)
                placeholders.append(Placeholder(node, "input", leaf=len(self._inputs)))
                self._inputs.append(position)
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        children = tuple(Structure("tensor", index=index) for index in range(len(outputs)))
        leaves = tuple(ResultLeaf("output", index) for index in range(len(outputs)))
        structure, flat = flatten_structure((tuple(args[position] for position in self._inputs),))
        example = ExampleCall(CallBinder(lambda *args: None), structure, tuple(flat), names)
        shape_env = torch_api.shape_env_of(self._fakes)
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


def _fix_number(placeholder: fx.Node) -> None:
    """Lets the ShapeEnv know that a number is what it was in the example; each call compares it."""
    for user in placeholder.users:
        value = user.meta.get("example_value")
        if isinstance(value, torch.SymFloat):
            float(value)


def _is_state(source: str, value: torch.Tensor) -> bool:
    """Whether a tensor belongs to the model and not to the call."""
    if array_source(source) is not None:
        return False  # Dynamo makes it of the array, anew for each call
    return isinstance(value, torch.nn.Parameter) or any(
        table in source for table in ("._parameters[", "._buffers[", "._modules[")
    )
