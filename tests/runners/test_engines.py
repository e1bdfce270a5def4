"""Which graph engine serves a device, and what engines know of devices."""

from __future__ import annotations

import pytest
import torch

from runners.engines import ENGINE_NAMES, engine_for, native_engine
from runners.errors import EngineOfAnotherDevice, UnknownEngine

CPU = torch.device("cpu")


def test_engine_for_names_what_there_is() -> None:
    assert engine_for("auto", "cpu").name == engine_for("tape", CPU).name == "tape"
    assert ENGINE_NAMES[:3] == ("auto", "tape", "cuda")
    with pytest.raises(UnknownEngine, match="'auto', 'tape'.* or .*'metal'"):
        engine_for("metal", CPU)


def test_a_real_graph_engine_needs_a_cuda_device() -> None:
    assert engine_for("cuda", "cuda:0") is engine_for("auto", "cuda") is native_engine("cuda")
    assert engine_for("tape", "cuda").name == native_engine("meta").name == "tape"
    with pytest.raises(EngineOfAnotherDevice, match="expected 'auto'.* 'tape'.* got 'cuda'"):
        engine_for("cuda", CPU)


def test_an_engine_works_through_its_protocol_only() -> None:
    engine = engine_for("auto", CPU)
    pool = engine.new_pool(CPU)
    x = torch.ones(3)
    graph = engine.capture(lambda: [x + 1], pool=pool, segment="segment 1")
    pool.end_bucket()
    pool.overwrite_with_garbage()
    graph.replay()
    assert graph.outputs[0].tolist() == [2.0] * 3 and graph.num_ops == 1 and not graph.is_empty
    graph.reset()
    pool.release()


def test_the_engine_of_a_cpu_has_nothing_to_wait_for_and_keeps_the_hosts_generator() -> None:
    engine = native_engine(CPU)
    engine.synchronize(CPU)
    assert engine.free_memory(CPU) is None and not engine.has_tf32()
    assert (engine.device_type, engine.has_triton, engine.dies_of_bad_index) == (None, False, False)
    before = torch.get_rng_state()
    with engine.fork_random_state(CPU):
        torch.randn(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_engine_of_cuda_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, waits = native_engine("cuda"), []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    device = torch.device("cuda", 1)
    engine.synchronize(device)
    assert engine.free_memory(device) == (130, 1000) and waits == [device]
    assert (engine.device_type, engine.has_triton, engine.dies_of_bad_index) == ("cuda", True, True)
    assert engine.has_tf32() == torch.backends.cuda.matmul.allow_tf32
