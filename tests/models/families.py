"""Small random models of 39 transformers configurations, and the share of their ops that graphs must hold.

`FAMILIES` is the table that `test_family_coverage.py` checks. A row says how a model is built and called, and
what its capture must reach. Models of `attached` rows attend through the paged cache, those of the others
through a boundary op of this module that attends to the call's own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

import boundary_ops

LAYERS, VOCAB, HIDDEN = 2, 61, 32
NAME = "families_attention"


def _attend(q, k, v, out, scale, window, is_causal):
    """Writes the attention of rows [num_tokens, heads, head size] into `out`, in torch operators."""
    groups = q.shape[1] // k.shape[1]
    k, v = (rows.repeat_interleave(groups, 1) for rows in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places
    allowed = (distance >= 0) if is_causal else distance.abs() >= 0
    if window:
        allowed &= distance.abs() < window
    out.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v))


attend = boundary_ops.define(
    "families::attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float scale, int window, bool is_causal) "
    "-> ()",
    _attend,
)


def _attention(module, query, key, value, attention_mask=None, scaling=None, sliding_window=None, **_):
    """Calls the boundary op in the form in which transformers calls its attention functions."""
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend(q, k, v, out, float(scale), int(sliding_window or 0), bool(getattr(module, "is_causal", True)))
    return out[None], None


def _no_mask(*_, **__):
    """Makes no mask, because the boundary op hides the keys itself."""


transformers.AttentionInterface.register(NAME, _attention)
transformers.AttentionMaskInterface.register(NAME, _no_mask)

SMALL = dict(
    vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)  # fmt: skip
HEADS, WINDOW, SCALED = dict(head_dim=8), dict(sliding_window=4), dict(query_pre_attn_scalar=16)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
LINEAR_AND_FULL = ["linear_attention", "full_attention"]
MAMBA = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8
)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    n_shared_experts=1, first_k_dense_replace=1,
)  # fmt: skip

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
# Why ops are outside of graphs: the code that the plan gives for each.
SORTED_EXPERTS = {
    # The rows of all tokens are sorted by expert: with padded rows among them, their order is another.
    "sort": "mixes_tokens",
    "histc": "consumes_token_dim",  # A histogram counts all rows.
    # transformers' grouped matmul for a trace in float32 reads the experts' bounds back.
    "transformers::grouped_mm_fallback": "unknown_op",
    "setitem": "mixes_tokens",  # The inverse of the permutation is written at places that tokens give.
}
if RELEASE < (5, 18):  # it limits the experts' numbers, which the sort gave, in place
    SORTED_EXPERTS["clamp_"] = "shared_with_eager"
# The rows are padded to whole chunks: how many are added follows from the count.
CHUNKS = {"pad": "token_count_as_value"}
# The states of all chunks are summed, and there are as many as tokens give.
CHUNK_STATES = {**CHUNKS, "einsum" if RELEASE >= (5, 18) else "sum": "mixes_tokens"}

# Which row is the last one, or the one at an index of the call, is known by the real rows alone.
KEPT_ROW = {"getitem": "consumes_token_dim"}

BY_EXAMPLE_ALONE = "sort: the example that decided before hid that it mixes tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One configuration of a model, how it is called, and what its capture must reach.

    Attributes:
        name: the row's name.
        model: the name of the class in transformers.
        config: the name of its config's class, where it is not that of the model.
        changes: settings of the config beyond `SMALL`.
        is_attached: whether attention goes through `boundary_ops.huggingface.attach`.
        arguments: further arguments of a call, made from its input ids.
        example: the number of tokens of the captured example.
        buckets: the buckets, all of which must be captured.
        counts: the token counts at which results are compared, all of which must replay.
        least: the least coverage of the example's plan, in percent.
        sampled: the coverage that looking at one example's values once gave, in percent.
        eager: op -> code of the reason why it is outside of graphs; all ops that are.
        below: why `least` is below `sampled`.
        error: the start of the message of the error that tracing ends in, for a model that cannot be traced.
    """

    name: str
    model: str
    config: str = ""
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_attached: bool = False
    arguments: Callable[[torch.Tensor], dict[str, Any]] = lambda ids: {}
    example: int = 5
    buckets: tuple[int, ...] = (8, 16)
    counts: tuple[int, ...] = (3, 8, 13)
    least: float = 100.0
    sampled: float = 100.0
    eager: Mapping[str, str] = dataclasses.field(default_factory=dict)
    below: str = ""
    error: str = ""

    def build(self, *, seed: int = 0) -> torch.nn.Module:
        """Makes the model with random weights, large enough for each part of it to show in the result."""
        stem = self.model.partition("For")[0].removesuffix("LMHeadModel")
        config = getattr(transformers, self.config or f"{stem}Config")(**{**SMALL, **self.changes})
        config._attn_implementation = NAME
        torch.manual_seed(seed)
        model: torch.nn.Module = getattr(transformers, self.model)(config).eval().requires_grad_(False)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        return model

    def call(self, num_tokens: int, *, seed: int = 3) -> dict[str, Any]:
        """Makes the arguments of a call of so many tokens."""
        generator = torch.Generator().manual_seed(seed + 7 * num_tokens)
        ids = torch.randint(3, VOCAB, (1, num_tokens), generator=generator)
        if self.is_attached:
            return dict(input_ids=ids, position_ids=torch.arange(num_tokens)[None])
        return dict(input_ids=ids, **self.arguments(ids))


def _no_cache(ids: torch.Tensor) -> dict[str, Any]:
    return dict(use_cache=False)


def _attached(name: str, model: str, changes: Mapping[str, Any] | None = None, **row: Any) -> Family:
    return Family(name=name, model=f"{model}ForCausalLM", changes=changes or {}, is_attached=True, **row)


def _plain(name: str, model: str, changes: Mapping[str, Any] | None = None, **row: Any) -> Family:
    row.setdefault("arguments", _no_cache)
    model = model if "For" in model or "Head" in model else f"{model}ForCausalLM"
    return Family(name=name, model=model, changes=changes or {}, **row)


def _hybrid(name: str, model: str, changes: Mapping[str, Any] | None = None, **row: Any) -> Family:
    # At multiples of the chunk no rows are added: that is another trace, so the buckets are others.
    sizes = dict(example=20, buckets=(23, 30), counts=(9, 20, 30))
    return _plain(name, model, changes, **{**sizes, **row})


FAMILIES = [
    _attached("Llama", "Llama"),
    _attached("Qwen2", "Qwen2"),
    _attached("Qwen3", "Qwen3", dict(head_dim=16)),
    _attached("Mistral", "Mistral", {**HEADS, **WINDOW}),
    _attached("Gemma2", "Gemma2", {**HEADS, **WINDOW, **SCALED}),
    _attached("Gemma3", "Gemma3", {**HEADS, **WINDOW, **SCALED}, config="Gemma3TextConfig"),
    _attached("Phi3", "Phi3", WINDOW),
    _attached("OLMo2", "Olmo2"),
    _plain("GPT-2", "GPT2LMHeadModel", dict(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=128)),
    _plain("OLMo3", "Olmo3", WINDOW),
    _plain("Cohere2", "Cohere2", {**HEADS, **WINDOW}),
    _plain("GLM4", "Glm4", HEADS),
    _plain("ERNIE", "Ernie4_5", HEADS),
    _plain("SmolLM3", "SmolLM3"),
    _plain("Granite", "Granite"),
    _plain(
        "ModernBERT", "ModernBertForMaskedLM",
        dict(local_attention=4, cls_token_id=1, sep_token_id=2), arguments=lambda ids: {},
    ),
    _plain(
        "Qwen3 sequence classification", "Qwen3ForSequenceClassification", HEADS, least=99.1, sampled=98.3,
        eager={"argmax": "consumes_token_dim"},  # the last token that is no padding, found among all
    ),
    _plain(
        "Llama, last row kept", "Llama", arguments=lambda ids: dict(use_cache=False, logits_to_keep=1),
        least=98.9, sampled=98.9, eager=KEPT_ROW,
    ),
    _plain(
        "Llama, a row kept by a tensor", "Llama",
        arguments=lambda ids: dict(use_cache=False, logits_to_keep=torch.tensor([ids.shape[1] - 1])),
        least=98.9, sampled=98.9, eager=KEPT_ROW,
    ),
    _plain(
        "Llama, labels", "Llama", arguments=lambda ids: dict(use_cache=False, labels=ids),
        least=97.8, sampled=97.8,
        # The labels are shifted by one row, and the mean of the loss is that of all tokens.
        eager={"pad": "mixes_tokens", "cross_entropy": "unknown_op"},
    ),
    _attached(
        "Mixtral", "Mixtral", dict(**LOCAL_EXPERTS, sliding_window=None),
        least=91.9, sampled=91.9, eager=SORTED_EXPERTS,
    ),
    _attached(
        "GPT-OSS", "GptOss", {**HEADS, **WINDOW, **LOCAL_EXPERTS},
        least=90.3, sampled=91.7, below=BY_EXAMPLE_ALONE,
        # The experts' biases are added in place to what the grouped matmul, an eager op, has returned.
        eager={**SORTED_EXPERTS, "add_": "shared_with_eager"},
    ),
    _attached(
        "Qwen3-MoE", "Qwen3Moe", {**HEADS, **EXPERTS},
        least=93.0, sampled=94.4, below=BY_EXAMPLE_ALONE, eager=SORTED_EXPERTS,
    ),
    _plain(
        "Qwen2-MoE", "Qwen2Moe", dict(**EXPERTS, shared_expert_intermediate_size=16),
        least=92.8, sampled=92.7, eager=SORTED_EXPERTS,
    ),
    _plain(
        "OLMoE", "Olmoe", dict(num_experts=4, num_experts_per_tok=2),
        least=93.1, sampled=93.0, eager=SORTED_EXPERTS,
    ),
    _plain(
        "GLM4-MoE", "Glm4Moe",
        dict(
            **HEADS, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1,
            first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
        least=96.1, sampled=96.1, eager=SORTED_EXPERTS,
    ),
    _plain("Lfm2", "Lfm2", dict(layer_types=["conv", "full_attention"]), sampled=98.9),
    _hybrid(
        "Falcon-H1", "FalconH1", dict(**MAMBA, **HEADS, mamba_d_ssm=64),
        least=94.8, sampled=93.9, eager=CHUNK_STATES,
    ),
    _hybrid(
        "Bamba", "Bamba", dict(**MAMBA, attn_layer_indices=[1]),
        least=95.7, sampled=95.0, eager=CHUNK_STATES,
    ),
    _hybrid(
        "Nemotron-H", "NemotronH",
        dict(
            **HEADS, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=1, chunk_size=8,
            layers_block_type=LINEAR_AND_FULL,
        ),
        least=93.7, sampled=92.8, eager=CHUNK_STATES,
    ),
    _hybrid(
        "Zamba2", "Zamba2",
        dict(
            n_mamba_heads=4, mamba_d_state=8, mamba_ngroups=1, chunk_size=8, use_mem_rope=True,
            layers_block_type=["linear_attention", "hybrid"],
        ),
        least=94.0, sampled=93.1, eager=CHUNK_STATES,
    ),
    _plain(
        "Qwen3-Next", "Qwen3Next",
        dict(
            **HEADS, **EXPERTS, layer_types=LINEAR_AND_FULL, shared_expert_intermediate_size=16,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        least=93.0, sampled=91.0, eager={**SORTED_EXPERTS, **CHUNKS},
    ),
    _hybrid(
        "Granite hybrid", "GraniteMoeHybrid",
        dict(**MAMBA, **LOCAL_EXPERTS, shared_intermediate_size=16, layer_types=["mamba", "attention"]),
        least=90.3, sampled=88.6, eager={**SORTED_EXPERTS, **CHUNK_STATES},
    ),
    _plain(
        "DeepSeek V3", "DeepseekV3", dict(**LATENT, n_group=2, topk_group=1),
        least=97.0, sampled=97.0, eager=SORTED_EXPERTS,
    ),
    _plain(
        "DeepSeek V2", "DeepseekV2", dict(**LATENT, n_group=None, topk_group=None, topk_method="greedy"),
        least=96.1, sampled=96.1, eager=SORTED_EXPERTS,
    ),
    _plain(
        "MiniMax", "MiniMax", dict(**HEADS, **LOCAL_EXPERTS, block_size=8, layer_types=LINEAR_AND_FULL),
        # A trace holds for the counts of one number of blocks; whole blocks are traces at their size alone.
        buckets=(7, 16), counts=(3, 7, 16), least=91.9, sampled=97.3,
        eager={**SORTED_EXPERTS, "matmul": "mixes_tokens"},
        below="the trace serves several counts; that of one count alone has 97.3, as before",
    ),
    _plain(
        "Phi-3 longrope", "Phi3",
        dict(
            rope_parameters=dict(
                rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
                original_max_position_embeddings=16, factor=8.0,
            ),
        ),
        error="Phi3ForCausalLM.forward changes model.rotary_emb.long_inv_freq"
        if RELEASE >= (5, 21)
        else "forward cannot be traced: Data-dependent branching",
    ),
    _plain(
        "Llama dynamic NTK", "Llama",
        dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)),
        error="forward cannot be traced: Data-dependent branching",
    ),
    _plain(
        "RecurrentGemma", "RecurrentGemma", dict(**HEADS, lru_width=HIDDEN, attention_window_size=4),
        error="RecurrentGemmaForCausalLM.forward changes model.layers.0.temporal_block.rg_lru",
    ),
]  # fmt: skip
