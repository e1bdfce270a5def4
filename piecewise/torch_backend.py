"""Serves `torch.compile(model, backend="piecewise")`: Dynamo traces and guards, graphs serve the calls.

    compiled = torch.compile(model, backend="piecewise", options={"buckets": [64, 128]})

Unlike with `piecewise.compile`, Dynamo's guards run on each call (they cost 90 µs and more), and the token
count has no symbol until Dynamo has seen two sizes, a `mark_dynamic` or `dynamic=True`. A Dynamo graph that
cannot be captured runs as Dynamo gave it. Buckets are captured after their third call, or all at once at the
first call inside `piecewise.capture_window()`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from boundary_ops.declare.registry import lookup
from piecewise import torch_api
from piecewise.calls.binder import CallBinder, bound_call
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.capture.analyse import TracedModel, prepare
from piecewise.capture.call_router import CallRouter
from piecewise.capture.captured_call import CapturedSignature, Cut, Matched, SignatureList
from piecewise.capture.store import GraphStore
from piecewise.errors.api import BackendArguments, ExcludedByDynamo, NoHandle
from piecewise.errors.report import CoverageError
from piecewise.ir.plan import ResultLeaf
from piecewise.ir.tensors import array_source
from piecewise.report.report import Report
from piecewise.report.startup_times import StartupTimes
from piecewise.settings.config import PiecewiseConfig
from piecewise.trace.dynamo.sources import readable_path
from piecewise.trace.trace import ExampleCall, Placeholder, Trace
from runners.collector import paused_collector
from runners.errors import PiecewiseError
from runners.state.state_check import StateFacts, StateRef
from runners.stats import FallbackReason

# The model or code that Dynamo compiles → its handle, which is freed with it.
_handles: weakref.WeakKeyDictionary[Any, BackendHandle] = weakref.WeakKeyDictionary()


class BackendHandle:
    """Holds the report and counters of one compiled model, over all graphs that Dynamo made of it."""

    def __init__(self, config: PiecewiseConfig) -> None:
        self.asked_for = config
        self.store = GraphStore(config)
        self.piecewise_config = self.store.config
        self.stats, self.traffic = self.store.stats, self.store.traffic
        self.graphs: list[CompiledGraph] = []
        self.notes: dict[str, int] = {}
        self.router = CallRouter(self.store, captures_calls=True)

    def report(self) -> Report:
        """Reports plans, captures and calls so far; lists graphs that could not be planned, with reasons."""
        return self.store.report(self.notes)

    def suspend(self) -> None:
        """Gives all graph memory back and keeps the plans; calls run eagerly until `resume()`."""
        with self.router.exclusive("suspend"):
            self.store.suspend()
            for graph in self.graphs:
                graph.let_go()

    def resume(self) -> None:
        """Lets each graph capture its buckets again at its next call, whose arguments carry the weights.

        Raises:
            StateError: it is not suspended.
        """
        with self.router.exclusive("resume"):
            self.store.resume(None)

    def release(self) -> None:
        """Gives all graph memory back and forgets the plans; a later call captures from its own weights."""
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
    """Compiles a Dynamo graph; torch finds this function by the entry point group `torch_dynamo_backends`.

    Args:
        options: fields of `PiecewiseConfig` by name; see there.
    Raises:
        ConfigError: an option is unknown or wrong; the message lists the valid ones.
    """
    if unknown:
        arguments = ", ".join(map(repr, unknown))
        raise BackendArguments(f"torch.compile argument {arguments}", expected="none beside 'options'")
    odd = [key for key in options or {} if not isinstance(key, str)]
    if odd:
        kind = type(odd[0]).__name__
        raise BackendArguments(f"option {odd[0]!r}", expected="the name of a setting", got=kind)
    config = PiecewiseConfig.from_any(None, **dict(options or {}))
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
    """Returns the report and counters behind a `torch.compile(..., backend="piecewise")` result.

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
    raise NoHandle(kind=type(compiled).__name__)


class CompiledGraph:
    """Serves one graph from Dynamo: replays where a bucket is captured, runs the graph itself elsewhere.

    Attributes:
        signatures: the signature of its calls; empty before the first call, and if it cannot be planned.
    """

    def __init__(self, graph: fx.GraphModule, owner: BackendHandle) -> None:
        self._eager = graph
        self._owner = owner
        self.signatures = SignatureList()
        self._refused: FallbackReason | None = None
        nodes = graph.graph.find_nodes(op="placeholder")
        self._sources = [torch_api.source_name(node) or node.name for node in nodes]
        self._fakes = [node.meta.get("example_value") for node in nodes]
        # Dynamo passes float attributes as tensors and does not guard their values: position → value seen.
        numbers = {
            index: math.nan
            for index, (node, source) in enumerate(zip(nodes, self._sources, strict=True))
            if torch_api.wraps_number(node) and array_source(source) is None
        }
        self._binder = _ArgumentBinder(len(nodes), numbers)

    def __call__(self, *args: Any) -> Any:
        return self._owner.router.serve(self, self._eager, args, {})

    def forget(self) -> None:
        """Drops the plan; the next call makes one again."""
        self.signatures.clear()
        self._refused = None
        self._binder.inputs.clear()

    def let_go(self) -> None:
        """Drops references to the last call's arguments, weights among them."""
        self._binder.let_go()

    def new_kind(
        self, args: tuple[Any, ...], _: dict[str, Any], *, may_capture: bool
    ) -> tuple[CapturedSignature, Matched] | FallbackReason:
        """Plans the graph with the first call's arguments; if that fails, the graph stays eager for good."""
        if not self.signatures and self._refused is None:
            self._plan(args)
        if self._refused is not None:
            return self._refused
        # Dynamo's guards already matched the call; `choose_plan` gives the reason if no plan serves it.
        signature, bound = self.signatures[0], bound_call(self._binder, args, {})
        matched = signature.match(bound) if bound is not None else None
        return (signature, matched) if matched is not None else FallbackReason.UNSEEN_SIGNATURE

    @paused_collector()
    def _plan(self, args: tuple[Any, ...]) -> None:
        config = self._owner.piecewise_config
        times = StartupTimes()
        self._binder.take(args)
        try:
            with times.timed("trace"):
                traced = prepare(self._trace(args), config)

            def retrace(bucket: int) -> TracedModel:
                raise ExcludedByDynamo(bucket=bucket)

            # One token gets its own graph: Dynamo specialises sizes 0 and 1.
            one_token = "Dynamo makes a graph of its own for one token"
            cut = Cut(traced, traced.planned(config, times, move_weights=True))
            signature = CapturedSignature(
                [cut], lambda: (one_token, StateFacts()), retrace, times, one_token=one_token
            )
            self.signatures.append(self._owner.store.add(signature))
        except PiecewiseError as error:
            note = str(error).splitlines()[0]
            self._owner.notes[note] = self._owner.notes.get(note, 0) + 1
            self._refused = self._owner.store.first.because(self._refusal(error), note)
            if config.strict or self._refused is FallbackReason.LOW_COVERAGE:
                raise

    def _refusal(self, error: PiecewiseError) -> FallbackReason:
        if isinstance(error, CoverageError):
            return FallbackReason.LOW_COVERAGE
        targets = [node.target for node in self._eager.graph.nodes if node.op == "call_function"]
        if not any(lookup(target) is not None for target in targets):
            return FallbackReason.NO_GRAPH  # a graph break left a graph without boundary ops
        sizes = [size for fake in self._fakes if isinstance(fake, torch.Tensor) for size in fake.shape]
        is_static = not any(isinstance(size, torch.SymInt) for size in (*sizes, *self._fakes))
        return FallbackReason.STATIC_TOKEN_COUNT if is_static else FallbackReason.CAPTURE_FAILED

    def _trace(self, args: tuple[Any, ...]) -> Trace:
        binder = self._binder
        graph = _copy_graph(self._eager)
        nodes = graph.graph.find_nodes(op="placeholder")
        placeholders = []
        names: dict[int, str] = {}
        for position, (node, source, value) in enumerate(zip(nodes, self._sources, args, strict=True)):
            if position in binder.numbers:
                binder.numbers[position] = value.item()
                _fix_number(node)
                placeholders.append(Placeholder(node, "symbol"))
            elif isinstance(value, torch.Tensor) and _is_state(source, value):
                state = StateRef(binder.arguments, position, readable_path(source))
                placeholders.append(Placeholder(node, "state", state=state))
            else:
                names[len(binder.inputs)] = readable_path(source)
                placeholders.append(Placeholder(node, "input", leaf=len(binder.inputs)))
                binder.inputs.append(position)
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        children = tuple(Structure("tensor", index=index) for index in range(len(outputs)))
        leaves = tuple(ResultLeaf("output", index) for index in range(len(outputs)))
        structure, flat = flatten_structure((tuple(args[position] for position in binder.inputs),))
        example = ExampleCall(binder, structure, tuple(flat), names)
        shape_env = torch_api.shape_env_of(self._fakes)
        result = Structure("tuple", children=children)
        # No facts: Dynamo's guards compare the module's state before each call.
        return Trace(graph, tuple(placeholders), result, leaves, shape_env, StateFacts(), example)


class _ArgumentBinder(CallBinder):
    """Binds a call of Dynamo's graph: the call's inputs become its values, the model's tensors its state.

    Attributes:
        inputs: positions of arguments that belong to the call, not the model.
        numbers: position of a number that is passed as a tensor → the value that the plan holds for.
    """

    def __init__(self, num_arguments: int, numbers: dict[int, float]) -> None:
        self.arguments: list[Any] = [None] * num_arguments
        self.inputs: list[int] = []
        self.numbers = numbers
        self.bind = self._bind

    def take(self, args: Sequence[Any]) -> None:
        self.arguments[:] = args

    def let_go(self) -> None:
        self.take([None] * len(self.arguments))

    def _bind(self, *args: Any) -> tuple:
        if len(args) != len(self.arguments):  # the example call has no arguments
            raise TypeError("not a call of this graph")
        self.take(args)
        if any(args[position].item() != value for position, value in self.numbers.items()):
            raise TypeError("a number is another one")
        return (tuple(args[position] for position in self.inputs),)


def _copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copies a graph so that its nodes can be rewritten: the original still serves the eager calls."""
    copied = fx.Graph()
    output = copied.graph_copy(graph.graph, {})
    copied.output(output)
    return fx.GraphModule(graph, copied)


def _fix_number(placeholder: fx.Node) -> None:
    """Tells the ShapeEnv that a number equals the example's; each call compares it."""
    for user in placeholder.users:
        value = user.meta.get("example_value")
        if isinstance(value, torch.SymFloat):
            float(value)


def _is_state(source: str, value: torch.Tensor) -> bool:
    if array_source(source) is not None:
        return False  # Dynamo makes the tensor from the array anew for each call
    return isinstance(value, torch.nn.Parameter) or any(
        table in source for table in ("._parameters[", "._buffers[", "._modules[")
    )
