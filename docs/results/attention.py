"""Measures `piecewise::attn_inplace` against torch's flash attention, and checks it in the same run.

    PYTHONPATH=. python3 docs/results/attention.py --out docs/results/attention.json

Per size (one new sequence, plain causal, 32 query and 8 K/V heads of 128, bfloat16), medians over interleaved
rounds of:

* `op`: the op, which also writes K and V to the pages and its result in place; with the built-in block sizes,
  and with measured ones (`tuned`);
* `flash`: `aten._flash_attention_forward` alone, in the faster of its dense and its packed form;
* `pieces`: two `index_copy_` into the pages, flash, and a copy into `out`, which is what the op replaces;
* `captured`: the op's captured form, replayed from a CUDA graph, with room for 16 sequences.

Device time is per call, of launches that queue up behind a sleeping device. Host time is per call, of the
same launches. Step time is from the first of 16 layers' calls to an idle device, per layer. Inputs rotate, so
that no call finds its own in the cache. The checks' reference is float32 attention on float32 copies.

`--smoke` runs the whole script in seconds without a GPU: tiny sizes, triton's interpreter, meaningless times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "models"))
if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
    import interpreter_fixes  # noqa: F401

import torch
import triton
from block_sizes import block_sizes, measure_block_sizes

from boundary_ops import PagedKVCache, PrefillBatch, attn_captured, attn_inplace
from boundary_ops.attention import attention
from boundary_ops.attention import captured as attention_captured
from boundary_ops.attention.checks import CapturedCall
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.attention.triton import prefill
from boundary_ops.backends.library import AttentionCall

SMOKE = "--smoke" in sys.argv
DEVICE = torch.device("cpu" if SMOKE else "cuda")
SIZES = (16, 40) if SMOKE else (16, 64, 128, 256, 512, 1024, 2048, 4096)
HEADS, KV_HEADS, DIM, PAGE = (4, 2, 16, 16) if SMOKE else (32, 8, 128, 64)
DTYPE = torch.float32 if SMOKE else torch.bfloat16
LAYERS = 2 if SMOKE else 16
ROUNDS, LAUNCHES = (1, 2) if SMOKE else (9, 32)
# New tokens per sequence, context tokens per sequence, options.
MIXES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "16 sequences of 64": ((64,) * 16, 0, {}),
    "unequal lengths": ((1000, 7, 300, 1, 64, 650), 0, {}),
    "512 after 4096": ((512,), 4096, {}),
    "8 of 64 after 2048": ((64,) * 8, 2048, {}),
    "2048, window 512": ((2048,), 0, {"window": 512}),
    "2048, soft cap 50": ((2048,), 0, {"softcap": 50.0}),
}
if SMOKE:
    MIXES = {"unequal lengths after 20": ((5, 1, 17), 20, {"window": 9, "softcap": 5.0})}


def synchronize() -> None:
    if not SMOKE:
        torch.cuda.synchronize()


class Layers:
    """One step's inputs for several layers: rows as views of one projection, pools, and outputs."""

    def __init__(self, lens: tuple[int, ...], context: int = 0, layers: int = LAYERS) -> None:
        self.lens, self.count = lens, layers
        blocks = sum(-(-(context + length) // PAGE) for length in lens)
        self.cache = PagedKVCache(
            num_layers=layers, num_blocks=blocks, block_size=PAGE, num_kv_heads=KV_HEADS, head_dim=DIM,
            dtype=DTYPE, device=DEVICE,
        )  # fmt: skip
        for at in range(len(lens)):
            if context:
                self.cache.allocate(at, context)
                self.cache.append(at, context)
        for pool in (*self.cache.k, *self.cache.v):
            pool.normal_()
        self.batch = PrefillBatch.build(self.cache, range(len(lens)), lens)
        self.rows = sum(lens)
        self.inputs = []
        for _ in range(layers):
            fused = torch.randn(self.rows, HEADS + 2 * KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
            self.inputs.append(fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1))
        self.out = [
            torch.full((self.rows, HEADS, DIM), float("nan"), device=DEVICE, dtype=DTYPE)
            for _ in range(layers)
        ]

    def op(self, layer: int, **options: Any) -> None:
        q, k, v = self.inputs[layer]
        attn_op(q, k, v, self.out[layer], self.cache.k[layer], self.cache.v[layer], DIM**-0.5, **options)

    def flash(self, layer: int, *, packed: bool = False) -> torch.Tensor:
        q, k, v = self.inputs[layer]
        if SMOKE:
            q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)
        starts, longest = self.batch.cu_seqlens_q, self.batch.max_seqlen_q
        if packed:
            return torch.ops.aten._flash_attention_forward(
                q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=DIM**-0.5
            )[0]
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        size = self.rows
        return torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, size, size, 0.0, True, False, scale=DIM**-0.5
        )[0][0]

    def pieces(self, layer: int, *, packed: bool = False) -> None:
        _, k, v = self.inputs[layer]
        self.cache.k[layer].view(-1, KV_HEADS, DIM).index_copy_(0, self.batch.slot_mapping, k)
        self.cache.v[layer].view(-1, KV_HEADS, DIM).index_copy_(0, self.batch.slot_mapping, v)
        self.out[layer].copy_(self.flash(layer, packed=packed))

    def check(self, layer: int = 0, **options: Any) -> float:
        """Relative error of the op's last result in that layer; raises where the pages are wrong."""
        q, k, v = self.inputs[layer]
        expected = reference(self, layer, **options)
        slots = self.batch.slot_mapping
        for pool, new in ((self.cache.k[layer], k), (self.cache.v[layer], v)):
            assert torch.equal(pool.view(-1, KV_HEADS, DIM)[slots], new), "the pages hold other rows"
        return error_of(self.out[layer], expected)


def attn_op(*args: Any, **options: Any) -> None:
    """The op as a graph plan calls it; on the CPU, the CUDA implementation under the interpreter."""
    if SMOKE:
        attention.attend_by_program(PrefillBatch.current(), AttentionCall(*args, **options), prefill)
    else:
        attn_inplace(*args, **options)


def reference(layers: Layers, layer: int, *, window: int = 0, softcap: float = 0.0) -> torch.Tensor:
    """Float32 attention of all sequences, by the definition; context from the pages."""
    q, k, v = layers.inputs[layer]
    batch, results, start = layers.batch, [], 0
    for at, (new, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        rows, pages = slice(start, start + new), batch.block_tables[at].long()
        start += new
        keys, values = (
            torch.cat((pool[pages].flatten(0, 1)[:context], tensor[rows])).float().transpose(0, 1)
            for pool, tensor in ((layers.cache.k[layer], k), (layers.cache.v[layer], v))
        )
        last = torch.arange(context, context + new, device=DEVICE).unsqueeze(1)
        column = torch.arange(context + new, device=DEVICE).unsqueeze(0)
        visible = (column <= last) & (column > last - window) if window else column <= last
        group = HEADS // KV_HEADS
        for head in range(HEADS):
            scores = q[rows, head].float() @ keys[head // group].T * DIM**-0.5
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            results.append(scores.masked_fill(~visible, float("-inf")).softmax(-1) @ values[head // group])
    per_sequence = [torch.stack(results[at : at + HEADS], dim=1) for at in range(0, len(results), HEADS)]
    return torch.cat(per_sequence)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = float((found.float() - expected).norm() / expected.norm())
    assert error == error, "the result has NaN"
    # Never zero, as errors are divided by one another.
    return max(error, 1e-8)


def time_launches(call: Callable[[int], object], layers: int) -> tuple[float, float]:
    """(device, host) microseconds per call, of launches that queue up behind a sleeping device."""
    if SMOKE:
        begin = time.perf_counter()
        call(0)
        taken = (time.perf_counter() - begin) * 1e6
        return taken, taken
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000)
    first.record()
    begin = time.perf_counter()
    for at in range(LAUNCHES):
        call(at % layers)
    host = (time.perf_counter() - begin) / LAUNCHES * 1e6
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / LAUNCHES * 1e3, host


def time_step(call: Callable[[int], object], layers: int) -> float:
    """Microseconds per layer, from the first layer's call to an idle device."""
    synchronize()
    begin = time.perf_counter()
    for layer in range(layers):
        call(layer)
    synchronize()
    return (time.perf_counter() - begin) / layers * 1e6


def measure(calls: dict[str, Callable[[int], object]], layers: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds, and the relative spread (quartiles) of the device time."""
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        for layer in range(layers):
            call(layer)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            samples[name].append((*time_launches(call, layers), time_step(call, layers)))
    results = {}
    for name, taken in samples.items():
        device, host, step = (statistics.median(column) for column in zip(*taken, strict=True))
        ordered = sorted(sample[0] for sample in taken)
        spread = (ordered[len(ordered) * 3 // 4] - ordered[len(ordered) // 4]) / device
        results[name] = {"device_us": device, "host_us": host, "step_us": step, "spread": spread}
    return results


def capture(layers: Layers) -> Callable[[int], object]:
    """One CUDA graph per layer of the captured form, on the step's own rows."""
    pools = (*layers.cache.k, *layers.cache.v)
    step = StepBuffers(pools, max_num_seqs=16, max_num_tokens=layers.rows, max_seq_len=layers.rows)

    def captured(layer: int) -> None:
        tensors = (*layers.inputs[layer], layers.out[layer], layers.cache.k[layer], layers.cache.v[layer])
        if SMOKE:
            call = CapturedCall(*tensors, **step.tensors, scale=DIM**-0.5)
            attention_captured.attend_by_program(call, prefill)
        else:
            attn_captured(*tensors, **step.tensors, scale=DIM**-0.5)

    if SMOKE:
        step.load(layers.batch)
        return captured
    graphs = []
    captured(0)
    torch.cuda.synchronize()
    for layer in range(layers.count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured(layer)
        graphs.append(graph)
    step.load(layers.batch)

    def replay(layer: int) -> None:
        assert step.max_num_tokens == layers.rows  # holds the step: the graphs read its buffers
        graphs[layer].replay()

    return replay


def clear(layers: Layers) -> None:
    """Poison where results go, so that a check sees what the last call wrote."""
    for out in layers.out:
        out.fill_(float("nan"))
    for pool in (*layers.cache.k, *layers.cache.v):
        pool.view(-1, KV_HEADS, DIM)[layers.batch.slot_mapping] = float("nan")


def plain(size: int) -> dict[str, Any]:
    """All variants at one size of plain causal prefill."""
    layers = Layers((size,), layers=LAYERS if size <= 1024 else max(LAYERS // 2, 2))
    result: dict[str, Any] = {"num_tokens": size}
    with torch.no_grad(), layers.batch:
        expected = reference(layers, 0)
        result["error_flash"] = error_of(layers.flash(0, packed=True), expected)
        layers.op(0)
        result["error_op"] = layers.check()
        geometry = next(reversed(prefill.plans.geometries))
        result["blocks"] = str(prefill.plans.config_for(geometry, size))
        calls: dict[str, Callable[[int], object]] = {
            "op": layers.op,
            "flash_packed": lambda layer: layers.flash(layer, packed=True),
            "pieces_packed": lambda layer: layers.pieces(layer, packed=True),
            "captured": capture(layers),
        }
        try:
            error_of(layers.flash(0), expected)
            calls |= {"flash": layers.flash, "pieces": layers.pieces}
        except RuntimeError as error:
            result["no_dense_flash"] = str(error)
        result["times"] = measure(calls, layers.count)
        clear(layers)
        calls["captured"](0)
        result["error_captured"] = layers.check()
        if not SMOKE:
            pools = layers.cache.k[0], layers.cache.v[0]
            call = AttentionCall(*layers.inputs[0], layers.out[0], *pools, DIM**-0.5)
            tuned = measure_block_sizes(size, call)
            best = min(tuned, key=tuned.__getitem__)
            result["tuning"] = {str(config): taken for config, taken in tuned.items()}
            result["tuned_blocks"] = str(best)
            with block_sizes(best):
                clear(layers)
                layers.op(0)
                result["error_tuned"] = layers.check()
                flash = calls[fastest(result["times"], "flash", "device_us")]
                result["times"] |= measure({"tuned": layers.op, "flash_again": flash}, layers.count)
    return result


def mixed(name: str) -> dict[str, Any]:
    """The op on a step of several sequences, context or options; checked and timed."""
    lens, context, options = MIXES[name]
    layers = Layers(lens, context, layers=min(LAYERS, 4))
    with torch.no_grad(), layers.batch:
        layers.op(0, **options)
        error = layers.check(**options)
        calls: dict[str, Callable[[int], object]] = {"op": lambda layer: layers.op(layer, **options)}
        if not context and not options and not SMOKE:
            calls["flash_packed"] = lambda layer: layers.flash(layer, packed=True)
        return {"name": name, "error_op": error, "times": measure(calls, layers.count)}


def fastest(times: dict[str, dict[str, float]], name: str, key: str) -> str:
    """The faster of a variant's dense and packed form."""
    return min(
        (form for form in (name, f"{name}_packed") if form in times), key=lambda form: times[form][key]
    )


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """What the project is judged on, from one size's times."""
    times = result["times"]
    flash = times[fastest(times, "flash", "device_us")]["device_us"]
    pieces = times[fastest(times, "pieces", "step_us")]["step_us"]
    found = {
        "flash_over_op": flash / times["op"]["device_us"],
        "pieces_over_op_step": pieces / times["op"]["step_us"],
        "captured_over_op": times["captured"]["device_us"] / times["op"]["device_us"],
    }
    if "tuned" in times:
        found["flash_over_tuned"] = times["flash_again"]["device_us"] / times["tuned"]["device_us"]
    return found


def commit() -> str:
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def show(report: dict[str, Any]) -> None:
    head = ["tokens", "op", "tuned", "flash", "captured", "flash/op", "flash/tuned", "host op", "host flash"]
    head += ["step op", "step pieces", "err/flash"]
    print(" ".join(f"{title:>11}" for title in head))
    for result in report["plain"]:
        times, ratio = result["times"], result["ratios"]
        flash = times[fastest(times, "flash", "device_us")]
        cells = [
            str(result["num_tokens"]),
            *(f"{times[key]['device_us']:.1f}" if key in times else "-" for key in ("op", "tuned")),
            f"{flash['device_us']:.1f}",
            f"{times['captured']['device_us']:.1f}",
            *(f"{ratio[key]:.2f}" if key in ratio else "-" for key in ("flash_over_op", "flash_over_tuned")),
            *(f"{variant['host_us']:.1f}" for variant in (times["op"], flash)),
            f"{times['op']['step_us']:.1f}",
            f"{times[fastest(times, 'pieces', 'step_us')]['step_us']:.1f}",
            f"{result['error_op'] / result['error_flash']:.2f}",
        ]
        print(" ".join(f"{cell:>11}" for cell in cells))
    for result in report["plain"]:
        if "tuning" in result:
            best = sorted(result["tuning"].items(), key=lambda item: item[1])[:3]
            print(result["num_tokens"], "table:", result["blocks"].removeprefix("BlockConfig"))
            for blocks, taken in best:
                print("    ", f"{taken:.1f} us", blocks.removeprefix("BlockConfig"))
    for result in report["mixed"]:
        times = {name: round(value["device_us"], 1) for name, value in result["times"].items()}
        print(f"{result['name']}: device us {times}, error {result['error_op']:.1e}")
    print(f"took {report['seconds']:.0f} s; all times in microseconds per call")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, no GPU")
    options = parser.parse_args()
    if not SMOKE and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --smoke runs without one")
    began = time.perf_counter()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "command": "PYTHONPATH=. python3 docs/results/attention.py" + (" --smoke" if SMOKE else ""),
        "device": "cpu" if SMOKE else torch.cuda.get_device_name(),
        "host": platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        },
        "commit": commit(),
        "shape": {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "page": PAGE, "dtype": str(DTYPE)},
        "rounds": ROUNDS,
        "plain": [plain(size) for size in SIZES],
        "mixed": [mixed(name) for name in MIXES],
    }
    for result in report["plain"]:
        result["ratios"] = ratios(result)
    report["seconds"] = time.perf_counter() - began
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    errors = [
        result[key] / result["error_flash"]
        for result in report["plain"]
        for key in ("error_op", "error_captured", "error_tuned")
        if key in result
    ]
    limit = 1e-5 if SMOKE else 1e-2
    wrong = max(errors) > 1.5 and not SMOKE or any(result["error_op"] > limit for result in report["mixed"])
    if wrong:
        print("WRONG: an error is beyond what rounding explains", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
