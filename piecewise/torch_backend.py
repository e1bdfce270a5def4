"""Serves `torch.compile(model, backend="piecewise")`: Dynamo traces and guards, graphs serve the calls.

    compiled = torch.compile(model, backend="piecewise", options={"buckets": [64, 128]})
    piecewise.handle(compiled).capture(ids)

Unlike with `piecewise.compile`, Dynamo's guards run on each call (they cost 90 µs and more), and without
`capture` the token count has no symbol until Dynamo has seen two sizes, a `mark_dynamic` or `dynamic=True`.
Buckets are then captured after their third call, or all at once at the first call inside
`piecewise.capture_window()`. Of a model that breaks into several Dynamo graphs, those with boundary ops are
captured so, and the others run as Dynamo gave them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from piecewise import torch_api
from piecewise.api import GraphControls
from piecewise.capture.call_router import CallRouter
from piecewise.capture.dynamo_calls import DynamoCalls
from piecewise.capture.store import GraphStore
from piecewise.errors.api import BackendArguments, NoHandle
from piecewise.settings.config import PiecewiseConfig
from runners.errors import shown

# The module or function given to torch.compile → a handle for each of its options, all freed with it.
_handles: weakref.WeakKeyDictionary[Any, list[BackendHandle]] = weakref.WeakKeyDictionary()


class BackendHandle(GraphControls):
    """Captures, checks and reports on one compiled model, over all graphs that Dynamo made of it.

    Its methods are `GraphedModule`'s. `capture` gives each size of its example a symbol, whatever `dynamic`
    says; `verify` compares with Dynamo's graph, run op by op; `resume` and `release` let each graph capture
    again at its next call.
    """

    def __init__(self, owner: Any, arguments: Mapping[str, Any]) -> None:
        graphs = GraphStore(_settings(**arguments))
        router = CallRouter(graphs, captures_calls=True)
        self._arguments = dict(arguments)
        self._dynamo_calls = DynamoCalls(owner, graphs, router)
        super().__init__(graphs, self._dynamo_calls, router)


def piecewise_backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], **arguments: Any
) -> Callable[..., Any]:
    """Compiles a Dynamo graph; torch finds this function by the entry point group `torch_dynamo_backends`.

    Args:
        arguments: `options`: fields of `PiecewiseConfig` by name, and "config", the path of a TOML file.
    Raises:
        ConfigError: an option is unknown or wrong, or there is a `mode`.
    """
    owner, is_whole = torch_api.callable_in_compilation()
    return _handle_of(owner, arguments)._dynamo_calls.add(graph, is_whole=is_whole)


# Called by torch._dynamo.reset(), after which nothing that was compiled before serves a call.
piecewise_backend.reset = _handles.clear  # type: ignore[attr-defined]


def handle(compiled: Any) -> BackendHandle:
    """Returns what captures, checks and reports on a `torch.compile(..., backend="piecewise")` result.

    Results of equal options for one model share Dynamo's graphs, and so one handle. After
    `torch._dynamo.reset()` there is a new one; one that you hold keeps its graphs until its `release()`.

    Raises:
        StateError: it was not compiled by this backend.
        ConfigError: as `piecewise_backend` does.
    """
    compilation = torch_api.compilation_of(compiled)
    if compilation is not None and compilation[1] is piecewise_backend:
        found = _handle_of(compilation[0], compilation[2])
        found._dynamo_calls.compiled = weakref.ref(compiled)
        return found
    raise NoHandle(kind=type(compiled).__name__)


def _handle_of(owner: Any, arguments: Mapping[str, Any]) -> BackendHandle:
    """Finds or makes the handle of a callable compiled with these arguments."""
    known = _handles.get(owner, [])
    found = next((each for each in known if each._arguments == arguments), None)
    if found is None:
        found = BackendHandle(owner, arguments)
        _handles.setdefault(owner, []).append(found)
    return found


def _settings(options: Any = None, mode: str | None = None) -> PiecewiseConfig:
    if mode is not None:
        fix = (
            "leave mode out: graphs are replayed anyway, as in mode 'reduce-overhead'; for compiled kernels,"
            ' as in \'max-autotune\', pass options={"lowering": "inductor"} instead'
        )
        raise BackendArguments(f"torch.compile argument mode={mode!r}", expected="no mode", fix=fix)
    options = {} if options is None else options
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        expected = "a dict with the names of settings"
        raise BackendArguments("torch.compile argument 'options'", expected=expected, got=shown(options))
    settings = dict(options)
    return PiecewiseConfig.from_any(settings.pop("config", None), **settings)
