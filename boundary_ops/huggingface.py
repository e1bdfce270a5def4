"""Puts `piecewise::attn_inplace` and a paged cache into an unmodified transformers model.

transformers looks its attention up by name, `config._attn_implementation`, in `AttentionInterface`, and the function
that makes the mask in `AttentionMaskInterface`. `attach` registers ours under one name in both, and gives each
attention module its layer's two pools as plain attributes. So the pools reach the op as tensors with a path
(`model.layers[3].self_attn.paged_k_cache`), and the state dict does not change.

A mask, a cache or a batch dimension would be ignored by this attention, so the decoder's `forward` is wrapped by a
guard that refuses them. It runs in both worlds. Eagerly it also looks at the running `PrefillBatch`. In a trace it
sees structure only (what is None), no values and no batch; what hangs on those is decided by the op at each call
(`implied_positions`), or refused in the trace (a mask).
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from boundary_ops.attention import attn_inplace, check_implied_positions
from boundary_ops.batch import PrefillBatch
from boundary_ops.decoder import DecoderLayer, find_decoder
from boundary_ops.errors import BoundaryOpError
from boundary_ops.kv_cache import PagedKVCache

__all__ = ["attach", "detach"]

NAME = "piecewise_paged"
ATTACHMENT = "_paged_attachment"
MODULE_ATTRIBUTES = ("paged_k_cache", "paged_v_cache", "paged_path", "paged_layer_type", ATTACHMENT)
CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "cache", "cache_params")
ABSENT: Any = object()

# Attention keyword arguments beside those that `paged_attention` names. A name on neither list is refused.
NEUTRAL = frozenset(
    "position_ids use_cache cache_position output_hidden_states output_router_logits return_dict num_items_in_batch "
    "layer_idx position_embeddings logits_to_keep".split()
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


@dataclass(slots=True, eq=False)
class _Attachment:
    """What `attach` has changed, and all that `detach` needs to change it back."""

    cache: PagedKVCache
    decoder: nn.Module
    inner_forward: Any
    # Positional names of the decoder's forward, to find arguments however they are passed.
    names: tuple[str, ...]
    accepts_use_cache: bool
    layers: tuple[DecoderLayer, ...]
    # (object, attribute, former value or ABSENT), in the order of the changes.
    former: list[tuple[Any, str, Any]] = field(default_factory=list)
    # Set only while a trace runs through the guard; the op's constant of that name.
    implied_positions: bool = False


def attach(model: nn.Module, cache: PagedKVCache) -> nn.Module:
    """Makes a transformers decoder attend through `piecewise::attn_inplace` and keep its K and V in `cache`.

    From then on the model is called inside `with batch:`, with `input_ids` (or `inputs_embeds`) [1, num_tokens] and
    `position_ids=batch.positions`. `use_cache` is forced off, because the paged cache is the only one. Grouped and
    multi-query heads, sliding windows, soft caps and attention sinks are honoured; what else a model's attention asks for
    is refused by name when it is called.

    Args:
        model: a causal decoder of transformers 5, such as `LlamaForCausalLM` or its inner `LlamaModel`; changed in place.
        cache: with the model's number of layers, K/V heads, head size, dtype and device.

    Returns:
        The same model. `detach` undoes everything.

    Raises:
        BoundaryOpError: the model is attached already, has a layer without self attention, an encoder, several stacks,
            another kind of attention, or does not fit the cache.
    """
    if _find_attachment(model) is not None:
        raise BoundaryOpError(
            f"attach({type(model).__name__}, cache): the model is attached already",
            rule="a model has one paged cache at a time",
            fix="call boundary_ops.huggingface.detach(model) first",
        )
    decoder, layers = find_decoder(model, cache)
    _register_with_transformers()
    inner = decoder.forward
    parameters = inspect.signature(inner).parameters
    attachment = _Attachment(
        cache=cache,
        decoder=decoder,
        inner_forward=inner,
        names=tuple(name for name, value in parameters.items() if value.kind is value.POSITIONAL_OR_KEYWORD),
        accepts_use_cache="use_cache" in parameters
        or any(value.kind is value.VAR_KEYWORD for value in parameters.values()),
        layers=layers,
    )
    try:
        _change(model, attachment)
    except BaseException:
        _restore(attachment)
        raise
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undoes `attach`: forward, generate, config values and module attributes are what they were. Returns the model.

    Raises:
        BoundaryOpError: the model is not attached, or its forward was replaced since (by `piecewise.enable`, for example).
    """
    attachment = _find_attachment(model)
    if attachment is None:
        raise BoundaryOpError(
            f"detach({type(model).__name__}): the model is not attached",
            rule="detach undoes one attach",
            fix="call it once, with the model that attach returned",
        )
    forward = attachment.decoder.__dict__.get("forward")
    if getattr(forward, "__func__", None) is None or not hasattr(forward.__func__, "_paged_guard"):
        raise BoundaryOpError(
            f"detach({type(model).__name__}): its forward was replaced after attach",
            expected="the forward that attach put there",
            got=repr(forward),
            rule="changes are undone in the reverse order",
            fix="undo the later change first, for example with piecewise.disable(model)",
        )
    _restore(attachment)
    return model


def _find_attachment(model: nn.Module) -> _Attachment | None:
    found = (module.__dict__.get(ATTACHMENT) for module in model.modules())
    return next((attachment for attachment in found if attachment is not None), None)


def _change(model: nn.Module, attachment: _Attachment) -> None:
    decoder = attachment.decoder

    def change(owner: Any, name: str, value: Any) -> None:
        # Configs keep `_attn_implementation` behind a property: the value is read, not the instance's dict.
        former = owner.__dict__.get(name, ABSENT) if isinstance(owner, nn.Module) else getattr(owner, name, ABSENT)
        attachment.former.append((owner, name, former))
        setattr(owner, name, value)

    configs = {id(config): config for config in (decoder.config, *(layer.attention.config for layer in attachment.layers))}
    for config in configs.values():
        change(config, "_attn_implementation", NAME)
    top = getattr(model, "config", None)
    for config in {**configs, id(top): top}.values():
        if hasattr(config, "use_cache"):
            change(config, "use_cache", False)
    for index, layer in enumerate(attachment.layers):
        pools = (attachment.cache.k[index], attachment.cache.v[index])
        for name, value in zip(MODULE_ATTRIBUTES, (*pools, layer.path, layer.kind, attachment), strict=True):
            change(layer.attention, name, value)
    change(decoder, ATTACHMENT, attachment)
    # Bound methods, so that a deep copy of the model is bound to the copy.
    change(decoder, "forward", types.MethodType(_guarded(attachment.inner_forward), decoder))
    if hasattr(model, "generate"):
        change(model, "generate", types.MethodType(_refuse_generate, model))


def _restore(attachment: _Attachment) -> None:
    for owner, name, former in reversed(attachment.former):
        if former is ABSENT or (isinstance(former, object) and type(former) is object):
            # A deep copy has its own ABSENT, hence the second test.
            delattr(owner, name)
        else:
            setattr(owner, name, former)
    attachment.former.clear()


def _guarded(inner_forward: Any) -> Any:
    @functools.wraps(getattr(inner_forward, "__func__", inner_forward))
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = getattr(self, ATTACHMENT)
        arguments = _bind(attachment.names, args, kwargs)
        _check_structure(arguments)
        if attachment.accepts_use_cache:
            arguments["use_cache"] = False
        arguments["attention_mask"] = _checked_mask(arguments.pop("attention_mask", None))
        implied = arguments.get("position_ids") is None
        if not torch.compiler.is_compiling():
            _check_against_batch(attachment, arguments, implied)
            return attachment.inner_forward(**arguments)
        attachment.implied_positions = implied
        try:
            return attachment.inner_forward(**arguments)
        finally:
            attachment.implied_positions = False

    forward._paged_guard = True  # type: ignore[attr-defined]
    return forward


def _refuse(what: str, expected: str, got: str, rule: str, fix: str) -> NoReturn:
    """Raises our error, also from inside a trace: `attach` marks it as a function that Dynamo calls instead of tracing."""
    raise BoundaryOpError(what, expected=expected, got=got, rule=rule, fix=fix)


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
            _refuse(
                f"model input '{name}'",
                "none: K and V live in the attached PagedKVCache",
                "another cache",
                "an attached model has one cache; a second one would be filled and never read",
                "leave it out; the PrefillBatch says what was written before. For generate(), detach the model first",
            )
    if arguments.get("output_attentions"):
        _refuse(
            "model input 'output_attentions'",
            "False",
            "True",
            REFUSED["output_attentions"],
            "leave it out, or detach the model and use eager attention",
        )
    for name in ("input_ids", "inputs_embeds"):
        value = arguments.get(name)
        if value is not None and (value.dim() < 2 or value.shape[0] != 1):
            _refuse(
                f"model input '{name}'",
                "one row of packed tokens, [1, num_tokens]",
                f"{value.dim()} dims, the first of size {value.shape[0]}",
                "sequences are packed one after the other, not stacked and padded",
                "ids = batch.pack(prompts), and call the model inside `with batch:`",
            )


def _checked_mask(mask: Any) -> None:
    """Accepts a mask that masks nothing, and drops it."""
    if mask is None:
        return
    if torch.compiler.is_compiling():
        _refuse(
            "model input 'attention_mask'",
            "none while the model is traced",
            "a mask",
            "a trace cannot look at a mask's values, and packed input needs no mask",
            "leave attention_mask out",
        )
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not bool((mask == 1).all()):
        is_padded = isinstance(mask, torch.Tensor) and mask.dim() == 2
        _refuse(
            "model input 'attention_mask'",
            "none, or [1, num_tokens] of ones",
            "a mask that hides tokens" if is_padded else f"a prepared mask, {type(mask).__name__}",
            "attention is causal within each packed sequence; a mask cannot change that",
            "pack the sequences without padding: batch.pack(prompts), and leave attention_mask out",
        )


def _check_against_batch(attachment: _Attachment, arguments: dict[str, Any], implied_positions: bool) -> None:
    """Eager only: the running step is Python state, which a trace would freeze."""
    batch = PrefillBatch.peek()
    if batch is None:
        # Looked up for its error: `peek` has none.
        batch = PrefillBatch.current("piecewise::attn_inplace")
    if batch.cache is not attachment.cache:
        _refuse(
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
            _refuse(
                f"model input '{name}'",
                f"{batch.num_tokens} tokens, as the current PrefillBatch",
                f"{tensor.shape[dim]}",
                "a step runs exactly the tokens that its batch was built for",
                "pass batch.pack(prompts) and batch.positions of the same batch",
            )
    if implied_positions:
        check_implied_positions(batch)


def _refuse_generate(self: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
    _refuse(
        f"{type(self).__name__}.generate",
        "prefill calls of the model itself",
        "generate()",
        "an attached model runs prefill steps on a paged cache; generate() brings a cache and masks of its own",
        "call model(input_ids=batch.pack(prompts), position_ids=batch.positions) inside `with batch:`, or detach(model) first",
    )


@functools.cache
def _register_with_transformers() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    # Called while tracing instead of traced: Dynamo shows the whole message of what it raises.
    torch.compiler.assume_constant_result(_refuse)


def no_mask(*args: Any, attention_mask: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:
    """The mask function: none is needed, and what only a mask could express is refused."""
    if use_vmap:
        _refuse(
            "attention mask",
            "causal, or causal within a sliding window",
            "a mask function of the model's own",
            "the op has no other masks",
            "use this model with its own attention: detach it",
        )
    _checked_mask(attention_mask)


def paged_attention(
    module: nn.Module,
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
    path = getattr(module, "paged_path", None)
    if path is None:
        _refuse(
            f"attention of {type(module).__name__}",
            "a module that attach has given its pools",
            "one without",
            f"the attention implementation '{NAME}' is set by attach alone",
            "call boundary_ops.huggingface.attach(model, cache) instead of naming the implementation",
        )
    _check_request(path, module.paged_layer_type, attention_mask, dropout, sliding_window, is_causal, kwargs)
    _check_heads(path, module.paged_k_cache, query, key, value)
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    # [num_tokens, heads, head_dim]; allocated by the model, so that its address belongs to the graph before the op
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
    path: str,
    layer_type: str | None,
    attention_mask: Any,
    dropout: float,
    sliding_window: int | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    """Each thing that the model asks of its attention is honoured or refused, never dropped."""

    def refuse(name: str, expected: str, got: str, rule: str, fix: str = "use this model with its own attention") -> NoReturn:
        _refuse(f"{path}: attention argument '{name}'", expected, got, rule, fix)

    if attention_mask is not None:
        refuse("attention_mask", "none", "a mask that the model made", "the op has no masks but causal and window")
    if dropout:
        refuse("dropout", "0.0", str(dropout), "the op drops nothing", "call model.eval()")
    if is_causal is False:
        refuse("is_causal", "True", "False", "the op is causal")
    if layer_type == "sliding_attention" and not sliding_window:
        refuse("sliding_window", "a window, as the layer's type is sliding_attention", "none", "a window is never dropped")
    if layer_type == "full_attention" and sliding_window:
        refuse("sliding_window", "none, as the layer's type is full_attention", str(sliding_window), "a window is honoured")
    for name, value in kwargs.items():
        if value is None or value is False or name in NEUTRAL:
            continue
        if name in REFUSED:
            refuse(name, "none", type(value).__name__, REFUSED[name], "leave it out, or use this model with its own attention")
        refuse(name, "only arguments that the op knows", type(value).__name__, "unknown arguments are not dropped")


def _check_heads(
    path: str, k_cache: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    if query.shape[0] != 1:
        _refuse(
            f"{path}: attention input",
            "one row of packed tokens, a batch of 1",
            f"a batch of {query.shape[0]}",
            "sequences are packed one after the other, not stacked and padded",
            "ids = batch.pack(prompts), and call the model inside `with batch:`",
        )
    if key.shape[2] != query.shape[2]:
        _refuse(
            f"{path}: attention input 'key'",
            "as many rows as 'query'",
            "another number",
            "the model passes the step's new K and V; older ones come from the pages",
            "pass no cache to the model, and use no cross attention",
        )
    wanted = (k_cache.shape[2], k_cache.shape[3])
    for name, tensor in (("key", key), ("value", value)):
        if (tensor.shape[1], tensor.shape[3]) != wanted or tensor.dtype != k_cache.dtype or tensor.device != k_cache.device:
            _refuse(
                f"{path}: attention input '{name}'",
                f"{wanted[0]} heads of {wanted[1]}, {k_cache.dtype} on {k_cache.device}, as the cache",
                f"{tensor.shape[1]} heads of {tensor.shape[3]}, {tensor.dtype} on {tensor.device}",
                "K and V are kept as the model computes them",
                "make the cache with the model's heads, head size, dtype and device",
            )
