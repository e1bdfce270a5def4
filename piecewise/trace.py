"""Model + example call → one flat FX graph with symbolic sizes, without running the model.

The tool is `torch.compile(fullgraph=True)` with a backend of our own; three of its habits are in the way:

* *It runs what the backend returns.* Our backend returns a function that hands back one distinct dummy per
  graph output. The model's kernels never run, no KV cache is touched, and where each dummy turns up in the
  result tells the output structure by identity, for any class that Dynamo can rebuild. A dummy that does
  not turn up was
  stored somewhere by forward: a side effect that a replay would drop, so it is refused.
* *It gives equal sizes one symbol.* Each dim above 1 of each input is marked, which gives each a symbol of
  its own; those that the model requires to be equal unify while tracing.
* *It caches by code object.* Each trace runs a generated function of its own, whose cache entry is dropped
at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecewise import torch_internals as internals
from piecewise.plan import ResultLeaf
from piecewise.side_effects import StateSnapshot
from piecewise.signature import CallBinder, is_plain_leaf
from piecewise.state import Scope, facts_read, readable_path, resolve
from piecewise.structure import Namespace, Structure, flatten_structure
from piecewise.trace_errors import refuse_flags, refuse_opaque, translated
from piecewise.unguarded import compares_identity, facts_unguarded, names_read, reads_flags
from runners.errors import PiecewiseError, TraceError
from runners.state_check import StateFacts, StateRef

_serial = itertools.count()
# Above any real size, below what float64 holds exactly: an int of the result that is one of these stands
# for a symbol.
_FIRST_DUMMY = 1 << 50


@dataclasses.dataclass(frozen=True, slots=True)
class ExampleCall:
    """An example's bound values, taken apart.

    Attributes:
        values: structure of the bound parameter values.
        leaves: tensors (as passed by the user) and ints, one per leaf index.
        names: leaf index → what the user calls it.
    """

    binder: CallBinder
    values: Structure
    leaves: tuple[Any, ...]
    names: Mapping[int, str]

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
        return cls(binder, values, tuple(leaves), binder.leaf_paths(values))

    @property
    def passes_one_twice(self) -> bool:
        """Whether two of the leaves are one tensor."""
        ids = [id(leaf) for leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return len(set(ids)) < len(ids)

    def with_leaves(self, leaves: Sequence[Any]) -> ExampleCall:
        return dataclasses.replace(self, leaves=tuple(leaves))


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """What a graph placeholder stands for: an input leaf, state of the model, or a symbol's value."""

    node: fx.Node
    kind: str
    leaf: int = -1
    state: StateRef | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One traced forward.

    Attributes:
        graph: the Dynamo-level graph; placeholders carry fakes in ``meta["example_value"]``.
        placeholders: one per placeholder node, in order.
        result: structure of the result; `result_leaves` has one entry per leaf index.
        shape_env: where symbols are simplified, None for a graph without any.
        state_facts: what the trace saw of the model's Python state; none where it was not asked for.
        example: the call that was traced.
        leaves_seen: input tensors that forward looked at, if only at their sizes.
        reads_flags: whether forward may ask if an input is a Parameter or requires grad.
        compares_identity: whether forward may ask if two inputs are one object.
    """

    graph: fx.GraphModule
    placeholders: tuple[Placeholder, ...]
    result: Structure
    result_leaves: tuple[ResultLeaf, ...]
    shape_env: ShapeEnv | None
    state_facts: StateFacts
    example: ExampleCall
    leaves_seen: frozenset[int] = frozenset()
    reads_flags: bool = False
    compares_identity: bool = False

    def symbols_of_leaf(self, leaf: int) -> tuple[sympy.Expr, ...]:
        """The simplified size expressions of an input tensor; empty for one that the graph does not read."""
        for placeholder in self.placeholders:
            if placeholder.kind == "input" and placeholder.leaf == leaf:
                fake = placeholder.node.meta["example_value"]
                if isinstance(fake, torch.Tensor):
                    return tuple(internals.expression(size, self.shape_env) for size in fake.shape)  # type: ignore[misc]
        return ()


def trace(
    model: nn.Module,
    example: ExampleCall,
    *,
    forward: Any,
    static_dims: Mapping[int, Sequence[int]] = {},
    keeps_identity: bool = False,
    finds_facts: bool = True,
) -> Trace:
    """Traces `forward(model's call)` with the example's structure; the model is not run and its state is
    unchanged.

    Args:
        model: the module whose state the trace records.
        forward: the callable to trace; reached from `model` (the module itself, or its own forward).
        static_dims: leaf index → dims that get no symbol; an int argument in here gets none either.
        keeps_identity: whether a tensor that the example passes twice is one for forward, too. The trace is
            made again in this way where forward may ask for it.
        finds_facts: whether the trace lists the Python state that it read; one that is only looked at, and
            never replayed, need not.
    Raises:
        TraceError: forward cannot be one graph, has side effects, or returns something that cannot be
            rebuilt.
    """
    disabled = internals.dynamo_is_disabled()
    if disabled is not None:
        raise TraceError(
            "the model cannot be traced",
            expected="torch.compile in its default stance",
            got=disabled,
            rule="the graph comes from one torch.compile trace",
            fix="leave that mode around capture(), or run the model eagerly",
        )
    leaves = _prepare_leaves(example, static_dims, keeps_identity=keeps_identity)
    function = _traced_function(example, forward)
    snapshot = StateSnapshot(model)
    collector = _Collector(
        model, function, leaves, snapshot, own_name=_name_of_self(function, forward, model)
    )
    logger = logging.getLogger("torch._guards")
    level = logger.level
    try:
        ints = [
            i for i, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor) and i not in static_dims
        ]
        int_names = [f"i{index}" for index in ints]
        with internals.tracing_config(int_names), torch.inference_mode(False), torch.no_grad():
            logger.setLevel(logging.CRITICAL)  # it prints a page before the exception that is re-raised below
            result = torch.compile(function, backend=collector, fullgraph=True)(model, *leaves)
    except PiecewiseError:
        raise
    except Exception as error:
        raise translated(error) from error
    finally:
        logger.setLevel(level)
        changes = snapshot.restore()
        internals.forget_compilation(function.__code__, collector)
        linecache.cache.pop(function.__code__.co_filename, None)
    if collector.graph is None:
        raise TraceError(
            f"{type(model).__name__}.forward has no tensor operation to graph",
            rule="a graph needs at least one op",
            fix="pass the example that your model is called with",
        )
    if changes:
        raise TraceError(
            f"{type(model).__name__}.forward changes {changes[0]}"
            + (f" and {len(changes) - 1} more" if changes[1:] else ""),
            rule="a replay runs none of the model's Python, so what forward stores would be stale [I8]",
            fix="keep it in a registered buffer and write that in place (self.count.add_(1), not +=), "
            "or return it",
        )
    if collector.compares_identity and not keeps_identity and example.passes_one_twice:
        return trace(
            model, example, forward=forward, static_dims=static_dims, keeps_identity=True,
            finds_facts=finds_facts,
        )  # fmt: skip
    if reads_flags(collector.names_read):
        refuse_flags(example.leaves, example.names)
    skip_root = not isinstance(forward, nn.Module)
    return collector.finish(result, example, skip_root=skip_root, finds_facts=finds_facts)


def _prepare_leaves(
    example: ExampleCall, static_dims: Mapping[int, Sequence[int]], *, keeps_identity: bool
) -> list[Any]:
    """Detached twins of the tensors, dims marked; the caller's objects are never marked."""
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
        if not keeps_identity or id(leaf) not in twins:
            with torch.inference_mode(False), torch.no_grad():
                twins[id(leaf)] = leaf.clone() if leaf.is_inference() else leaf.detach()
        twin = twins[id(leaf)]
        for dim, size in enumerate(twin.shape):
            if size > 1 and dim not in static_dims.get(index, ()):
                internals.mark_dynamic(twin, dim)
        prepared.append(twin)
    return prepared


def _traced_function(example: ExampleCall, forward: Any) -> Any:
    """A function with its own code object that makes the example's call from flat leaves."""
    namespace = Namespace()
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


class _Collector:
    """The backend: keeps the graph, and answers the one call with dummies.

    `own_name` is another name that sources may have for the model than ``L['model']``.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Any,
        leaves: Sequence[Any],
        snapshot: StateSnapshot,
        *,
        own_name: str | None,
    ) -> None:
        self.own_name = own_name
        self.model, self.function, self.leaves, self.snapshot = model, function, leaves, snapshot
        self.graph: fx.GraphModule | None = None
        self.sources: dict[str, str | None] = {}
        self.guards: list[internals.SeenGuard] = []
        self.names_read: frozenset[str] = frozenset()
        self.compares_identity = False
        self.arguments: tuple[Any, ...] = ()
        self.dummies: list[Any] = []

    def __call__(self, graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        self.graph = graph
        for node in graph.graph.find_nodes(op="placeholder"):
            source = internals.source_name(node)
            self.sources[node.name] = self._as_read(source) if source else None
        self.guards = [
            dataclasses.replace(guard, source=self._as_read(guard.source))
            for guard in internals.current_guards()
        ]
        code = internals.traced_code()
        self.names_read, self.compares_identity = names_read(code), compares_identity(code)
        self._note_writes()
        outputs = graph.graph.output_node().args[0]
        fakes = [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in outputs]  # type: ignore[union-attr]
        self.dummies = [_dummy_for(fake, index) for index, fake in enumerate(fakes)]

        def answer(*arguments: Any) -> list[Any]:
            self.arguments = arguments
            return self.dummies

        return answer

    def _as_read(self, source: str) -> str:
        return source.replace(self.own_name, "L['model']") if self.own_name else source

    def _facts(self, placeholders: Sequence[Placeholder], scope: Scope, *, skip_root: bool) -> StateFacts:
        facts = facts_read(self.guards, scope, self.model, skip_root=skip_root)
        places = {
            id(argument): placeholder.state
            for placeholder, argument in zip(placeholders, self.arguments, strict=True)
            if placeholder.state is not None
        }
        ties = [tuple(map(self._as_read, sources)) for sources in map(internals.tied_sources, self.guards)]
        return facts_unguarded(
            facts, self.model, names=self.names_read, ties=ties, places=places, scope=scope
        )

    def _scope(self) -> Scope:
        return Scope({"model": self.model}, self.function.__globals__)

    def _note_writes(self) -> None:
        """Adds to the snapshot what Dynamo will write to after the graph, before it does."""
        scope = self._scope()
        for source in internals.sources_to_be_written():
            source = self._as_read(source)
            try:
                value, place = scope.find(source)
            except (KeyError, AttributeError, IndexError, ValueError):
                continue
            self.snapshot.add(readable_path(source), value)
            if place is not None:
                self.snapshot.add(readable_path(source).rpartition(".")[0], place.owner)

    def finish(self, result: Any, example: ExampleCall, *, skip_root: bool, finds_facts: bool) -> Trace:
        assert self.graph is not None
        fakes = [node.meta["example_value"] for node in self.graph.graph.find_nodes(op="placeholder")]
        shape_env = internals.shape_env_of(fakes)
        internals.forget_tensors(internals.fake_mode_of(fakes))
        scope = self._scope()
        placeholders = tuple(
            self._placeholder(node, argument, scope)
            for node, argument in zip(
                self.graph.graph.find_nodes(op="placeholder"), self.arguments, strict=True
            )
        )
        structure, result_leaves = self._result(result, placeholders)
        facts = self._facts(placeholders, scope, skip_root=skip_root) if finds_facts else StateFacts()
        seen = (re.match(r"L\['t(\d+)'\]", guard.source) for guard in self.guards)
        return Trace(
            self.graph, placeholders, structure, result_leaves, shape_env, facts, example,
            leaves_seen=frozenset(int(found[1]) for found in seen if found),
            reads_flags=reads_flags(self.names_read), compares_identity=self.compares_identity,
        )  # fmt: skip

    def _placeholder(self, node: fx.Node, argument: Any, scope: Scope) -> Placeholder:
        for index, leaf in enumerate(self.leaves):
            is_tensor = isinstance(leaf, torch.Tensor)
            if (is_tensor and argument is leaf) or (
                not is_tensor and self.sources[node.name] == f"L['i{index}']"
            ):
                return Placeholder(node, "input", leaf=index)
        if not isinstance(argument, torch.Tensor):
            return Placeholder(node, "symbol")
        source = self.sources[node.name]
        state = resolve(source, scope) if source else None
        if state is None or state.get() is not argument:
            raise TraceError(
                f"forward reads a tensor through {source or 'an unnamed source'}",
                expected="an attribute, dict entry or list item reached from the model",
                rule="a tensor that a graph reads needs a recorded path, so that a move is noticed [I4]",
                fix="keep it as a parameter, buffer or plain attribute of a module",
            )
        return Placeholder(node, "state", state=state)

    def _result(
        self, result: Any, placeholders: Sequence[Placeholder]
    ) -> tuple[Structure, tuple[ResultLeaf, ...]]:
        by_id = {id(dummy): index for index, dummy in enumerate(self.dummies)}
        numbers = {_FIRST_DUMMY + index: index for index in range(len(self.dummies))}
        structure, leaves = flatten_structure(
            result, is_leaf=lambda value: type(value) is float and value in numbers, share=True
        )
        refuse_opaque(structure, self.leaves)
        found = []
        for leaf in leaves:
            if id(leaf) in by_id:
                found.append(ResultLeaf("output", by_id[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                found.append(self._tensor_leaf(leaf, placeholders))
            elif leaf in numbers:
                found.append(ResultLeaf("output", numbers[leaf], value=type(leaf)))
            else:
                source = next((i for i, given in enumerate(self.leaves) if given is leaf), None)
                found.append(
                    ResultLeaf("const", value=leaf) if source is None else ResultLeaf("input", source)
                )
        missing = set(range(len(self.dummies))) - {leaf.index for leaf in found if leaf.kind == "output"}
        if missing:
            assert self.graph is not None
            node = self.graph.graph.output_node().args[0][min(missing)]  # type: ignore[index]
            raise TraceError(
                f"forward stores the result of '{node}' outside its return value",
                rule="a replay runs none of the model's Python, so what forward stores would be stale [I8]",
                fix="return it, keep it in a buffer written with copy_(), "
                "or pass use_cache=False to a transformers model",
            )
        return structure, tuple(found)

    def _tensor_leaf(self, leaf: torch.Tensor, placeholders: Sequence[Placeholder]) -> ResultLeaf:
        for index, given in enumerate(self.leaves):
            if leaf is given:
                return ResultLeaf("input", index)
        for placeholder, argument in zip(placeholders, self.arguments, strict=True):
            if leaf is argument:
                return ResultLeaf("state", state=placeholder.state)
        for path, tensor in itertools.chain(self.model.named_parameters(), self.model.named_buffers()):
            if leaf is tensor:
                owner, _, key = path.rpartition(".")
                module = self.model.get_submodule(owner)
                table = module._parameters if key in module._parameters else module._buffers
                return ResultLeaf("state", state=StateRef(table, key, f"model.{path}"))
        raise TraceError(
            "forward returns a tensor that is neither computed, an input, nor a parameter or buffer",
            rule="every output has a source that a replay can renew [I7]",
            fix="register it as a buffer",
        )


def _dummy_for(fake: Any, index: int) -> Any:
    if isinstance(fake, torch.Tensor):
        # A float computed from sizes leaves the graph as a 0-dim float64 tensor and comes back through
        # .item().
        return (
            torch.tensor(float(_FIRST_DUMMY + index), dtype=torch.float64)
            if fake.dim() == 0
            else torch.empty(0)
        )
    return _FIRST_DUMMY + index if isinstance(fake, (int, torch.SymInt)) else float(_FIRST_DUMMY + index)
