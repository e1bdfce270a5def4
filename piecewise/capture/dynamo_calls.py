"""Knows the calls of one `torch.compile` result: the graphs that Dynamo made of it, and what serves each."""

from __future__ import annotations

import dataclasses
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn

from boundary_ops.declare.registry import lookup
from piecewise import torch_api
from piecewise.calls.binder import CallBinder, bound_call
from piecewise.calls.structure import Structure, flatten_structure
from piecewise.capture.analyse import (
    ANOTHER_PROGRAM,
    TracedModel,
    example_of_size,
    prepare,
    runs_same_program,
)
from piecewise.capture.call_router import CallRouter
from piecewise.capture.captured_call import CapturedSignature, Cut, FoundCall, Matched, SignatureList
from piecewise.capture.store import GraphStore
from piecewise.errors.analysis import NoBoundaryOp
from piecewise.errors.api import BreaksApart, ExcludedByDynamo, NoHandle
from piecewise.errors.report import CoverageError
from piecewise.errors.trace import CompileIsOff
from piecewise.ir.plan import ResultLeaf
from piecewise.ir.tensors import array_source
from piecewise.report.report import CaptureReport
from piecewise.report.startup_times import StartupTimes
from piecewise.trace.dynamo.sources import readable_path
from piecewise.trace.trace import ExampleCall, Placeholder, Trace
from runners.collector import paused_collector
from runners.errors import PiecewiseError
from runners.state.state_check import StateFacts, StateRef
from runners.stats import FallbackReason


class DynamoCalls:
    """Finds the graph that a call comes to, and captures, explains and verifies through it.

    Attributes:
        compiled: returns the result of `torch.compile`, or None; it is not held, as it holds the model.
        graphs: what Dynamo compiled, in its order.
        notes: why graphs could not be planned → how many.
    """

    def __init__(self, owner: Any, store: GraphStore, router: CallRouter) -> None:
        self.store, self.router = store, router
        self.compiled: Callable[[], Any] = lambda: None
        self.graphs: list[CompiledGraph] = []
        self.notes: dict[str, int] = {}
        self._owner = weakref.ref(owner)

    @property
    def model(self) -> nn.Module:
        owner = self._owner()
        return owner if isinstance(owner, nn.Module) else nn.Module()  # a function: its state is the graph's

    def add(self, graph: fx.GraphModule, *, is_whole: bool) -> CompiledGraph:
        """Serves one more graph of Dynamo's."""
        self.graphs.append(CompiledGraph(graph, self, is_whole=is_whole))
        return self.graphs[-1]

    def capture(self, args: Any, kwargs: Any) -> CaptureReport:
        """Captures every bucket; the call is left at its graph, of which nothing runs."""
        call = torch_api.with_symbolic_sizes((args, kwargs))
        with torch.no_grad():
            graph, values = self._reach(*call)
            twin = graph.twin(values)
            signature = graph.planned(values) if twin is None else twin[0].planned(twin[1])
            if self.store.config.buckets[0] == 1:  # whether one token is the same program, Dynamo must tell
                traced = signature.traced
                leaves = zip(traced.trace.example.leaves, example_of_size(traced, 1).leaves, strict=True)
                sizes = {id(old): new for old, new in leaves}
                self.found(*torch_api.tree_map(lambda leaf: sizes.get(id(leaf), leaf), call))
            if signature.suspended is not None:
                signature.end_suspension()
            return self.store.capture_listed(signature)

    def traced(self, args: Any, kwargs: Any) -> TracedModel:
        graph, values = self._reach(*torch_api.with_symbolic_sizes((args, kwargs)))
        return graph.traced(values, graph.new_binder())

    def found(self, args: Any, kwargs: Any) -> FoundCall:
        graph, values = self._reach(args, kwargs)
        return graph.found(values)

    def resume(self) -> CaptureReport | None:
        return self.store.resume(None)  # the arguments of the next call carry the weights

    def release(self) -> None:
        for graph in self.graphs:
            graph.forget()

    def let_go(self) -> None:
        for graph in self.graphs:
            graph.let_go()

    def refused(self) -> Mapping[str, int]:
        return self.notes

    def _reach(self, args: Any, kwargs: Any) -> tuple[CompiledGraph, tuple[Any, ...]]:
        """Finds the graph that serves a call, and its arguments there; the call is left at that point."""
        compiled = self.compiled()
        if compiled is None:
            raise NoHandle(kind="a model that is gone")
        if (mode := torch_api.dynamo_is_disabled()) is not None:
            raise CompileIsOff(mode=mode)
        token = _is_sought.set(True)
        try:
            with torch.no_grad(), torch_api.marks_are_wishes():
                compiled(*args, **kwargs)
        except _Reached as reached:
            graph, values = reached.graph, reached.values
        except Exception as error:
            raise getattr(error, "inner_exception", error) from None  # a refusal of ours, inside Dynamo's
        else:
            raise BreaksApart()
        finally:
            _is_sought.reset(token)
        if not graph.is_whole:
            raise BreaksApart()
        if graph.owner is not self:
            raise NoHandle(kind="a compilation that is over")
        return graph, values


# Dynamo's sources of the ints that a graph takes for sizes of its inputs.
_SIZE = re.compile(r"(.+)\.(size|stride)\(\)\[(\d+)\]")
# Whether the call in progress looks for its graph alone.
_is_sought: ContextVar[bool] = ContextVar("_is_sought", default=False)


class _Reached(BaseException):
    """Leaves a call at the graph that would serve it; no `except Exception` of the model's stops it."""

    def __init__(self, graph: CompiledGraph, values: tuple[Any, ...]) -> None:
        self.graph, self.values = graph, values


class CompiledGraph:
    """Serves one graph from Dynamo: replays where a bucket is captured, runs the graph itself elsewhere.

    Attributes:
        owner: all graphs of its model.
        is_whole: whether it is the whole of the model's forward.
        signatures: the signature of its calls; empty before the first call, and if it cannot be planned.
    """

    def __init__(self, graph: fx.GraphModule, owner: DynamoCalls, *, is_whole: bool) -> None:
        self._eager = graph
        self.owner, self.is_whole = owner, is_whole
        self.signatures = SignatureList()
        self._refused: FallbackReason | None = None
        self._note = ""
        nodes = graph.graph.find_nodes(op="placeholder")
        self.sources = [torch_api.source_name(node) or node.name for node in nodes]
        self._fakes = fakes = [node.meta.get("example_value") for node in nodes]
        sizes = [size for fake in fakes if isinstance(fake, torch.Tensor) for size in fake.shape]
        self._is_static = not any(isinstance(size, torch.SymInt) for size in (*sizes, *fakes))
        # Dynamo passes float attributes as tensors and does not guard their values: position → value seen.
        self._numbers = {
            index: math.nan
            for index, (node, source) in enumerate(zip(nodes, self.sources, strict=True))
            if torch_api.wraps_number(node) and array_source(source) is None
        }
        state = zip(nodes, self.sources, fakes, strict=True)
        torch_api.guard_modules_of([node for node, source, fake in state if _is_state(source, fake)])
        self.binder = self.new_binder()
        # Another graph → whether it is the same program.
        self._is_same: dict[CompiledGraph, bool] = {}

    def __call__(self, *args: Any) -> Any:
        if _is_sought.get():
            if self.is_whole or self._has_boundary_op():
                raise _Reached(self, args)
            return self._eager(*args)
        return self.owner.router.serve(self, self._eager, args, {})

    def new_binder(self) -> _ArgumentBinder:
        """Makes a binder for another trace."""
        return _ArgumentBinder(len(self.sources), dict(self._numbers))

    def forget(self) -> None:
        """Drops the plan; the next call makes one again."""
        self.signatures.clear()
        self._refused = None
        self.binder = self.new_binder()

    def let_go(self) -> None:
        """Drops references to the last call's arguments, weights among them."""
        self.binder.take([None] * len(self.sources))

    def new_kind(
        self, args: tuple[Any, ...], _: dict[str, Any], *, may_capture: bool
    ) -> tuple[CapturedSignature, Matched] | FallbackReason:
        """Plans the graph with the first call's arguments; if that fails, the graph stays eager for good."""
        if not self.signatures:
            twin = self.twin(args)
            if twin is not None:
                return twin[0].signatures[0], twin[2]
            if self._refused is None:
                try:
                    self.planned(args)
                except PiecewiseError as error:
                    self._refuse(error)
            if self._refused is not None:
                return self._refused
        # Dynamo's guards already matched the call; `choose_plan` gives the reason if no plan serves it.
        own = self._match(args)
        return (self.signatures[0], own) if own is not None else FallbackReason.UNSEEN_SIGNATURE

    @paused_collector()
    def planned(self, values: Sequence[Any]) -> CapturedSignature:
        """Returns the signature of calls like this one, made anew if the model or a number has changed."""
        store = self.owner.store
        if self.signatures:
            signature = self.signatures[0]
            if signature in store.signatures and self._match(values) is not None and signature.is_current():
                return signature
            store.remove(signature)
            self.forget()
        config, times, binder = self.owner.store.config, StartupTimes(), self.new_binder()
        with times.timed("trace"):
            traced = self.traced(values, binder)

        def retrace(bucket: int) -> TracedModel:
            raise ExcludedByDynamo(bucket=bucket)

        unknown = "Dynamo makes a graph of its own for one token, which no call has asked for yet"
        cut = Cut(traced, traced.planned(config, times, move_weights=True))
        made = CapturedSignature([cut], lambda: (unknown, StateFacts()), retrace, times)
        self.signatures.append(store.add(made))
        self.binder = binder
        self.owner.notes.pop(self._note, None)
        self._refused = None
        return made

    def found(self, values: tuple[Any, ...]) -> FoundCall:
        """Finds what `verify` compares for a call; eager is Dynamo's graph, run op by op."""
        graph, arguments, _ = self.twin(values) or (self, values, None)
        return graph.signatures, lambda: tuple(self._eager(*values)), arguments, {}

    def traced(self, values: Sequence[Any], binder: _ArgumentBinder) -> TracedModel:
        """Prepares the graph for a cut, with these arguments as the example."""
        binder.take(values)
        return prepare(self._trace(values, binder), self.owner.store.config)

    def _refuse(self, error: PiecewiseError) -> None:
        """Serves the graph eagerly from now on, for the reason that a plan failed."""
        if isinstance(error, NoBoundaryOp) and self.is_whole:
            raise error
        self._note = str(error).splitlines()[0]
        self.owner.notes[self._note] = self.owner.notes.get(self._note, 0) + 1
        if isinstance(error, CoverageError):
            self._refused = FallbackReason.LOW_COVERAGE
        elif not self._has_boundary_op():
            self._refused = FallbackReason.NO_GRAPH  # a graph break left a graph without boundary ops
        else:
            codes = FallbackReason.CAPTURE_FAILED, FallbackReason.STATIC_TOKEN_COUNT
            self._refused = codes[self._is_static]
        self.owner.store.first.because(self._refused, self._note)
        if self.owner.store.config.strict or self._refused is FallbackReason.LOW_COVERAGE:
            raise error

    def _has_boundary_op(self) -> bool:
        return any(lookup(node.target) is not None for node in self._eager.graph.nodes)

    def _match(self, values: Sequence[Any]) -> Matched | None:
        bound = bound_call(self.binder, values, {})
        return self.signatures[0].match(bound) if bound is not None else None

    def twin(self, values: tuple[Any, ...]) -> tuple[CompiledGraph, list[Any], Matched] | None:
        """Finds an earlier graph that serves this call, with its arguments.

        Dynamo makes one more graph for one token, or for a tensor of inference mode. Its guards have matched,
        so the call is this graph's program; where the earlier one's is the same, its replays are right.
        """
        for other in self.owner.graphs if not self.signatures else ():
            arguments = self._arguments_of(other, values) if other.signatures else None
            if arguments is None:
                continue
            signature, before = other.signatures[0], list(other.binder.arguments)
            matched = other._match(arguments)
            if matched is None or not matched[0] or not signature.is_current():
                other.binder.take(before)  # of another layer with the same code, maybe
                continue
            if other not in self._is_same:
                self._is_same[other] = self._has_program_of(other, values, arguments, matched[0])
            is_same = self._is_same[other]
            if matched[0] == 1 and is_same:
                if signature.one_token:  # unknown, when bucket 1 was to be captured
                    signature.take_back(1)
                signature.one_token = ""
            elif matched[0] == 1:
                signature.one_token = signature.one_token or ANOTHER_PROGRAM
                self._refused = self.owner.store.first.because(
                    FallbackReason.ONE_TOKEN_BRANCH, ANOTHER_PROGRAM
                )
            if is_same:
                return other, arguments, matched
        return None

    def _arguments_of(self, other: CompiledGraph, values: tuple[Any, ...]) -> list[Any] | None:
        """Finds the arguments of another graph for this call; None if the two read different things."""
        found = dict(zip(self.sources, values, strict=True))
        for source in [source for source in other.sources if source not in found]:
            size = _SIZE.fullmatch(source)
            if size is None or size[1] not in found:
                return None
            found[source] = getattr(found[size[1]], size[2])()[int(size[3])]
        return [found[source] for source in other.sources] if len(found) == len(other.sources) else None

    @paused_collector()
    def _has_program_of(
        self, other: CompiledGraph, values: tuple[Any, ...], arguments: list[Any], num_tokens: int
    ) -> bool:
        several, config = other.signatures[0].traced, self.owner.store.config
        leaves = tuple(arguments[at] for at in other.binder.inputs)
        example = dataclasses.replace(several.trace.example, leaves=leaves)
        count = num_tokens if self._is_static or num_tokens == 1 else None
        try:
            trace = self._trace(values, other.binder, example=example, like=other.sources)
            return runs_same_program(several, trace, config, num_tokens=count)
        except PiecewiseError:
            return False

    def _trace(
        self,
        values: Sequence[Any],
        binder: _ArgumentBinder,
        *,
        example: ExampleCall | None = None,
        like: Sequence[str] | None = None,
    ) -> Trace:
        """Makes a trace of Dynamo's graph; its arguments are named as in another graph with these sources."""
        graph = _copy_graph(self._eager)
        nodes = graph.graph.find_nodes(op="placeholder")
        placeholders = []
        names: dict[int, str] = {}
        for position, (node, source, value) in enumerate(zip(nodes, self.sources, values, strict=True)):
            place = position if like is None else like.index(source)
            if position in self._numbers:
                if like is None:
                    binder.numbers[position] = value.item()
                _fix_number(node)
                placeholders.append(Placeholder(node, "symbol"))
            elif _is_state(source, value):
                state = StateRef(binder.arguments, place, readable_path(source))
                placeholders.append(Placeholder(node, "state", state=state))
            else:
                if like is None:
                    names[len(binder.inputs)] = readable_path(source)
                    binder.inputs.append(position)
                placeholders.append(Placeholder(node, "input", leaf=binder.inputs.index(place)))
        outputs = graph.graph.output_node().args[0]
        assert isinstance(outputs, (tuple, list))
        children = tuple(Structure("tensor", index=index) for index in range(len(outputs)))
        leaves = tuple(ResultLeaf("output", index) for index in range(len(outputs)))
        if example is None:
            structure, flat = flatten_structure((tuple(values[position] for position in binder.inputs),))
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


def _is_state(source: str, value: Any) -> bool:
    if array_source(source) is not None:
        return False  # Dynamo makes the tensor from the array anew for each call
    is_owned = any(table in source for table in ("._parameters[", "._buffers[", "._modules["))
    return isinstance(value, torch.Tensor) and (is_owned or isinstance(value, nn.Parameter))
