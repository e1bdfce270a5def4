"""Wraps private parts of Dynamo: settings of a trace, what it reads and writes, and its symbolic sizes."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any, ClassVar

import sympy
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo import external_utils
from torch._dynamo.guards import GuardBuilder, _get_closure_vars, install_guard
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import GlobalSource, LocalSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.builder import VariableBuilder
from torch._guards import ChainedSource, Source, TracingContext
from torch._library.opaque_object import get_opaque_obj_info
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_map
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

from piecewise.torch_api.fakes import einsums_from_the_left, fake_mode_of, fakes_remembered

_TORCH = os.path.dirname(torch.__file__)
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def shape_env_of(values: Sequence[Any]) -> ShapeEnv | None:
    """Finds the ShapeEnv of the first fake tensor among `values`."""
    return getattr(fake_mode_of(values), "shape_env", None)


def name_of(source: Any) -> Any:
    """Writes a source as Python source: a method in some versions of torch, a property in others."""
    name = getattr(source, "name", None)
    return name() if callable(name) else name


def expression(value: Any, shape_env: ShapeEnv | None) -> sympy.Expr | None:
    """Simplifies the expression of an int, float or symbolic scalar; None for anything else. `example_value`
    keeps the symbol at recording; symbols are unified later, so always simplify."""
    if isinstance(value, SYMBOLIC):
        expr = value.node.expr
        return shape_env.simplify(expr) if shape_env is not None and isinstance(expr, sympy.Expr) else expr
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)


def free_symbols(values: Iterable[Any], shape_env: ShapeEnv | None) -> set[sympy.Symbol]:
    """Finds the symbols in the simplified expressions of sizes and other numbers."""
    exprs = [expression(value, shape_env) for value in values]
    return {symbol for expr in exprs if expr is not None for symbol in expr.free_symbols}  # type: ignore[misc]


def is_unbacked(expr: sympy.Basic) -> bool:
    """Whether the expression has a data-dependent symbol (`u0`, `zuf0`)."""
    return any(symbol.name.startswith(("u", "zu")) for symbol in expr.free_symbols)  # type: ignore[attr-defined]


def compile_expressions(
    expressions: Sequence[sympy.Basic], symbols: Sequence[sympy.Symbol]
) -> Callable[..., tuple]:
    """Compiles one plain Python function of `symbols`: 0.1 µs an expression, not sympy's 40."""
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
    """Lists the trace's simplified conditions on symbols, without true ones."""
    if shape_env is None:
        return []
    exprs = dict.fromkeys(shape_env.simplify(guard.expr) for guard in shape_env.guards)
    return [expr for expr in exprs if expr != sympy.true]


def holds_as_guard(shape_env: ShapeEnv | None, condition: sympy.Basic) -> bool:
    """Whether a condition holds for the symbols' hints; adds the condition as a guard."""
    if condition in (sympy.true, sympy.false) or shape_env is None:
        return bool(condition)
    return bool(shape_env.evaluate_expr(condition))


@contextmanager
def asked_of_sizes(shape_env: ShapeEnv | None) -> Iterator[set[sympy.Basic]]:
    """Collects what code in this block asks of sizes, answered for the example; adds no guard or symbol."""
    asked: set[sympy.Basic] = set()
    if shape_env is None:
        yield asked
        return
    answer = shape_env.evaluate_expr

    def noted(expr: sympy.Basic, *args: Any, **kwargs: Any) -> Any:
        asked.add(expr)
        return answer(expr, *args, **kwargs)

    shape_env.evaluate_expr = noted  # type: ignore[assignment, method-assign]
    try:
        quiet, fresh = shape_env.suppress_guards(), shape_env.ignore_fresh_unbacked_symbols()
        with quiet, fresh, einsums_from_the_left():
            yield asked
    finally:
        del shape_env.evaluate_expr


def specialisation_places(shape_env: ShapeEnv | None) -> list[str]:
    """Lists ``"file.py", line 42, in forward: code`` of each place where the model fixed a size, if known."""
    found = []
    for stack in getattr(shape_env, "specialization_stacks", {}).values():
        theirs = [frame for frame in stack or () if not frame.filename.startswith(_TORCH)]
        if theirs:
            frame = theirs[-1]
            found.append(f'"{frame.filename}", line {frame.lineno}, in {frame.name}: {frame.line}')
    return list(dict.fromkeys(found))


def symbol_source(shape_env: ShapeEnv | None, symbol: sympy.Symbol) -> tuple[int, int] | None:
    """Finds (leaf, dim) of the traced function's argument that defines `symbol`; dim −1 for an int."""
    for source in shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ():
        found = re.fullmatch(r"L\['t(\d+)'\]\.size\(\)\[(\d+)\]|L\['i(\d+)'\]", name_of(source))
        if found:
            tensor, dim, number = found.groups()
            return (int(tensor), int(dim)) if number is None else (int(number), -1)
    return None


def source_of_symbol(shape_env: ShapeEnv | None, symbol: sympy.Basic) -> str | None:
    """Finds the Python source of a value that the symbol stands for."""
    sources = shape_env.var_to_sources.get(symbol, ()) if shape_env is not None else ()
    return name_of(sources[0]) if sources else None


def symbolic_sizes(shape_env: ShapeEnv | None) -> dict[tuple[int, int], sympy.Expr]:
    """Maps (leaf, dim) to the expression of each symbolic size, read or not; dim −1 for an int."""
    found: dict[tuple[int, int], sympy.Expr] = {}
    for symbol in list(shape_env.var_to_sources) if shape_env is not None else []:
        if (source := symbol_source(shape_env, symbol)) is not None:
            found[source] = shape_env.simplify(symbol)  # type: ignore[union-attr]
    return found


def symbolic_count(fake_mode: FakeTensorMode, name: str, hint: int) -> torch.SymInt:
    """Makes an int symbol, 2 or more, whose name follows from `name` alone; `hint` is its example value."""
    source, shape_env = LocalSource(name), fake_mode.shape_env
    assert shape_env is not None
    symbol = shape_env.create_symbol(hint, source, DimDynamic.DYNAMIC, None)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def size_hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)  # type: ignore[arg-type]


def row_condition(fake_mode: FakeTensorMode, rows: Any) -> Callable[[int], bool]:
    """Makes a predicate: whether a count may stand for `rows`, under the symbols' guards and range."""
    if isinstance(rows, int):
        return lambda count: count == rows
    symbol, shape_env = rows.node.expr, fake_mode.shape_env
    assert shape_env is not None
    if not symbol.is_Symbol or shape_env.simplify(symbol) != symbol:
        known = int(shape_env.simplify(symbol))
        return lambda count: count == known
    bounds = shape_env.var_to_range[symbol]
    # Plain ints also compare with symbols, since a function that asks may be traced in its turn.
    low, high = int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else sys.maxsize
    conditions = compile_expressions(guard_expressions(shape_env), [symbol])
    return lambda count: low <= count <= high and all(conditions(count))


# Gives a dim of a tensor a symbol of its own; unlike the strict form, the model may still specialise it.
mark_dynamic: Callable[[torch.Tensor, int], None] = dynamo.maybe_mark_dynamic
# Maps the names that sources may call, beside Python's builtins, to their objects.
names_in_sources: Callable[[], Mapping[str, Any]] = _get_closure_vars


@contextmanager
def tracing_config(int_names: Sequence[str], *, repeats: bool) -> Iterator[None]:
    """Sets Dynamo's configuration for one trace. Scalars and data-dependent shapes stay in the graph, named
    ints are symbols, and no garbage is collected at the end; `repeats` as for `fakes_remembered`."""
    kept: Any = dynamo.config.patch(  # type: ignore[attr-defined]
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, run_gc_after_compile=False
    )
    # Without ints the user's own setting stays, which names sources of the user's frames.
    patterns = ",".join(re.escape(f"L['{name}']") for name in int_names)
    ints: Any = torch.compiler.config.patch(dynamic_sources=patterns) if patterns else nullcontext()  # type: ignore[attr-defined]
    with fakes_remembered(repeats), kept, ints, einsums_from_the_left():
        yield


def dynamo_is_disabled() -> str | None:
    """Returns why `torch.compile` would not call a backend now, or None."""
    if (stance := dynamo.eval_frame._stance.stance) != "default":
        return f'torch.compiler.set_stance("{stance}") is active'
    if dynamo.config.disable:  # type: ignore[attr-defined]
        return "TorchDynamo is disabled (TORCH_COMPILE_DISABLE or torch._dynamo.config.disable)"
    return None


def forget_compilation(code: Any, backend: Any) -> None:
    """Drops Dynamo's cache entries of one code object and its backend, with the graph and its inputs."""
    dynamo.reset_code(code)
    backends = dynamo.eval_frame.cached_backends
    for key, known in list(backends.items()):
        if known is backend or getattr(known, "compiler_fn", None) is backend:
            del backends[key]


@dataclasses.dataclass(frozen=True, slots=True)
class SeenGuard:
    """Describes a guard of a trace: its source as Python, its kind, and the kind's arguments. `other` is
    another source, if the guard requires both sources to give one object."""

    # The kind of a read without a guard.
    UNGUARDED: ClassVar[str] = "unguarded"

    source: str
    kind: str
    arguments: Mapping[str, Any]
    other: str = ""


def current_guards() -> list[SeenGuard]:
    """Lists the guards of the trace in progress; only inside a backend."""
    if (context := TracingContext.try_get()) is None:
        return []
    found = []
    for guard in context.guards_context.dynamo_guards:
        kind, arguments = guard.create_fn_name(), getattr(guard.create_fn, "keywords", {})
        other = name_of(arguments["source_b"]) if kind == "DUPLICATE_INPUT" else ""
        found.append(SeenGuard(guard.name, kind, arguments, other))
    return found


def guard_kinds() -> frozenset[str]:
    """Names all kinds of guards of this torch version."""
    return frozenset(name for name in vars(GuardBuilder) if name.isupper())


def opaque_answer(value: Any) -> Any:
    """Returns what an opaque object's class has registered for comparison; None without a registration."""
    known = get_opaque_obj_info(type(value))
    compared: Any = known.guard_fn if known is not None else None
    return tuple(compared(value)) if compared is not None else None


def traced_code() -> list[CodeType]:
    """Lists the code of each function that the trace in progress went through; only inside a backend."""
    # Each call adds the function's code again. Code of two files may be equal, so compare identity.
    return list({id(code): code for code in TracingContext.get_traced_code() or ()}.values())


def sources_to_be_written() -> list[tuple[str, tuple[str, ...]]]:
    """Lists the sources of older objects that Dynamo writes after the graph; only inside a backend. Each has
    the names of the attributes that Dynamo sets; none for a container whose items it writes."""
    effects = InstructionTranslator.current_tx().output.side_effects
    older = (AttributeMutationExisting, ValueMutationExisting)
    known = [item for item in effects.id_to_variable.values() if isinstance(item.mutation_type, older)]
    # A plain `Source` was made by the trace and leads nowhere.
    written = [item for item in known if effects.is_modified(item) and type(item.source) is not Source]
    sets = effects.store_attr_mutations
    return [(name, tuple(sets.get(item, ()))) for item in written if (name := name_of(item.source))]


_patches = threading.RLock()


@contextmanager
def _noted(owner: Any, name: str, note: Callable[..., list[str]]) -> Iterator[list[str]]:
    """Lists what `note` says of each call of a method that this thread makes in this block."""
    found: list[str] = []
    thread = threading.get_ident()

    def noting(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if threading.get_ident() == thread:
            with suppress(NotImplementedError):  # one that lives for a moment has no source
                found.extend(note(*args, **kwargs))
        return made

    with _patches:
        original = getattr(owner, name)
        setattr(owner, name, noting)
        try:
            yield found
        finally:
            setattr(owner, name, original)


def sources_read() -> AbstractContextManager[list[str]]:
    """Lists the sources that Dynamo reads in a block, as Python source; Dynamo guards nearly all of them.
    Dynamo leaves out methods of C types, and objects that it has met under another source."""
    return _noted(VariableBuilder, "__call__", lambda builder, value: [name_of(builder.source)])


def tensor_attributes_set() -> AbstractContextManager[list[str]]:
    """Lists the Python attributes that Dynamo sees set on tensors in a block, when they are set, since Dynamo
    forgets tensors that are gone when it calls its backend."""
    return _noted(
        SideEffects, "store_attr",
        lambda effects, item, name, *rest, **options: [name] if isinstance(item, TensorVariable) else [],
    )  # fmt: skip


def source_name(node: torch.fx.Node) -> str | None:
    """Returns a placeholder's Python source, in terms of L and G; only inside a backend."""
    return name_of(getattr(node.meta.get("grapharg"), "source", None))


def wraps_number(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a 0-dim tensor for a Python number; only inside a backend."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def guard_modules_of(placeholders: Iterable[torch.fx.Node]) -> None:
    """Lets the compilation in progress serve only the modules that hold these tensors; only inside a backend.

    Dynamo would reuse it for another model of the same class, whose weights lie elsewhere, and would keep it
    when the model is gone.
    """

    frame = InstructionTranslator.current_tx().output.root_tx
    names = {LocalSource: ("local_name", frame.f_locals), GlobalSource: ("global_name", frame.f_globals)}
    sources = [getattr(node.meta.get("grapharg"), "source", None) for node in placeholders]
    for root in {each.get_base() if isinstance(each, ChainedSource) else each for each in sources if each}:
        attribute, values = names.get(type(root), ("", {}))
        if isinstance(values.get(getattr(root, attribute, "")), nn.Module):
            install_guard(root.make_guard(GuardBuilder.ID_MATCH))


def callable_in_compilation() -> tuple[Any, bool]:
    """Finds the module or function whose `torch.compile` call is running, and whether Dynamo's graph is the
    whole of its forward; only inside a backend."""

    caller: Any = sys._getframe()
    while caller.f_code.co_name != "compile_wrapper" or caller.f_globals is not vars(dynamo.eval_frame):
        caller = caller.f_back
    function, output = caller.f_locals["fn"], InstructionTranslator.current_tx().output
    owner, code = _owner_of(function), output.root_tx.f_code
    entries = [function, owner.forward if isinstance(owner, nn.Module) else function.__call__]
    for entry in entries:  # decorators of torch's own have no frame in Dynamo's eyes
        entries += [entry.__wrapped__] if hasattr(entry, "__wrapped__") else []
    is_entry = any(getattr(entry, "__code__", None) is code for entry in [*entries, nn.Module._call_impl])
    return owner, is_entry and not output.compile_subgraph_reason.graph_break


def _owner_of(function: Any) -> Any:
    """Finds the module of a bound method or of Dynamo's wrapper; any other function is its own owner."""
    if getattr(function, "__code__", None) is external_utils.wrap_inline(len).__code__:
        function = function.__wrapped__
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else getattr(function, "__func__", function)


def compilation_of(compiled: Any) -> tuple[Any, Any, Mapping[str, Any]] | None:
    """Finds the owner, the backend and the backend's arguments behind a result of `torch.compile`."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled
    context = getattr(compiled, "dynamo_ctx", None)
    if context is not None:
        owner = compiled._orig_mod
    elif hasattr(compiled, "_torchdynamo_orig_callable"):
        owner = _owner_of(compiled._torchdynamo_orig_callable)
        names = dict(zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True))
        context = names["self"].cell_contents if "self" in names else None
    else:
        return None
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return owner, getattr(backend, "compiler_fn", backend), getattr(backend, "kwargs", {})


def with_symbolic_sizes(call: Any) -> Any:
    """Replaces a call's tensors by twins, each dim above 1 of which has a symbol in a compilation."""
    twins: dict[int, torch.Tensor] = {}

    def twin_of(leaf: Any) -> Any:
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided:
            return leaf
        if id(leaf) not in twins:
            with torch.inference_mode(leaf.is_inference()), torch.no_grad():
                twin = twins[id(leaf)] = twin_in_memory(leaf)
            for dim in [dim for dim, size in enumerate(twin.shape) if size > 1]:
                dynamo.mark_dynamic(twin, dim)
        return twins[id(leaf)]

    return tree_map(twin_of, call)


def marks_are_wishes() -> Any:
    """Lets code specialise marked dims in this block. A weak mark would, but it does not make each version
    leave earlier compilations without symbols."""
    return dynamo.config.patch(allow_ignore_mark_dynamic=True)  # type: ignore[attr-defined]


def twin_in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a tensor of the present inference mode in the same memory, which is no view of the other."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return twin.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload, no-any-return]
