"""Wraps classes of ops, pytrees, settings of the process, versions of dicts, and Inductor, which is loaded
where it is used."""

# ruff: noqa: F401

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._guards import TracingContext, tracing
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses import FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

from runners.engines import native_engine

_guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
# The product of two int8 matrices, in int32.
int_mm = torch._int_mm


class GlobalState:
    """Holds the settings of process and thread that a trace depends on, as they are under `no_grad`. They are
    autocast, default dtype, tf32, determinism, the number of threads, and active dispatch modes."""

    def __init__(self) -> None:
        with torch.no_grad():
            self._guard = _guards.GlobalStateGuard()
        self._modes = _active_modes()

    def check(self) -> bool:
        """Whether all settings are unchanged; call with gradients disabled."""
        return bool(self._guard.check()) and _active_modes() == self._modes


def _active_modes() -> tuple[Any, ...]:
    num_function_modes = torch._C._len_torch_function_stack()
    num_dispatch_modes = torch._C._len_torch_dispatch_stack()
    if not num_function_modes and not num_dispatch_modes:
        return ()
    modes = [torch._C._get_function_stack_at(index) for index in range(num_function_modes)]
    modes += [torch._C._get_dispatch_stack_at(index) for index in range(num_dispatch_modes)]
    # `with torch.device(...)` makes an equal new mode each time.
    return tuple(mode.device if isinstance(mode, DeviceContext) else id(mode) for mode in modes)


def forbids_replay() -> bool:
    """Whether the stance is "force_eager", or a tracer (`torch.jit.trace`), a transform (`vmap`, `jvp`) or
    forward-mode AD is active, whose tensors stand for others, and which would not see a replay."""
    is_tracing = torch._C._get_tracing_state() is not None or forward_ad._current_level >= 0
    is_transforming = is_tracing or torch._C._functorch.peek_interpreter_stack() is not None
    return is_transforming or eval_frame._stance.stance == "force_eager"


def is_forced_eager() -> bool:
    """Whether `torch.compiler.set_stance("force_eager")` is in force; it is so for all threads."""
    return eval_frame._stance.stance == "force_eager"


def dispatch_keys(tensor: torch.Tensor) -> str:
    """Describes the dispatch keys of a tensor, which select an op's implementation."""
    return str(torch._C._dispatch_keys(tensor))


def num_storage_users(storage: torch.UntypedStorage) -> int:
    """Counts the tensors of a storage, beside the passed Python object."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # type: ignore[attr-defined]


def dict_versions(
    dicts: Sequence[dict], objects: Sequence[Any], classes: Sequence[type]
) -> Callable[[], bool]:
    """Makes a function, one call in C, that is true while dicts, objects and classes are unchanged: no dict
    was written (restoring a value is a write, as far as `dict_versions_tell`), no object got another
    `__dict__`, and each object kept its class. The function holds all of them."""
    from torch._dynamo.guards import GuardManagerType

    kind = GuardManagerType.GUARD_MANAGER
    root = _guards.RootGuardManager()
    attributes = {id(item.__dict__) for item in objects}
    others = [owner for owner in dicts if id(owner) not in attributes]
    items = [*others, *objects]
    # An example value would make the nodes compare version numbers of their own.
    add = functools.partial(root.list_getitem_manager, example_value=None, guard_manager_enum=kind)
    nodes = [add(key=at, source=str(at)) for at in range(len(items))]
    for node, owner in zip(nodes, others, strict=False):
        node.add_dict_version_guard(owner, [], None)
    for node, item, cls in zip(nodes[len(others) :], objects, classes, strict=True):
        node.add_type_match_guard(id(cls), [], None)
        inner = node.get_generic_dict_manager(source="", example_value=None, guard_manager_enum=kind)
        inner.add_dict_version_guard(item.__dict__, [], None)
    check = functools.partial(root.check, items)
    # From Python 3.12 on `update` of an empty dict does not notify torch's watcher.
    empty = [owner for owner in dicts if not owner] if sys.version_info >= (3, 12) else []
    return (lambda: check() and not any(empty)) if empty else check


class _Plain:
    value = 0


@functools.cache
def dict_versions_tell() -> bool:
    """Whether each write changes a dict's version. On Python 3.13.0 a write through an attribute does not
    (https://github.com/python/cpython/issues/125608)."""
    item, owner = _Plain(), {"key": 0}
    # Enough writes for the interpreter to specialise the store; an equal value need not change the version.
    for value in range(1, 100):
        is_same = dict_versions([owner, item.__dict__], [item], [_Plain])
        item.value = value
        if is_same():
            return False
        is_same = dict_versions([owner, item.__dict__], [item], [_Plain])
        owner["key"] = value
        if is_same():
            return False
    return True


# Inductor's own CUDA graphs would nest in ours; strides must be those recorded in the plan.
_INDUCTOR_PATCHES = dict.fromkeys(
    ("triton.cudagraphs", "triton.cudagraph_trees", "graph_partition", "freezing"), False
) | {"keep_output_stride": True}
# Disables autocast in a block.
without_autocast: Any = torch._C._DisableAutocast  # type: ignore[attr-defined]


def start_compile_workers(values: Sequence[Any]) -> None:
    """Starts Inductor's worker processes, if one of the values lies on a GPU. They take seconds to be ready;
    until then the first compile would run in this process."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    if on_gpu := [device for device in devices if native_engine(device).has_triton]:
        from torch._inductor.async_compile import AsyncCompile

        AsyncCompile.wakeup()
        threading.Thread(target=_hash_installed_code, args=(on_gpu[0],), daemon=True).start()


def _hash_installed_code(device: torch.device) -> None:
    """Hashes torch's and Triton's files for Inductor's cache keys; most of that does not hold the GIL."""
    from torch._inductor.codecache import CacheBase, torch_key

    with suppress(Exception), torch.cuda.device(device):  # where it fails, it fails where it is needed
        torch_key()
        CacheBase.get_system()


def compile_aten_graph(
    graph: torch.fx.GraphModule, arguments: Sequence[Any], fake_mode: FakeTensorMode
) -> Callable[..., Sequence[Any]]:
    """Compiles the graph, which Inductor takes over, under settings of its own; errors may be of any kind."""
    from torch._inductor.compile_fx import compile_fx

    with tracing(TracingContext(fake_mode)), torch.inference_mode(False), torch.no_grad(), without_autocast():
        compiled: Any = compile_fx(graph, list(arguments), config_patches=dict(_INDUCTOR_PATCHES))
        return compiled


def inductor_cache_counts() -> tuple[int, int]:
    """Counts this process's compiles that were found on disk, and those that were not."""
    from torch._dynamo.utils import counters

    # The outer cache counts its own hits and, where torch's own caches do, those of the inner one.
    found = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    return found, counters["inductor"]["fxgraph_cache_miss"] + counters["inductor"]["fxgraph_cache_bypass"]


def numeric_settings(device: torch.device) -> str:
    """Describes the settings that decide on dtypes and kernels when a function is traced or compiled."""
    kinds = sorted({"cpu", device.type})
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    deterministic = torch.are_deterministic_algorithms_enabled()
    return f"{casts} {torch.get_default_dtype()} {torch.get_float32_matmul_precision()} {deterministic}"
