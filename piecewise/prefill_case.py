"""Pairs a model with inputs of any token count: what the command line measures, explains and verifies."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from boundary_ops.errors import BoundaryOpError
from piecewise.errors.tools import WrongCase, WrongSpec, user_code
from runners.errors import PiecewiseError, shown

Made = TypeVar("Made")


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
        model, make, baseline = self.model, self.make_inputs, self.baseline
        _require(isinstance(model, nn.Module), "PrefillCase.model", "a torch.nn.Module", model)
        _require(callable(make), "PrefillCase.make_inputs", "a function of num_tokens", make)
        is_case = baseline is None or isinstance(baseline, PrefillCase)
        _require(is_case, "PrefillCase.baseline", "a PrefillCase or None", baseline)

    @property
    def takes_seed(self) -> bool:
        """Tells whether `make_inputs` makes other values for each seed."""
        try:
            seed = inspect.signature(self.make_inputs).parameters.get("seed")
        except (TypeError, ValueError):
            return False
        return seed is not None and seed.kind in (seed.KEYWORD_ONLY, seed.POSITIONAL_OR_KEYWORD)

    def inputs(self, num_tokens: int, *, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the arguments of one call; `seed` says which values, where `make_inputs` takes one.

        Raises:
            WrongCase: `make_inputs` returned something else than `(args, kwargs)`.
        """
        seeded = {"seed": seed} if self.takes_seed else {}
        with user_code():
            made = self.make_inputs(num_tokens, **seeded)
        where = f"make_inputs({num_tokens})"
        _require(isinstance(made, tuple) and len(made) == 2, where, "a pair (args, kwargs)", made)
        args, kwargs = made
        _require(isinstance(args, (tuple, list)), f"{where}[0]", "a tuple of positional arguments", args)
        is_named = isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)
        _require(is_named, f"{where}[1]", "a dict of keyword arguments", kwargs)
        return tuple(args), dict(kwargs)

    def run(self, num_tokens: int) -> None:
        """Calls the model itself once, which shows whether it is the model that raises."""
        args, kwargs = self.inputs(num_tokens)
        with user_code(), torch.no_grad():
            self.model(*args, **kwargs)


def load_case(spec: str) -> PrefillCase:
    """Returns the case that the function named by `spec` makes; the working directory is searched, too.

    Args:
        spec: ``package.module:function``.

    Raises:
        ConfigError: the spec is malformed, its module or function does not exist, or it returns another type.
        Exception: whatever the module's import or the function raises, unchanged.
    """
    module_name, colon, function_name = spec.partition(":")
    names = [*module_name.split("."), function_name]
    if not colon or not all(name.isidentifier() for name in names):
        raise WrongSpec(spec=spec, wanted="'package.module:function'", found="no such form")
    module = _module(spec, module_name)
    function = getattr(module, function_name, None)
    if function is None:
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        nearest = get_close_matches(function_name, known, n=1, cutoff=0.5)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise WrongSpec(spec=spec, wanted=f"a function in {module_name}", found=f"no {function_name!r}{hint}")
    if not callable(function):
        raise WrongSpec(spec=spec, wanted="a function", found=shown(function))
    with user_code():
        case = function()
    if not isinstance(case, PrefillCase):
        raise WrongSpec(
            spec=spec, wanted="a function that returns a piecewise.PrefillCase", found=shown(case)
        )
    return case


def unless_the_model_raises(case: PrefillCase, num_tokens: int, work: Callable[[], Made]) -> Made:
    """Returns what `work` does; an error of this project gives way to what the model itself raises, if any.

    A trace or a capture tells only that forward raised, not with which traceback.
    """
    try:
        return work()
    except (PiecewiseError, BoundaryOpError) as error:
        ours = error
    case.run(num_tokens)  # not while the other is handled: its traceback would come first
    raise ours


def _module(spec: str, module_name: str) -> ModuleType:
    # A console script starts without the working directory on its path; `python -m` starts with it.
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with user_code():
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but lacks one of its own imports is the user's to see as it is.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        wanted = f"an importable module {module_name}"
        raise WrongSpec(spec=spec, wanted=wanted, found=f"no module {error.name!r}") from error


def _require(is_right: bool, what: str, expected: str, value: object) -> None:
    if not is_right:
        raise WrongCase(what, expected=expected, got=shown(value))
