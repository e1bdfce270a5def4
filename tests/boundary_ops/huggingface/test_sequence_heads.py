"""Heads of transformers models over packed sequences: what the unpacked model gives, or an error by name."""

from __future__ import annotations

import copy

import pytest
import torch
from inspection import inspect

transformers = pytest.importorskip("transformers")

import small_transformers  # noqa: E402
from small_transformers import LAYERS, MODELS, SMALL, call, make_cache, prompts_of  # noqa: E402

import piecewise  # noqa: E402
from boundary_ops import PagedKVCache, PrefillBatch  # noqa: E402
from boundary_ops.errors.huggingface import ForwardReplaced, LabelsRefused, PoolingHead  # noqa: E402
from boundary_ops.errors.step import WrongNumTokens  # noqa: E402
from boundary_ops.huggingface import attach, detach  # noqa: E402
from boundary_ops.huggingface.sequence_heads import TOKEN_WISE  # noqa: E402

PAD = SMALL["pad_token_id"]
LABELS = 3


def build(name, head="SequenceClassification", **changes):
    config = getattr(transformers, f"{name}Config")(
        **{**SMALL, **MODELS[name], "num_labels": LABELS, **changes}
    )
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}For{head}")(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def unpacked(model, prompts):
    """The scores of each prompt alone, float32 [num_prompts, LABELS]."""
    with torch.no_grad():
        return torch.cat([model(input_ids=prompt[None], use_cache=False).logits for prompt in prompts])


def step(cache, prompts):
    names = [f"request {index}" for index in range(len(prompts))]
    for name in names:
        if cache.has_request(name):
            cache.free(name)
    return PrefillBatch.build(cache, names, [len(prompt) for prompt in prompts])


def ending_in(prompts, *ends):
    """The prompts, with these numbers of pad tokens in the place of their last ones."""
    made = [prompt.clone() for prompt in prompts]
    for prompt, count in zip(made, ends, strict=True):
        if count:
            prompt[-count:] = PAD
    return made


PROMPTS = {
    "one": lambda: prompts_of([5]),
    "several": lambda: prompts_of([4, 1, 6]),
    # Here the last token is one that transformers takes for padding, as where it is the end of sequence.
    "ending in padding": lambda: ending_in(prompts_of([4, 2, 5, 3]), 2, 0, 1, 0),
    "all padding": lambda: ending_in(prompts_of([3, 4, 2]), 0, 4, 2),
    "one token each": lambda: prompts_of([1, 1, 1]),
}


@pytest.mark.parametrize("pad", [PAD, None], ids=["pad", "no pad"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma2"])
def test_packed_sequences_get_one_row_of_scores_each(name, pad):
    model = build(name, pad_token_id=pad)
    cases = {kind: make() for kind, make in PROMPTS.items()}
    wanted = {kind: unpacked(model, prompts) for kind, prompts in cases.items()}
    cache = make_cache(model)
    attach(model, cache)
    for kind, prompts in cases.items():
        found = call(model, step(cache, prompts), prompts)
        assert isinstance(found, transformers.modeling_outputs.SequenceClassifierOutputWithPast)
        torch.testing.assert_close(found.logits, wanted[kind], rtol=1e-4, atol=1e-5, msg=kind)
        (as_tuple,) = call(model, step(cache, prompts), prompts, return_dict=False)
        assert torch.equal(as_tuple, found.logits)


@pytest.mark.parametrize("boundary", ["eager", "captured"])
def test_graphed_scores_are_the_unpacked_models(boundary):
    model = build("Qwen3")
    cases = [make() for make in PROMPTS.values()]
    wanted = [unpacked(model, prompts) for prompts in cases]
    cache = make_cache(model)
    attach(model, cache)
    limits = dict(max_num_seqs=4, max_seq_len=20, max_num_tokens=16) if boundary == "captured" else {}
    graphed = piecewise.compile(model, buckets=(8, 16), progress=False, boundary=boundary, **limits)
    ids = torch.arange(3, 10)[None]
    with torch.no_grad():
        assert graphed.capture(input_ids=ids, position_ids=torch.arange(7)[None]).ok
    assert inspect(graphed).layers.num_traced == 1
    for prompts, scores in zip(cases, wanted, strict=True):
        found = call(graphed, step(cache, prompts), prompts).logits
        torch.testing.assert_close(found, scores, rtol=1e-4, atol=1e-5)
        batch = step(cache, prompts)
        with torch.no_grad(), batch:
            report = graphed.verify(input_ids=batch.pack(prompts), position_ids=batch.positions)
        assert report.ok, str(report)
    assert graphed.stats.replays == len(cases), graphed.stats


def test_a_sequence_in_chunks_is_scored_with_its_last_one():
    model = build("Llama")
    prompts = prompts_of([9, 6])
    wanted = unpacked(model, prompts)
    cache = make_cache(model)
    attach(model, cache)
    for parts in zip(prompts[0].split([4, 5]), prompts[1].split([5, 1]), strict=True):
        batch = PrefillBatch.build(cache, ["a", "b"], [len(part) for part in parts])
        found = call(model, batch, parts).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_embeddings_are_scored_at_the_last_token_of_each_sequence():
    model = build("Llama", pad_token_id=None)
    prompts = prompts_of([4, 3])
    wanted = unpacked(model, prompts)
    cache = make_cache(model)
    attach(model, cache)
    batch = step(cache, prompts)
    with torch.no_grad(), batch:
        embeds = model.model.embed_tokens(batch.pack(prompts))
        found = model(inputs_embeds=embeds, position_ids=batch.positions).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["TokenClassification", "QuestionAnswering", "CausalLM"])
def test_heads_that_look_at_each_token_alone_give_the_unpacked_models_rows(head):
    model, prompts = build("Llama", head), prompts_of([4, 6, 1])
    keys = ["start_logits", "end_logits"] if head == "QuestionAnswering" else ["logits"]
    with torch.no_grad():
        alone = [model(input_ids=prompt[None]) for prompt in prompts]
    cache = make_cache(model)
    attach(model, cache)
    found = call(model, step(cache, prompts), prompts)
    for key in keys:
        wanted = torch.cat([getattr(result, key)[0] for result in alone])
        torch.testing.assert_close(getattr(found, key)[0], wanted, rtol=1e-4, atol=1e-5)


class MeanPooled(transformers.LlamaForCausalLM):
    """A head of the user's own, below a name that is known."""

    def forward(self, **kwargs):
        return super().forward(**kwargs).logits.mean(1)


class Scorer(transformers.LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = transformers.LlamaModel(config)

    def forward(self, **kwargs):
        return self.model(**kwargs).last_hidden_state[:, -1]


class WithPooler(transformers.LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.pooler = torch.nn.Linear(config.hidden_size, config.hidden_size)


REFUSED = {
    "OPTForSequenceClassification": ("OPTConfig", dict(ffn_dim=48, word_embed_proj_dim=32)),
    "GPTNeoXForSequenceClassification": ("GPTNeoXConfig", {}),
    "GPT2DoubleHeadsModel": ("GPT2Config", dict(n_layer=LAYERS)),
    MeanPooled: ("LlamaConfig", {}),
    Scorer: ("LlamaConfig", {}),
    WithPooler: ("LlamaConfig", {}),
}


@pytest.mark.parametrize("cls", REFUSED)
def test_a_head_that_may_pool_is_refused_by_name(cls):
    config, changes = REFUSED[cls]
    cls = getattr(transformers, cls) if isinstance(cls, str) else cls
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    model = cls(getattr(transformers, config)(**{**SMALL, **heads, **changes})).eval()
    cache = PagedKVCache.for_model(model, num_tokens=32, block_size=4)
    with pytest.raises(PoolingHead, match=rf"(?s){cls.__name__}.*Rule:.*Fix:.*(attach|without)") as error:
        attach(model, cache)
    assert TOKEN_WISE[0] in str(error.value)
    if cls is not WithPooler:  # what the fix says
        path = str(error.value).partition("the decoder, model.")[2].partition(",")[0]
        decoder = model.get_submodule(path)
        assert attach(decoder, cache) is decoder


def test_detach_and_a_deep_copy():
    model, prompts = build("Llama"), prompts_of([4, 2])
    wanted = unpacked(model, prompts)
    state = dict(vars(model))
    cache = make_cache(model)
    copied = copy.deepcopy(attach(model, cache))
    found = call(model, step(cache, prompts), prompts)
    torch.testing.assert_close(found.logits, wanted, rtol=1e-4, atol=1e-5)
    assert copied.forward.__self__ is copied
    piecewise.enable(model, buckets=(8,), progress=False)
    with pytest.raises(ForwardReplaced, match=r"(?s)LlamaForSeq.* was replaced.*Fix:.*disable"):
        detach(model)
    piecewise.disable(model)
    assert detach(model) is model and vars(model) == state
    assert torch.equal(unpacked(model, prompts), wanted)


def test_labels_and_a_call_outside_a_batch_are_refused():
    model, prompts = build("Llama"), prompts_of([4, 2])
    cache = make_cache(model)
    attach(model, cache)
    with pytest.raises(LabelsRefused, match=r"(?s)'labels'.*Rule:.*Fix:"):
        call(model, step(cache, prompts), prompts, labels=torch.tensor([0, 1]))
    rows = torch.zeros(1, 3, LABELS)
    with pytest.raises(WrongNumTokens, match=r"(?s)3 tokens.*none.*Rule:.*Fix:.*with batch"):
        torch.ops.piecewise.last_tokens(rows, None, None)
    with step(cache, prompts), pytest.raises(WrongNumTokens, match=r"(?s)3 tokens.*one of 6"):
        torch.ops.piecewise.last_tokens(rows, None, None)


def test_an_empty_step_has_no_scores():
    model = build("Llama")
    cache = make_cache(model)
    attach(model, cache)
    with step(cache, []):
        for ids in (None, torch.zeros(1, 0, dtype=torch.int64)):
            found = torch.ops.piecewise.last_tokens(torch.zeros(1, 0, LABELS), ids, PAD)
            assert found.shape == (0, LABELS)


@pytest.mark.parametrize("pad", [PAD, None])
def test_opcheck(pad):
    prompts = prompts_of([4, 2])
    cache = make_cache(small_transformers.build("Llama"))
    batch = step(cache, prompts)
    with batch, torch.no_grad():
        arguments = torch.randn(1, 6, LABELS), batch.pack(prompts), pad
        torch.library.opcheck(torch.ops.piecewise.last_tokens, arguments)
