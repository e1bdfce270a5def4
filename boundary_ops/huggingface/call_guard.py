"""The guard around an attached decoder's forward: refuses what paged attention would silently ignore.

A mask, a second cache and a batch dimension mean nothing to it. The guard runs in both worlds. Eagerly it
also looks at the running `PrefillBatch`. In a trace it sees structure only (what is None), no values and no
batch; what hangs on those is decided by the op at each call (`implied_positions`), or refused in the trace
(a mask).
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import nn

from boundary_ops.attention.checks import check_implied_positions
from boundary_ops.errors import refuse
from boundary_ops.step.batch import PrefillBatch

__all__ = ["ATTACHMENT", "drop_mask", "guarded", "is_guarded", "refuse_generate"]

# The attribute of the decoder and of its attention modules that holds what `attach` did.
ATTACHMENT = "_paged_attachment"
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "cache", "cache_params")


def guarded(inner_forward: Any) -> Any:
    """A forward, to be bound to the decoder, that checks its arguments and calls the attached one's.

    It keeps `inner_forward`'s signature; what it calls is found in the decoder's attachment.
    """

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
    """Whether this is a forward that `guarded` made."""
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
    """What can be said without values; the same eagerly and in a trace."""
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            refuse(
                f"model input '{name}'",
                "none: K and V live in the attached PagedKVCache",
                "another cache",
                "an attached model has one cache; a second one would be filled and never read",
                "leave it out: the PrefillBatch knows the context. For generate(), detach the model first",
            )
    if arguments.get("output_attentions"):
        refuse(
            "model input 'output_attentions'",
            "False",
            "True",
            "the op never has the attention weights as a tensor",
            "leave it out, or detach the model and use eager attention",
        )
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if value is not None and (value.dim() < 2 or value.shape[0] != 1):
            refuse(
                f"model input '{name}'",
                "one row of packed tokens, [1, num_tokens]",
                f"{value.dim()} dims, the first of size {value.shape[0]}",
                "sequences are packed one after the other, not stacked and padded",
                "ids = batch.pack(prompts), and call the model inside `with batch:`",
            )


def drop_mask(mask: Any) -> None:
    """Accepts a mask that masks nothing, and drops it."""
    if mask is None:
        return
    if torch.compiler.is_compiling():
        refuse(
            "model input 'attention_mask'",
            "none while the model is traced",
            "a mask",
            "a trace cannot look at a mask's values, and packed input needs no mask",
            "leave attention_mask out",
        )
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not bool((mask == 1).all()):
        is_padded = isinstance(mask, torch.Tensor) and mask.dim() == 2
        refuse(
            "model input 'attention_mask'",
            "none, or [1, num_tokens] of ones",
            "a mask that hides tokens" if is_padded else f"a prepared mask, {type(mask).__name__}",
            "attention is causal within each packed sequence; a mask cannot change that",
            "pack the sequences without padding: batch.pack(prompts), and leave attention_mask out",
        )


def _check_against_batch(attachment: Any, arguments: dict[str, Any], implied_positions: bool) -> None:
    """Eager only: the running step is Python state, which a trace would freeze."""
    batch = PrefillBatch.peek()
    if batch is None:
        # Looked up for its error: `peek` has none.
        batch = PrefillBatch.current("piecewise::attn_inplace")
    if batch.cache is not attachment.cache:
        refuse(
            "PrefillBatch",
            "one that was built for the cache that the model is attached to",
            "a batch of another cache",
            "slots and block tables mean nothing in another cache",
            "build the batch with the attached cache, or detach and attach the model to the other one",
        )
    value = arguments.get("input_ids")
    value = arguments.get("inputs_embeds") if value is None else value
    positions = arguments.get("position_ids")
    for name, tensor, dim in (("input_ids", value, 1), ("position_ids", positions, -1)):
        if tensor is not None and tensor.shape[dim] != batch.num_tokens:
            refuse(
                f"model input '{name}'",
                f"{batch.num_tokens} tokens, as the current PrefillBatch",
                f"{tensor.shape[dim]}",
                "a step runs exactly the tokens that its batch was built for",
                "pass batch.pack(prompts) and batch.positions of the same batch",
            )
    if implied_positions:
        check_implied_positions(batch)


def refuse_generate(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    refuse(
        f"{type(self).__name__}.generate",
        "prefill calls of the model itself",
        "generate()",
        "an attached model runs prefill steps; generate() brings a cache and masks of its own",
        "call the model itself, with batch.pack(prompts) and batch.positions, or detach(model) first",
    )
