"""Runs Dynamo once over one call, for a graph and the state that it read; the model itself does not run.

The tool is `torch.compile(fullgraph=True)` with our own backend; docs/DESIGN.md says how Dynamo is kept from
running the backend's result, and from giving equal sizes one symbol. Dynamo caches by code object, so each
run traces a newly generated function, whose cache entry is dropped at the end.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from piecewise import torch_api
from piecewise.calls.binder import is_plain_leaf
from piecewise.calls.structure import Namespace
from piecewise.errors.trace import InputNotPlain, NoOps, NotOneGraph
from piecewise.trace.dynamo.sources import Scope, readable_path
from piecewise.trace.trace import ExampleCall
from runners.errors import PiecewiseError

_serial = itertools.count()
# Above any real size, below the exact limit of float64: result ints from here on are dummies of symbols.
FIRST_DUMMY = 1 << 50
_MAX_DETAIL = 400


@dataclasses.dataclass(eq=False)
class DynamoRun:
    """Holds what one run saw; serves as Dynamo's backend, and answers the one call with dummies.

    Attributes:
        own_name: another name that sources may have for the model than L['model'].
        graph: Dynamo's graph; each node has its fake in ``meta["example_value"]``.
        arguments: per placeholder, the model's tensor or one of `leaves`, the twins of the inputs.
        sources: placeholder's name → Python source of what it stands for, in terms of L and G.
        guards: all that the run read; a read without a guard has kind `UNGUARDED`.
        marks_tensors: whether forward sets a Python attribute of a tensor.
        written: objects, older than the run, that forward writes to; None for one that is not found.
        stores: sources of what forward sets, and of containers whose items it sets.
        dummies: one per graph output; `result` is what forward returned of them.
        changes: paths of Python state that forward changed and the run restored.
        bound_again: outputs that are the model's own tensors, assigned again to their own places.
    """

    model: nn.Module
    forward: Any
    function: Any
    leaves: Sequence[Any]
    snapshot: StateSnapshot
    own_name: str | None
    graph: fx.GraphModule = None  # type: ignore[assignment]  # until Dynamo calls its backend
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
        self.graph = graph
        for node in self.placeholders():
            source = torch_api.source_name(node)
            self.sources[node.name] = self.as_read(source) if source else None
        read, seen = self.as_read, torch_api.current_guards()
        self.guards = [dataclasses.replace(g, source=read(g.source), other=read(g.other)) for g in seen]
        guarded = {source for guard in self.guards for source in (guard.source, guard.other)}
        unguarded = [source for source in dict.fromkeys(map(read, self.reads)) if source not in guarded]
        made, kind = torch_api.SeenGuard, torch_api.SeenGuard.UNGUARDED
        self.guards += [made(source, kind, {}) for source in unguarded]
        self.code = torch_api.traced_code()
        self._note_writes()
        outputs: Any = graph.graph.output_node().args[0]
        fakes = [node.meta.get("example_value") if isinstance(node, fx.Node) else node for node in outputs]
        self.dummies = [_dummy_for(fake, FIRST_DUMMY + index) for index, fake in enumerate(fakes)]

        def answer(*arguments: Any) -> list[Any]:
            self.arguments = arguments
            return self.dummies

        return answer

    def as_read(self, source: str) -> str:
        """Rewrites a source so that the model has its one name."""
        if not self.own_name:
            return source
        # The bound forward itself has defaults and a closure.
        forward = self.own_name.removesuffix(".__self__")
        return source.replace(self.own_name, "L['model']").replace(forward, "L['model'].forward")

    def scope(self) -> Scope:
        names = self.function.__globals__
        known = {"L['model'].forward": self.forward} if self.own_name else {}
        return Scope({"model": self.model}, names, known)

    def is_bound_again(self, old: Any, new: Any) -> bool:
        """Whether the dummy `new` stands for `old`: ``self.load += x`` writes and reassigns a tensor."""
        found = [index for index, dummy in enumerate(self.dummies) if dummy is new]
        for index in found if isinstance(old, torch.Tensor) else ():
            outputs: Any = self.graph.graph.output_node().args[0]
            made = outputs[index].meta["example_value"]
            for placeholder, argument in zip(self.placeholders(), self.arguments, strict=True):
                # An op in place returns the fake that it wrote.
                if argument is old and placeholder.meta["example_value"] is made:
                    self.bound_again.add(index)
                    return True
        return False

    def names_in_sources(self) -> dict[str, Any]:
        """Finds the objects that sources name as G."""
        sources = itertools.chain(*((guard.source, guard.other) for guard in self.guards))
        names = {found[1] for source in sources for found in re.finditer(r"\bG\['([^']+)'\]", source)}
        return {name: value for name, value in self.function.__globals__.items() if name in names}

    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.graph.find_nodes(op="placeholder"))

    def _note_writes(self) -> None:
        """Adds to the snapshot what Dynamo writes after the graph, before the write."""
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
    """Runs Dynamo over `forward(model's call)`; arguments are those of `FrontEnd`.

    Args:
        repeats: whether forward runs many layers of one kind.
        namespace: names for the generated function; runs that share a namespace share the names of G.
    """
    leaves = _prepare_leaves(example, static_dims)
    namespace = namespace or Namespace()
    function = _traced_function(example, forward, namespace)
    own_name = None
    if getattr(forward, "__self__", None) is model:
        own_name = f"G['{namespace.name(forward)}'].__self__"
    run = DynamoRun(model, forward, function, leaves, StateSnapshot(model), own_name)
    logger = logging.getLogger("torch._guards")
    level = logger.level
    ints = [f"i{i}" for i, leaf in enumerate(leaves) if type(leaf) is int and i not in static_dims]
    try:
        settings = torch_api.tracing_config(ints, repeats=repeats)
        with settings, torch.inference_mode(False), torch.no_grad():
            logger.setLevel(logging.CRITICAL)  # it prints a page before the exception that is re-raised below
            # The function is called only once, so Dynamo need not keep its guards.
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
            torch_api.refuse_class(f"model.{path}", tensor, cause=error)
        raise _translated(error, held) from error
    finally:
        logger.setLevel(level)
        run.changes = run.snapshot.restore(run.is_bound_again)
        names = run.names_in_sources()
        torch_api.forget_compilation(function.__code__, run)
        function.__globals__.update(names)  # some go with Dynamo's code
        linecache.cache.pop(function.__code__.co_filename, None)
    if run.graph is None:
        raise NoOps(model=type(model).__name__)
    scope = run.scope()
    # Drops those of objects that existed only during the trace.
    run.guards = [each for each in run.guards if each.kind != each.UNGUARDED or scope.steps_to(each.source)]
    return run


def _prepare_leaves(example: ExampleCall, static_dims: Mapping[int, Sequence[int]]) -> list[Any]:
    """Detaches and marks twins of the tensors, one per object; the caller's tensors are never marked."""
    twins: dict[int, torch.Tensor] = {}
    for index, leaf in enumerate(example.leaves):
        if not is_plain_leaf(leaf):
            kind = f"a {type(leaf).__name__} of layout {leaf.layout}"
            raise InputNotPlain(name=example.names[index], kind=kind)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in twins:
            with torch.inference_mode(False), torch.no_grad():
                twins[id(leaf)] = torch_api.twin_in_memory(leaf) if leaf.is_inference() else leaf.detach()
        for dim, size in enumerate(twins[id(leaf)].shape) if isinstance(leaf, torch.Tensor) else ():
            if size > 1 and dim not in static_dims.get(index, ()):
                torch_api.mark_dynamic(twins[id(leaf)], dim)
    return [twins.get(id(leaf), leaf) for leaf in example.leaves]


def _traced_function(example: ExampleCall, forward: Any, namespace: Namespace) -> Any:
    """Generates a function with its own code object that makes the example's call from flat leaves."""
    names = [f"t{i}" if isinstance(leaf, torch.Tensor) else f"i{i}" for i, leaf in enumerate(example.leaves)]
    arguments = example.binder.call_source(example.values, names, namespace)
    callee = "model" if isinstance(forward, nn.Module) else namespace.name(forward, "forward")
    name = f"piecewise_trace_{next(_serial)}"
    source = f"def {name}({', '.join(['model', *names])}):\n    return {callee}({arguments})\n"
    # Dynamo wraps code without source, which hides the argument names; linecache provides a source.
    linecache.cache[f"{name}.py"] = (len(source), None, source.splitlines(True), f"{name}.py")
    exec(compile(source, f"{name}.py", "exec"), namespace.globals)
    return namespace.globals[name]


def _dummy_for(fake: Any, number: int) -> Any:
    if isinstance(fake, torch.Tensor):
        # A float computed from sizes leaves the graph as a 0-dim float64 tensor, read with .item().
        return torch.empty(0) if fake.dim() else torch.tensor(float(number), dtype=torch.float64)
    return number if isinstance(fake, (int, torch.SymInt)) else float(number)


def _translated(error: Exception, held: Iterable[tuple[str, torch.Tensor]]) -> NotOneGraph:
    """Translates Dynamo's error into ours; `held` are the model's tensors by their paths."""
    cause: BaseException = error
    while cause.__cause__ is not None and not str(cause):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).strip().splitlines() if line.strip()]
    rule, fix = (_after(word, lines) for word in ("Rule:", "Fix:"))
    if rule and fix:  # an error of ours, raised by code that Dynamo was tracing through
        return NotOneGraph(lines[0].partition(": ")[2] or lines[0], rule=rule, fix=fix)
    # The headline names the construct; the place is in the user's code.
    detail = _after("Explanation:", lines) or _after("Developer debug context:", lines)
    words = [": ".join(filter(None, (lines[0], detail[:_MAX_DETAIL]))) if lines else type(cause).__name__]
    words += [f"({line})" for line in reversed(lines) if line.startswith("File ")][:1]
    if "in maybe_install_capturing_hooks" in words[-1]:
        fix = (
            "call the model once like this, then capture: transformers installs hooks at its first such call"
        )
        return NotOneGraph(cause=" ".join(words), fix=fix)
    wrapped = next(((path, type(each).__name__) for path, each in held if torch_api.is_wrapper(each)), None)
    hint = "; it may be one of the code of tensor subclasses, for model.{} is a {}"
    return NotOneGraph(cause=" ".join(words), hint=hint.format(*wrapped) if wrapped else "")


def _after(word: str, lines: Iterable[str]) -> str:
    return next((text for line in lines if line.startswith(word) and (text := line[len(word) :].strip())), "")


_TABLES = ("_modules", "_parameters", "_buffers")


class StateSnapshot:
    """Copies containers, not their contents, to find and undo what a trace changed. Dynamo repeats forward's
    writes to attributes, containers and globals after the call, with the backend's results; a replay would
    repeat none. Every module of `model` is included from the start, with the containers among its
    attributes."""

    def __init__(self, model: nn.Module) -> None:
        self._entries: dict[int, tuple[str, Any, Any]] = {}
        for path, module in model.named_modules():
            names = module.__dict__
            for table in (names, *(names[name] for name in _TABLES)):
                self._add(path, table)
            for key, value in names.items():
                if key not in _TABLES:
                    self._add(f"{path}.{key}" if path else key, value)

    def add(self, path: str, value: Any) -> None:
        """Adds a container, or the attributes of an object; ignores anything else."""
        self._add(path, value)
        self._add(path, getattr(value, "__dict__", None))

    def _add(self, path: str, value: Any) -> None:
        if type(value) in (list, dict, set, deque):
            self._entries.setdefault(id(value), (path, value, value.copy()))

    def restore(self, is_same: Callable[[Any, Any], bool]) -> list[str]:
        """Restores every changed container; returns the changed paths, except where `is_same(old, new)`."""
        changed: list[str] = []
        for path, container, before in self._entries.values():
            old, now = _by_key(before), _by_key(container)
            keys = [key for key in now if key not in old]
            others = [key for key, value in old.items() if key not in now or now[key] is not value]
            if not keys and not others and (isinstance(container, set) or list(old) == list(now)):
                continue
            keys += [key for key in others if key not in now or not is_same(old[key], now[key])]
            if isinstance(container, dict):
                changed += [f"{path}.{key}" if path else str(key) for key in keys]
            elif keys:
                changed.append(path)
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(before)
        return changed


def _by_key(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return container
    return dict.fromkeys(container) if isinstance(container, set) else dict(enumerate(container))
