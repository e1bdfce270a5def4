"""Measures a Llama-1B-shaped and an 8B-shaped transformers model: `python -m docs.results.llama_1b`.

Writes `llama_1b.json`, `llama_8b.json` and a plot of each beside this file, or into `--out`. Weights are
random and made on the device; one sequence, bfloat16, logits of the last token only. `--smoke` runs a tiny
model on whatever device there is, to try the command itself.

Each factory is a spec for the command line too: `piecewise bench docs.results.llama_1b:llama_1b`. A picture
is drawn again with `piecewise bench --from docs/results/llama_1b.json --plot docs/results/llama_1b.png`.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

import boundary_ops
import piecewise
from piecewise.tools.bench.latency import run_spec
from piecewise.tools.bench.variants import DEFAULT_VARIANTS

SIZES = (16, 128, 512, 1024, 2048)
# Eight, so that memory of many buckets is compared with that of the largest alone.
BUCKETS = (16, 64, 128, 256, 512, 1024, 1536, 2048)
_BLOCK_SIZE = 256


def llama_1b() -> piecewise.PrefillCase:
    """16 layers, hidden 2048, 32 query and 8 key/value heads of 64."""
    return _case(
        dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
             num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    )  # fmt: skip


def llama_8b() -> piecewise.PrefillCase:
    """32 layers, hidden 4096, 32 query and 8 key/value heads of 128."""
    return _case(
        dict(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
             num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    )  # fmt: skip


def four_layers() -> piecewise.PrefillCase:
    """4 layers of the width of `llama_1b`, for the gate: set up in seconds."""
    return _case(
        dict(vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
             num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    )  # fmt: skip


def smoke() -> piecewise.PrefillCase:
    """3 layers, hidden 128: shows that the command works."""
    return small_layers(3)


def small_layers(num_layers: int) -> piecewise.PrefillCase:
    """Hidden 128: for what does not depend on sizes."""
    return _case(
        dict(vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=num_layers,
             num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    )  # fmt: skip


def _case(sizes: dict[str, int]) -> piecewise.PrefillCase:
    from transformers import LlamaConfig, LlamaForCausalLM

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            unmodified = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    # The same weights in both, so that the larger model fits three times beside a float32 copy.
    tensors = [*unmodified.parameters(), *unmodified.buffers()]
    model = copy.deepcopy(unmodified, {id(tensor): tensor for tensor in tensors})
    cache = boundary_ops.PagedKVCache.for_model(model, num_tokens=4096, block_size=_BLOCK_SIZE)
    boundary_ops.huggingface.attach(model, cache)
    ids_of = _ids(config.vocab_size, device)

    def plain_inputs(num_tokens: int, *, seed: int = 0) -> tuple[tuple[()], dict[str, Any]]:
        positions = torch.arange(num_tokens, device=device)[None]
        return (), dict(
            input_ids=ids_of(num_tokens, seed), position_ids=positions, logits_to_keep=1, use_cache=False
        )

    return piecewise.PrefillCase(
        model, _paged_inputs(cache, ids_of), piecewise.PrefillCase(unmodified, plain_inputs)
    )


def _ids(vocab_size: int, device: torch.device) -> Callable[[int, int], torch.Tensor]:
    """(num_tokens, seed) → random token ids, [1, num_tokens]."""

    def ids_of(num_tokens: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed + 1)
        return torch.randint(vocab_size, (1, num_tokens), generator=generator).to(device)

    return ids_of


def _paged_inputs(
    cache: boundary_ops.PagedKVCache, ids_of: Callable[[int, int], torch.Tensor]
) -> Callable[..., AbstractContextManager[tuple[tuple[()], dict[str, Any]]]]:
    """Inputs of one sequence, whose step runs and whose blocks are held as long as the call."""

    @contextmanager
    def make_inputs(num_tokens: int, *, seed: int = 0) -> Iterator[tuple[tuple[()], dict[str, Any]]]:
        batch = boundary_ops.PrefillBatch.build(cache, ["sequence"], [num_tokens])
        try:
            with batch:
                ids = ids_of(num_tokens, seed)
                yield (), dict(input_ids=ids, position_ids=batch.positions, logits_to_keep=1)
        finally:
            cache.free("sequence")

    return make_inputs


def main() -> int:
    """Measures what the command line asks for and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the results")
    parser.add_argument("--only", choices=("llama_1b", "llama_8b"), help="one of the models")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--peer", choices=("breakable",), help="measure this package too")
    parser.add_argument("--quick", action="store_true", help="leave out the two torch.compile variants")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, few rounds")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Compiling two variants of the larger model takes longer than all the rest.
    quick = [name for name in DEFAULT_VARIANTS if name not in ("compile", "reduce-overhead")]
    runs: dict[str, dict[str, Any]] = {
        "llama_1b": dict(sizes=SIZES, buckets=BUCKETS, rounds=arguments.rounds, peer=arguments.peer),
        # One float32 call of the larger model takes most of a second.
        "llama_8b": dict(sizes=SIZES, buckets=BUCKETS, rounds=arguments.rounds, draws=6, variants=quick),
    }
    if arguments.quick:
        runs["llama_1b"] |= dict(variants=quick)
    if arguments.smoke:
        runs = {
            "smoke": dict(sizes=(4, 8), buckets=(4, 8, 16), rounds=3, variants=quick, peer=arguments.peer)
        }
    for name, options in runs.items():
        if arguments.only not in (None, name):
            continue
        result = run_spec(f"docs.results.llama_1b:{name}", **options)
        result.write(arguments.out / f"{name}.json")
        try:
            result.plot(arguments.out / f"{name}.png")
        except piecewise.ConfigError as error:
            print(error, file=sys.stderr)
        print(f"## {name}\n\n{result}\n\nmemory: {dict(result.memory)}\n", flush=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
