"""Pairs a model with inputs of any token count, for the command line to measure, explain and verify."""

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
    """Holds a model and a function that makes its inputs for a given number of tokens.

    Args:
        model: the module to graph; it is not copied.
        make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)` of one call with that many tokens. It
            is called anew for each call, so it may allocate KV cache; a benchmark repeats the call with the
            inputs made last. If it takes a keyword `seed` (an int), its values must depend on the seed
            alone; a benchmark then measures errors over many seeds.
        baseline: the unmodified model with its own attention and inputs, if `model` was changed to be
            graphed. A benchmark measures it as eager and takes the right results from it.

    Raises:
        ConfigError: `model` is not a module, `make_inputs` is not callable, or `baseline` is not a case.
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
        """Whether `make_inputs` takes a seed."""
        try:
            seed = inspect.signature(self.make_inputs).parameters.get("seed")
        except (TypeError, ValueError):
            return False
        return seed is not None and seed.kind in (seed.KEYWORD_ONLY, seed.POSITIONAL_OR_KEYWORD)

    def inputs(self, num_tokens: int, *, seed: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Makes the arguments of one call, from `seed` if `make_inputs` takes one.

        Raises:
            WrongCase: `make_inputs` did not return `(args, kwargs)`.
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
        """Calls the model itself once, so that errors of its own appear."""
        args, kwargs = self.inputs(num_tokens)
        with user_code(), torch.no_grad():
            self.model(*args, **kwargs)


def load_case(spec: str) -> PrefillCase:
    """Calls the function that `spec` names, and returns its case; the working directory is searched, too.

    Args:
        spec: ``package.module:function``.

    Raises:
        ConfigError: the spec is malformed, or its module or function does not exist or returns another type.
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
    """Returns the result of `work`; the model's own error, if any, replaces an error of this project.

    Errors of a trace or a capture only say that forward raised, without its traceback.
    """
    try:
        return work()
    except (PiecewiseError, BoundaryOpError) as error:
        ours = error
    case.run(num_tokens)  # outside the except block, else our traceback would come first
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
        # If the module exists and one of its own imports is missing, the user sees that error unchanged.
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        wanted = f"an importable module {module_name}"
        raise WrongSpec(spec=spec, wanted=wanted, found=f"no module {error.name!r}") from error


def _require(is_right: bool, what: str, expected: str, value: object) -> None:
    if not is_right:
        raise WrongCase(what, expected=expected, got=shown(value))
