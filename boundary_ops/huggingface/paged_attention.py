"""Holds the two functions that transformers calls for an attached model: its attention, and its mask's maker.

Whatever a model asks of its attention is honoured by `piecewise::attn_inplace` or refused by name; nothing
is dropped. Both functions are traced by Dynamo, so they look at structure and constants only.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from boundary_ops.attention.attention import attn_inplace
from boundary_ops.errors import huggingface as errors
from boundary_ops.errors import refuse
from boundary_ops.huggingface.call_guard import ATTACHMENT, drop_mask
from boundary_ops.step.batch import PrefillBatch

__all__ = ["NAME", "no_mask", "paged_attention"]

NAME = "piecewise_paged"

# Attention keyword arguments beside those that `paged_attention` names. A name on neither list is refused.
NEUTRAL = frozenset(
    "position_ids use_cache cache_position output_hidden_states output_router_logits return_dict "
    "num_items_in_batch layer_idx position_embeddings logits_to_keep".split()
)
REFUSED = {
    name: reason
    for reason, names in (
        ("the op adds no bias to the scores", "position_bias attention_bias alibi"),
        ("the op masks no heads", "head_mask layer_head_mask"),
        ("the op never has the attention weights as a tensor", "output_attentions"),
        ("the op attends to the sequence's own tokens", "is_cross_attention encoder_hidden_states"),
        ("the op attends to all tokens that causality and window leave, not to chosen ones",
         "indices block_indices"),
        ("packing is described by the PrefillBatch",
         "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k seq_idx"),
        ("pages are described by the PrefillBatch", "block_table"),
        ("the attached PagedKVCache is the only cache", "cache past_key_values"),
    )
    for name in names.split()
}  # fmt: skip
_WINDOWS = "a window is neither added nor left out"


def no_mask(*args: Any, attention_mask: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """Makes no mask: none is needed, and what only a mask could express is refused."""
    if use_vmap:
        refuse(errors.MaskFunction)
    drop_mask(attention_mask)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as transformers asks an attention function to.

    Takes `query` [1, heads, num_tokens, head_dim], `key` and `value` [1, kv_heads, num_tokens, head_dim] and
    the module that `attach` changed; returns a new [1, num_tokens, heads, head_dim], and no weights.

    Raises BoundaryOpError where the model asks for something that the op does not do.
    """
    if not hasattr(module, "paged_k_cache"):
        refuse(errors.NameWithoutAttach, layer=type(module).__name__, name=NAME)
    _check_options(module, attention_mask, dropout, sliding_window, is_causal, kwargs)
    _check_rows(module, query, key, value)
    if not torch.compiler.is_compiling() and (batch := PrefillBatch.peek()) is not None:
        called = batch.derived.setdefault(ATTACHMENT, set())  # emptied as the call began
        if module in called:
            raise errors.CalledTwice(path=module.paged_path)
        called.add(module)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    # [num_tokens, heads, head_dim]; allocated by the model, so that its address belongs to the graph before
    # the op
    out = torch.empty((q.shape[0], q.shape[1], q.shape[2]), dtype=q.dtype, device=q.device)
    attn_inplace(
        q, k, v, out, module.paged_k_cache, module.paged_v_cache,
        q.shape[2] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, s_aux,
        getattr(module, ATTACHMENT).implied_positions,
    )  # fmt: skip
    if torch.is_grad_enabled() and query.requires_grad:
        out = _NoGradient.apply(out, query)
    return out.unsqueeze(0), None


class _NoGradient(torch.autograd.Function):
    """Lets a forward with grad mode on run, and fails where the missing gradient would be needed."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise errors.NoGradient()


def _check_options(
    module: Any,
    attention_mask: Any,
    dropout: float,
    sliding_window: int | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Honours or refuses each thing that the model asks of its attention; drops none."""
    layer_type = module.paged_layer_type

    # The module's path is read where something is refused, so that a trace of one layer serves the others.
    def no(name: str, expected: str, got: str, reason: str, **fix: str) -> NoReturn:
        path = module.paged_path
        refuse(errors.OptionRefused, path=path, name=name, expected=expected, got=got, reason=reason, **fix)

    if attention_mask is not None:
        no("attention_mask", "none", "a mask that the model made", "its masks are causality and windows")
    if dropout:
        no("dropout", "0.0", str(dropout), "the op drops nothing", fix="call model.eval()")
    if is_causal is False:
        no("is_causal", "True", "False", "the op is causal")
    if layer_type == "sliding_attention" and not sliding_window:
        no("sliding_window", "a window, as the layer's type is sliding_attention", "none", _WINDOWS)
    if layer_type == "full_attention" and sliding_window:
        no("sliding_window", "none, as the layer's type is full_attention", str(sliding_window), _WINDOWS)
    for name, value in kwargs.items():
        if value is None or value is False or name in NEUTRAL:
            continue
        kind = type(value).__name__
        if name in REFUSED:
            no(name, "none", kind, REFUSED[name])
        no(name, "only arguments that the op knows", kind, "it does not know this one")


def _check_rows(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    pool = module.paged_k_cache
    if query.shape[0] != 1:
        refuse(
            errors.NotPacked,
            place=f"{module.paged_path}: attention input",
            got=f"a batch of {query.shape[0]}",
        )
    if key.shape[2] != query.shape[2]:
        refuse(errors.OtherKeys, path=module.paged_path)
    heads, dim = pool.shape[2], pool.shape[3]
    for name, rows in (("key", key), ("value", value)):
        fits = rows.shape[1] == heads and rows.shape[3] == dim
        if not fits or rows.dtype != pool.dtype or rows.device != pool.device:
            refuse(
                errors.CacheMismatch,
                what=f"{module.paged_path}: attention input '{name}'",
                expected=f"{heads} heads of {dim}, {pool.dtype} on {pool.device}, as the cache",
                got=f"{rows.shape[1]} heads of {rows.shape[3]}, {rows.dtype} on {rows.device}",
            )
