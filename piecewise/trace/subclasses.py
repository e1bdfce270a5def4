"""Rewrites a traced graph of tensor subclasses into one of the plain tensors inside of them.

A wrapper subclass, such as a quantised weight, is a Python object around plain tensors. Its ops are Python
code, `__torch_function__` and `__torch_dispatch__`, which Dynamo does not trace:

    before   linear(x, weight)                                                weight: Int8Tensor
    after    mm(x, _to_copy(t(weight.qdata))) · mul(·, weight.scale) · ...    plain tensors, aten ops

Each node that takes or makes a subclass is run on fakes, once per kind of node, and replaced by the recorded
ops. Rules, passes, compilers and captures then see only plain tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.errors.trace import InputNotPlain, ResultSubclass, SubclassOp
from piecewise.ir.nodes import autocast_of, call_on_fakes, copy_calls, whereabouts
from piecewise.ir.plan import ResultLeaf
from piecewise.ir.tensors import storage_of, tensors_in
from piecewise.passes.int8_matmul import int8_matmul
from piecewise.trace.trace import Placeholder, Trace
from runners.errors import one_line
from runners.state.state_check import InnerRef, StateRef

Make = Callable[[Sequence[Any]], Any]


# An output that is a subclass: the positions of its plain tensors, and what makes it of these.
Wrapped = tuple[tuple[int, ...], Make]


def see_through(graph: fx.GraphModule) -> dict[int, Wrapped]:
    """Rewrites the graph, in place, to one of plain tensors.

    A placeholder of a subclass becomes one per tensor inside; ``meta["inner"]`` is (that placeholder, path).

    Returns:
        The outputs that are subclasses, by position; their tensors are outputs after all others.
    Raises:
        TraceError: a class or one of its ops cannot be rewritten.
    """
    return _Rewrite(graph).run()


class _Rewrite:
    def __init__(self, graph: fx.GraphModule) -> None:
        self.module, self.graph = graph, graph.graph
        fakes = [node.meta.get("example_value") for node in self.graph.nodes]
        self.fake_mode = torch_api.fake_mode_of([*fakes, *torch_api.plain_tensors(fakes)])
        self.wrapped: dict[int, Wrapped] = {}
        # Values of erased nodes, and the node of each plain fake inside of them.
        self.values: dict[fx.Node, Any] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.held: list[Any] = []  # so that none of these numbers is given again
        # The ops of a kind of node on plain tensors and sizes, what makes its result, and fakes of the ops.
        self.known: dict[Any, tuple[fx.Graph, Make]] = {}
        self.fakes: dict[fx.Graph, Mapping[fx.Node, Any]] = {}
        self.contexts: list[Any] = []
        # Memory of fakes that were recreated.
        self.stale: set[int] = set()

    def run(self) -> dict[int, Wrapped]:
        for node in list(self.graph.nodes):
            value = node.meta.get("example_value")
            is_below = any(argument in self.values for argument in node.all_input_nodes)
            if node.op == "placeholder" and torch_api.holds_wrapper(value):
                self._open(node)
            elif node.op == "output" and is_below:
                self._open_outputs(node)
            elif node.op.startswith("call") and (is_below or torch_api.holds_wrapper(value)):
                self._replace(node)
            elif self.stale and any(storage_of(fake) in self.stale for fake in tensors_in(value)):
                node.meta["example_value"] = call_on_fakes(node, self.fake_mode)
        for node in reversed(self.values):
            self.graph.erase_node(node)
        if self.values:
            self.module.recompile()
        return self.wrapped

    def _open(self, node: fx.Node) -> None:
        self.values[node] = node.meta["example_value"]
        for keys, fake in torch_api.tensors_inside(self.values[node]):
            if torch_api.is_wrapper(fake):
                torch_api.refuse_class(whereabouts(node), fake)
                continue
            with self.graph.inserting_before(node):
                inner = self.graph.placeholder("_".join((node.name, *keys)))
            inner.meta = {"example_value": fake, "inner": (node, keys)}
            self._note(fake, inner)

    def number_of(self, context: Any) -> int:
        """Numbers the contexts of subclasses; equal ones share a number."""
        for number, known in enumerate(self.contexts):
            # Comparing tensors in there gives no single bool.
            with contextlib.suppress(Exception):
                if known is context or (known == context and repr(known) == repr(context)):
                    return number
        self.contexts.append(context)
        return len(self.contexts) - 1

    def value_of(self, node: fx.Node) -> Any:
        return self.values[node] if node in self.values else node.meta.get("example_value")

    def _replace(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), self.value_of)
        if node.target is operator.getitem and isinstance(args[0], (tuple, list)):
            self._keep(node, args[0][args[1]])  # type: ignore[index]
            return
        taken = _Taken(self, node)
        given, make = taken.apart((args, kwargs))
        key = given, node.op, str(node.target), node.meta.get("autocast", ()), taken.pattern()
        if key not in self.known:
            self.known[key] = self._record(node, make, taken.leaves)
        self._keep(node, self._put_in(node, *self.known[key], taken.nodes))

    def _record(self, node: fx.Node, make: Make, leaves: Sequence[Any]) -> tuple[fx.Graph, Make]:
        makers: list[Make] = []
        what = f"'{node.name}'" + (f" ({where})" if (where := whereabouts(node)) else "")

        def program(*given: Any) -> tuple[Any, ...]:
            args, kwargs = make(given)
            before = [id(tensor) for tensor in torch_api.plain_tensors((args, tuple(kwargs.values())))]
            call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
            with autocast_of(node):
                made = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
            if before != [id(tensor) for tensor in torch_api.plain_tensors((args, tuple(kwargs.values())))]:
                raise TypeError("it binds other tensors inside of a tensor that it was given")
            taken = _Taken(self)
            makers[:] = [taken.apart(made)[1]]
            return tuple(taken.leaves)

        involved = torch_api.tree_leaves((node.meta.get("example_value"), make(leaves)))
        names = " and a ".join(sorted({type(t).__name__ for t in involved if torch_api.is_wrapper(t)}))
        try:
            module = torch_api.trace_below(
                program, leaves, self.fake_mode,
                int_matmul=int8_matmul, torch_function="below_torch_function" not in node.meta,
            )  # fmt: skip
        except Exception as error:
            problem = f"cannot be followed: {one_line(error)}"
            raise SubclassOp(node=what, names=names, problem=problem) from error
        if any(op.op == "get_attr" for op in module.graph.nodes):
            raise SubclassOp(node=what, names=names, problem="reads a tensor that is not inside of it")
        return module.graph, makers[0]

    def _put_in(self, node: fx.Node, below: fx.Graph, make: Make, nodes: Sequence[fx.Node]) -> Any:
        """Copies the ops below, on these nodes, in front of the node; makes the node's result."""
        values: dict[fx.Node, Any] = dict(zip(below.find_nodes(op="placeholder"), nodes, strict=True))
        kept = ("stack_trace", "nn_module_stack", "below_torch_function")
        meta: dict[str, Any] = {key: node.meta[key] for key in kept if key in node.meta}
        meta["below"] = node.name
        given = torch_api.plain_tensors(list(map(self.value_of, node.all_input_nodes)))
        kinds = sorted({tensor.device.type for tensor in given})
        # The ops below include autocast's casts.
        is_on = bool(node.meta.get("autocast")) or any(map(torch.is_autocast_enabled, kinds))
        meta["autocast"] = tuple((kind, None, False, False) for kind in kinds if is_on)
        fakes = copy_calls(
            below, values, node,
            like=self.fakes.get(below), fake_mode=self.fake_mode, meta_of=lambda _: dict(meta),
        )  # fmt: skip
        self.fakes.setdefault(below, fakes)
        outputs: Any = below.output_node().args[0]
        results = []
        for output in outputs:
            made = values[output] if isinstance(output, fx.Node) else output
            results.append(made.meta["example_value"] if isinstance(made, fx.Node) else made)
            if isinstance(made, fx.Node):
                self._note(results[-1], made)
        return make(results)

    def _note(self, value: Any, node: fx.Node) -> None:
        self.nodes.setdefault(id(value), node)
        self.held.append(value)

    def _keep(self, node: fx.Node, value: Any) -> None:
        """Registers a value for a node: the node that makes it, if it is one plain tensor or number."""
        self.stale |= set(map(storage_of, torch_api.plain_tensors(node.meta.get("example_value"))))
        given = list(map(self.value_of, node.all_input_nodes))
        self.stale -= set(map(storage_of, torch_api.plain_tensors(given)))
        if id(value) not in self.nodes or torch_api.is_wrapper(value):
            self.values[node] = value
            return
        node.replace_all_uses_with(self.nodes[id(value)])
        self.graph.erase_node(node)

    def _open_outputs(self, output: fx.Node) -> None:
        items: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        for position, item in enumerate(list(items)):
            if not isinstance(item, fx.Node) or item not in self.values:
                continue
            taken = _Taken(self, output)
            taken.apart(value := self.values[item])
            if not isinstance(value, torch.Tensor):
                items[position] = value
                continue
            parts = tuple(range(len(items), len(items) + len(taken.nodes)))
            self.wrapped[position] = parts, _maker(value, iter(range(len(parts))))
            items[position] = taken.nodes[0]
            items += taken.nodes
        output.args = (tuple(items),)


class _Taken:
    """Collects the plain tensors and symbolic numbers of values, each once, and the nodes of one taker."""

    def __init__(self, rewrite: _Rewrite, taker: fx.Node | None = None) -> None:
        self.rewrite, self.taker = rewrite, taker
        self.leaves: list[Any] = []
        self.nodes: list[fx.Node] = []

    def apart(self, value: Any) -> tuple[Any, Make]:
        """Splits a value into a key and a maker from leaves; equal keys make equal values of them."""
        if torch_api.is_wrapper(value):
            return self._subclass(value)
        if isinstance(value, (torch.Tensor, *torch_api.SYMBOLIC)):
            at = next((at for at, known in enumerate(self.leaves) if known is value), len(self.leaves))
            if at == len(self.leaves):
                self.leaves.append(value)
                self.nodes += [self._node(value, self.taker)] if self.taker is not None else []
            return ("leaf", at), lambda given: given[at]
        if isinstance(value, (tuple, list)):
            kind: Any = list if isinstance(value, list) else tuple
            keys, makers = zip(*map(self.apart, value), strict=True) if value else ((), ())
            return (kind, *keys), lambda given: kind(make(given) for make in makers)
        if isinstance(value, slice):
            bounds, make_bounds = self.apart((value.start, value.stop, value.step))
            return (slice, bounds), lambda given: slice(*make_bounds(given))
        if isinstance(value, dict):
            items, make_items = self.apart(tuple(value.values()))
            return (dict, *value, items), lambda given: dict(zip(value, make_items(given), strict=True))
        return (type(value), repr(value)), lambda given: value

    def _subclass(self, value: Any) -> tuple[Any, Make]:
        names, context = value.__tensor_flatten__()
        cls, size, stride = type(value), value.size(), value.stride()
        inner, make_inner = self.apart([getattr(value, name) for name in names])
        shape = _exprs((*size, *stride))
        key = cls, self.rewrite.number_of(context), shape, value.requires_grad, tuple(names), inner

        def make(given: Sequence[Any]) -> Any:
            tensors = dict(zip(names, make_inner(given), strict=True))
            return cls.__tensor_unflatten__(tensors, context, size, stride)

        return key, make

    def _node(self, value: Any, taker: fx.Node) -> fx.Node:
        if id(value) in self.rewrite.nodes:
            return self.rewrite.nodes[id(value)]
        for node in taker.all_input_nodes:
            held = self.rewrite.value_of(node)
            if held is value:
                return node
            for at, item in enumerate(held) if isinstance(held, (tuple, list)) else ():
                if item is value:
                    with self.rewrite.graph.inserting_before(taker):
                        found = self.rewrite.graph.call_function(operator.getitem, (node, at))
                    found.meta = {**node.meta, "example_value": value}
                    return found
        raise AssertionError(f"no node makes an argument of {taker.name}")

    def pattern(self) -> Any:
        """Describes the leaves, and which of them share memory."""
        memory: dict[int, int] = {}
        return tuple(
            (
                leaf.dtype, leaf.device, leaf.requires_grad,
                _exprs((*leaf.shape, *leaf.stride(), leaf.storage_offset())),
                memory.setdefault(storage_of(leaf), len(memory)),
            )
            if isinstance(leaf, torch.Tensor)
            else _exprs((leaf,))
            for leaf in self.leaves
        )  # fmt: skip


def _exprs(numbers: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(each.node.expr if isinstance(each, torch_api.SYMBOLIC) else each for each in numbers)


def _maker(value: Any, places: Iterator[int]) -> Make:
    """Makes a subclass like `value` from real tensors, in the order of its plain tensors."""
    if not torch_api.is_wrapper(value):
        at = next(places)
        return lambda given: given[at]
    names, context = value.__tensor_flatten__()
    outer = _exprs((*value.size(), *value.stride()))
    parts = {name: getattr(value, name) for name in names}
    like = [name for name, part in parts.items() if _exprs((*part.size(), *part.stride())) == outer]
    cls = type(value)
    if not like:
        raise ResultSubclass(name=f"{cls.__module__}.{cls.__qualname__}")
    makers = {name: _maker(part, places) for name, part in parts.items()}

    def make(given: Sequence[Any]) -> Any:
        tensors = {name: maker(given) for name, maker in makers.items()}
        shape = tensors[like[0]]
        return cls.__tensor_unflatten__(tensors, context, shape.size(), shape.stride())

    return make


def mark_subclasses(trace: Trace) -> None:
    """Prepares the graph, in place, for `see_through`: marks nodes whose class code Dynamo has followed."""
    for placeholder in trace.placeholders:
        place = placeholder.state
        tensor = place.get() if place is not None else None
        if isinstance(tensor, torch.Tensor) and type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            assert place is not None
            torch_api.refuse_class(place.path, tensor)
            if torch_api.has_torch_function(tensor):
                for node in trace.graph.graph.nodes:
                    node.meta["below_torch_function"] = True
    # Drops `weight.data = x` where the weight lies there already, as bitsandbytes writes in each call. Graphs
    # that read either tensor compare its address [I4].
    state = {placeholder.node: placeholder.state for placeholder in trace.placeholders}
    for node in list(trace.graph.graph.nodes):
        if node.op != "call_function" or node.target is not torch.Tensor.set_ or len(node.args) != 2:
            continue
        places = [state.get(argument) for argument in node.args]
        tensors = [place.get() for place in places if place is not None]
        if len(tensors) == 2 and _place_of(tensors[0]) == _place_of(tensors[1]):
            for user in [user for user in node.users if "_lower_version_count" in str(user.target)]:
                trace.graph.graph.erase_node(user)
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            trace.graph.graph.erase_node(node)


def _place_of(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.untyped_storage().data_ptr()


def open_state(trace: Trace, wrapped: Mapping[int, Wrapped]) -> Trace:
    """Makes the trace of the graph after `see_through`, which returned `wrapped`. State that is a subclass is
    read as the plain tensors inside, each at a place that calls compare like a weight, through the subclass
    [I4]. Tensors inside of results that are subclasses become leaves, after all others."""
    leaves, made_of = list(trace.result_leaves), list(trace.wrapped)
    for place, leaf in enumerate(trace.result_leaves):
        if leaf.kind == "output" and leaf.index in wrapped:
            parts, make = wrapped[leaf.index]
            made_of.append((place, tuple(range(len(leaves), len(leaves) + len(parts))), make))
            leaves[place] = ResultLeaf("const")
            leaves += [ResultLeaf("output", part) for part in parts]
    return dataclasses.replace(
        trace, placeholders=_opened(trace), result_leaves=tuple(leaves), wrapped=tuple(made_of)
    )


def _opened(trace: Trace) -> tuple[Placeholder, ...]:
    known = {placeholder.node: placeholder for placeholder in trace.placeholders}
    found: list[Placeholder] = []
    places: dict[tuple[int, str], StateRef] = {}
    for node in trace.graph.graph.find_nodes(op="placeholder"):
        if "inner" not in node.meta:
            found.append(known[node])
            continue
        outer, keys = node.meta["inner"]
        given = known[outer]
        if (place := given.state) is None:
            name = trace.example.names.get(given.leaf, given.leaf)
            raise InputNotPlain(name=name, kind="a tensor subclass")
        for key in keys:
            place = places.setdefault((id(place), key), InnerRef(place, key, f"{place.path}.{key}"))
        found.append(Placeholder(node, "state", state=place))
    return tuple(found)
