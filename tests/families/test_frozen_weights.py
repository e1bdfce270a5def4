"""Weights that need no gradient, all or some of them, and adapters of peft: graphed like any others.

torch's own kernel of `matmul` folds the leading dims of what it is given only where the weight needs a
gradient; where none does, that of torch 2.11 asks for sizes as numbers, which a traced tensor has none of.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toy_models import HIDDEN, VOCAB, Block, check_sizes, kinds, make_ids

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch
from piecewise import TraceError, torch_api
from piecewise.passes.fakes import run_node

HEADS = {
    "linear": lambda model, x: F.linear(x, model.weight),
    "linear of a transposed input": lambda model, x: F.linear(
        x.transpose(0, 1), model.weight, model.weight[0]
    ).transpose(0, 1),
    "matmul": lambda model, x: x @ model.weight,
    "matmul of four dims": lambda model, x: (
        (x.unflatten(-1, (2, -1)).transpose(1, 2) @ model.weight[:8, :8]).transpose(1, 2).flatten(2)
    ),
    "einsum": lambda model, x: torch.einsum("bnh,kh->bnk", x, model.weight),
    "tensordot": lambda model, x: torch.tensordot(x, model.weight, 1),
    "vmap": lambda model, x: torch.vmap(lambda rows: rows @ model.weight, 1, 1)(x),
    "autocast": lambda model, x: _in_bfloat16(x, model.weight),
    "autograd function": lambda model, x: _Product.apply(x, model.weight),
}


def _in_bfloat16(x, weight):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ weight).float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        return x @ weight

    @staticmethod
    def backward(context, grad):
        return grad, None


class Batched(nn.Module):
    """[1, num_tokens] ids · block on [num_tokens, hidden] · head on [1, num_tokens, hidden] · projection."""

    def __init__(self, head):
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCAB, HIDDEN), Block()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.head, self.projection = head, nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.block(x[0]).unsqueeze(0)
        return self.projection(self.head(self, x))


@pytest.mark.parametrize("share", [1, 2], ids=["all", "every second"])
@pytest.mark.parametrize("head", HEADS)
def test_frozen_weights_are_graphed(head, share):
    model = Batched(HEADS[head]).eval()
    for weight in list(model.parameters())[::share]:
        weight.requires_grad_(False)
    # bfloat16 rounds another matmul's sums to other numbers.
    sizes = (8,) if head == "autocast" else (2, 7, 8)
    graphed = check_sizes(
        model, buckets=(8,), sizes=sizes, arguments=lambda n: (make_ids(n).unsqueeze(0),), poison=False
    )
    assert kinds(graphed) == "gbg"


def test_weights_made_in_inference_mode_are_graphed():
    with torch.inference_mode():
        model = Batched(HEADS["linear of a transposed input"]).eval()
        graphed = piecewise.compile(model, buckets=[8], progress=False)
        assert graphed.capture(make_ids(5).unsqueeze(0)).ok
        ids = make_ids(8).unsqueeze(0)
        assert torch.equal(graphed(ids), model(ids))
    assert graphed.stats.replays == 1 and kinds(graphed) == "gbg"


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_rewritten_graph_runs_composite_ops_on_fakes(needs_grad):
    """A pass may leave a node for an op that consists of others."""
    fake_mode = torch_api.new_fake_mode()
    count = torch_api.symbolic_count(fake_mode, "num_rows", 5)
    with fake_mode:
        rows = torch.empty(count, 2, HIDDEN)
    weight = torch_api.static_fake(fake_mode, nn.Parameter(torch.randn(HIDDEN, 3), requires_grad=needs_grad))
    graph = torch.fx.Graph()
    given = [graph.placeholder("rows"), graph.placeholder("weight")]
    for node, value in zip(given, (rows, weight), strict=True):
        node.meta["val"] = value
    found = run_node(graph.call_function(torch.ops.aten.matmul.default, tuple(given)), fake_mode)
    assert found.shape == (count, 2, 3)


# --- peft


def adapted(**options):
    """A small Llama with adapters that are not zero, the attached model inside, and its cache."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    lora = peft.LoraConfig(init_lora_weights=False, **options)
    whole = peft.get_peft_model(model, lora).eval()
    cache = PagedKVCache.for_model(model, num_tokens=128, block_size=4)
    boundary_ops.huggingface.attach(model, cache)
    return whole, model, cache


@pytest.mark.parametrize("outer", [True, False], ids=["PeftModel", "its base model"])
@pytest.mark.parametrize(
    "options",
    [
        dict(r=4, target_modules=["q_proj", "v_proj"]),
        dict(r=4, target_modules="all-linear", bias="all"),
        dict(r=4, target_modules=["q_proj"], use_dora=True),
    ],
    ids=["lora", "lora of all linears and their biases", "dora"],
)
def test_adapted_models_are_graphed(options, outer):
    whole, base, cache = adapted(**options)
    model = whole if outer else base
    graphed = piecewise.compile(model, buckets=[8, 16], progress=False)
    ids = torch.arange(5).unsqueeze(0)
    if options.get("use_dora") and torch.__version__ >= "2.13":
        # It asks for `type(weight).__module__.startswith(...)`, which Dynamo traces up to torch 2.12.
        with pytest.raises(TraceError, match="startswith.*in dequantize_module_weight"):
            graphed.capture(input_ids=ids, position_ids=ids.clone())
        return
    with torch.no_grad():
        assert graphed.capture(input_ids=ids, position_ids=ids.clone()).ok
        for number, lengths in enumerate([[3, 5], [1], [7, 4]]):
            names = [f"{number}-{at}" for at in range(len(lengths))]
            batch = PrefillBatch.build(cache, names, lengths)
            packed = batch.pack([make_ids(length) for length in lengths])
            with batch:
                want = model(input_ids=packed, position_ids=batch.positions).logits
                found = graphed(input_ids=packed, position_ids=batch.positions).logits
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert graphed.stats.replays == 3 and not graphed.stats.reasons
    assert kinds(graphed) == "gbgbgbg"
