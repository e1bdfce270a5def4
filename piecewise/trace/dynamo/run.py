"""One run of Dynamo over one call, as a graph and what it read; nothing of the model runs.

The tool is `torch.compile(fullgraph=True)` with a backend of our own; docs/DESIGN.md says how it is kept
from running what the backend returns, and from giving equal sizes one symbol. It caches by code object, so
each run is of a generated function of its own, whose cache entry is dropped at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import re
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.binder import CallBinder, is_plain_leaf
from piecewise.calls.structure import Namespace, Structure, flatten_structure
from piecewise.trace.dynamo.sources import Scope, readable_path
from piecewise.trace.errors import translated
from piecewise.trace.state.side_effects import StateSnapshot
from piecewise.trace.subclasses.kinds import refuse_class
from runners.errors import PiecewiseError, TraceError

_serial = itertools.count()
# Above any real size, below what float64 holds exactly: an int of the result that is one of these stands
# for a symbol.
FIRST_DUMMY = 1 << 50


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleCall:
    """An example's bound values, taken apart.

    Attributes:
        values: structure of the bound parameter values.
        leaves: tensors (as passed by the user) and ints, one per leaf index.
        names: leaf index → what the user calls it.
        args, kwargs: the call as it was made, to be bound anew where the model's hooks have changed.
    """

    binder: CallBinder
    values: Structure
    leaves: tuple[Any, ...]
    names: Mapping[int, str]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_call(cls, binder: CallBinder, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExampleCall:
        """Binds and flattens a call.

        Raises:
            TypeError: an argument that forward does not have, as calling it would raise.
            TraceError: an argument that forward needs is not there.
        """
        bound = binder.bind(*args, **kwargs)
        absent = binder.absent(bound)
        if absent:
            raise TraceError(
                f"an example call without {', '.join(map(repr, absent))}",
                expected=f"forward's arguments ({', '.join(binder.names)})",
                rule="the model is traced with the example, so each argument without a default is needed",
                fix="pass to capture() what you pass to the model",
            )
        values, leaves = flatten_structure(bound)
        return cls(binder, values, tuple(leaves), binder.leaf_paths(values), tuple(args), kwargs)

    def with_leaves(self, leaves: Sequence[Any]) -> ExampleCall:
        return dataclasses.replace(self, leaves=tuple(leaves))


@dataclasses.dataclass(eq=False)
class DynamoRun:
    """What one run saw; it is the backend, too: it keeps the graph, and answers the one call with dummies.

    Attributes:
        forward: what is traced; reached from `model`.
        own_name: another name that sources may have for the model than L['model'].
        graph: the Dynamo-level graph; placeholders carry fakes in ``meta["example_value"]``.
        arguments: what Dynamo passed for each placeholder: the tensors of the model, twins of the inputs.
        sources: placeholder's name → Python source of what it stands for, in terms of L and G.
        guards: all that the run looked at.
        reads: Python source of all that Dynamo looked at; a guard says how, or that there is none.
        code: of each function that it went through.
        marks_tensors: whether forward sets a Python attribute of a tensor.
        written: objects, older than the run, that forward writes to, for a while or for good; None for one
            that is not found.
        stores: sources of what forward sets, and of containers whose items it sets.
        leaves: the inputs' twins; `dummies`: one per graph output; `result`: what forward returned of them.
        changes: paths of Python state that forward left changed; it was put back.
        bound_again: outputs that are tensors of the model itself, which forward put where they were.
    """

    model: nn.Module
    forward: Any
    function: Any
    leaves: Sequence[Any]
    snapshot: StateSnapshot
    own_name: str | None
    graph: fx.GraphModule = dataclasses.field(default_factory=lambda: fx.GraphModule({}, fx.Graph()))
    has_graph: bool = False
    sources: dict[str, str | None] = dataclasses.field(default_factory=dict)
    guards: list[torch_api.SeenGuard] = dataclasses.field(default_factory=list)
    reads: list[str] = dataclasses.field(default_factory=list)
    code: list[CodeType] = dataclasses.field(default_factory=list)
    marks_tensors: bool = False
    written: list[Any] = dataclasses.field(default_factory=list)
    stores: list[str] = dataclasses.field(default_factory=list)
    arguments: tuple[Any, ...] = ()
    dummies: list[Any] = dataclasses.field(default_factory=list)
    result: Any = None
    changes: list[str] = dataclasses.field(default_factory=list)
    bound_again: set[int] = dataclasses.field(default_factory=set)

    def __call__(self, graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        self.graph, self.has_graph = graph, True
        for node in graph.graph.find_nodes(op="placeholder"):
            source = torch_api.source_name(node)
            self.sources[node.name] = self.as_read(source) if source else None
        self.guards = [
            dataclasses.replace(guard, source=self.as_read(guard.source), other=self.as_read(guard.other))
            for guard in torch_api.current_guards()
        ]
        guarded = {source for guard in self.guards for source in (guard.source, guard.other)}
        self.guards += [
            torch_api.SeenGuard(source, torch_api.SeenGuard.UNGUARDED, {})
            for source in dict.fromkeys(map(self.as_read, self.reads))
            if source not in guarded
        ]
        self.code = torch_api.traced_code()
        self._note_writes()
        outputs = graph.graph.output_node().args[0]
        fakes = [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in outputs]  # type: ignore[union-attr]
        self.dummies = [_dummy_for(fake, index) for index, fake in enumerate(fakes)]

        def answer(*arguments: Any) -> list[Any]:
            self.arguments = arguments
            return self.dummies

        return answer

    def as_read(self, source: str) -> str:
        """A source with the model under its one name."""
        if not self.own_name:
            return source
        # The bound forward itself has defaults and a closure.
        forward = self.own_name.removesuffix(".__self__")
        return source.replace(self.own_name, "L['model']").replace(forward, "L['model'].forward")

    def scope(self) -> Scope:
        """Where sources are looked up."""
        names = self.function.__globals__
        known = {"L['model'].forward": self.forward} if self.own_name else {}
        return Scope({"model": self.model}, names, known)

    def is_bound_again(self, old: Any, new: Any) -> bool:
        """Whether the dummy `new` stands for the tensor `old`: ``self.load += x`` writes it, and binds it
        again."""
        index = next((index for index, dummy in enumerate(self.dummies) if dummy is new), None)
        if index is None or not isinstance(old, torch.Tensor):
            return False
        node: Any = self.graph.graph.output_node().args[0][index]  # type: ignore[index]
        for placeholder, argument in zip(self.placeholders(), self.arguments, strict=True):
            # A fake that an op wrote in place is what that op returns.
            if argument is old and placeholder.meta["example_value"] is node.meta["example_value"]:
                self.bound_again.add(index)
                return True
        return False

    def names_in_sources(self) -> dict[str, Any]:
        """What sources name as G, of that which is there."""
        sources = itertools.chain(*((guard.source, guard.other) for guard in self.guards))
        names = {found[1] for source in sources for found in re.finditer(r"\bG\['([^']+)'\]", source)}
        return {name: value for name, value in self.function.__globals__.items() if name in names}

    def fake_mode(self) -> Any:
        return torch_api.fake_mode_of([node.meta["example_value"] for node in self.placeholders()])

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.graph.find_nodes(op="placeholder"))

    def _note_writes(self) -> None:
        """Adds to the snapshot what Dynamo will write to after the graph, before it does."""
        scope = self.scope()
        for source, names in torch_api.sources_to_be_written():
            source = self.as_read(source)
            self.stores += [f"{source}.{name}" for name in names] or [source]
            try:
                found = scope.find(source)
            except Exception:  # nothing there, or a property of the user's
                self.written.append(None)
                continue
            value, place = found.value, found.place
            self.written.append(value)
            self.snapshot.add(readable_path(source), value)
            if place is not None:
                self.snapshot.add(readable_path(source).rpartition(".")[0], place.owner)


def run_dynamo(
    model: nn.Module,
    example: ExampleCall,
    *,
    forward: Any,
    static_dims: Mapping[int, Sequence[int]],
    repeats: bool,
    namespace: Namespace | None = None,
) -> DynamoRun:
    """Runs Dynamo over `forward(model's call)`; arguments are those of `trace`.

    Args:
        repeats: whether forward goes through many layers that look alike.
        namespace: where the generated function looks up names; runs that share it share the names of G.
    Raises:
        TraceError: forward cannot be one graph.
    """
    leaves = _prepare_leaves(example, static_dims)
    function = _traced_function(example, forward, namespace or Namespace())
    snapshot = StateSnapshot(model)
    run = DynamoRun(
        model, forward, function, leaves, snapshot, own_name=_name_of_self(function, forward, model)
    )
    logger = logging.getLogger("torch._guards")
    level = logger.level
    try:
        ints = [
            i for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor) and i not in static_dims
        ]
        int_names = [f"i{index}" for index in ints]
        settings = torch_api.tracing_config(int_names, repeats=repeats)
        with settings, torch.inference_mode(False), torch.no_grad():
            logger.setLevel(logging.CRITICAL)  # it prints a page before the exception that is re-raised below
            # Called once, at once: Dynamo need not keep the guards that it found.
            options: Any = {"guard_filter_fn": lambda entries: [False] * len(entries)}
            compiled = torch.compile(function, backend=run, fullgraph=True, options=options)
            with torch_api.tensor_attributes_set() as marked, torch_api.sources_read() as run.reads:
                run.result = compiled(model, *leaves)
            run.marks_tensors = bool(marked)
    except PiecewiseError:
        raise
    except Exception as error:
        held = list(itertools.chain(model.named_parameters(), model.named_buffers()))
        for path, tensor in held:
            refuse_class(f"model.{path}", tensor, cause=error)
        raise translated(error, held) from error
    finally:
        logger.setLevel(level)
        run.changes = snapshot.restore(run.is_bound_again)
        names = run.names_in_sources()
        torch_api.forget_compilation(function.__code__, run)
        function.__globals__.update(names)  # some go with Dynamo's code
        linecache.cache.pop(function.__code__.co_filename, None)
    if not run.has_graph:
        raise TraceError(
            f"{type(model).__name__}.forward has no tensor operation to graph",
            rule="a graph needs at least one op",
            fix="pass the example that your model is called with",
        )
    scope = run.scope()
    run.guards = [guard for guard in run.guards if guard.kind != guard.UNGUARDED or _leads(guard, scope)]
    return run


def _leads(guard: torch_api.SeenGuard, scope: Scope) -> bool:
    """Whether there is anything at a source that Dynamo looked at for a moment."""
    try:
        return bool(scope.steps(guard.source))
    except Exception:  # it may be no Python at all
        return False


def _prepare_leaves(example: ExampleCall, static_dims: Mapping[int, Sequence[int]]) -> list[Any]:
    """Detached twins of the tensors, one for a tensor passed twice, dims marked; the caller's objects are
    never marked."""
    prepared: list[Any] = []
    twins: dict[int, torch.Tensor] = {}
    for index, leaf in enumerate(example.leaves):
        if not isinstance(leaf, torch.Tensor):
            prepared.append(leaf)
            continue
        if not is_plain_leaf(leaf):
            raise TraceError(
                f"input '{example.names[index]}'",
                expected="a plain strided tensor",
                got=f"a {type(leaf).__name__} of layout {leaf.layout}",
                rule="graphs read static buffers, which are plain memory [I4]",
                fix="convert it before the call, or keep it inside the model",
            )
        if id(leaf) not in twins:
            with torch.inference_mode(False), torch.no_grad():
                twins[id(leaf)] = _normal_twin(leaf) if leaf.is_inference() else leaf.detach()
        twin = twins[id(leaf)]
        for dim, size in enumerate(twin.shape):
            if size > 1 and dim not in static_dims.get(index, ()):
                torch_api.mark_dynamic(twin, dim)
        prepared.append(twin)
    return prepared


def _normal_twin(leaf: torch.Tensor) -> torch.Tensor:
    """A tensor that is none of inference mode, in the same memory, so that the trace sees who shares it."""
    if leaf.is_conj() or leaf.is_neg():
        return leaf.clone()
    twin = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    return twin.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())  # type: ignore[call-overload, no-any-return]


def _traced_function(example: ExampleCall, forward: Any, namespace: Namespace) -> Any:
    """A function with its own code object that makes the example's call from flat leaves."""
    names = [f"t{i}" if isinstance(leaf, torch.Tensor) else f"i{i}" for i, leaf in enumerate(example.leaves)]
    arguments = example.binder.call_source(example.values, names, namespace)
    callee = "model" if isinstance(forward, nn.Module) else namespace.name(forward, "forward")
    name = f"piecewise_trace_{next(_serial)}"
    source = f"def {name}({', '.join(['model', *names])}):\n    return {callee}({arguments})\n"
    # Dynamo wraps code whose source cannot be found, which hides the argument names: linecache counts as a
    # source.
    linecache.cache[f"{name}.py"] = (len(source), None, source.splitlines(True), f"{name}.py")
    exec(compile(source, f"{name}.py", "exec"), namespace.globals)
    return namespace.globals[name]


def _name_of_self(function: Any, forward: Any, model: nn.Module) -> str | None:
    """How sources name the model where its bound forward is traced, and not the model itself."""
    if getattr(forward, "__self__", None) is not model:
        return None
    name = next(name for name, value in function.__globals__.items() if value is forward)
    return f"G['{name}'].__self__"


def _dummy_for(fake: Any, index: int) -> Any:
    if isinstance(fake, torch.Tensor):
        # A float computed from sizes leaves the graph as a 0-dim float64 tensor and comes back through
        # .item().
        return (
            torch.tensor(float(FIRST_DUMMY + index), dtype=torch.float64)
            if fake.dim() == 0
            else torch.empty(0)
        )
    return FIRST_DUMMY + index if isinstance(fake, (int, torch.SymInt)) else float(FIRST_DUMMY + index)
