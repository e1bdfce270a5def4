"""What the package uses of torch's inside: each name does what it is used for in the installed torch."""

from __future__ import annotations

import pytest
import torch

from boundary_ops import _torch


def test_a_schema_tells_its_name_arguments_and_what_is_written():
    schema = _torch.parse_schema("ns::op.over(Tensor x, Tensor(a!) out, int n=3) -> ()")
    assert (schema.name, schema.overload_name) == ("ns::op", "over") and list(schema.returns) == []
    assert [argument.name for argument in schema.arguments] == ["x", "out", "n"]
    assert [str(argument.type) for argument in schema.arguments] == ["Tensor", "Tensor", "int"]
    assert [bool(argument.alias_info and argument.alias_info.is_write) for argument in schema.arguments] == [
        False, True, False,
    ]  # fmt: skip
    for wrong in ("ns::op(Tensor x", "", "ns::op(Tensr x) -> ()"):
        with pytest.raises((RuntimeError, TypeError)):
            _torch.parse_schema(wrong)


def test_the_dispatcher_names_all_ops_with_their_overloads():
    names = _torch.op_names()
    assert {"aten::add.Tensor", "aten::relu", "piecewise::attn_inplace"} <= names
    assert "nowhere_at_all::zzzz" not in names


def test_ops_and_packets_are_of_these_types():
    assert isinstance(torch.ops.aten.add.Tensor, _torch.OpOverload)
    assert isinstance(torch.ops.aten.add, _torch.OpOverloadPacket)


def test_check_raises_with_the_message():
    _torch.check(True, lambda: "not shown")
    with pytest.raises(RuntimeError, match="two sizes"):
        _torch.check(False, lambda: "two sizes")


@pytest.mark.gpu
def test_the_short_ways_to_the_stream_and_the_device_are_those_of_torch_cuda():
    assert _torch.raw_device is not None and _torch.raw_stream is not None
    with torch.cuda.stream(torch.cuda.Stream()):
        device = torch.cuda.current_device()
        assert _torch.raw_device() == device
        assert _torch.raw_stream(device) == torch.cuda.current_stream().cuda_stream
