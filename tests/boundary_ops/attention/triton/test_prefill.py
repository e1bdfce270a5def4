"""The CUDA kernels without a GPU: interpreted, compiled for Hopper, and their host side."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from boundary_ops import PagedKVCache, PrefillBatch
from boundary_ops.attention import attention, program
from boundary_ops.attention.step_buffers import StepBuffers
from boundary_ops.attention.triton.configs import BlockConfig, Geometry, default_config, fitted, power_of_two
from boundary_ops.attention.triton.tiles import tile_records, tiles_of
from boundary_ops.errors.attention import StepTooLarge, WrongStepLimit
from boundary_ops.errors.step import OtherCache

INTERPRETED = Path(__file__).resolve().parents[3] / "models" / "interpreted_kernels.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
HOPPER_SHARED_BYTES = 227 * 1024


def make_cache(**changes):
    sizes = {"num_layers": 1, "num_blocks": 16, "block_size": 4, "num_kv_heads": 2, "head_dim": 8}
    return PagedKVCache(**{**sizes, "dtype": torch.float32, **changes})


# --- the program, interpreted -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Test function of interpreted_kernels.py -> what failed in it; all run in one process, once."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        f"--junitxml={report}",
        str(INTERPRETED),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = found.setdefault(case.attrib["name"].partition("[")[0], [])
        failures += [
            f"{case.attrib['name']}: {problem.text}" for problem in case if problem.tag != "properties"
        ]
    return found


@needs_triton
@pytest.mark.parametrize(
    "name",
    [
        node.name
        for node in ast.parse(INTERPRETED.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ],
)
def test_interpreted(outcomes, name):
    assert name in outcomes, f"{name} did not run"
    assert not outcomes[name], "\n".join(outcomes[name])


# --- the program, compiled for a GPU that need not be here --------------------------------------------------


def compile_for_hopper(geometry, config, *, has_context, max_seqs=0):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from boundary_ops.attention.triton.programs import prefill_program

    names = prefill_program.arg_names
    constants = geometry.constants(config, has_context=has_context, max_seqs=max_seqs)
    constants = dict(zip(names[-len(constants) :], constants, strict=True))
    element = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[geometry.dtype]
    types = {
        "slots": "*i64",
        "tiles": "*i32",
        "seq_lens": "*i32",
        "tables": "*i32",
        "scale": "fp32",
        "cap": "fp32",
    }
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        is_tensor = index < names.index("table_stride")
        default = f"*{element}" if is_tensor else "i32"
        signature[name] = "constexpr" if name in constants else types.get(name, default)
        if name not in constants and (is_tensor or name.endswith(("token_stride", "head_stride"))):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(prefill_program, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@needs_triton
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_tokens", [256, 4096])
def test_default_blocks_compile_for_hopper_with_its_matrix_unit(monkeypatch, tmp_path, head_dim, num_tokens):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    geometry = Geometry(torch.bfloat16, 0, 32, 8, head_dim, 64)
    config = default_config(
        num_tokens=num_tokens, heads=32, kv_heads=8, head_dim=head_dim, element_bytes=2, num_processors=132
    )
    compiled = compile_for_hopper(geometry, config, has_context=False)
    assert compiled.metadata.shared <= HOPPER_SHARED_BYTES
    # The estimate that decides what fits a device is no lower than what the compiler takes.
    assert fitted(config, head_dim, 2, compiled.metadata.shared) == config
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_options_compile_for_capture(monkeypatch, tmp_path, dtype):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    geometry = Geometry(dtype, 0, 9, 3, 80, 16, True, True, torch.float32, True)
    config = BlockConfig(16, 32, 4, 2)
    assert compile_for_hopper(geometry, config, has_context=True, max_seqs=5).metadata.shared > 0


@needs_triton
def test_this_tritons_launcher_is_the_one_that_direct_launches_know():
    import inspect

    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import CompiledKernel

    from boundary_ops.attention.triton.launcher import LAUNCHER_PARAMETERS

    names = tuple(inspect.signature(CudaLauncher.__call__).parameters)[1:]
    assert names[: len(LAUNCHER_PARAMETERS)] == LAUNCHER_PARAMETERS
    assert isinstance(CompiledKernel.run, property)


@needs_triton
def test_a_direct_launch_passes_what_the_launcher_expects():
    from boundary_ops.attention.triton.launcher import direct_launch

    calls = []

    def run(gridX, gridY, gridZ, stream, function, *rest):
        calls.append((gridX, gridY, gridZ, stream, function, rest))

    compiled = SimpleNamespace(run=run, function=7, packed_metadata="packed")
    direct_launch(compiled)(2, 3, 11, (1, 2.0, None))
    assert calls == [(2, 3, 1, 11, 7, ("packed", None, None, None, 1, 2.0, None))]
    for name in ("run", "function", "packed_metadata"):
        parts = {key: value for key, value in vars(compiled).items() if key != name}
        assert direct_launch(SimpleNamespace(**parts)) is None
    assert (
        direct_launch(SimpleNamespace(run=lambda grid, *rest: None, function=7, packed_metadata=())) is None
    )


class HopperDriver:
    """What triton's JIT asks of a driver before it launches."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@needs_triton
def test_programs_are_compiled_together_and_none_is_launched(monkeypatch, tmp_path):
    import triton

    from boundary_ops.attention.triton.launcher import compiling_together, jit_launch
    from boundary_ops.attention.triton.programs import prefill_program

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", HopperDriver())
    threads = set()

    def noting(compile_):
        def call(*args, **kwargs):
            threads.add(threading.get_ident())
            return compile_(*args, **kwargs)

        return call

    def binder():
        made = prefill_program.create_binder()
        monkeypatch.setattr(prefill_program, "compile", noting(prefill_program.compile))
        return made

    caches = defaultdict(binder)
    monkeypatch.setattr(prefill_program, "device_caches", caches)
    q, k, pool = (torch.empty(16, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    slots, tiles = torch.empty(16, dtype=torch.int64), torch.empty(4, 4, dtype=torch.int32)
    tensors = (q, k, k, q, pool, pool, slots, tiles, slots.int(), tiles, q)
    strides = tuple(stride for each in (q, k, k, q) for stride in each.stride()[:2])
    geometry = Geometry(torch.bfloat16, 0, 4, 2, 64, 16)
    with compiling_together():
        for has_context in (False, True):
            constants = geometry.constants(BlockConfig(16, 32, 4, 2), has_context=has_context, max_seqs=0)
            arguments = (*tensors, 16, 16, *strides, 0, 0.1, 0.0, *constants)
            assert jit_launch(prefill_program, (2, 1), arguments, 4, 2) is None
    compiled = caches[0][0]
    assert len(compiled) == 2 and all("ptx" in each.asm for each in compiled.values())
    assert threads and threading.get_ident() not in threads


@needs_triton
def test_a_program_that_fails_to_compile_with_others_is_compiled_by_its_launch(monkeypatch):
    import gc

    import triton

    from boundary_ops.attention.triton import launcher

    launched = []

    def failing():
        assert not gc.isenabled()  # parses of several threads do not bear a collection
        raise SystemError("AST constructor recursion depth mismatch")

    class Program:
        def warmup(self, *arguments, grid, **options):
            mode = triton.runtime._async_compile.active_mode.get()
            mode.submit("key", failing, launched.append)

        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(arguments)

    monkeypatch.setattr(launcher, "is_interpreted", lambda program: True)
    with launcher.compiling_together():
        assert launcher.jit_launch(Program(), (1, 1), (3,), 4, 2) is None
    assert not launched and gc.isenabled()
    launcher.jit_launch(Program(), (1, 1), (3,), 4, 2)
    assert launched == [(3,)]


@needs_triton
def test_a_warm_up_compiles_all_programs_before_it_launches_one(monkeypatch):
    from boundary_ops.attention.triton import prefill

    geometry = Geometry(torch.float32, -1, 4, 2, 64, 16)
    runs, blocks = [], []

    class Scratch:
        def __init__(self, geometry, num_tokens):
            self.num_tokens = num_tokens

        def new_step(self, *, has_context):
            return has_context

        @property
        def call(self):
            return self.num_tokens

    @contextmanager
    def together():
        yield
        blocks.append(len(runs))

    def run(has_context, num_tokens):
        runs.append((len(blocks), num_tokens, has_context))

    for name, placeholder in (("ScratchLayer", Scratch), ("compiling_together", together), ("attend", run)):
        monkeypatch.setattr(prefill, name, placeholder)
    monkeypatch.setattr(prefill, "is_interpreted", lambda program: False)
    monkeypatch.setattr(prefill.plans, "geometries", {geometry: None})
    prefill.compile_ahead(1000)
    assert blocks == [len(runs) // 2] and len(runs) == len(set(runs)) >= 4
    assert [run[1:] for run in runs[: blocks[0]]] == [run[1:] for run in runs[blocks[0] :]]
    runs.clear()
    monkeypatch.setattr(prefill, "is_interpreted", lambda program: True)
    prefill.compile_ahead(1000)
    assert len(runs) == blocks[0] and len(blocks) == 1


# --- block sizes and tiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(32, 8), (9, 3), (71, 1), (128, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_default_blocks_are_powers_of_two_that_fit(heads, head_dim, element_bytes):
    for num_tokens in (1, 3, 16, 100, 512, 5000):
        config = default_config(
            num_tokens=num_tokens,
            heads=heads[0],
            kv_heads=heads[1],
            head_dim=head_dim,
            element_bytes=element_bytes,
            num_processors=132,
        )
        for size in (config.block_m, config.block_n):
            assert size >= 16 and size == power_of_two(size)
        assert fitted(config, head_dim, element_bytes, HOPPER_SHARED_BYTES) == config
        small = fitted(config, head_dim, element_bytes, 64 * 1024)
        row_bytes = power_of_two(head_dim) * element_bytes
        assert (small.block_m + 2 * small.num_stages * small.block_n) * row_bytes <= 64 * 1024
        group = heads[0] // heads[1]
        assert config.tile_heads(group) * config.tile_tokens(group) <= config.block_m


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@needs_triton
def test_candidates_fit_hopper(head_dim):
    from block_sizes import candidates

    found = candidates(head_dim, 2)
    assert len(found) == len(set(found)) >= 4
    assert all(fitted(config, head_dim, 2, HOPPER_SHARED_BYTES) == config for config in found)


@pytest.mark.parametrize("tile_tokens", [1, 5, 16, 64])
def test_tiles_cover_each_token_once_and_the_heaviest_come_first(tile_tokens):
    new, context = (7, 1, 64, 33), (0, 100, 3, 0)
    records = tile_records(new, context, tile_tokens)
    starts = np.concatenate(([0], np.cumsum(new)))
    rows, keys = [], []
    for sequence, row, first, count, before, *rest in records.tolist():
        assert (row, count, before, rest) == (starts[sequence], new[sequence], context[sequence], [0, 0, 0])
        last = min(first + tile_tokens, count)
        rows += range(row + first, row + last)
        keys.append(before + last)
    assert sorted(rows) == list(range(sum(new)))
    assert keys == sorted(keys, reverse=True)


def test_tiles_of_a_window_are_weighed_by_what_they_read():
    # Beyond the window all tiles read the same; the short sequence's are the lighter ones.
    records = tile_records((64, 8), (1000, 0), 8, window=16)
    assert records[-1].tolist()[:3] == [1, 64, 0]
    assert records[:8, 2].tolist() == list(range(0, 64, 8))


def test_tiles_are_made_once_per_batch_size_and_stream():
    batch = PrefillBatch.build(make_cache(), "ab", (9, 3))
    first = tiles_of(batch, 4, 0, 0)
    assert tiles_of(batch, 4, 0, 0) is first and first.num_tiles == 4 and not first.has_context
    assert {id(tiles_of(batch, *key)) for key in ((8, 0, 0), (4, 2, 0), (4, 0, 1))}.isdisjoint({id(first)})
    assert len(batch.derived) == 4


# --- metadata for capture -----------------------------------------------------------------------------------


def test_step_buffers_hold_a_batch_and_nothing_of_the_one_before():
    cache = make_cache()
    step = StepBuffers((*cache.k, *cache.v), max_num_seqs=3, max_num_tokens=20, max_seq_len=24)
    assert step.cu_seqlens_q.tolist() == [0, 0, 0, 0] and step.block_tables.shape == (3, 6)
    for ids, lens in (("abc", (5, 9, 6)), ("ab", (2, 1)), ([], [])):
        with PrefillBatch.build(cache, ids, lens) as batch:
            step.load()
        count, rows, width = batch.num_seqs, batch.num_tokens, batch.block_tables.shape[1]
        assert step.cu_seqlens_q.tolist() == batch.cu_seqlens_q.tolist() + [rows] * (3 - count)
        assert step.seq_lens.tolist() == batch.seq_lens.tolist() + [0] * (3 - count)
        assert (
            torch.equal(step.slot_mapping[:rows], batch.slot_mapping) and not step.slot_mapping[rows:].any()
        )
        assert torch.equal(step.block_tables[:count, :width], batch.block_tables)
        assert not step.block_tables[count:].any() and not step.block_tables[:, width:].any()
    assert cache.context_len("a") == 7


def test_a_step_beyond_the_buffers_is_refused_and_changes_nothing():
    cache = make_cache()
    step = StepBuffers((*cache.k, *cache.v), max_num_seqs=2, max_num_tokens=8, max_seq_len=12)
    step.load(PrefillBatch.build(cache, "a", [3]))
    before = step._all.clone()
    cache.allocate("old", 12)
    cache.append("old", 12)
    cases = [
        ("abc", (1, 1, 1), "max_num_seqs"),
        ("ab", (4, 5), "max_num_tokens"),
        (["old"], [1], "max_seq_len"),
    ]
    for ids, lens, bound in cases:
        with pytest.raises(StepTooLarge, match=bound):
            step.load(PrefillBatch.build(cache, ids, lens))
    with pytest.raises(OtherCache, match="another cache"):
        step.load(PrefillBatch.build(make_cache(), "a", [3]))
    assert torch.equal(step._all, before)
    for wrong in (0, True, 2.0):
        with pytest.raises(WrongStepLimit, match="max_num_seqs"):
            StepBuffers((*cache.k, *cache.v), max_num_seqs=wrong, max_num_tokens=8, max_seq_len=12)


# --- what needs no triton -----------------------------------------------------------------------------------


def test_importing_the_packages_imports_no_triton():
    code = (
        "import sys, boundary_ops, boundary_ops.attention.triton.tiles\n"
        "assert 'triton' not in sys.modules, 'triton was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_triton_the_cuda_op_runs_as_torch_operators(monkeypatch, recwarn):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "boundary_ops.attention.triton.prefill", raising=False)
    monkeypatch.delitem(sys.modules, "boundary_ops.attention.triton.launcher", raising=False)
    # Once imported, by another test, the package has it.
    monkeypatch.delattr("boundary_ops.attention.triton.prefill", raising=False)
    program.find_program.cache_clear()
    try:
        cache = make_cache()
        q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
        found, expected = torch.empty_like(q), torch.empty_like(q)
        with PrefillBatch.build(cache, "a", [5]):
            monkeypatch.setattr(cache, "device", torch.device("cuda"))
            attention.attend_inplace(q, k, v, found, cache.k[0], cache.v[0], 0.3)
            attention.attend_inplace(q, k, v, found, cache.k[0], cache.v[0], 0.3)
            monkeypatch.setattr(cache, "device", torch.device("cpu"))
            attention.attend_inplace(q, k, v, expected, cache.k[0], cache.v[0], 0.3)
    finally:
        program.find_program.cache_clear()
    assert torch.equal(found, expected)
    (warned,) = recwarn
    assert "torch operators" in str(warned.message)


def test_the_op_is_declared_with_its_cuda_half():
    op = attention.attn_inplace
    assert op.capture_safe and op.warm_up is attention.warm_up
