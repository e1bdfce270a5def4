"""Errors of CUDA in words; no device is needed."""

from __future__ import annotations

import pytest
import torch

from runners.cuda import driver as cuda_driver
from runners.cuda.faults import translated
from runners.errors import (
    DeviceCrossing,
    DriverCallFailed,
    LegacyStream,
    OtherCapture,
    OutOfDeviceMemory,
    RandomDraw,
    UnjoinedStream,
    WaitForDevice,
)


def raise_as_translated(text: str) -> None:
    """Raises an error of CUDA from a user's line, and what it is translated to."""
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        found = translated(error, "segment 3 (model.layers.2)")
        assert found is not None
        raise found from error


def test_an_error_of_cuda_is_told_in_words_with_the_users_line() -> None:
    with pytest.raises(WaitForDevice) as caught:
        raise_as_translated("CUDA error: operation not permitted when stream is capturing")
    message = str(caught.value)
    assert message.startswith("segment 3 (model.layers.2): expected") and "a wait for the device" in message
    assert "test_cuda_faults.py:" in message and "`raise RuntimeError(text)`" in message
    assert "Rule:" in message and "Fix: " in message
    with pytest.raises(UnjoinedStream, match="not joined again"):
        raise_as_translated("CUDA error: capturing stream has unjoined work")
    with pytest.raises(LegacyStream, match="legacy"):
        raise_as_translated("operation would make the legacy stream depend on a capturing blocking stream")
    with pytest.raises(RandomDraw, match="random numbers"):
        raise_as_translated("Attempt to increase offset for a CUDA generator not in capture mode.")
    with pytest.raises(OtherCapture, match="another capture"):
        raise_as_translated("CUDA error: dependency created on uncaptured work in another stream")
    with pytest.raises(DeviceCrossing, match="another device"):
        raise_as_translated("Cannot copy between CPU and CUDA tensors unless the CPU tensor is pinned.")


def test_an_error_that_is_not_recognised_passes_through() -> None:
    assert translated(RuntimeError("shape '[3]' is invalid for input of size 4"), "s") is None
    assert translated(KeyError("operation not permitted when stream is capturing"), "s") is None
    memory = translated(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."), "s")
    assert type(memory) is OutOfDeviceMemory and "Tried to allocate 20.00 GiB" in str(memory)


def test_the_driver_is_not_asked_for_before_it_is_needed() -> None:
    """Importing the engine works where there is no driver."""
    assert callable(cuda_driver.restart_capture)
    if not torch.cuda.is_available():
        with pytest.raises(OSError):
            cuda_driver.capture_status(0)


def test_a_failed_call_of_the_driver_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_call", lambda name, *arguments: 700)
    with pytest.raises(DriverCallFailed, match="cuStreamIsCapturing.*error 700"):
        cuda_driver.capture_status(0)
