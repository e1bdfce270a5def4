"""Unmodified transformers models on the paged op: the logits of their own attention, or an error by name."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from small_transformers import (  # noqa: E402
    LAYERS,
    LOCAL_GLOBAL,
    MODELS,
    SMALL,
    VOCAB,
    attached,
    build,
    call,
    make_cache,
    prompts_of,
)

import boundary_ops  # noqa: E402
from boundary_ops import PagedKVCache, PrefillBatch  # noqa: E402
from boundary_ops.errors.attention import PositionsMissing  # noqa: E402
from boundary_ops.errors.huggingface import (  # noqa: E402
    AlreadyAttached,
    CacheMismatch,
    ForwardReplaced,
    GenerateRefused,
    MaskFunction,
    MaskHides,
    MaskInTrace,
    NameWithoutAttach,
    NoGradient,
    NotACache,
    NotAModel,
    NotAttached,
    NotPacked,
    OptionRefused,
    OtherKeys,
    SecondCache,
    SeveralDecoders,
    UnsupportedModel,
)
from boundary_ops.errors.step import NoRunningBatch, OtherCache, WrongNumTokens  # noqa: E402
from boundary_ops.huggingface import attach, detach  # noqa: E402
from boundary_ops.huggingface.paged_attention import no_mask, paged_attention  # noqa: E402

PROMPTS, CUTS = (11, 7, 1), (6, 2, 1)


def trace(model):
    """A fully traced call of the model, and the list that its graphs come to."""
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph.forward

    def run(ids, position_ids):
        return model(input_ids=ids, position_ids=position_ids).logits

    torch._dynamo.reset()
    return torch.compile(run, backend=keep, fullgraph=True), graphs


def mark(tensor):
    torch._dynamo.maybe_mark_dynamic(tensor, 1)
    return tensor


def op_nodes(graph):
    return [
        node for node in graph.graph.nodes if boundary_ops.lookup(node.target) is boundary_ops.attn_inplace
    ]


@pytest.mark.parametrize("name", MODELS)
def test_packed_and_continued_steps_give_the_logits_of_the_unmodified_model(name):
    model, prompts = build(name), prompts_of(PROMPTS)
    with torch.no_grad():
        expected = [model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts]
    cache = make_cache(model)
    attach(model, cache)
    first = PrefillBatch.build(cache, "abc", CUTS)
    output = call(model, first, [prompt[:cut] for prompt, cut in zip(prompts, CUTS, strict=True)])
    assert getattr(output, "past_key_values", None) is None
    found = list(output.logits[0].split(CUTS))
    second = PrefillBatch.build(cache, "ba", (5, 5))
    rest = call(model, second, [prompts[1][2:], prompts[0][6:]]).logits[0].split(5)
    found[0], found[1] = torch.cat((found[0], rest[1])), torch.cat((found[1], rest[0]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert [cache.context_len(request) for request in "abc"] == list(PROMPTS)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_the_pages_hold_the_keys_and_values_of_the_models_own_cache(name):
    model, (prompt,) = build(name, sliding_window=64) if name != "Llama" else build(name), prompts_of([9])
    own = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=prompt[None], past_key_values=own, use_cache=True)
    cache = make_cache(model)
    call(attach(model, cache), PrefillBatch.build(cache, "a", [9]), [prompt])
    for layer in range(LAYERS):
        k, v = cache.gather(layer, "a")
        torch.testing.assert_close(k, own.layers[layer].keys[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(v, own.layers[layer].values[0].transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_bfloat16_follows_the_model():
    model, (prompt,) = build("Llama").to(torch.bfloat16), prompts_of([9])
    with torch.no_grad():
        expected = model(input_ids=prompt[None], use_cache=False).logits
    cache = make_cache(model)
    found = call(attach(model, cache), PrefillBatch.build(cache, "a", [9]), [prompt]).logits
    assert cache.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("name", MODELS)
def test_a_full_trace_holds_one_op_per_layer_and_serves_other_token_counts(name):
    model, cache = attached(name)
    compiled, graphs = trace(model)
    for counts in ((4, 5), (9, 4), (1, 1, 1, 2)):
        ids = [f"{counts}{at}" for at in range(len(counts))]
        batch, prompts = PrefillBatch.build(cache, ids, counts), prompts_of(counts)
        with torch.no_grad(), batch:
            found = compiled(mark(batch.pack(prompts)), mark(batch.positions.clone()))
        torch.testing.assert_close(found, call(model, batch, prompts).logits, rtol=1e-4, atol=1e-4)
    (graph,) = graphs
    nodes = op_nodes(graph)
    assert len(nodes) == LAYERS
    for node in nodes:
        for at in range(4):
            # [num_tokens, heads, head_dim], the first of them the one symbol of the trace
            assert not isinstance(node.args[at].meta["example_value"].shape[0], int)
        assert node.args[10] is False
    pools = [node.args[at].name for node in nodes for at in (4, 5)]
    placeholders = {node.name for node in graph.graph.nodes if node.op == "placeholder"}
    assert len(set(pools)) == 2 * LAYERS and set(pools) <= placeholders
    assert all("self_attn_paged_" in name for name in pools)


def test_I8_a_trace_that_is_not_run_writes_no_page_and_counts_no_token():
    model, cache = attached()

    def refuse_to_run(graph, example):
        return lambda *args: (torch.zeros(1),)

    torch._dynamo.reset()
    before = {name: module.__dict__.copy() for name, module in model.named_modules()}
    with torch.no_grad(), PrefillBatch.build(cache, "a", [5]):
        traced = torch.compile(lambda **inputs: model(**inputs).logits, backend=refuse_to_run, fullgraph=True)
        traced(input_ids=torch.ones(1, 5, dtype=torch.int64), position_ids=torch.arange(5)[None])
    assert not any(pool.any() for pool in (*cache.k, *cache.v)) and cache.context_len("a") == 0
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
    assert not model.base_model._paged_attachment.implied_positions


def test_a_trace_without_positions_is_right_for_one_new_sequence_and_refused_by_the_op_for_others():
    model, cache = attached()
    compiled, graphs = trace(model)
    (prompt,) = prompts_of([9])
    batch = PrefillBatch.build(cache, "a", [9])
    with torch.no_grad(), batch:
        found = compiled(mark(prompt[None].clone()), None)
    torch.testing.assert_close(found, call(model, batch, [prompt]).logits)
    for ids, lens in (("bc", (5, 4)), ("a", (9,))):
        with (
            torch.no_grad(),
            pytest.raises(PositionsMissing, match="position_ids=batch.positions"),
            PrefillBatch.build(cache, ids, lens),
        ):
            compiled(mark(prompt[None].clone()), None)
    (graph,) = graphs
    assert all(node.args[10] is True for node in op_nodes(graph))
    assert cache.context_len("a") == 9 and not cache.context_len("b")


def test_detach_restores_every_module_config_and_method():
    model = build("Gemma3")

    def state():
        modules = {name: dict(module.__dict__) for name, module in model.named_modules()}
        configs = {
            id(module.config): str(module.config.__dict__)
            for module in model.modules()
            if hasattr(module, "config")
        }
        return modules, configs, list(model.state_dict()), model.forward.__func__, model.generate.__func__

    before = state()
    prompts, cache = prompts_of([9]), make_cache(model)
    with torch.no_grad():
        expected = model(input_ids=prompts[0][None]).logits
    assert attach(model, cache) is model
    assert list(model.state_dict()) == before[2]
    assert model.config._attn_implementation != "eager" and model.config.use_cache is False
    call(model, PrefillBatch.build(cache, "a", [9]), prompts)
    assert detach(model) is model
    after = state()
    assert after[1:] == before[1:]
    for name, attributes in before[0].items():
        assert attributes.keys() == after[0][name].keys()
        assert all(value is after[0][name][key] for key, value in attributes.items()), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=prompts[0][None]).logits, expected)
    attach(model, cache)
    detach(model)


def test_a_model_that_shares_the_config_is_not_touched():
    reference = build("Llama")
    model = transformers.LlamaForCausalLM(reference.config).eval()
    assert model.config is reference.config
    model.load_state_dict(reference.state_dict())
    cache = make_cache(model)
    attach(model, cache)
    (prompt,) = prompts_of([9])
    with torch.no_grad():
        output = reference(input_ids=prompt[None])
    assert reference.config._attn_implementation == "eager" and output.past_key_values is not None
    found = call(model, PrefillBatch.build(cache, "a", [9]), [prompt]).logits
    torch.testing.assert_close(found, output.logits, rtol=1e-4, atol=1e-4)


def test_a_deep_copy_of_an_attached_model_runs_its_own_weights_on_its_own_cache():
    model, cache = attached()
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.lm_head.weight)
    own = other.base_model._paged_attachment.cache
    assert own is not cache
    assert not call(other, PrefillBatch.build(own, "a", [4]), prompts_of([4])).logits.any()
    assert not cache.k[0].any() and own.k[0].any()
    detach(other)
    assert call(model, PrefillBatch.build(cache, "a", [4]), prompts_of([4])).logits.any()


def test_the_inner_decoder_can_be_attached_alone():
    model, (prompt,) = build("Llama"), prompts_of([9])
    with torch.no_grad():
        expected = model.model(input_ids=prompt[None]).last_hidden_state
    cache = make_cache(model)
    attach(model.model, cache)
    found = call(model.model, PrefillBatch.build(cache, "a", [9]), [prompt]).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(AlreadyAttached, match="attached already"):
        attach(model, cache)
    detach(model)


def test_positional_arguments_inputs_embeds_and_a_mask_of_ones_work():
    model, cache = attached()
    batch, prompts = PrefillBatch.build(cache, "ab", (4, 5)), prompts_of((4, 5))
    expected = call(model, batch, prompts).logits
    ids, ones = batch.pack(prompts), torch.ones(1, 9, dtype=torch.int64)
    with torch.no_grad(), batch:
        assert torch.equal(model(ids, ones, batch.positions).logits, expected)
        embeds = model.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds, position_ids=batch.positions).logits, expected)
        last = model(ids, position_ids=batch.positions, logits_to_keep=1, use_cache=True)
        hidden = model(ids, position_ids=batch.positions, output_hidden_states=True).hidden_states
    torch.testing.assert_close(last.logits, expected[:, -1:])
    assert last.past_key_values is None and len(hidden) == LAYERS + 1


def test_with_grad_mode_the_forward_runs_and_backward_says_why_not():
    model, cache = attached()
    batch, prompts = PrefillBatch.build(cache, "a", [5]), prompts_of([5])
    with batch:
        logits = model(input_ids=batch.pack(prompts), position_ids=batch.positions).logits
    torch.testing.assert_close(logits.detach(), call(model, batch, prompts).logits)
    assert not any(pool.requires_grad for pool in (*cache.k, *cache.v))
    with pytest.raises(NoGradient):
        logits.sum().backward()


IDS = torch.full((1, 9), 5)
REFUSED_CALLS = {
    "cache": (lambda: dict(past_key_values=transformers.DynamicCache()), "cache"),
    "batch of two": (lambda: dict(input_ids=torch.full((2, 9), 5)), "'input_ids'.*size 2"),
    "no batch dim": (lambda: dict(input_ids=torch.full((9,), 5)), "'input_ids'.*1 dims"),
    "embeds of two": (lambda: dict(input_ids=None, inputs_embeds=torch.zeros(2, 9, 32)), "'inputs_embeds'"),
    "attentions": (lambda: dict(output_attentions=True), "'output_attentions'"),
    "lengths": (
        lambda: dict(cu_seq_lens_q=torch.tensor([0, 9])),
        "(?s)self_attn.*'cu_seq_lens_q'.*PrefillBatch",
    ),
    "not causal": (lambda: dict(is_causal=False), "is_causal"),
    "unknown": (lambda: dict(novelty=3), "self_attn.*'novelty'"),
    "padding": (lambda: dict(attention_mask=torch.tensor([[0] + [1] * 8])), "'attention_mask'"),
    "prepared mask": (lambda: dict(attention_mask=torch.ones(1, 1, 9, 9)), "'attention_mask'"),
}


@pytest.mark.parametrize(
    ("case", "refusal"),
    [
        ("cache", SecondCache),
        *((case, NotPacked) for case in ("batch of two", "no batch dim", "embeds of two")),
        *((case, OptionRefused) for case in ("attentions", "lengths", "not causal", "unknown")),
        *((case, MaskHides) for case in ("padding", "prepared mask")),
    ],
)
def test_calls_that_attention_would_ignore_are_refused_and_change_nothing(case, refusal):
    model, cache = attached()
    arguments, text = REFUSED_CALLS[case]
    with torch.no_grad(), pytest.raises(refusal, match=text) as error, PrefillBatch.build(cache, "a", [9]):
        model(**{"input_ids": IDS, "position_ids": torch.arange(9)[None], **arguments()})
    assert str(error.value).count("\n") == 2
    assert not any(pool.any() for pool in (*cache.k, *cache.v)) and cache.context_len("a") == 0


@pytest.mark.parametrize("case", REFUSED_CALLS)
def test_I10_the_same_calls_are_refused_in_a_trace(case):
    model, cache = attached()
    arguments, text = REFUSED_CALLS[case]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    wanted = "(?s)(SecondCache|NotPacked|OptionRefused|MaskInTrace): .*" + text.removeprefix("(?s)")
    with torch.no_grad(), pytest.raises(Exception, match=wanted):
        compiled(**{"input_ids": IDS, "position_ids": torch.arange(9)[None], **arguments()})
    assert not any(pool.any() for pool in (*cache.k, *cache.v))


def test_a_mask_is_refused_in_a_trace_even_when_it_is_all_ones():
    model, _ = attached()
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="leave attention_mask out"):
        torch.compile(model, backend="eager", fullgraph=True)(
            input_ids=IDS, position_ids=torch.arange(9)[None], attention_mask=torch.ones(1, 9)
        )


def test_a_mask_is_refused_by_name_whoever_traces(monkeypatch):
    model, _ = attached()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.no_grad(), pytest.raises(MaskInTrace, match="'attention_mask'"):
        model(input_ids=IDS, position_ids=torch.arange(9)[None], attention_mask=torch.ones(1, 9))


def test_a_mask_function_of_the_models_own_is_refused():
    with pytest.raises(MaskFunction, match="mask function of the model's own"):
        no_mask(use_vmap=True)


def test_missing_positions_are_refused_for_packed_and_for_continued_input_only():
    model, cache = attached()
    with torch.no_grad(), PrefillBatch.build(cache, "a", [9]) as batch:
        implied = model(input_ids=IDS).logits
        assert torch.equal(implied, model(input_ids=IDS, position_ids=batch.positions).logits)
    for ids, lens in (("bc", (4, 5)), ("a", (9,))):
        batch = PrefillBatch.build(cache, ids, lens)
        for called in (model, model.model):
            with (
                torch.no_grad(),
                pytest.raises(PositionsMissing, match="position_ids=batch.positions"),
                batch,
            ):
                called(input_ids=IDS)


def test_a_call_without_its_batch_is_refused():
    model, cache = attached()
    with torch.no_grad(), pytest.raises(NoRunningBatch, match="with batch|inside it"):
        model(input_ids=IDS, position_ids=torch.arange(9)[None])
    foreign = PrefillBatch.build(make_cache(model), "a", [9])
    with torch.no_grad(), pytest.raises(OtherCache, match="another cache"), foreign:
        model(input_ids=IDS, position_ids=foreign.positions)
    other = PrefillBatch.build(cache, "a", [8])
    with torch.no_grad(), pytest.raises(WrongNumTokens, match="'input_ids'.*8 tokens.*9"), other:
        model(input_ids=IDS, position_ids=other.positions)
    with torch.no_grad(), pytest.raises(WrongNumTokens, match="'position_ids'.*8 tokens.*9"), other:
        model(input_ids=IDS[:, :8], position_ids=torch.arange(9)[None])


def test_generate_says_what_to_do_and_works_again_after_detach():
    model, cache = attached()
    with pytest.raises(GenerateRefused, match="(?s)generate.*detach"):
        model.generate(IDS, max_new_tokens=2)
    assert cache.num_free_blocks == 32
    detach(model)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape[1] > 9


def test_dropout_is_refused_by_layer():
    model, cache = attached(attention_dropout=0.1)
    model.train()
    with (
        torch.no_grad(),
        pytest.raises(OptionRefused, match=r"layers.0.self_attn.*'dropout'.*\n.*\n.*eval"),
    ):
        with PrefillBatch.build(cache, "a", [9]) as batch:
            model(input_ids=IDS, position_ids=batch.positions)


@pytest.mark.parametrize(
    ("arguments", "refusal", "text"),
    [
        (dict(attention_mask=torch.ones(1, 1, 3, 3)), OptionRefused, "'attention_mask'"),
        (dict(position_bias=torch.zeros(1)), OptionRefused, "'position_bias'.*\n.*no bias"),
        (dict(head_mask=torch.zeros(1)), OptionRefused, "'head_mask'"),
        (dict(indices=torch.zeros(1)), OptionRefused, "'indices'"),
        (dict(is_cross_attention=True), OptionRefused, "'is_cross_attention'"),
        (dict(seq_idx=torch.zeros(1)), OptionRefused, "'seq_idx'"),
        (dict(key=torch.zeros(1, 2, 4, 8)), OtherKeys, "'key'.*as many rows"),
        (dict(key=torch.zeros(1, 2, 3, 16)), CacheMismatch, "'key'.*2 heads of 8.*2 heads of 16"),
        (dict(value=torch.zeros(1, 1, 3, 8)), CacheMismatch, "'value'.*1 heads"),
        (dict(value=torch.zeros(1, 2, 3, 8, dtype=torch.float64)), CacheMismatch, "'value'.*float64"),
        (dict(query=torch.zeros(2, 4, 3, 8)), NotPacked, "batch of 2"),
    ],
    ids=str,
)
def test_what_a_layer_asks_beyond_the_op_is_refused_with_its_path(arguments, refusal, text):
    model, _ = attached()
    module = model.model.layers[1].self_attn
    inputs = dict(query=torch.zeros(1, 4, 3, 8), key=torch.zeros(1, 2, 3, 8), value=torch.zeros(1, 2, 3, 8))
    with pytest.raises(refusal, match=f"model.layers.1.self_attn: .*{text}"):
        paged_attention(module, **{**inputs, "scaling": 1.0, **arguments})


@pytest.mark.parametrize(("layer", "window"), [(0, None), (1, 4)])
def test_a_window_that_contradicts_the_layers_type_is_refused(layer, window):
    model, _ = attached("Gemma3")
    module = model.model.layers[layer].self_attn
    inputs = [torch.zeros(1, heads, 3, 8) for heads in (4, 2, 2)]
    with pytest.raises(
        OptionRefused, match=f"layers.{layer}.self_attn.*'sliding_window'.*{LOCAL_GLOBAL[layer]}"
    ):
        paged_attention(module, *inputs, scaling=1.0, sliding_window=window)


def test_the_implementation_name_alone_is_not_enough():
    model, _ = attached()
    name, plain = model.config._attn_implementation, build("Llama")
    plain.config._attn_implementation = name
    with torch.no_grad(), pytest.raises(NameWithoutAttach, match="huggingface.attach"):
        plain(input_ids=IDS, use_cache=False)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(num_layers=2), "num_layers: expected 3.*got 2"),
        (dict(num_kv_heads=4), "num_kv_heads of 'model.layers.0.self_attn': expected 2.*got 4"),
        (dict(head_dim=16), "head_dim of .*: expected 8.*got 16"),
        (dict(dtype=torch.bfloat16), "dtype of .*: expected torch.float32.*got torch.bfloat16"),
        (dict(device="meta"), "device of .*: expected cpu.*got meta"),
    ],
    ids=str,
)
def test_a_cache_that_does_not_fit_is_refused_and_the_model_left_alone(changes, text):
    model = build("Llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(CacheMismatch, match=text):
        attach(model, make_cache(model, **changes))
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_something_else_than_a_model_or_a_cache_is_refused_by_name():
    model = build("Llama")
    for cache in (None, [], torch.zeros(1)):
        with pytest.raises(NotACache, match=f"PagedKVCache as 'cache', got {type(cache).__name__}"):
            attach(model, cache)
    for other in (None, "model", lambda x: x):
        for act in (lambda other: attach(other, make_cache(model)), detach):
            with pytest.raises(NotAModel, match=f"'model'.*got {type(other).__name__}"):
                act(other)
    attach(model, make_cache(model))


def test_attach_twice_and_detach_twice_are_refused():
    model, cache = attached()
    with pytest.raises(AlreadyAttached, match="attached already.*\n.*\n.*detach"):
        attach(model, cache)
    detach(model)
    with pytest.raises(NotAttached, match="not attached"):
        detach(model)


def test_detach_is_refused_while_someone_else_replaced_the_forward():
    model, _ = attached()
    ours = model.model.forward
    model.model.forward = lambda *args, **kwargs: None
    with pytest.raises(ForwardReplaced, match="reverse order"):
        detach(model)
    model.model.forward = ours
    detach(model)


TINY = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


def hybrid():
    config = transformers.Qwen3NextConfig(
        **SMALL,
        head_dim=8,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    return transformers.Qwen3NextForCausalLM(config)


def encoder_decoder():
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8)
    return transformers.T5ForConditionalGeneration(config)


def encoder():
    return transformers.BertModel(transformers.BertConfig(vocab_size=VOCAB, **TINY))


def two_stacks():
    vision = dict(image_size=8, patch_size=4, **TINY)
    config = transformers.CLIPConfig(text_config=dict(vocab_size=VOCAB, **TINY), vision_config=vision)
    return transformers.CLIPModel(config)


def chunked():
    config = transformers.Llama4TextConfig(
        **SMALL, head_dim=8, num_local_experts=2, intermediate_size_mlp=16, attention_chunk_size=4
    )
    return transformers.Llama4ForCausalLM(config)


def own_attention():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=1, n_head=2)
    return transformers.BloomForCausalLM(config)


def bidirectional():
    return build("Gemma3", use_bidirectional_attention=True)


def not_transformers():
    return torch.nn.Linear(2, 2)


UNFIT = {
    hybrid: "layer 'model.layers.1' .*a self attention.*linear_attn",
    encoder_decoder: "an encoder-decoder",
    encoder: "encoder.layer.0",
    two_stacks: r"text_model.encoder' \(.*is_causal=False\) and '.*vision_model.encoder' \(",
    chunked: "layer 'model.layers.0'.*chunked_attention",
    bidirectional: "causal attention.*(is_causal=False|use_bidirectional_attention)",
    own_attention: r"attach\(BloomForCausalLM.*",
    not_transformers: "Linear without a transformers config",
}


@pytest.mark.parametrize(
    ("make", "refusal"),
    [(make, SeveralDecoders if make is two_stacks else UnsupportedModel) for make in UNFIT],
    ids=[make.__name__ for make in UNFIT],
)
def test_models_that_cannot_be_served_are_refused_with_the_reason(make, refusal):
    cache = PagedKVCache(
        num_layers=3, num_blocks=2, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32
    )
    with pytest.raises(refusal, match=UNFIT[make]) as error:
        attach(make(), cache)
    assert str(error.value).count("\n") == 2
