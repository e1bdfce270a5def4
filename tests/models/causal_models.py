"""Small random models of the causal language models of transformers, as far as a small config makes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 61
# By the names that families use; a config takes those that it has.
SMALL = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    n_embd=32, n_layer=2, n_head=4, n_positions=128, n_inner=48, d_model=32, ffn_dim=48, n_layers=2,
    n_heads=4,    decoder_layers=2, decoder_attention_heads=4, encoder_layers=2, encoder_attention_heads=4,
    decoder_ffn_dim=48, encoder_ffn_dim=48, embedding_size=32, word_embed_proj_dim=32, rotary_dim=4,
    head_dim=8, sliding_window=4, num_experts=4, num_local_experts=4, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16, n_group=1,
    topk_group=1, first_k_dense_replace=1, intermediate_size_mlp=48, ffn_hidden_size=48,
    expert_ffn_hidden_size=16, kv_channels=8, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, qk_head_dim=16, v_head_dim=8, index_n_heads=2, index_head_dim=8, index_topk=4,
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=8, linear_num_key_heads=2,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=0,
    type_vocab_size=2,
)  # fmt: skip
MOST_PARAMETERS = 20_000_000


def model_types() -> Iterator[str]:
    """The model types of which transformers has a causal language model."""
    yield from MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def build_causal(model_type: str, **changes: Any) -> Any:
    """Makes the model, or raises whatever its config or constructor raises where the sizes do not suit it."""
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    fields = {name for cls in config_class.__mro__ for name in getattr(cls, "__annotations__", {})}
    fields |= set(inspect.signature(config_class.__init__).parameters) | {"is_decoder"}
    fields |= set(getattr(config_class, "attribute_map", {}))
    sizes = {name: size for name, size in SMALL.items() if name in fields}
    config = config_class(**{**sizes, "is_decoder": True, **changes})
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with torch.device("meta"):
        size = sum(weight.numel() for weight in model_class(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.is_floating_point():
            torch.nn.init.normal_(weight, std=0.2)
    return model
