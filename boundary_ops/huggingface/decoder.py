"""Finds the decoder layers of a transformers model, and says by name why a model cannot be attached.

Knows transformers' conventions and imports nothing of it: a decoder is a list of layers, each with one self
attention that has a `config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from boundary_ops.errors.huggingface import CacheMismatch, NotACache, SeveralDecoders, UnsupportedModel
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["DecoderLayer", "find_decoder"]

SELF_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
CROSS_ATTENTION = (
    "encoder_attn", "crossattention", "cross_attn", "cross_attention", "encoder_decoder_attention"
)  # fmt: skip
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Describes one layer's attention: its path, its module, and its type in the config, if any."""

    path: str
    attention: Any
    kind: str | None


def find_decoder(model: nn.Module, cache: PagedKVCache) -> tuple[nn.Module, tuple[DecoderLayer, ...]]:
    """Returns the owner of the one stack of decoder layers, and the layers; raises as `attach` does."""
    name = type(model).__name__
    if not isinstance(cache, PagedKVCache):
        raise NotACache(model=name, got=type(cache).__name__)
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise _unsupported(name, "a transformers model", f"{name} without a transformers config")
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(name, "a decoder", "an encoder-decoder")
    stacks = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(_attention_name(layer) for layer in module)
    }
    if not stacks:
        raise _unsupported(name, "a list of decoder layers with 'self_attn'", f"none in {name}")
    if len(stacks) > 1:
        raise SeveralDecoders(model=name, got=" and ".join(map(repr, stacks)))
    ((path, stack),) = stacks.items()
    decoder = model.get_submodule(path.rpartition(".")[0])
    if not hasattr(decoder, "config"):
        raise _unsupported(name, f"a config on the owner of '{path}'", type(decoder).__name__)
    layers = tuple(_layer(name, f"{path}.{index}", index, layer) for index, layer in enumerate(stack))
    _check_kind(name, model, decoder)
    _check_fit(name, layers, cache)
    return decoder, layers


def _unsupported(model: str, expected: str, got: str, place: str = "") -> UnsupportedModel:
    return UnsupportedModel(model=model, place=place and f": {place}", expected=expected, got=got)


def _attention_name(layer: nn.Module) -> str | None:
    return next((name for name in SELF_ATTENTION if isinstance(getattr(layer, name, None), nn.Module)), None)


def _layer(model: str, path: str, index: int, layer: nn.Module) -> DecoderLayer:
    children = [name for name, _ in layer.named_children()]
    place, name = f"layer '{path}' ({type(layer).__name__})", _attention_name(layer)
    if name is None:
        raise _unsupported(model, "a self attention ('self_attn')", ", ".join(children), place)
    for other in CROSS_ATTENTION:
        if other in children:
            raise _unsupported(model, "self attention alone", f"'{other}'", place)
    attention: Any = getattr(layer, name)
    config: Any = getattr(attention, "config", None)
    if config is None:
        raise _unsupported(model, "an attention with a config", "none", place)
    if getattr(attention, "is_causal", True) is False or getattr(config, "is_causal", True) is False:
        raise _unsupported(model, "causal attention", "is_causal=False", place)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types and index < len(types) else None
    if kind is None and getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    if kind is not None and kind not in LAYER_TYPES:
        raise _unsupported(model, f"a layer of type {' or '.join(LAYER_TYPES)}", f"'{kind}'", place)
    return DecoderLayer(path=f"{path}.{name}", attention=attention, kind=kind)


def _check_kind(name: str, model: nn.Module, decoder: Any) -> None:
    if getattr(model, "_is_stateful", False) or getattr(decoder, "_is_stateful", False):
        raise _unsupported(name, "no state but K and V", "recurrent layers (_is_stateful)")
    if getattr(decoder.config, "use_bidirectional_attention", None):
        raise _unsupported(name, "causal attention", "use_bidirectional_attention in its config")
    owner = type(decoder)
    supports = getattr(owner, "_can_set_attn_implementation", None)
    if not getattr(owner, "_supports_attention_backend", False) and not (supports and supports()):
        # An attention that cannot be replaced would ignore the cache.
        expected = "a model that looks its attention up in AttentionInterface"
        raise _unsupported(name, expected, f"{owner.__name__}, which does not")


def _check_fit(name: str, layers: tuple[DecoderLayer, ...], cache: PagedKVCache) -> None:
    sizes: list[tuple[str, Any, Any]] = [("num_layers", cache.num_layers, len(layers))]
    for layer in layers:
        config, attention = layer.attention.config, layer.attention
        heads = getattr(config, "num_attention_heads", None)
        head_dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None)
        if head_dim is None and heads:
            head_dim = config.hidden_size // heads
        weights = attention.parameters()
        weight = next((w for w in weights if w.dim() > 1 and w.dtype.is_floating_point), None)
        kv_heads, place = getattr(config, "num_key_value_heads", None) or heads, f" of '{layer.path}'"
        sizes += [
            (f"num_kv_heads{place}", cache.num_kv_heads, kv_heads),
            (f"head_dim{place}", cache.head_dim, head_dim),
            (f"device{place}", cache.device, getattr(weight, "device", None)),
            (f"dtype{place}", cache.dtype, getattr(weight, "dtype", None)),
        ]
    for what, ours, theirs in sizes:
        if theirs is not None and ours != theirs:
            expected = f"{theirs}, the model's"
            raise CacheMismatch(f"attach({name}, cache): {what}", expected=expected, got=str(ours))
