"""Every private torch API that the compile-time half uses, in one place, for torch 2.11 to 2.13.

Only the pattern matcher, which takes long to load, is elsewhere (`passes/matcher.py`). Nothing here has a
public equivalent; `tests/test_torch_internals.py` checks each of them on the installed version.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import CodeType
from typing import Any

import sympy
import torch
import torch._dynamo as dynamo
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import LocalSource
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._device import DeviceContext
from torch.utils._sympy.printers import PythonPrinter

_TORCH = os.path.dirname(torch.__file__)
_guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class GlobalState:
    """Process-wide and thread-wide settings that a trace depends on, as they are under `no_grad` now.

    Autocast, default dtype, tf32, determinism and the number of threads; and the modes that see ops before
    any kernel does, the default device among them.
    """

    def __init__(self) -> None:
        with torch.no_grad():
            self._guard = torch._C._dynamo.guards.GlobalStateGuard()  # type: ignore[attr-defined]
        self._modes = _active_modes()

    def check(self) -> bool:
        """Whether all are the same now; only to be asked with gradients disabled."""
        return bool(self._guard.check()) and _active_modes() == self._modes


def _active_modes() -> tuple[Any, ...]:
    num_function_modes = torch._C._len_torch_function_stack()
    num_dispatch_modes = torch._C._len_torch_dispatch_stack()
    if not num_function_modes and not num_dispatch_modes:
        return ()
    modes = [torch._C._get_function_stack_at(index) for index in range(num_function_modes)]
    modes += [torch._C._get_dispatch_stack_at(index) for index in range(num_dispatch_modes)]
    # `with torch.device(...)` makes a new mode each time that means the same.
    return tuple(mode.device if isinstance(mode, DeviceContext) else id(mode) for mode in modes)


@contextmanager
def tracing_config(int_names: Sequence[str], *, repeats: bool) -> Iterator[None]:
    """Dynamo settings for one trace: scalars and data-dependent shapes stay in the graph, named ints are
    symbols, and no garbage is collected at its end.

    Args:
        repeats: whether many ops are like others before; see `_fakes_remembered`.
    """
    with ExitStack() as stack:
        stack.enter_context(_fakes_remembered(repeats))
        stack.enter_context(
            dynamo.config.patch(  # type: ignore[attr-defined]
                capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, run_gc_after_compile=False
            )
        )
        patterns = ",".join(re.escape(f"L['{name}']") for name in int_names)
        if patterns:  # replaces the user's own setting, which names sources of the user's frames
            stack.enter_context(torch.compiler.config.patch(dynamic_sources=patterns))  # type: ignore[attr-defined]
        yield


def dynamo_is_disabled() -> str | None:
    """Why `torch.compile` would not call a backend now, or None."""
    stance = dynamo.eval_frame._stance.stance
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager") is active'
    if dynamo.config.disable:  # type: ignore[attr-defined]
        return "TorchDynamo is disabled (TORCH_COMPILE_DISABLE or torch._dynamo.config.disable)"
    return None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Gives `dim` a symbol of its own; unlike the strict form it may still be specialised by the model."""
    dynamo.maybe_mark_dynamic(tensor, dim)


def forget_compilation(code: Any, backend: Any) -> None:
    """Drops what Dynamo keeps of one code object and its backend, and with it the graph and its inputs."""
    dynamo.reset_code(code)
    backends = dynamo.eval_frame.cached_backends
    for key, known in list(backends.items()):
        if known is backend or getattr(known, "compiler_fn", None) is backend:
            del backends[key]


@dataclasses.dataclass(frozen=True, slots=True)
class SeenGuard:
    """A guard of a trace: what it looks at, as Python source, its kind, and the kind's own arguments.

    Attributes:
        other: another source of the same object, where the guard says that both give it.
    """

    source: str
    kind: str
    arguments: Mapping[str, Any]
    other: str = ""


def current_guards() -> list[SeenGuard]:
    """Each guard of the trace in progress; only inside a backend."""
    context = TracingContext.try_get()
    if context is None:
        return []
    found = []
    for guard in context.guards_context.dynamo_guards:
        kind, arguments = guard.create_fn_name(), getattr(guard.create_fn, "keywords", {})
        other = arguments["source_b"].name if kind == "DUPLICATE_INPUT" else ""
        found.append(SeenGuard(guard.name, kind, arguments, other() if callable(other) else other))
    return found


def traced_code() -> list[CodeType]:
    """Each function's code that the trace in progress went through, once; only inside a backend."""
    # Each call adds the function's code again. Equal code may be of two files: so once each by identity.
    return list({id(code): code for code in TracingContext.get_traced_code() or ()}.values())


def sources_to_be_written() -> list[str]:
    """Sources of the objects, older than the trace, whose attributes or items Dynamo writes after the graph
    has run; only inside a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    older = (AttributeMutationExisting, ValueMutationExisting)
    found = []
    for variable in effects.id_to_variable.values():
        if isinstance(variable.mutation_type, older) and effects.is_modified(variable):
            name = getattr(variable.source, "name", None)
            text = name() if callable(name) else name
            if text:
                found.append(text)
    return found


_patches_side_effects = threading.RLock()


@contextmanager
def tensor_attributes_set() -> Iterator[list[str]]:
    """The list of Python attributes that Dynamo sees set on tensors in this block.

    It forgets those of tensors that are gone when it calls its backend, so they are noted as they are set.
    """
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import TensorVariable

    names: list[str] = []
    with _patches_side_effects:
        original = SideEffects.store_attr

        def noting(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            if isinstance(item, TensorVariable):
                names.append(name)
            return original(self, item, name, *args, **kwargs)

        SideEffects.store_attr = noting  # type: ignore[method-assign]
        try:
            yield names
        finally:
            SideEffects.store_attr = original  # type: ignore[method-assign]


def source_name(node: torch.fx.Node) -> str | None:
    """Python source, in terms of L and G, of what a placeholder stands for; only inside a backend."""
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    name = getattr(source, "name", None)
    return name() if callable(name) else name


def wraps_number(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a 0-dim tensor that stands for a Python number; only inside a backend."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """The ShapeEnv behind the first fake tensor among `values`."""
    fake_mode = detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])
    return fake_mode.shape_env if fake_mode is not None else None


def fake_mode_of(values: Sequence[Any]) -> Any:
    return detect_fake_mode([value for value in values if isinstance(value, torch.Tensor)])


def forget_tensors(fake_mode: Any) -> None:
    """Drops a fake mode's weak references to the real tensors that it stood in for.

    `torch.utils.swap_tensors` refuses tensors with weak references, and the fakes of a trace stay alive.
    """
    if fake_mode is not None:
        describer = fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()


def expression(value: Any, shape_env: ShapeEnv | None) -> sympy.Expr | None:
    """The simplified expression behind an int, float or symbolic scalar; None for anything else.

    `example_value` keeps the symbol of the time of recording; unification comes later, so always simplify.
    """
    if isinstance(value, SYMBOLIC):
        expr = value.node.expr
        return shape_env.simplify(expr) if shape_env is not None and isinstance(expr, sympy.Expr) else expr
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)


def is_unbacked(expr: sympy.Basic) -> bool:
    """Whether the expression holds a symbol whose value only data tells (`u0`, `zuf0`)."""
    return any(str(symbol).startswith(("u", "zu")) for symbol in expr.free_symbols)


def compile_expressions(
    expressions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[..., tuple]:
    """One plain Python function of `symbols` that returns the tuple of values; 0.1 µs an expression, not
    sympy's 40."""
    import math

    names = {symbol: f"a{position}" for position, symbol in enumerate(symbols)}
    printer = PythonPrinter()
    parts = []
    for expr in expressions:
        renamed = expr.xreplace({symbol: sympy.Symbol(name, integer=True) for symbol, name in names.items()})
        parts.append(printer.doprint(renamed))
    source = f"lambda {', '.join(names.values())}: ({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return eval(source, {"math": math, "torch": torch})  # the printer's own output, not user text


def guard_expressions(shape_env: ShapeEnv | None) -> list[sympy.Basic]:
    """Conditions on the symbols under which the trace holds, simplified, true ones left out."""
    if shape_env is None:
        return []
    found = []
    for guard in shape_env.guards:
        expr = shape_env.simplify(guard.expr)
        if expr != sympy.true and expr not in found:
            found.append(expr)
    return found


def raw_guards(shape_env: ShapeEnv | None) -> list[sympy.Basic]:
    """The conditions as they were found, in the symbols of that time."""
    return [guard.expr for guard in shape_env.guards] if shape_env is not None else []


def holds_as_guard(shape_env: ShapeEnv | None, condition: sympy.Basic) -> bool:
    """Whether a condition holds for what its symbols stand for; from then on it is a guard."""
    if condition in (sympy.true, sympy.false) or shape_env is None:
        return bool(condition)
    return bool(shape_env.evaluate_expr(condition))


def is_fake(value: Any) -> bool:
    """Whether it is a tensor of a trace."""
    return isinstance(value, FakeTensor)


def static_fake(fake_mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """The fake of a model's tensor in a trace, without symbols; what shares memory there does here."""
    return fake_mode.from_tensor(tensor, static_shapes=True)


def fake_twin(fake: torch.Tensor, memory: torch.Tensor | None) -> torch.Tensor:
    """A fake like another one, in the memory of `memory` or, for None, in memory of its own, of size 0.

    Sizes and strides are shared, not computed anew: 13 µs where an op on fakes with symbols takes 200 to 500.
    """
    assert isinstance(fake, FakeTensor)
    with torch._C._DisableTorchDispatch(), in_kernel_invocation_manager(fake.fake_mode):
        twin = FakeTensor(fake.fake_mode, torch.ops.aten.detach.default(fake), fake.fake_device)
    with torch._C._DisableTorchDispatch():
        donor = torch.empty(0, device="meta") if memory is None else memory
        torch._functionalize_unsafe_set(twin, donor)  # type: ignore[attr-defined]
    return twin


def holds_constant(fake: torch.Tensor) -> bool:
    """Whether a fake knows the values that it stands for."""
    return getattr(fake, "constant", None) is not None


def dispatch_keys(tensor: torch.Tensor) -> str:
    """Which implementations of an op the tensor chooses."""
    return str(torch._C._dispatch_keys(tensor))


def has_dynamic_dims(tensor: torch.Tensor) -> bool:
    """Whether somebody has marked dims of the tensor for Dynamo."""
    return any(name.startswith("_dynamo_") and "dynamic" in name for name in vars(tensor))


def specialisation_places(shape_env: ShapeEnv | None) -> list[str]:
    """``"file.py", line 42, in forward: code`` of each place where the model fixed a size, if known."""
    found = []
    for stack in getattr(shape_env, "specialization_stacks", {}).values():
        theirs = [frame for frame in stack or () if not frame.filename.startswith(_TORCH)]
        if theirs:
            frame = theirs[-1]
            found.append(f'"{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}')
    return list(dict.fromkeys(found))


def symbol_source(shape_env: ShapeEnv | None, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """(leaf, dim) of the traced function's argument that defines `symbol`; dim −1 for an int argument."""
    for source in shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ():
        name = source.name() if callable(source.name) else source.name
        tensor = re.fullmatch(r"L\['t(\d+)'\]\.size\(\)\[(\d+)\]", name)
        if tensor:
            return int(tensor[1]), int(tensor[2])
        number = re.fullmatch(r"L\['i(\d+)'\]", name)
        if number:
            return int(number[1]), -1
    return None


def source_of_symbol(shape_env: ShapeEnv | None, symbol: sympy.Basic) -> str | None:
    """Python source of a value that the symbol stands for."""
    sources = shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ()
    names = [source.name() if callable(source.name) else source.name for source in sources]
    return names[0] if names else None


def symbolic_sizes(shape_env: ShapeEnv | None) -> dict[tuple[int, int], sympy.Expr]:
    """(leaf, dim) → simplified expression of each size that the trace held as a symbol, whether the graph
    reads the tensor or not; dim −1 for an int argument."""
    found: dict[tuple[int, int], sympy.Expr] = {}
    for symbol in list(shape_env.var_to_sources) if shape_env is not None else []:
        source = symbol_source(shape_env, symbol)
        if source is not None:
            found[source] = shape_env.simplify(symbol)  # type: ignore[union-attr]
    return found


def compiled_object() -> Any:
    """The module, or else the code, that Dynamo is compiling now; only inside a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
    except (AttributeError, RuntimeError):
        return None
    arguments = root.f_code.co_varnames[: root.f_code.co_argcount]
    owner = root.f_locals.get(arguments[0]) if arguments else None
    return owner if isinstance(owner, torch.nn.Module) else root.f_code


def new_fake_mode(*, repeats: bool = False) -> FakeTensorMode:
    """A fake mode with symbols of its own; `repeats` as for `tracing_config`."""
    with _fakes_remembered(repeats):
        return FakeTensorMode(shape_env=ShapeEnv())


def _fakes_remembered(repeats: bool) -> Any:
    """A block in which new fake modes remember what ops gave for operands of one kind, where that pays.

    To remember takes as long as to run the op once more. Of one layer's ops a quarter are like others, and a
    trace without a memory takes a tenth less time, of symbolic aten ops half.
    """
    enabled = repeats and dynamo.config.fake_tensor_cache_enabled  # type: ignore[attr-defined]
    return dynamo.config.patch(fake_tensor_cache_enabled=enabled)  # type: ignore[attr-defined]


def symbolic_count(fake_mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """A fresh int symbol, 2 or more, whose name follows from `name` alone; `hint` is what it is taken for
    where a choice needs a number."""
    source, shape_env = LocalSource(name), fake_mode.shape_env
    assert shape_env is not None
    symbol = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def size_hint(size: Any) -> int:
    """A size of a traced tensor for the number that its symbol was taken for."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def functional_aten_graph(
    function: Callable[..., tuple], arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> torch.fx.GraphModule:
    """The aten ops of `function` on fakes; what it writes into arguments is copied into them at the end.

    Autocast of here and of regions inside is resolved into casts; torch's decompositions are not applied.
    """
    with torch.inference_mode(False):
        return trace_aten(torch.func.functionalize(function, remove="mutations"), arguments, fake_mode)


# Graphs of Inductor's own would nest in ours; strides must be those that the plan has recorded.
_INDUCTOR_PATCHES = {
    "triton.cudagraphs": False,
    "triton.cudagraph_trees": False,
    "graph_partition": False,
    "freezing": False,
    "keep_output_stride": True,
}


def start_compile_workers(values: Sequence[Any]) -> None:
    """Starts the processes in which Inductor compiles kernels for a GPU, where one of the values lies on one.

    They take seconds to be ready. The first `compile_aten_graph` would start them too, and compile what it
    needs before they are ready in this process, one kernel after the other.
    """
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    on_gpu = [device for device in devices if device.type == "cuda"]
    if on_gpu:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
        threading.Thread(target=_hash_installed_code, args=(on_gpu[0],), daemon=True).start()


def _hash_installed_code(device: torch.device) -> None:
    """Makes what all of Inductor's cache keys hold: hashes of torch's and Triton's files.

    Inductor keeps both. They take most of a second, and reading and hashing need no interpreter.
    """
    from torch._inductor.codecache import CacheBase, torch_key

    with suppress(Exception), torch.cuda.device(device):  # where it fails, it fails where it is needed
        torch_key()
        CacheBase.get_system()


def compile_aten_graph(
    graph: torch.fx.GraphModule, arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> Callable[..., Sequence[Any]]:
    """Inductor's function of the graph, which it takes over. Its settings change for the compile alone.

    Raises:
        Exception: of any kind, where Inductor cannot compile it.
    """
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode)), torch.inference_mode(False), torch.no_grad(), without_autocast():
        compiled: Any = compile_fx(graph, list(arguments), config_patches=dict(_INDUCTOR_PATCHES))
        return compiled


def without_autocast() -> Any:
    """A block in which autocast changes no op."""
    return torch._C._DisableAutocast()  # type: ignore[attr-defined]


def inductor_cache_counts() -> tuple[int, int]:
    """How often, in this process, a compile was found on disk, and how often it was not."""
    from torch._dynamo.utils import counters

    # Of the two caches the outer one counts a hit of its own and of the inner one, where torch's own do.
    found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return found, counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def row_condition(fake_mode: FakeTensorMode, rows: Any) -> Callable[[int], bool]:
    """Count → whether it may stand for `rows`: all guards of the fake mode's symbols hold, and its range."""
    if isinstance(rows, int):
        return lambda count: count == rows
    symbol, shape_env = rows.node.expr, fake_mode.shape_env
    assert shape_env is not None
    if not symbol.is_Symbol or shape_env.simplify(symbol) != symbol:
        known = int(shape_env.simplify(symbol))
        return lambda count: count == known
    bounds = shape_env.var_to_range[symbol]
    # As plain ints they compare with a symbol, too: a function that asks may be traced in its turn.
    low, high = int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else sys.maxsize
    conditions = compile_expressions(guard_expressions(shape_env), [symbol])
    return lambda count: low <= count <= high and all(conditions(count))


def numeric_settings(device: torch.device) -> str:
    """The settings of here that decide on dtypes and kernels when a function is traced or compiled."""
    kinds = sorted({"cpu", device.type})
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{casts} {torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {deterministic}"


def trace_aten(
    function: Callable[..., Any], arguments: Sequence[Any], fake_mode: Any
) -> torch.fx.GraphModule:
    """The aten ops that `function` runs on fakes and symbolic ints, gradients and autocast resolved, as a
    graph with fakes in ``meta["val"]``; ops that write are left as they are."""
    # With Python's kernels for ops that consist of others: in torch 2.11 those in C++ fail on symbolic sizes.
    with fake_mode, enable_python_dispatcher(), torch.no_grad():
        return make_fx(function)(*arguments)


def num_storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors look at a storage, beside the Python object that is passed."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


def number_dicts(
    dicts: Sequence[dict], objects: Sequence[Any], classes: Sequence[type]
) -> Callable[[], bool]:
    """A function that is true while no dict is written, no object gets another `__dict__`, and each is of its
    class; one call in C for all of them.

    What is written and put back counts as written, as far as `dict_numbers_tell`. Dicts and objects are held.
    """
    from torch._dynamo.guards import GuardManagerType

    kind = GuardManagerType.GUARD_MANAGER
    root = _guards.RootGuardManager()
    attributes = {id(item.__dict__) for item in objects}
    others = [owner for owner in dicts if id(owner) not in attributes]
    items = [*others, *objects]
    # No example value: it would make the nodes compare numbers of their own.
    nodes = [
        root.list_getitem_manager(key=at, source=str(at), example_value=None, guard_manager_enum=kind)
        for at in range(len(items))
    ]
    for node, owner in zip(nodes, others, strict=False):
        node.add_dict_version_guard(owner, [], None)
    for node, item, cls in zip(nodes[len(others) :], objects, classes, strict=True):
        node.add_type_match_guard(id(cls), [], None)
        inner = node.get_generic_dict_manager(source="", example_value=None, guard_manager_enum=kind)
        inner.add_dict_version_guard(item.__dict__, [], None)
    return functools.partial(root.check, items)


class _Plain:
    """An object with attributes."""

    value = 0


@functools.cache
def dict_numbers_tell() -> bool:
    """Whether each write shows in a dict's number.

    On Python 3.13.0 one through an attribute does not (https://github.com/python/cpython/issues/125608).
    """
    item, owner = _Plain(), {"key": 0}
    # Beyond the point where the interpreter specialises the store. The same value again need not show.
    for value in range(1, 100):
        is_same = number_dicts([owner, item.__dict__], [item], [_Plain])
        item.value = value
        if is_same():
            return False
        is_same = number_dicts([owner, item.__dict__], [item], [_Plain])
        owner["key"] = value
        if is_same():
            return False
    return True
