"""Guards an attached decoder's forward: refuses what paged attention would silently ignore.

A mask, a second cache and a batch dimension mean nothing to it. Eagerly the guard also looks at the running
`PrefillBatch`. In a trace it sees structure only (what is None); what hangs on values is decided by the op at
each call (`implied_positions`), or refused in the trace (a mask).
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import nn

from boundary_ops.attention.checks import check_positions
from boundary_ops.errors import huggingface as errors
from boundary_ops.errors import refuse
from boundary_ops.errors.step import OtherCache, WrongNumTokens
from boundary_ops.step.batch import PrefillBatch

__all__ = ["ATTACHMENT", "drop_mask", "guarded", "is_guarded", "refuse_generate"]

# The attribute of the decoder and of its attention modules that holds what `attach` did.
ATTACHMENT = "_paged_attachment"
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "cache", "cache_params")


def guarded(inner_forward: Any) -> Any:
    """Makes a forward with `inner_forward`'s signature that checks and calls the attached one's."""

    @functools.wraps(getattr(inner_forward, "__func__", inner_forward))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = getattr(self, ATTACHMENT)
        arguments = _bind(attachment.names, args, kwargs)
        _check_structure(arguments)
        if attachment.accepts_use_cache:
            arguments["use_cache"] = False
        drop_mask(arguments.pop("attention_mask", None))
        implied = arguments.get("position_ids") is None
        if not torch.compiler.is_compiling():
            _check_against_batch(attachment, arguments, implied)
            return attachment.inner_forward(**arguments)
        if not implied:  # a trace that writes nothing may use one layer's graph for the others
            return attachment.inner_forward(**arguments)
        return _with_implied_positions(attachment, arguments)

    forward._paged_guard = True  # type: ignore[attr-defined]
    return forward


def _with_implied_positions(attachment: Any, arguments: dict[str, Any]) -> Any:
    attachment.implied_positions = True
    try:
        return attachment.inner_forward(**arguments)
    finally:
        attachment.implied_positions = False


def is_guarded(forward: Any) -> bool:
    """Whether a forward was made by `guarded`."""
    return hasattr(getattr(forward, "__func__", None), "_paged_guard")


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    if len(args) > len(names):
        raise TypeError(f"forward takes {len(names)} positional arguments, {len(args)} were given")
    arguments = dict(kwargs)
    for name, value in zip(names, args, strict=False):
        if name in arguments:
            raise TypeError(f"forward got two values for argument '{name}'")
        arguments[name] = value
    return arguments


def _check_structure(arguments: dict[str, Any]) -> None:
    """Checks what can be said without values; the same eagerly and in a trace."""
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            refuse(errors.SecondCache, name=name)
    if arguments.get("output_attentions"):
        what, reason = "model input 'output_attentions'", "the op never has the weights as a tensor"
        refuse(errors.OptionRefused, what=what, expected="False", got="True", reason=reason)
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if value is not None and (value.dim() < 2 or value.shape[0] != 1):
            got = f"{value.dim()} dims, the first of size {value.shape[0]}"
            refuse(errors.NotPacked, place=f"model input '{name}'", got=got)


def drop_mask(mask: Any) -> None:
    """Accepts a mask that masks nothing, and drops it."""
    if mask is None:
        return
    if torch.compiler.is_compiling():
        refuse(errors.MaskInTrace)
    is_flat = isinstance(mask, torch.Tensor) and mask.dim() == 2
    if not is_flat or not bool((mask == 1).all()):
        refuse(
            errors.MaskHides,
            got="a mask that hides tokens" if is_flat else f"a prepared mask, {type(mask).__name__}",
        )


def _check_against_batch(attachment: Any, arguments: dict[str, Any], implied_positions: bool) -> None:
    """Checks a call against the running step, which is Python state that a trace would freeze."""
    batch = PrefillBatch.peek()
    if batch is None:
        # Looked up for its error: `peek` has none.
        batch = PrefillBatch.current("piecewise::attn_inplace")
    if batch.cache is not attachment.cache:
        raise OtherCache("PrefillBatch", expected="one that was built for the model's cache")
    value = arguments.get("input_ids")
    value = arguments.get("inputs_embeds") if value is None else value
    positions = arguments.get("position_ids")
    batch.derived[ATTACHMENT] = set()  # the attention modules that this call has been in
    for name, tensor, dim in (("input_ids", value, 1), ("position_ids", positions, -1)):
        if tensor is not None and tensor.shape[dim] != batch.num_tokens:
            raise WrongNumTokens(
                f"model input '{name}'", num_tokens=batch.num_tokens, got=str(tensor.shape[dim])
            )
    if implied_positions:
        check_positions(batch)


def refuse_generate(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    """Takes the place of an attached model's `generate`."""
    refuse(errors.GenerateRefused, model=type(self).__name__)
