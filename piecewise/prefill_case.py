"""A model with inputs of any token count: what the command line measures, explains and verifies."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from boundary_ops.errors import BoundaryOpError
from runners.errors import ConfigError, PiecewiseError

Made = TypeVar("Made")

_RULE = (
    "a spec is 'package.module:function'; the function takes no arguments and returns a piecewise.PrefillCase"
)


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """A model and its inputs for a given number of tokens.

    Args:
        model: the module to graph; it is not copied.
        make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)` for one call of the model with that
            many tokens; called again for each call, so that it may allocate KV cache for it. A benchmark
            repeats the call with the inputs made last. One that takes a keyword `seed`, an int, makes other
            values for each seed, and the same ones for the same: a benchmark then measures errors over many.
        baseline: the unmodified model with its own attention and its inputs, where `model` was changed to
            be graphed: what a benchmark measures as eager, and what it takes the right results from.

    Raises:
        ConfigError: `model` is not a module, `make_inputs` cannot be called, or `baseline` is no case.
    """

    model: nn.Module
    make_inputs: Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]
    baseline: PrefillCase | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise _wrong("PrefillCase.model", "a torch.nn.Module", _typed(self.model))
        if not callable(self.make_inputs):
            raise _wrong("PrefillCase.make_inputs", "a function of num_tokens", _typed(self.make_inputs))
        if self.baseline is not None and not isinstance(self.baseline, PrefillCase):
            raise _wrong("PrefillCase.baseline", "a PrefillCase or None", _typed(self.baseline))

    @property
    def takes_seed(self) -> bool:
        """Whether `make_inputs` makes other values for each seed."""
        try:
            parameter = inspect.signature(self.make_inputs).parameters.get("seed")
        except (TypeError, ValueError):
            return False
        kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
        return parameter is not None and parameter.kind in kinds

    def inputs(self, num_tokens: int, *, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one call with `num_tokens` tokens.

        Args:
            seed: which values, where `make_inputs` takes one.
        Raises:
            ConfigError: `make_inputs` returned something else than `(args, kwargs)`.
        """
        with _user_code():
            made = (
                self.make_inputs(num_tokens, seed=seed) if self.takes_seed else self.make_inputs(num_tokens)
            )
        where = f"make_inputs({num_tokens})"
        if not isinstance(made, tuple) or len(made) != 2:
            raise _wrong(where, "a pair (args, kwargs)", _typed(made))
        args, kwargs = made
        if not isinstance(args, (tuple, list)):
            raise _wrong(f"{where}[0]", "a tuple of positional arguments", _typed(args))
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise _wrong(f"{where}[1]", "a dict of keyword arguments", _typed(kwargs))
        return tuple(args), dict(kwargs)

    def run(self, num_tokens: int) -> None:
        """One call of the model itself, which shows whether it is the model that raises."""
        args, kwargs = self.inputs(num_tokens)
        with _user_code(), torch.no_grad():
            self.model(*args, **kwargs)


def load_case(spec: str) -> PrefillCase:
    """The case that the function named by `spec` returns; modules in the working directory are found too.

    Args:
        spec: ``package.module:function``.

    Raises:
        ConfigError: the spec is malformed, its module or function does not exist, or it returns another type.
        Exception: whatever the module's import or the function raises, unchanged.
    """
    module_name, colon, function_name = spec.partition(":")
    names = [*module_name.split("."), function_name]
    if not colon or not all(name.isidentifier() for name in names):
        raise _wrong(f"spec {spec!r}", "'package.module:function'", "no such form")
    module = _module(spec, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        nearest = get_close_matches(function_name, known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise _wrong(f"spec {spec!r}", f"a function in {module_name}", f"no {function_name!r}{hint}")
    if not callable(function):
        raise _wrong(f"spec {spec!r}", "a function", _typed(function))
    with _user_code():
        case = function()
    if not isinstance(case, PrefillCase):
        raise _wrong(f"spec {spec!r}", "a function that returns a piecewise.PrefillCase", _typed(case))
    return case


def unless_the_model_raises(case: PrefillCase, num_tokens: int, work: Callable[[], Made]) -> Made:
    """What `work` returns; an error of this project gives way to what the model raises by itself, if it does.

    A trace or a capture tells only that forward raised, not with which traceback.
    """
    try:
        return work()
    except (PiecewiseError, BoundaryOpError) as error:
        ours = error
    case.run(num_tokens)  # not while the other is handled: its traceback would come first
    raise ours


def comes_from_user_code(error: BaseException) -> bool:
    """Whether an error passed through a function of the user's, so that its traceback tells something."""
    return getattr(error, _MARK, False)


_MARK = "_passed_through_user_code"


@contextmanager
def _user_code() -> Iterator[None]:
    """A block that runs what the user wrote; what it raises is marked, and unchanged otherwise."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError, TypeError):  # a class may forbid attributes
            setattr(error, _MARK, True)
        raise


def _module(spec: str, module_name: str) -> ModuleType:
    # A console script starts without the working directory on its path; `python -m` starts with it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with _user_code():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but lacks one of its own imports is the user's to see as it is.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise _wrong(
            f"spec {spec!r}", f"an importable module {module_name}", f"no module {error.name!r}"
        ) from error


def _typed(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({type(value).__name__})"


def _wrong(where: str, expected: str, got: str) -> ConfigError:
    return ConfigError(
        where,
        expected=expected,
        got=got,
        rule=_RULE,
        fix="def case(): return piecewise.PrefillCase(model, lambda num_tokens: ((ids[:num_tokens],), {}))",
    )
