"""Finds the decoder layers of a transformers model and what their K and V ask of a cache.

Says by name why a model cannot be served. Knows transformers' conventions and imports nothing of it: a
decoder is a list of layers, each with one self attention that has a `config`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from boundary_ops.errors import BoundaryOpError
from boundary_ops.errors import huggingface as errors

__all__ = ["Decoder", "DecoderLayer", "find_decoder"]

SELF_ATTENTION = ("self_attn", "attn", "attention", "self_attention")
CROSS_ATTENTION = (
    "encoder_attn", "crossattention", "cross_attn", "cross_attention", "encoder_decoder_attention"
)  # fmt: skip
_OWN_MODEL = (
    "in a model of your own call boundary_ops.attn_inplace, and give the sizes by name: "
    "PagedKVCache(num_layers=, num_blocks=, block_size=, num_kv_heads=, head_dim=, dtype=, device=)"
)
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Describes one layer's attention: its path, its module, and its type in the config, if any."""

    path: str
    attention: Any
    kind: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """Describes a decoder: the module that owns the layers, the layers, and the sizes of a cache that fits.

    Attributes:
        sizes: num_layers, num_kv_heads, head_dim, dtype and device, the latter two None where the weights do
            not say.
    """

    module: nn.Module
    layers: tuple[DecoderLayer, ...]
    sizes: dict[str, Any]


def find_decoder(model: Any, call: str, *, among_others: bool = False) -> Decoder:
    """Returns the one decoder of a model, or raises a BoundaryOpError in the name of `call`.

    With `among_others` it may be the only one of several stacks that can be served, as the text decoder of a
    model of images and text.
    """
    if not isinstance(model, nn.Module):
        raise errors.NotAModel(got=type(model).__name__)
    name, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        got = f"{name} without a transformers config"
        raise _unsupported(call, "a transformers model", got, fix=_OWN_MODEL)
    if getattr(config, "is_encoder_decoder", False):
        raise _unsupported(call, "a decoder", "an encoder-decoder")
    stacks = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(_attention_name(layer) for layer in module)
    }
    if not stacks:
        _check_kind(call, model, model)
        raise _unsupported(call, "a list of decoder layers with 'self_attn'", f"none in {name}")
    if len(stacks) > 1:
        return _find_among(model, call, stacks, is_enough=among_others)
    ((path, stack),) = stacks.items()
    decoder = model.get_submodule(path.rpartition(".")[0])
    if not hasattr(decoder, "config"):
        raise _unsupported(call, f"a config on the owner of '{path}'", type(decoder).__name__)
    layers = tuple(_layer(call, f"{path}.{index}", index, layer) for index, layer in enumerate(stack))
    _check_kind(call, model, decoder)
    return Decoder(decoder, layers, _sizes(call, layers))


def _find_among(model: nn.Module, call: str, stacks: Iterable[str], *, is_enough: bool) -> Decoder:
    """Returns the only stack's decoder that can be served, if that is enough; else raises, and names it."""
    served, told, fix = {}, [], None
    for owner in filter(None, dict.fromkeys(path.rpartition(".")[0] for path in stacks)):
        try:
            served[owner] = find_decoder(model.get_submodule(owner), call)
            told.append(repr(owner))
        except BoundaryOpError as error:
            told.append(f"'{owner}' (expected {error.expected}, got {error.got})")
    if len(served) == 1:
        ((owner, decoder),) = served.items()
        if is_enough:
            return decoder
        fix = f"attach that decoder alone and call it: boundary_ops.huggingface.attach(model.{owner}, cache)"
    raise errors.SeveralDecoders(call=call, got=" and ".join(told), fix=fix)


def _unsupported(call: str, expected: str, got: str, place: str = "", **fix: str) -> BoundaryOpError:
    return errors.UnsupportedModel(call=call, place=place and f": {place}", expected=expected, got=got, **fix)


def _attention_name(layer: nn.Module) -> str | None:
    return next((name for name in SELF_ATTENTION if isinstance(getattr(layer, name, None), nn.Module)), None)


def _layer(call: str, path: str, index: int, layer: nn.Module) -> DecoderLayer:
    children = [name for name, _ in layer.named_children()]
    place, name = f"layer '{path}' ({type(layer).__name__})", _attention_name(layer)
    if name is None:
        raise _unsupported(call, "a self attention ('self_attn')", ", ".join(children), place)
    for other in CROSS_ATTENTION:
        if other in children:
            raise _unsupported(call, "self attention alone", f"'{other}'", place)
    attention: Any = getattr(layer, name)
    config: Any = getattr(attention, "config", None)
    if config is None:
        raise _unsupported(call, "an attention with a config", "none", place)
    if getattr(attention, "is_causal", True) is False or getattr(config, "is_causal", True) is False:
        raise _unsupported(call, "causal attention", "is_causal=False", place)
    types = getattr(config, "layer_types", None)
    implied = (("attention_chunk_size", "chunked_attention"), ("sliding_window", "sliding_attention"))
    kind = next((kind for field, kind in implied if getattr(config, field, None)), None)
    kind = types[index] if types and index < len(types) else kind
    if kind is not None and kind not in LAYER_TYPES:
        raise _unsupported(call, f"a layer of type {' or '.join(LAYER_TYPES)}", f"'{kind}'", place)
    return DecoderLayer(path=f"{path}.{name}", attention=attention, kind=kind)


def _check_kind(call: str, model: nn.Module, decoder: Any) -> None:
    if getattr(model, "_is_stateful", False) or getattr(decoder, "_is_stateful", False):
        raise _unsupported(call, "no state but K and V", "recurrent layers (_is_stateful)")
    if getattr(decoder.config, "use_bidirectional_attention", None):
        raise _unsupported(call, "causal attention", "use_bidirectional_attention in its config")
    owner = type(decoder)
    supports = getattr(owner, "_can_set_attn_implementation", None)
    if not getattr(owner, "_supports_attention_backend", False) and not (supports and supports()):
        # An attention that cannot be replaced would ignore the cache.
        expected = "a model that looks its attention up in AttentionInterface"
        raise _unsupported(call, expected, f"{owner.__name__}, which does not")


def _sizes(call: str, layers: tuple[DecoderLayer, ...]) -> dict[str, Any]:
    """Returns what all layers ask of a cache; raises where one asks for another thing than the first."""
    first = _sizes_of(call, layers[0])
    for layer in layers[1:]:
        for size, theirs in _sizes_of(call, layer).items():
            if theirs != first[size]:
                about = dict(call=call, size=size, path=layer.path, first=layers[0].path)
                raise errors.LayersDiffer(ours=first[size], got=str(theirs), **about)
    return {"num_layers": len(layers), **first}


def _sizes_of(call: str, layer: DecoderLayer) -> dict[str, Any]:
    attention, config = layer.attention, layer.attention.config

    def first(*names: str) -> Any:
        # A config's `attribute_map` gives the names of older families (n_head, n_embd), too.
        values = (getattr(owner, name, None) for owner in (attention, config) for name in names)
        return next((value for value in values if value is not None), None)

    heads = first("num_heads", "num_attention_heads")
    if heads is None:
        raise _unsupported(call, "'num_attention_heads' in its config", "none", f"'{layer.path}'")
    head_dim = first("qk_head_dim", "head_dim", "head_size") or config.hidden_size // heads
    value_dim = getattr(attention, "v_head_dim", None) or head_dim
    if value_dim != head_dim:
        latent = "multi-head latent attention (MLA), " if hasattr(attention, "kv_lora_rank") else ""
        got = f"{latent}keys of {head_dim}, values of {value_dim}"
        raise errors.ValuesDiffer(call=call, path=layer.path, layer=type(attention).__name__, got=got)
    # The first weight, which makes queries: one of packed integers or 8 bit floats says nothing of K and V.
    weight = next((each for each in attention.parameters() if each.dim() > 1), None)
    dtype, device = (None, None) if weight is None else (weight.dtype, weight.device)
    says = dtype is not None and dtype.is_floating_point and dtype.itemsize > 1
    # By the groups an attention function of transformers repeats the keys that it is given.
    kv_heads = heads // getattr(attention, "num_key_value_groups", 1)
    return dict(num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype if says else None, device=device)
