"""Small transformers models of many families with random weights, their caches, and a call of one step."""

from __future__ import annotations

import torch
import transformers

from boundary_ops import PagedKVCache
from boundary_ops.huggingface import attach

LAYERS, VOCAB = 3, 97
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LOCAL_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
# Windows are shorter than the prompts, so that one that is dropped shows.
MODELS = {
    "Llama": {},
    "Qwen2": dict(use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "Qwen3": dict(head_dim=16),
    "Mistral": dict(sliding_window=4, head_dim=8),
    "Mixtral": dict(num_local_experts=4, sliding_window=None),
    "Phi3": dict(sliding_window=5),
    "Olmo2": {},
    "Gemma2": dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=16, attn_logit_softcapping=0.1),
    "Gemma3": dict(head_dim=8, sliding_window=4, query_pre_attn_scalar=16, layer_types=LOCAL_GLOBAL),
    "GptOss": dict(head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4),
}


def build(name, **changes):
    config_class = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_class)(**{**SMALL, **MODELS[name], **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in model.parameters():
        # Large enough for attention to be far from uniform, so that scale, cap and sinks show in the logits.
        torch.nn.init.normal_(weight, std=0.3)
    return model


def make_cache(model, **changes):
    config, attention = model.config, model.base_model.layers[0].self_attn
    sizes = dict(num_layers=LAYERS, num_blocks=32, block_size=4, num_kv_heads=config.num_key_value_heads)
    sizes |= dict(head_dim=attention.head_dim, dtype=model.dtype, device=model.device)
    return PagedKVCache(**{**sizes, **changes})


def attached(name="Llama", **changes):
    model = build(name, **changes)
    cache = make_cache(model)
    return attach(model, cache), cache


def prompts_of(lengths):
    return [torch.randint(3, VOCAB, (length,)) for length in lengths]


def call(model, batch, prompts, **arguments):
    with torch.no_grad(), batch:
        return model(input_ids=batch.pack(prompts), position_ids=batch.positions, **arguments)
