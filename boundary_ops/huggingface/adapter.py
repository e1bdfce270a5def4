"""Puts `piecewise::attn_inplace` and a paged cache into an unmodified transformers model.

transformers looks its attention up by name, `config._attn_implementation`, in `AttentionInterface`, and the
function that makes the mask in `AttentionMaskInterface`. `attach` registers ours under one name in both, and
gives each attention module its layer's two pools as plain attributes. So the pools reach the op as tensors
with a path (`model.layers[3].self_attn.paged_k_cache`), and the state dict does not change.

The model's modules get copies of their configs, because a config is often shared with other models.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from boundary_ops.errors import refuse
from boundary_ops.errors.huggingface import (
    AlreadyAttached,
    CacheMismatch,
    ForwardReplaced,
    NotACache,
    NotAModel,
    NotAttached,
)
from boundary_ops.huggingface.call_guard import ATTACHMENT, guarded, is_guarded, refuse_generate
from boundary_ops.huggingface.paged_attention import NAME, no_mask, paged_attention
from boundary_ops.huggingface.sequence_heads import find_pooling_head, pooled
from boundary_ops.step.decoder import Decoder, DecoderLayer, find_decoder
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["attach", "cache_of", "detach"]

_log = logging.getLogger(__name__)


class _Absent:
    """Stands for an attribute that was not there; a class, because a deep copy keeps a class as it is."""


@dataclass(slots=True, eq=False)
class _Attachment:
    """Records what `attach` has changed, so that `detach` can change it back.

    Attributes:
        names: positional names of the decoder's forward, to find arguments however they are passed.
        former: (module, attribute, former value or _Absent), in the order of the changes.
        implied_positions: set only while a trace runs through the guard; the op's constant of that name.
    """

    cache: PagedKVCache
    decoder: nn.Module
    inner_forward: Any
    names: tuple[str, ...]
    accepts_use_cache: bool
    former: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    implied_positions: bool = False


def attach(model: nn.Module, cache: PagedKVCache) -> nn.Module:
    """Makes a transformers decoder attend through `piecewise::attn_inplace` and keep its K and V in `cache`.

    From then on the model is called inside `with batch:`, with `input_ids` (or `inputs_embeds`) [1,
    num_tokens] and `position_ids=batch.positions`. `use_cache` is forced off, because the paged cache is the
    only one. Grouped and multi-query heads, sliding windows, soft caps and attention sinks are honoured;
    what else a model's attention asks for is refused by name when it is called.

    A `...ForSequenceClassification` with transformers' common head gives one row of scores per sequence of
    the batch, as the unpacked model gives it; any other head that may pool is refused here.

    Args:
        model: a causal decoder of transformers 5, such as `LlamaForCausalLM` or its inner `LlamaModel`;
            changed in place.
        cache: with the model's number of layers, K/V heads, head size, dtype and device.

    Returns:
        The same model. `detach` undoes everything.

    Raises:
        BoundaryOpError: the model is attached already, does not fit the cache, or has layers, an attention or
            a head that the op cannot serve.
    """
    if _find_attachment(model) is not None:
        raise AlreadyAttached(model=type(model).__name__)
    call = f"attach({type(model).__name__}, cache)"
    if not isinstance(cache, PagedKVCache):
        raise NotACache(call=call, got=type(cache).__name__)
    found = find_decoder(model, call)
    _check_fit(call, found, cache)
    decoder = found.module
    head = find_pooling_head(model, decoder)
    _register_with_transformers()
    parameters = inspect.signature(decoder.forward).parameters
    attachment = _Attachment(
        cache=cache,
        decoder=decoder,
        inner_forward=decoder.forward,
        names=tuple(name for name, value in parameters.items() if value.kind is value.POSITIONAL_OR_KEYWORD),
        accepts_use_cache="use_cache" in parameters
        or any(value.kind is value.VAR_KEYWORD for value in parameters.values()),
    )
    try:
        _change(model, attachment, found.layers, head)
    except BaseException:
        _restore(attachment)
        raise
    _log.info("attached %s: %d layers", type(model).__name__, len(found.layers))
    return model


def detach(model: nn.Module) -> nn.Module:
    """Undoes `attach` and returns the model; forward, generate, configs and attributes are what they were.

    The names stay registered with transformers. Raises BoundaryOpError where the model is not attached or
    its decoder's forward was replaced since.
    """
    attachment = _find_attachment(model)
    if attachment is None:
        raise NotAttached(model=type(model).__name__)
    for changed in (owner for owner, name, _ in attachment.former if name == "forward"):
        forward = changed.__dict__.get("forward")
        if not is_guarded(forward):
            owner = type(changed).__name__
            raise ForwardReplaced(model=type(model).__name__, owner=owner, got=repr(forward))
    _restore(attachment)
    return model


def cache_of(model: nn.Module) -> PagedKVCache | None:
    """Returns the cache that a model is attached to, or None; raises NotAModel for anything else."""
    attachment = _find_attachment(model)
    return None if attachment is None else attachment.cache


def _find_attachment(model: nn.Module) -> _Attachment | None:
    if not isinstance(model, nn.Module):
        raise NotAModel(got=type(model).__name__)
    found = (module.__dict__.get(ATTACHMENT) for module in model.modules())
    return next((attachment for attachment in found if attachment is not None), None)


def _check_fit(call: str, decoder: Decoder, cache: PagedKVCache) -> None:
    for name, theirs in decoder.sizes.items():
        ours, place = getattr(cache, name), f" of '{decoder.layers[0].path}'"
        if theirs is not None and ours != theirs:
            what = f"{call}: {name}{'' if name == 'num_layers' else place}"
            raise CacheMismatch(what, expected=f"{theirs}, the model's", got=str(ours))


def _change(
    model: nn.Module, attachment: _Attachment, layers: tuple[DecoderLayer, ...], head: nn.Module | None
) -> None:
    decoder: Any = attachment.decoder

    def change(owner: nn.Module, name: str, value: Any) -> None:
        attachment.former.append((owner, name, owner.__dict__.get(name, _Absent)))
        setattr(owner, name, value)

    # One memo, so that configs which hold or share one another still do.
    memo: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "_attn_implementation"):
            change(module, "config", copy.deepcopy(config, memo))
    for config in (decoder.config, *(layer.attention.config for layer in layers)):
        config._attn_implementation = NAME
    top: Any = getattr(model, "config", None)
    for config in (decoder.config, top):
        if hasattr(config, "use_cache"):
            config.use_cache = False
    for index, layer in enumerate(layers):
        change(layer.attention, "paged_k_cache", attachment.cache.k[index])
        change(layer.attention, "paged_v_cache", attachment.cache.v[index])
        change(layer.attention, "paged_path", layer.path)
        change(layer.attention, "paged_layer_type", layer.kind)
        change(layer.attention, ATTACHMENT, attachment)
    change(decoder, ATTACHMENT, attachment)
    # Bound methods, so that a deep copy of the model has them bound to the copy.
    change(decoder, "forward", types.MethodType(guarded(attachment.inner_forward), decoder))
    if head is not None:
        change(head, "forward", types.MethodType(pooled(head.forward), head))
    if hasattr(model, "generate"):
        change(model, "generate", types.MethodType(refuse_generate, model))


def _restore(attachment: _Attachment) -> None:
    for owner, name, former in reversed(attachment.former):
        if former is _Absent:
            delattr(owner, name)
        else:
            setattr(owner, name, former)
    attachment.former.clear()


@functools.cache
def _register_with_transformers() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    torch.compiler.assume_constant_result(refuse)  # type: ignore[no-untyped-call, unused-ignore]
