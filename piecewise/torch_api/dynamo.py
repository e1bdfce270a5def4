"""Wraps private parts of Dynamo: settings of a trace, and what a trace reads and writes."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any, ClassVar

import torch
import torch._dynamo as dynamo
from torch._guards import Source, TracingContext

from piecewise.torch_api.fakes import einsums_from_the_left, fakes_remembered
from piecewise.torch_api.process import is_forced_eager
from piecewise.torch_api.symbols import name_of


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
    if is_forced_eager():
        return 'torch.compiler.set_stance("force_eager") is active'
    if dynamo.config.disable:  # type: ignore[attr-defined]
        return "TorchDynamo is disabled (TORCH_COMPILE_DISABLE or torch._dynamo.config.disable)"
    return None


def mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Gives `dim` a symbol of its own; unlike the strict form, the model may still specialise it."""
    dynamo.maybe_mark_dynamic(tensor, dim)


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
    context = TracingContext.try_get()
    if context is None:
        return []
    found = []
    for guard in context.guards_context.dynamo_guards:
        kind, arguments = guard.create_fn_name(), getattr(guard.create_fn, "keywords", {})
        other = name_of(arguments["source_b"]) if kind == "DUPLICATE_INPUT" else ""
        found.append(SeenGuard(guard.name, kind, arguments, other))
    return found


def guard_kinds() -> frozenset[str]:
    """Names all kinds of guards of this torch version."""
    from torch._dynamo.guards import GuardBuilder

    return frozenset(name for name in vars(GuardBuilder) if name.isupper())


def names_in_sources() -> Mapping[str, Any]:
    """Maps the names that sources may call, beside Python's builtins, to their objects."""
    from torch._dynamo.guards import _get_closure_vars

    return _get_closure_vars()


def opaque_answer(value: Any) -> Any:
    """Returns what an opaque object's class has registered for comparison; None without a registration."""
    from torch._library.opaque_object import get_opaque_obj_info

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
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    effects = InstructionTranslator.current_tx().output.side_effects
    older = (AttributeMutationExisting, ValueMutationExisting)
    known = [item for item in effects.id_to_variable.values() if isinstance(item.mutation_type, older)]
    # A plain `Source` was made by the trace and leads nowhere.
    written = [item for item in known if effects.is_modified(item) and type(item.source) is not Source]
    sets = effects.store_attr_mutations
    return [(name, tuple(sets.get(item, ()))) for item in written if (name := name_of(item.source))]


_patches = threading.RLock()


@contextmanager
def _patched(owner: Any, name: str, patch: Callable[[Any], Any]) -> Iterator[None]:
    with _patches:
        original = getattr(owner, name)
        setattr(owner, name, patch(original))
        try:
            yield
        finally:
            setattr(owner, name, original)


@contextmanager
def sources_read() -> Iterator[list[str]]:
    """Lists the sources that Dynamo reads in this block, as Python source; Dynamo guards nearly all of them.
    Dynamo leaves out methods of C types, and objects that it has met under another source."""
    from torch._dynamo.variables.builder import VariableBuilder

    found: list[str] = []
    thread = threading.get_ident()

    def noting(original: Any) -> Any:
        def build(self: Any, value: Any) -> Any:
            made = original(self, value)
            if threading.get_ident() == thread:
                with suppress(NotImplementedError):  # one that lives for a moment
                    found.append(name_of(self.source))
            return made

        return build

    with _patched(VariableBuilder, "__call__", noting):
        yield found


@contextmanager
def tensor_attributes_set() -> Iterator[list[str]]:
    """Lists the Python attributes that Dynamo sees set on tensors in this block. The block notes them when
    they are set, since Dynamo forgets tensors that are gone when it calls its backend."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import TensorVariable

    names: list[str] = []

    def noting(original: Any) -> Any:
        def store_attr(self: Any, item: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            names.extend([name] if isinstance(item, TensorVariable) else [])
            return original(self, item, name, *args, **kwargs)

        return store_attr

    with _patched(SideEffects, "store_attr", noting):
        yield names


def source_name(node: torch.fx.Node) -> str | None:
    """Returns a placeholder's Python source, in terms of L and G; only inside a backend."""
    return name_of(getattr(node.meta.get("grapharg"), "source", None))


def wraps_number(node: torch.fx.Node) -> bool:
    """Whether a placeholder is a 0-dim tensor for a Python number; only inside a backend."""
    return bool(getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False))


def compiled_object() -> Any:
    """Finds the module, or else the code, that Dynamo is compiling now; only inside a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        root = InstructionTranslator.current_tx().output.root_tx
    except (AttributeError, RuntimeError):
        return None
    arguments = root.f_code.co_varnames[: root.f_code.co_argcount]
    owner = root.f_locals.get(arguments[0]) if arguments else None
    return owner if isinstance(owner, torch.nn.Module) else root.f_code
