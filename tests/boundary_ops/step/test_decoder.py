"""`PagedKVCache.for_model`: of each family the cache that `attach` takes, or a refusal that says why."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from causal_models import build_causal, model_types  # noqa: E402
from families import FAMILIES  # noqa: E402
from small_transformers import SMALL, build, call, prompts_of  # noqa: E402

from boundary_ops import BoundaryOpError, PagedKVCache, PrefillBatch  # noqa: E402
from boundary_ops.errors.huggingface import (  # noqa: E402
    CalledTwice,
    LayersDiffer,
    NotAModel,
    OptionRefused,
    SeveralDecoders,
    UnsupportedModel,
    ValuesDiffer,
)
from boundary_ops.errors.step import WrongPoolDtype, WrongPoolSize  # noqa: E402
from boundary_ops.huggingface import attach, cache_of, detach  # noqa: E402

LENS, CUTS = (7, 4), (3, 2)
RECURRENT = UnsupportedModel, r"got recurrent layers \(_is_stateful\)"
LATENT = ValuesDiffer, r"got multi-head latent attention \(MLA\), keys of 16, values of 8"
# Families of the table that have no cache, and why.
REFUSED = {
    "ModernBERT": (UnsupportedModel, "causal attention, got is_causal=False"),
    "Lfm2": (UnsupportedModel, r"layers.0' .* a self attention \('self_attn'\), got conv"),
    "Falcon-H1": (UnsupportedModel, "a layer of type .*'hybrid'"),
    "MiniMax": (UnsupportedModel, "an attention with a config, got none"),
    "DeepSeek V2": LATENT,
    "DeepSeek V3": LATENT,
    **dict.fromkeys(
        ("Bamba", "Granite hybrid"), (UnsupportedModel, r"layers.0' .*'self_attn'\), got .*mamba")
    ),
    "Qwen3-Next": (UnsupportedModel, r"layers.0' .*'self_attn'\), got linear_attn"),
    **dict.fromkeys(("Nemotron-H", "Zamba2", "RecurrentGemma"), RECURRENT),
}
# K/V heads and head size of families whose configs have other names for them, or none.
SIZES = {
    "gpt2": (4, 8), "gpt_neox": (4, 8), "gptj": (4, 8), "opt": (4, 8), "codegen": (4, 8), "persimmon": (4, 8),
    "gpt_bigcode": (1, 8), "jetmoe": (4, 8), "phi": (2, 8), "qwen2": (2, 8), "starcoder2": (2, 8),
}  # fmt: skip


def assert_served(model, cache):
    """Attaches the model and compares two packed steps, the second of which reads pages, with its own."""
    prompts = [torch.randint(3, 60, (length,)) for length in LENS]
    with torch.no_grad():
        expected = [model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts]
    attach(model, cache)
    found = [[], []]
    for begin, end in (((0, 0), CUTS), (CUTS, LENS)):
        lens = [last - first for first, last in zip(begin, end, strict=True)]
        chunks = [prompt[a:b] for prompt, a, b in zip(prompts, begin, end, strict=True)]
        logits = call(model, PrefillBatch.build(cache, "ab", lens), chunks).logits[0].split(lens)
        for rows, new in zip(found, logits, strict=True):
            rows.append(new)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(ours), theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_of_the_table_is_served_or_refused_by_name(family):
    model = family.build()
    if family.name in REFUSED:
        kind, text = REFUSED[family.name]
        with pytest.raises(kind, match=rf"PagedKVCache.for_model\({family.model}\).*{text}") as error:
            PagedKVCache.for_model(model, num_tokens=64)
        assert "boundary_ops.define" in error.value.fix
        return
    model.config._attn_implementation = "eager"  # which has all that the table's own op leaves out
    cache = PagedKVCache.for_model(model, num_tokens=64, block_size=4)
    if "Classification" in family.model:
        assert attach(model, cache) is model
    else:
        assert_served(model, cache)


@pytest.mark.parametrize("model_type", list(model_types()))
def test_each_causal_model_of_transformers_is_served_or_refused_by_name(model_type):
    try:
        model = build_causal(model_type)
    except Exception as error:
        assert model_type not in SIZES, error
        pytest.skip(f"no small config: {type(error).__name__}")
    try:
        cache = PagedKVCache.for_model(model, num_tokens=64, block_size=4)
        if model_type in SIZES:
            assert (cache.num_kv_heads, cache.head_dim) == SIZES[model_type]
        assert_served(model, cache)
    except BoundaryOpError as error:
        assert model_type not in SIZES, error
        assert type(error) is not BoundaryOpError and error.expected and error.got and error.fix


def test_a_cache_holds_the_tokens_and_takes_dtype_device_and_back_end():
    model = build("Qwen2")
    cache = PagedKVCache.for_model(model, num_tokens=33)
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (3, 3, 16)
    assert (cache.dtype, cache.device, cache.attention_backend) == (model.dtype, model.device, "auto")
    cache = PagedKVCache.for_model(
        model.to(torch.float16),
        num_tokens=np.int64(32),
        block_size=torch.tensor(8),
        attention_backend="torch",
    )
    assert (cache.num_blocks, cache.dtype, cache.attention_backend) == (4, torch.float16, "torch")
    cache = PagedKVCache.for_model(model, num_tokens=1, dtype=torch.float64, device="meta")
    assert (cache.num_blocks, cache.dtype, cache.device.type) == (1, torch.float64, "meta")


@pytest.mark.parametrize("num_tokens", [0, -1, 3.0, True, None])
def test_wrong_arguments_are_refused(num_tokens):
    model = build("Llama")
    with pytest.raises(WrongPoolSize, match="'num_tokens': expected a positive int"):
        PagedKVCache.for_model(model, num_tokens=num_tokens)
    with pytest.raises(WrongPoolSize, match="'block_size': expected a positive int"):
        PagedKVCache.for_model(model, num_tokens=8, block_size=num_tokens)
    with pytest.raises(WrongPoolDtype):
        PagedKVCache.for_model(model, num_tokens=8, dtype=torch.int8)


def test_what_is_no_transformers_model_is_told_to_give_the_sizes():
    with pytest.raises(
        UnsupportedModel, match=r"(?s)for_model\(Linear\).*attn_inplace.*num_layers=.*head_dim="
    ):
        PagedKVCache.for_model(torch.nn.Linear(2, 2), num_tokens=8)
    for other in (None, "meta-llama/Llama-3.2-1B", build("Llama").config):
        with pytest.raises(NotAModel, match=type(other).__name__):
            PagedKVCache.for_model(other, num_tokens=8)


def test_the_model_is_only_read_and_may_be_attached_already():
    model = build("Llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    cache = PagedKVCache.for_model(model, num_tokens=32)
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    assert cache_of(model) is None
    attach(model, cache)
    assert cache_of(model) is cache
    larger = PagedKVCache.for_model(model, num_tokens=64)
    assert cache_of(detach(model)) is None
    assert cache_of(attach(model, larger)) is larger
    with pytest.raises(NotAModel):
        cache_of(cache)


def test_weights_of_packed_integers_say_nothing_of_the_dtype():
    model = build("Llama").to(torch.bfloat16)
    for layer in model.model.layers:
        packed = torch.zeros(16, 16, dtype=torch.uint8)
        layer.self_attn.q_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert PagedKVCache.for_model(model, num_tokens=8).dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_is_one_error_whatever_the_cache(name):
    (family,) = (each for each in FAMILIES if each.model.startswith(name))
    model = family.build()
    with pytest.raises(
        ValuesDiffer, match="'model.layers.0.self_attn'.*MLA.*keys of 16, values of 8"
    ) as first:
        PagedKVCache.for_model(model, num_tokens=8)
    assert "no PagedKVCache fits" in first.value.rule
    for head_dim in (8, 16):
        cache = PagedKVCache(
            num_layers=2, num_blocks=2, block_size=4, num_kv_heads=4, head_dim=head_dim, dtype=torch.float32
        )
        with pytest.raises(ValuesDiffer) as second:
            attach(model, cache)
        assert str(first.value).partition(": ")[2] == str(second.value).partition(": ")[2]


def test_layers_that_differ_are_one_error_whatever_the_cache():
    model = build("Llama")
    last = model.model.layers[2].self_attn
    last.head_dim = 16
    with pytest.raises(LayersDiffer, match=r"head_dim of 'model.layers.2.self_attn': expected 8, .*, got 16"):
        PagedKVCache.for_model(model, num_tokens=8)
    last.head_dim, last.num_key_value_groups = 8, 1
    with pytest.raises(LayersDiffer, match="num_kv_heads of .*: expected 2, .*layers.0.*, got 4"):
        PagedKVCache.for_model(model, num_tokens=8)
    last.num_key_value_groups = 2
    cache = PagedKVCache.for_model(model, num_tokens=8)
    last.to("meta")
    with pytest.raises(LayersDiffer, match=r"attach\(.*device of .*: expected cpu, .* got meta"):
        attach(model, cache)


def test_a_window_that_a_layer_leaves_to_the_mask_is_refused():
    model = build("Llama")
    model.config.sliding_window = 4
    cache = PagedKVCache.for_model(model, num_tokens=32)
    attach(model, cache)
    with pytest.raises(OptionRefused, match="layers.0.self_attn.*'sliding_window': expected a window"):
        call(model, PrefillBatch.build(cache, "a", [7]), prompts_of([7]))


def test_a_layer_that_attends_twice_in_a_call_is_refused_and_a_repeated_call_is_not():
    model = build("Llama")
    cache = PagedKVCache.for_model(model, num_tokens=32)
    attach(model, cache)
    batch, prompts = PrefillBatch.build(cache, "a", [7]), prompts_of([7])
    with torch.no_grad(), batch:
        first, second = (model(input_ids=batch.pack(prompts), position_ids=batch.positions) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    layer = model.model.layers[1]
    once = layer.forward
    layer.forward = lambda hidden, **options: once(once(hidden, **options), **options)
    with pytest.raises(CalledTwice, match="model.layers.1.self_attn: attention: expected one call"):
        call(model, batch, prompts)


# --- models of images and text

TEXT = {**SMALL, "num_hidden_layers": 2}
IMAGES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=8,
    patch_size=4,
)


def llava():
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT), vision_config=transformers.CLIPVisionConfig(**IMAGES)
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_5_vl():
    rope = dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)
    images = dict(
        depth=2, hidden_size=32, intermediate_size=48, num_heads=4, out_hidden_size=32, patch_size=4,
        fullatt_block_indexes=[1],
    )  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=dict(TEXT, rope_parameters=rope), vision_config=images)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def gemma3():
    text = dict(TEXT, head_dim=8, sliding_window=4, query_pre_attn_scalar=16)
    config = transformers.Gemma3Config(text_config=text, vision_config=IMAGES, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def internvl():
    images = dict(IMAGES, image_size=[8, 8], patch_size=[4, 4])
    config = transformers.InternVLConfig(text_config=transformers.Qwen2Config(**TEXT), vision_config=images)
    return transformers.InternVLForConditionalGeneration(config)


@pytest.mark.parametrize("make", [llava, qwen2_5_vl, gemma3, internvl])
def test_a_model_of_images_and_text_is_pointed_at_its_decoder_and_the_hint_works(make):
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    cache = PagedKVCache.for_model(model, num_tokens=64, block_size=4)
    with pytest.raises(SeveralDecoders, match=r"\(expected causal attention, got is_causal=False\)") as error:
        attach(model, cache)
    path = re.search(r"attach\(model\.([\w.]+), cache\)", error.value.fix)[1]
    decoder = model.get_submodule(path)
    prompts = prompts_of(LENS)
    expected = [decoder(input_ids=prompt[None], use_cache=False).last_hidden_state[0] for prompt in prompts]
    attach(decoder, cache)
    found = call(decoder, PrefillBatch.build(cache, "ab", LENS), prompts).last_hidden_state[0].split(LENS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_where_no_decoder_of_several_can_be_served_the_error_says_why_of_each():
    images = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_global_layers=1, attention_heads=4,
        image_size=8, patch_size=4, vision_output_dim=64, intermediate_layers_indices=[0], max_num_tiles=1,
        supported_aspect_ratios=[[1, 1]],
    )  # fmt: skip
    config = transformers.MllamaConfig(
        text_config=dict(TEXT, cross_attention_layers=[1]), vision_config=images
    )
    model = transformers.MllamaForConditionalGeneration(config)
    text = r"'model.vision_model.transformer' \(.*'model.language_model' \(.* self attention .*cross_attn"
    with pytest.raises(SeveralDecoders, match=text) as error:
        PagedKVCache.for_model(model, num_tokens=8)
    assert "do not attach this model" in error.value.fix
