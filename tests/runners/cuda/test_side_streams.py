"""Side streams of CUDA on fake streams: who waits for whom, and which stream is current afterwards."""

from __future__ import annotations

import contextlib

import pytest
import torch

from runners.cuda.side_streams import CudaStreams
from runners.engine import Streams

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self, number, log):
        self.cuda_stream, self.log = number, log

    def wait_stream(self, other):
        self.log.append((self.cuda_stream, "waits for", other.cuda_stream))


class Machine:
    """Streams numbered as torch hands them out: in turn, from a few."""

    def __init__(self, monkeypatch):
        if torch.cuda.is_available():
            pytest.skip("replaces torch.cuda, which is in use here")
        self.log, self.made, self.device = [], 0, "another"
        self.caller = self.current = Stream("caller", self.log)
        monkeypatch.setattr(torch.cuda, "Stream", self.next_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", self.set_stream)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)

    def next_stream(self, device):
        self.made += 1
        return Stream(self.made % 4, self.log)

    def set_stream(self, stream):
        self.current, self.device = stream, DEVICE  # torch changes the device with the stream

    @contextlib.contextmanager
    def on_device(self, device):
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def test_each_lane_waits_for_the_fork_and_the_join_for_each_lane(machine):
    streams = CudaStreams(DEVICE, Stream("capture", machine.log))
    with streams.opened():
        streams.fork(3)
        assert machine.current is machine.caller
        streams.enter(2)
        second = machine.current
        streams.enter(1)
        first = machine.current
        assert len({machine.caller, first, second}) == 3
        streams.enter(0)
        assert machine.current is machine.caller
        streams.join(torch.zeros(1))
        streams.fork(2)
        streams.enter(1)
        assert machine.current is first, "the same streams again [I9]"
        streams.join()
        assert machine.current is machine.caller
    one, two = first.cuda_stream, second.cuda_stream
    forked = [(one, "waits for", "caller"), (two, "waits for", "caller")]
    joined = [("caller", "waits for", one), ("caller", "waits for", two)]
    assert machine.log == [*forked, *joined, forked[0], joined[0]]


def test_side_streams_are_neither_each_other_nor_the_captures(machine):
    streams = CudaStreams(DEVICE, Stream(2, machine.log))
    with streams.opened():
        streams.fork(4)
        found = []
        for stream in range(1, 4):
            streams.enter(stream)
            found.append(machine.current.cuda_stream)
        streams.join()
    assert sorted(found) == [0, 1, 3]


@pytest.mark.parametrize("is_invalidated", [False, True], ids=["joined", "capture invalidated"])
def test_an_error_between_fork_and_join_leaves_the_callers_stream_and_device(machine, is_invalidated):
    def refuse(other):
        raise RuntimeError("operation failed due to a previous error during capture")

    streams = CudaStreams(DEVICE, Stream("capture", machine.log))
    with pytest.raises(ZeroDivisionError), streams.opened():
        streams.fork(2)
        streams.enter(1)
        machine.log.clear()
        if is_invalidated:
            machine.caller.wait_stream = refuse
        raise ZeroDivisionError
    assert machine.current is machine.caller and machine.device == "another"
    assert machine.log == ([] if is_invalidated else [("caller", "waits for", 1)])
    machine.log.clear()
    with streams.opened():
        pass
    assert machine.log == [], "nothing is left open"


def test_one_lane_takes_every_command_and_does_nothing():
    streams = Streams()
    with streams.opened():
        streams.fork(3)
        streams.enter(2)
        streams.join(torch.zeros(1))
