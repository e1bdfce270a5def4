"""Pairs a model with inputs of any token count, for the command line to measure, explain and verify."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

import boundary_ops
from boundary_ops import PagedKVCache, PrefillBatch
from boundary_ops.errors import BoundaryOpError
from boundary_ops.whole_numbers import whole_number
from piecewise.errors.tools import WrongCase, WrongSpec, user_code
from runners.errors import PiecewiseError, shown

Made = TypeVar("Made")
Inputs = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Holds a model and a function that makes its inputs for a given number of tokens.

    Args:
        model: the module to graph; it is not copied.
        make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)` of one call with that many tokens, or
            a context manager that gives them and stays open around the call, so that it can run a
            `PrefillBatch` and free its requests afterwards. It is called anew for each call; a benchmark
            repeats the call with the inputs made last. If it takes a keyword `seed` (an int), its values
            must depend on the seed alone; a benchmark then measures errors over many seeds.
        baseline: the unmodified model with its own attention and inputs, if `model` was changed to be
            graphed. A benchmark measures it as eager and takes the right results from it.

    Raises:
        ConfigError: `model` is not a module, `make_inputs` is not callable, or `baseline` is not a case.
    """

    model: nn.Module
    make_inputs: Callable[..., Inputs | AbstractContextManager[Inputs]]
    baseline: PrefillCase | None = None

    def __post_init__(self) -> None:
        model, make, baseline = self.model, self.make_inputs, self.baseline
        _require(isinstance(model, nn.Module), "PrefillCase.model", "a torch.nn.Module", model)
        _require(callable(make), "PrefillCase.make_inputs", "a function of num_tokens", make)
        is_case = baseline is None or isinstance(baseline, PrefillCase)
        _require(is_case, "PrefillCase.baseline", "a PrefillCase or None", baseline)

    @classmethod
    def for_model(
        cls, model: nn.Module, cache: PagedKVCache, *, num_seqs: int = 1, logits_to_keep: bool = True
    ) -> PrefillCase:
        """Makes a case of a model that `boundary_ops.huggingface.attach` has given this cache.

        A call packs `num_seqs` new requests of random tokens, about equally long; other requests of the cache
        are left alone, and the new ones are freed when the call is over. With `logits_to_keep`, and a forward
        that takes it, the call asks for the logits of each request's last token alone.

        Raises WrongCase where the model is not attached to the cache, or `num_seqs` is no positive int.
        """
        where, most = "PrefillCase.for_model", whole_number(num_seqs) or 0
        _require(most > 0, f"{where}, argument 'num_seqs'", "a positive int", num_seqs)
        attached = boundary_ops.huggingface.cache_of(model)
        if attached is None or attached is not cache:
            got = f"{type(model).__name__}, attached to {'no' if attached is None else 'another'} cache"
            fix = "case = PrefillCase.for_model(boundary_ops.huggingface.attach(model, cache), cache)"
            raise WrongCase(where, expected="a model that is attached to the cache", got=got, fix=fix)
        keeps = logits_to_keep and "logits_to_keep" in inspect.signature(model.forward).parameters
        config: Any = model.config
        vocab_size = config.get_text_config().vocab_size

        @contextmanager
        def make_inputs(num_tokens: int, *, seed: int = 0) -> Iterator[Inputs]:
            count = min(most, num_tokens)
            lens = [num_tokens // count + (at < num_tokens % count) for at in range(count)]
            ids = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed))
            # Equal to no other request's, as long as `lens` lives.
            requests = [f"sequence {at} of case {id(lens):x}" for at in range(count)]
            batch = PrefillBatch.build(cache, requests, lens)
            kwargs = dict(input_ids=batch.pack(ids.split(lens)), position_ids=batch.positions)
            try:
                with batch:
                    yield (), kwargs | (dict(logits_to_keep=batch.last_token_indices) if keeps else {})
            finally:
                for request in requests:
                    cache.free(request)

        return cls(model, make_inputs)

    @property
    def takes_seed(self) -> bool:
        """Whether `make_inputs` takes a seed."""
        try:
            seed = inspect.signature(self.make_inputs).parameters.get("seed")
        except (TypeError, ValueError):
            return False
        return seed is not None and seed.kind in (seed.KEYWORD_ONLY, seed.POSITIONAL_OR_KEYWORD)

    @contextmanager
    def inputs(self, num_tokens: int, *, seed: int = 0) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Makes the arguments of one call, from `seed` if `make_inputs` takes one; the block is the call's.

        Raises WrongCase where `make_inputs` made something else than `(args, kwargs)`.
        """
        seeded = {"seed": seed} if self.takes_seed else {}
        with ExitStack() as stack:
            with user_code():
                made = self.make_inputs(num_tokens, **seeded)
                if isinstance(made, AbstractContextManager):
                    made = stack.enter_context(made)
            where = f"make_inputs({num_tokens})"
            _require(isinstance(made, tuple) and len(made) == 2, where, "a pair (args, kwargs)", made)
            args, kwargs = made
            _require(isinstance(args, (tuple, list)), f"{where}[0]", "a tuple of positional arguments", args)
            is_named = isinstance(kwargs, Mapping) and all(isinstance(key, str) for key in kwargs)
            _require(is_named, f"{where}[1]", "a dict of keyword arguments", kwargs)
            yield tuple(args), dict(kwargs)

    def run(self, num_tokens: int) -> None:
        """Calls the model itself once, so that errors of its own appear."""
        with self.inputs(num_tokens) as (args, kwargs), user_code(), torch.no_grad():
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
