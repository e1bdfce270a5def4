"""Finds the decoder layers of a transformers model, and says by name why a model cannot be attached.

Knows transformers' conventions and imports nothing of it: a decoder is a list of layers, each with one self
attention that has a `config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from boundary_ops.errors import BoundaryOpError
from boundary_ops.step.kv_cache import PagedKVCache

__all__ = ["DecoderLayer", "find_decoder"]

SELF_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
CROSS_ATTENTION = (
    "encoder_attn",
    "crossattention",
    "cross_attn",
    "cross_attention",
    "encoder_decoder_attention",
)
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer's attention: its path in the model, the module, and the type that the config gives the
    layer, if any."""

    path: str
    attention: Any
    kind: str | None


def find_decoder(model: nn.Module, cache: PagedKVCache) -> tuple[nn.Module, tuple[DecoderLayer, ...]]:
    """The module that owns the one stack of decoder layers, and the layers, checked against the cache.

    Raises:
        BoundaryOpError: see `boundary_ops.huggingface.attach`.
    """
    title = f"attach({type(model).__name__}, cache)"
    if not isinstance(cache, PagedKVCache):
        _refuse(
            title, "a PagedKVCache as 'cache'", type(cache).__name__, fix="boundary_ops.PagedKVCache(...)"
        )
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        _refuse(title, "a transformers model", f"{type(model).__name__} without a transformers config")
    if getattr(config, "is_encoder_decoder", False):
        _refuse(
            title,
            "a decoder",
            "an encoder-decoder",
            "the op is causal self attention; it has no cross attention",
        )
    path, stack = _find_stack(title, model)
    decoder = model.get_submodule(path.rpartition(".")[0])
    if not hasattr(decoder, "config"):
        _refuse(title, f"a config on the owner of '{path}'", type(decoder).__name__)
    layers = tuple(_layer(title, f"{path}.{index}", index, layer) for index, layer in enumerate(stack))
    _check_kind(title, model, decoder)
    _check_fit(title, layers, cache)
    return decoder, layers


def _find_stack(title: str, model: nn.Module) -> tuple[str, nn.ModuleList]:
    stacks = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(_attention(layer) is not None for layer in module)
    ]
    if not stacks:
        _refuse(title, "a list of decoder layers with 'self_attn'", f"none in {type(model).__name__}")
    if len(stacks) > 1:
        _refuse(
            title,
            "one stack of attention layers",
            " and ".join(f"'{path}'" for path, _ in stacks),
            "a cache serves one decoder",
            "attach the text decoder alone, for example model.language_model",
        )
    return stacks[0]


def _attention(layer: nn.Module) -> nn.Module | None:
    found = (getattr(layer, name, None) for name in SELF_ATTENTION)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def _layer(title: str, path: str, index: int, layer: nn.Module) -> DecoderLayer:
    attention: Any = _attention(layer)
    children = [name for name, _ in layer.named_children()]
    if attention is None:
        _refuse(
            f"{title}: layer '{path}' ({type(layer).__name__})",
            "a self attention ('self_attn')",
            f"{', '.join(children)}",
            "each layer keeps its state in the paged cache; a recurrent layer has another state",
        )
    for name in CROSS_ATTENTION:
        if name in children:
            _refuse(
                f"{title}: layer '{path}'",
                "self attention alone",
                f"'{name}'",
                "the op has no cross attention",
            )
    config: Any = getattr(attention, "config", None)
    if config is None:
        _refuse(f"{title}: '{path}' ({type(attention).__name__})", "an attention with a config", "none")
    if getattr(attention, "is_causal", True) is False or getattr(config, "is_causal", True) is False:
        _refuse(f"{title}: '{path}' ({type(attention).__name__})", "causal attention", "is_causal=False")
    name = next(name for name in SELF_ATTENTION if getattr(layer, name, None) is attention)
    types = getattr(config, "layer_types", None)
    kind = types[index] if types and index < len(types) else None
    if kind is None and getattr(config, "attention_chunk_size", None):
        kind = "chunked_attention"
    if kind is not None and kind not in LAYER_TYPES:
        _refuse(f"{title}: layer '{path}'", f"a layer of type {' or '.join(LAYER_TYPES)}", f"'{kind}'")
    return DecoderLayer(path=f"{path}.{name}", attention=attention, kind=kind)


def _check_kind(title: str, model: nn.Module, decoder: Any) -> None:
    if getattr(model, "_is_stateful", False) or getattr(decoder, "_is_stateful", False):
        _refuse(
            title,
            "a model whose only state is K and V",
            "one with recurrent layers (_is_stateful)",
        )
    if getattr(decoder.config, "use_bidirectional_attention", None):
        _refuse(title, "causal attention", "use_bidirectional_attention in its config")
    owner = type(decoder)
    supports = getattr(owner, "_can_set_attn_implementation", None)
    if not getattr(owner, "_supports_attention_backend", False) and not (supports and supports()):
        _refuse(
            title,
            "a model that looks its attention up in AttentionInterface",
            f"{owner.__name__}, which does not",
            "an attention that cannot be replaced would ignore the cache",
        )


def _check_fit(title: str, layers: tuple[DecoderLayer, ...], cache: PagedKVCache) -> None:
    fix = "make the cache with the model's sizes, dtype and device"
    rule = "the cache holds each layer's K and V as the model computes them"
    if len(layers) != cache.num_layers:
        _refuse(f"{title}: num_layers", f"{len(layers)}, the model's", str(cache.num_layers), rule, fix)
    for layer in layers:
        config = layer.attention.config
        heads = getattr(config, "num_attention_heads", None)
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(layer.attention, "head_dim", None) or getattr(config, "head_dim", None)
        if head_dim is None and heads:
            head_dim = config.hidden_size // heads
        weights = layer.attention.parameters()
        weight = next((w for w in weights if w.dim() > 1 and w.dtype.is_floating_point), None)
        for name, ours, theirs in (
            ("num_kv_heads", cache.num_kv_heads, kv_heads),
            ("head_dim", cache.head_dim, head_dim),
            ("device", cache.device, getattr(weight, "device", None)),
            ("dtype", cache.dtype, getattr(weight, "dtype", None)),
        ):
            if theirs is not None and ours != theirs:
                _refuse(f"{title}: {name} of '{layer.path}'", f"{theirs}, the model's", str(ours), rule, fix)


def _refuse(
    what: str,
    expected: str,
    got: str,
    rule: str = "the op is causal self attention over a paged cache, in each layer of one decoder",
    fix: str = "use this model with its own attention",
) -> NoReturn:
    raise BoundaryOpError(what, expected=expected, got=got, rule=rule, fix=fix)
