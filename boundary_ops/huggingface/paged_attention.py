"""The two functions that transformers calls for an attached model: its attention, and what makes its mask.

Whatever a model asks of its attention is honoured by `piecewise::attn_inplace` or refused by name; nothing
is dropped. Both functions are traced by Dynamo, so they look at structure and constants only.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from boundary_ops.attention.attention import attn_inplace
from boundary_ops.errors import BoundaryOpError, refuse
from boundary_ops.huggingface.call_guard import ATTACHMENT, drop_mask

__all__ = ["NAME", "no_mask", "paged_attention"]

NAME = "piecewise_paged"
OWN_ATTENTION = "use this model with its own attention"

# Attention keyword arguments beside those that `paged_attention` names. A name on neither list is refused.
NEUTRAL = frozenset(
    "position_ids use_cache cache_position output_hidden_states output_router_logits return_dict "
    "num_items_in_batch layer_idx position_embeddings logits_to_keep".split()
)
REFUSED = {
    "position_bias": "the op adds no bias to the scores",
    "attention_bias": "the op adds no bias to the scores",
    "alibi": "the op adds no bias to the scores",
    "head_mask": "the op masks no heads",
    "layer_head_mask": "the op masks no heads",
    "output_attentions": "the op never has the attention weights as a tensor",
    "is_cross_attention": "the op attends to the sequence's own tokens",
    "encoder_hidden_states": "the op attends to the sequence's own tokens",
    "indices": "the op attends to all tokens that causality and window leave, not to chosen ones",
    "block_indices": "the op attends to all tokens that causality and window leave, not to chosen ones",
    "cu_seq_lens_q": "packing is described by the PrefillBatch",
    "cu_seq_lens_k": "packing is described by the PrefillBatch",
    "max_length_q": "packing is described by the PrefillBatch",
    "max_length_k": "packing is described by the PrefillBatch",
    "seq_idx": "packing is described by the PrefillBatch",
    "block_table": "pages are described by the PrefillBatch",
    "cache": "the attached PagedKVCache is the only cache",
    "past_key_values": "the attached PagedKVCache is the only cache",
}


def no_mask(*args: Any, attention_mask: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """The mask function: none is needed, and what only a mask could express is refused."""
    if use_vmap:
        refuse(
            "attention mask",
            "causal, or causal within a sliding window",
            "a mask function of the model's own",
            "the op has no other masks",
            "use this model with its own attention: detach it",
        )
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
    """The attention function that transformers calls.

    Args:
        module: the attention module, with the attributes that `attach` set.
        query: [1, heads, num_tokens, head_dim].
        key, value: [1, kv_heads, num_tokens, head_dim].

    Returns:
        [1, num_tokens, heads, head_dim], allocated here, and no weights.

    Raises:
        BoundaryOpError: the model asks for something that the op does not do.
    """
    if not hasattr(module, "paged_k_cache"):
        refuse(
            f"attention of {type(module).__name__}",
            "a module that attach has given its pools",
            "one without",
            f"the attention implementation '{NAME}' is set by attach alone",
            "call boundary_ops.huggingface.attach(model, cache) instead of naming the implementation",
        )
    _check_request(module, attention_mask, dropout, sliding_window, is_causal, kwargs)
    _check_heads(module, query, key, value)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    # [num_tokens, heads, head_dim]; allocated by the model, so that its address belongs to the graph before
    # the op
    out = torch.empty((q.shape[0], q.shape[1], q.shape[2]), dtype=q.dtype, device=q.device)
    attn_inplace(
        q,
        k,
        v,
        out,
        module.paged_k_cache,
        module.paged_v_cache,
        q.shape[2] ** -0.5 if scaling is None else scaling,
        sliding_window or 0,
        softcap or 0.0,
        s_aux,
        getattr(module, ATTACHMENT).implied_positions,
    )
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
        raise BoundaryOpError(
            "op 'piecewise::attn_inplace': backward",
            expected="a forward pass alone",
            got="a backward pass",
            rule="the op is for inference and has no gradient",
            fix="call detach(model) to train, or run the forward under torch.no_grad()",
        )


def _check_request(
    module: Any,
    attention_mask: Any,
    dropout: float,
    sliding_window: int | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Each thing that the model asks of its attention is honoured or refused, never dropped."""
    layer_type = module.paged_layer_type

    # The module's path is read where something is refused, so that a trace of one layer serves the others.
    def no(name: str, expected: str, got: str, rule: str, fix: str = OWN_ATTENTION) -> NoReturn:
        refuse(f"{module.paged_path}: attention argument '{name}'", expected, got, rule, fix)

    if attention_mask is not None:
        no(
            "attention_mask",
            "none",
            "a mask that the model made",
            "the op has no masks but causal and window",
        )
    if dropout:
        no("dropout", "0.0", str(dropout), "the op drops nothing", "call model.eval()")
    if is_causal is False:
        no("is_causal", "True", "False", "the op is causal")
    if layer_type == "sliding_attention" and not sliding_window:
        no(
            "sliding_window",
            "a window, as the layer's type is sliding_attention",
            "none",
            "a window is never dropped",
        )
    if layer_type == "full_attention" and sliding_window:
        no(
            "sliding_window",
            "none, as the layer's type is full_attention",
            str(sliding_window),
            "a window is honoured",
        )
    for name, value in kwargs.items():
        if value is None or value is False or name in NEUTRAL:
            continue
        if name in REFUSED:
            no(name, "none", type(value).__name__, REFUSED[name], f"leave it out, or {OWN_ATTENTION}")
        no(
            name,
            "only arguments that the op knows",
            type(value).__name__,
            "unknown arguments are not dropped",
        )


def _check_heads(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    k_cache = module.paged_k_cache
    if query.shape[0] != 1:
        refuse(
            f"{module.paged_path}: attention input",
            "one row of packed tokens, a batch of 1",
            f"a batch of {query.shape[0]}",
            "sequences are packed one after the other, not stacked and padded",
            "ids = batch.pack(prompts), and call the model inside `with batch:`",
        )
    if key.shape[2] != query.shape[2]:
        refuse(
            f"{module.paged_path}: attention input 'key'",
            "as many rows as 'query'",
            "another number",
            "the model passes the step's new K and V; older ones come from the pages",
            "pass no cache to the model, and use no cross attention",
        )
    wanted = (k_cache.shape[2], k_cache.shape[3])
    for name, tensor in (("key", key), ("value", value)):
        if (
            (tensor.shape[1], tensor.shape[3]) != wanted
            or tensor.dtype != k_cache.dtype
            or tensor.device != k_cache.device
        ):
            refuse(
                f"{module.paged_path}: attention input '{name}'",
                f"{wanted[0]} heads of {wanted[1]}, {k_cache.dtype} on {k_cache.device}, as the cache",
                f"{tensor.shape[1]} heads of {tensor.shape[3]}, {tensor.dtype} on {tensor.device}",
                "K and V are kept as the model computes them",
                "make the cache with the model's heads, head size, dtype and device",
            )
