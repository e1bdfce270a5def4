"""The private names of torch that run time uses, on the installed version."""

from __future__ import annotations

import pytest
import torch

from runners import _torch

ops = torch.ops.aten


def test_copy_each_copies_lists() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    _torch.copy_each(targets, [torch.ones(2), torch.full((3,), 2.0)])
    assert [target.tolist() for target in targets] == [[1.0] * 2, [2.0] * 3]


def test_a_tensor_guard_compares_geometry_and_tells_tensors_apart() -> None:
    one, other = torch.ones(2, 3), torch.ones(2, 3)
    guard = _torch.tensor_guard([one, other])
    assert guard.check(one, other) and not guard.check(one, one)
    assert not guard.check(one.T.contiguous(), other) and not guard.check(one.double(), other)
    assert _torch.tensor_guard([]) is None


def test_a_storage_at_an_address_owns_nothing() -> None:
    owner = torch.arange(4.0).untyped_storage()
    alias = _torch.storage_at(owner.data_ptr(), owner.device, owner.nbytes())
    assert (alias.data_ptr(), alias.nbytes()) == (owner.data_ptr(), owner.nbytes())
    assert alias._cdata != owner._cdata


def test_ops_below_modes_skip_autograd_and_autocast() -> None:
    x, weight = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.mm.default(x, weight).dtype is torch.bfloat16
        with _torch.without_keys(_torch.keys_above_kernels()):
            product = ops.mm.default(x, weight)
    assert product.dtype is torch.float32 and not product.requires_grad


def test_overloads_and_kernels_are_found() -> None:
    x = torch.ones(2)
    assert _torch.overload_for(ops.add, (x, 1), {}) is ops.add.Tensor
    for call in (_torch.call_boxed, _torch.call_kernel):
        assert call(ops.add.Tensor, (x, x), {"alpha": 2}).tolist() == [3.0, 3.0]
    assert _torch.decomposes(ops.matmul.default) and not _torch.decomposes(ops.mm.default)


def test_modes_can_be_left() -> None:
    class Counts(_torch.TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen += 1
            return func(*args, **(kwargs or {}))

    with Counts() as mode, _torch.without_torch_function():
        with _torch.without_modes():
            torch.ones(2).add(1)
        assert mode.seen == 0
        torch.ones(2).add(1)
        assert mode.seen == 2


@pytest.mark.gpu
def test_graphs_are_launched_on_the_current_stream() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    assert _torch.current_raw_stream(device.index) == torch.cuda.current_stream(device).cuda_stream
    _torch.clear_cublas_workspaces()
    x, graph = torch.zeros(4, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    launch = _torch.launch_of(graph)
    launch()
    launch()
    assert x.tolist() == [2.0] * 4
    assert callable(torch._C._cuda_releasePool)
