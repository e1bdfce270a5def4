"""Graph an unmodified transformers model: two prompts in one prefill, then a chunk that continues both.

`attach` puts the paged attention op into the model through transformers' own attention interface; the
model's code stays as it is. A batch plans the step: which request each token belongs to, and where its K
and V go.
"""

import copy

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import boundary_ops
import piecewise


def build() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    return Qwen3ForCausalLM(config).eval()


def main() -> None:
    torch.manual_seed(0)
    reference = build()
    model = copy.deepcopy(reference)
    cache = boundary_ops.PagedKVCache.for_model(model, num_tokens=128, block_size=8)
    boundary_ops.huggingface.attach(model, cache)
    graphed = piecewise.compile(model, buckets=[8, 16, 32], progress=False)
    prompts: list[list[int]] = [[], []]
    with torch.no_grad():
        graphed.capture(input_ids=torch.arange(4)[None], position_ids=torch.arange(4)[None])
        for lens in ((9, 4), (3, 13)):
            chunks = [torch.randint(reference.config.vocab_size, (length,)).tolist() for length in lens]
            batch = boundary_ops.PrefillBatch.build(cache, ["a", "b"], lens)
            with batch:
                found = graphed(input_ids=batch.pack(chunks), position_ids=batch.positions).logits
            # The unmodified model, without a cache: each sequence alone, from its beginning.
            prompts = [prompt + chunk for prompt, chunk in zip(prompts, chunks, strict=True)]
            expected = [reference(input_ids=torch.tensor([prompt])).logits for prompt in prompts]
            new = [logits[:, -length:] for logits, length in zip(expected, lens, strict=True)]
            torch.testing.assert_close(found, torch.cat(new, dim=1), rtol=1e-4, atol=1e-5)
    print(graphed.report())
    assert graphed.stats.replays == 2 and graphed.stats.eager_calls == 0
    print("2 packed steps replayed; results equal the unmodified model's")


if __name__ == "__main__":
    main()
