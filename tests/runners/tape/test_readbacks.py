"""What a recording refuses, by name, with the segment and the source line; and what it must not refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runners.errors import (
    DeviceCrossing,
    HostTensor,
    ReadBack,
    TensorResized,
    Unrecordable,
    UnstridedTensor,
    ValueDependentShape,
)
from runners.tape.tape import TapeEngine, TapeGraph

CPU = torch.device("cpu")
X = torch.arange(6.0).reshape(2, 3)
ROWS = torch.tensor([1, 0])
MASK = torch.tensor([True, False])
ONE = torch.tensor(1)
NUMBERS = np.ones(2, dtype=np.float32)

READ_BACKS: dict[str, tuple[str, Callable[[], object]]] = {
    "item": ("Tensor.item", lambda: ONE.item()),
    "tolist": ("Tensor.tolist", lambda: ROWS.tolist()),
    "numpy": ("Tensor.numpy", lambda: ROWS.numpy()),
    "asarray": ("Tensor.__array__", lambda: np.asarray(ROWS)),
    "numpy operand": ("Tensor.__array__", lambda: X * np.ones(3)),
    "bool": ("Tensor.__bool__", lambda: bool(ONE)),
    "if": ("Tensor.__bool__", lambda: 1 if ONE > 0 else 2),
    "and": ("Tensor.__bool__", lambda: (ONE > 0) and ONE),
    "int": ("Tensor.__int__", lambda: int(ONE)),
    "float": ("Tensor.__float__", lambda: float(ONE)),
    "complex": ("Tensor.__complex__", lambda: complex(ONE)),
    "range": ("Tensor.__index__", lambda: range(ONE)),
    "list index": ("Tensor.__index__", lambda: [1, 2, 3][ONE]),
    "slice bound": ("aten._local_scalar_dense", lambda: X[:ONE]),
    "scalar index": ("aten._local_scalar_dense", lambda: X[ONE]),
    "size": ("aten._local_scalar_dense", lambda: torch.zeros(ONE)),
    "fill value": ("aten._local_scalar_dense", lambda: torch.full((2,), ONE)),
    "arange": ("aten._local_scalar_dense", lambda: torch.arange(ONE)),
    "alpha": ("aten._local_scalar_dense", lambda: torch.add(X, X, alpha=ONE)),
    "contains": ("aten._local_scalar_dense", lambda: 3 in ROWS),
    "equal": ("torch.equal", lambda: torch.equal(X, X)),
    "method equal": ("Tensor.equal", lambda: X.equal(X)),
    "allclose": ("torch.allclose", lambda: torch.allclose(X, X)),
    "is_nonzero": ("torch.is_nonzero", lambda: torch.is_nonzero(ONE)),
    "dlpack": ("Tensor.__dlpack__", lambda: ROWS.__dlpack__()),
    "numpy dlpack": ("Tensor.__dlpack__", lambda: np.from_dlpack(ROWS)),
    "repr": ("Tensor.__repr__", lambda: repr(ROWS)),
    "str": ("Tensor.__repr__", lambda: str(ROWS)),
    "format": ("Tensor.__format__", lambda: f"{ONE}"),
    "deepcopy": ("Tensor.__deepcopy__", lambda: copy.deepcopy(ROWS)),
    "apply_": ("Tensor.apply_", lambda: X.apply_(lambda value: value)),
    "map_": ("Tensor.map_", lambda: X.map_(X, lambda a, b: a)),
    "tensor_split": ("torch.tensor_split", lambda: torch.tensor_split(X, ROWS)),
    "tensordot": ("torch.tensordot", lambda: torch.tensordot(X, X, dims=ROWS)),
    "one_hot": ("aten._local_scalar_dense", lambda: torch.nn.functional.one_hot(ROWS)),
    "opcheck aten": ("aten._local_scalar_dense", lambda: torch.ops.aten._local_scalar_dense(ONE)),
}

VALUE_SHAPES: dict[str, tuple[str, Callable[[], object]]] = {
    "nonzero": ("aten.nonzero", lambda: torch.nonzero(MASK)),
    "argwhere": ("aten.nonzero", lambda: torch.argwhere(MASK)),
    "where": ("aten.nonzero", lambda: torch.where(MASK)),
    "mask": ("aten.index.Tensor", lambda: X[MASK]),
    "full mask": ("aten.index.Tensor", lambda: X[X > 0]),
    "byte mask": ("aten.index.Tensor", lambda: torch.ops.aten.index(X, [MASK.to(torch.uint8)])),
    "masked_select": ("aten.masked_select", lambda: torch.masked_select(X, X > 0)),
    "unique": ("aten._unique2", lambda: torch.unique(ROWS)),
    "unique_consecutive": ("aten.unique_consecutive", lambda: torch.unique_consecutive(ROWS)),
    "bincount": ("aten.bincount", lambda: torch.bincount(ROWS)),
    "repeat_interleave": ("aten.repeat_interleave.Tensor", lambda: torch.repeat_interleave(X, ROWS, dim=0)),
    "masked rows written": ("aten.index_put_", lambda: X.clone().__setitem__(MASK, X[:1])),
    "masked rows from a value": ("aten.index_put_", lambda: X.clone().__setitem__(MASK, X.sum())),
    "inverse": ("aten._linalg_check_errors", lambda: torch.linalg.inv(torch.ones(2, 2) + torch.eye(2))),
}

HOST_TENSORS: dict[str, tuple[str, Callable[[], object]]] = {
    "tensor": ("torch.tensor", lambda: torch.tensor([1, 2])),
    "tensor of a number": ("torch.tensor", lambda: torch.tensor(2.0)),
    "as_tensor": ("torch.as_tensor", lambda: torch.as_tensor([1])),
    "as_tensor of an array": ("torch.as_tensor", lambda: torch.as_tensor(NUMBERS)),
    "asarray": ("torch.asarray", lambda: torch.asarray([1])),
    "from_numpy": ("aten.lift_fresh", lambda: torch.from_numpy(NUMBERS)),
    "Tensor": ("aten.lift_fresh", lambda: torch.Tensor([1, 2])),
    "LongTensor": ("aten.lift_fresh", lambda: torch.LongTensor([1])),
    "new_tensor": ("Tensor.new_tensor", lambda: X.new_tensor([1])),
    "new": ("aten.lift_fresh", lambda: X.new([1.0])),
    "list index": ("aten.lift_fresh", lambda: X[[1, 0]]),
    "array index": ("aten.lift_fresh", lambda: X[np.array([1, 0])]),
}

ALLOWED: dict[str, Callable[[], Any]] = {
    "number by index": lambda: X.clone().index_fill_(0, ROWS, 2.0),
    "number by mask": lambda: _written(MASK, 2.0),
    "number by rows": lambda: _written(ROWS, 2.0),
    "gather": lambda: X[ROWS],
    "row and column": lambda: X[ROWS, ROWS],
    "index_put rows": lambda: _written(ROWS, X.flip(0)),
    "where": lambda: torch.where(X > 1, X, 0.0),
    "masked_fill": lambda: X.masked_fill(X > 1, float("-inf")),
    "one_hot with a size": lambda: torch.nn.functional.one_hot(ROWS, 4),
    "one_hot by name": lambda: torch.nn.functional.one_hot(input=ROWS, num_classes=3),
    "repeat_interleave with a size": lambda: torch.repeat_interleave(X, ROWS, dim=0, output_size=1),
    "repeat_interleave by a number": lambda: torch.repeat_interleave(X, 2, dim=0),
    "nonzero_static": lambda: torch.nonzero_static(MASK, size=3),
    "as_tensor of a tensor": lambda: torch.as_tensor(X) + 1,
    "tensor_split by a number": lambda: torch.tensor_split(X, 2)[0] + 1,
    "tensordot": lambda: torch.tensordot(X, X, dims=2),
    "len and shape": lambda: X + len(X) + X.shape[1] + X.dim() + X.numel(),
    "iteration": lambda: sum(row for row in X),
    "numpy number": lambda: np.float32(2) * X,
    "topk": lambda: X.topk(2).indices,
    "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(X[None], X[None], X[None]),
    "searchsorted": lambda: torch.searchsorted(X, X),
    "assert_async": lambda: (torch._assert_async(ONE > 0), X + 1)[1],
}


def _written(index: Tensor, value: Any) -> Tensor:
    y = X.clone()
    y[index] = value
    return y


def record(fn: Callable[[], Any]) -> TapeGraph:
    engine = TapeEngine()
    return engine.capture(lambda: (fn(),), pool=engine.new_pool(CPU), segment="segment 3 (model.layers.2)")


def check_refused(op: str, kind: type[Unrecordable], fn: Callable[[], object]) -> None:
    with pytest.raises(kind) as caught:
        record(fn)
    message = str(caught.value)
    assert f"segment 3 (model.layers.2), op {op}" in message
    assert str(kind.got).removesuffix("{more}") in message and "Rule:" in message and "Fix:" in message
    assert f"{__file__}:" in message


@pytest.mark.parametrize("case", READ_BACKS)
def test_reading_a_value_back_is_refused(case: str) -> None:
    op, fn = READ_BACKS[case]
    check_refused(op, ReadBack, fn)


@pytest.mark.parametrize(
    ("kind", "op", "fn"),
    [(ValueDependentShape, *each) for each in VALUE_SHAPES.values()]
    + [(HostTensor, *each) for each in HOST_TENSORS.values()]
    + [(UnstridedTensor, "aten._to_sparse", lambda: X.to_sparse())],
)
def test_what_is_made_of_values_or_not_strided_is_refused(
    kind: type[Unrecordable], op: str, fn: Callable[[], object]
) -> None:
    check_refused(op, kind, fn)


@pytest.mark.parametrize("case", ALLOWED)
def test_what_a_device_can_do_alone_is_recorded(case: str) -> None:
    fn = ALLOWED[case]
    graph = record(fn)
    graph.replay()
    assert torch.equal(graph.outputs[0], fn()) and graph.outputs[0].dtype == fn().dtype


def test_the_source_line_is_the_models() -> None:
    def model() -> Tensor:
        limit = ROWS.max().item()  # the culprit
        return X[:limit]

    with pytest.raises(ReadBack) as caught:
        record(model)
    assert "`limit = ROWS.max().item()  # the culprit`" in str(caught.value)


@pytest.mark.parametrize("target", ["meta", torch.device("meta")])
def test_another_device_is_refused(target: Any) -> None:
    check_refused("aten._to_copy", DeviceCrossing, lambda: X.to(target))
    elsewhere = torch.empty(2, 3, device="meta")
    check_refused("aten.copy_", DeviceCrossing, lambda: elsewhere.copy_(X))
    check_refused("aten.copy_", DeviceCrossing, lambda: X.clone().copy_(elsewhere))
    check_refused("aten._to_copy", DeviceCrossing, lambda: elsewhere.to("cpu"))
    check_refused("aten.empty.memory_format", DeviceCrossing, lambda: torch.empty(2, device=target))
    check_refused("aten.add.Tensor", DeviceCrossing, lambda: elsewhere + 1)


def test_resizing_is_refused() -> None:
    out = torch.empty(0)
    for op, fn in (
        ("aten.resize_", lambda: X.clone().resize_(2)),
        ("aten.set_", lambda: X.clone().set_(X)),
        ("aten.add.out", lambda: torch.add(X, 1, out=torch.empty(0))),
        ("aten.add.out", lambda: torch.add(X, 1, out=out)),
    ):
        check_refused(op, TensorResized, fn)
        out.resize_(0)
    with pytest.raises(TensorResized):
        record(lambda: X.clone().resize_(2))


# Kernels of custom ops, where the function mode would be off and the dispatcher's mode too.

LIB = torch.library.Library("readback_test", "DEF")


def _reads(how: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def kernel(x: Tensor) -> Tensor:
        how(x)
        return x + 1

    return kernel


KERNELS: dict[str, tuple[str, str, Callable[[Tensor], object]]] = {
    "item": ("Tensor.item", ReadBack, lambda x: x.sum().item()),
    "tolist": ("Tensor.tolist", ReadBack, lambda x: x.tolist()),
    "numpy": ("Tensor.numpy", ReadBack, lambda x: x.numpy()),
    "bool": ("Tensor.__bool__", ReadBack, lambda x: bool(x.sum() > 0)),
    "slice": ("aten.", ReadBack, lambda x: x[: x.sum().long()]),
    "allclose": ("torch.allclose", ReadBack, lambda x: torch.allclose(x, x)),
    "is_nonzero": ("aten.", ReadBack, lambda x: torch.ops.aten.is_nonzero(x.sum())),
    "where": ("aten.nonzero", ValueDependentShape, lambda x: torch.where(x > 0)),
    "nonzero": ("aten.nonzero", ValueDependentShape, lambda x: x.nonzero()),
    "mask": ("aten.index.Tensor", ValueDependentShape, lambda x: x[x > 0]),
    "tensor": ("torch.tensor", HostTensor, lambda x: torch.tensor([1.0])),
    "list index": ("aten.lift_fresh", HostTensor, lambda x: x[[0]]),
    "nested": ("Tensor.tolist", ReadBack, lambda x: torch.ops.readback_test.tolist_cpu(x)),
}
KEYS = {"cpu": "CPU", "explicit": "CompositeExplicitAutograd", "implicit": "CompositeImplicitAutograd"}
for name, (_, _, how) in KERNELS.items():
    for suffix, key in KEYS.items():
        LIB.define(f"{name.replace(' ', '_')}_{suffix}(Tensor x) -> Tensor")
        LIB.impl(f"{name.replace(' ', '_')}_{suffix}", _reads(how), key)
LIB.define("scalar_fill_(Tensor(a!) x, Tensor mask) -> ()")
LIB.impl("scalar_fill_", lambda x, mask: x.__setitem__(mask, 3.0), "CPU")
LIB.define("kernel_with_defaults.tail(Tensor x, int n=2, *, float scale=1.0, Tensor? add=None) -> Tensor")
LIB.impl(
    "kernel_with_defaults.tail", lambda x, n=2, *, scale=1.0, add=None: x * n * scale + (add or 0), "CPU"
)


@torch.library.custom_op("readback_test::decorated", mutates_args=())
def decorated(x: Tensor) -> Tensor:
    return x * len(x.tolist())


@pytest.mark.parametrize("where", KEYS)
@pytest.mark.parametrize("call", ["packet", "overload"])
@pytest.mark.parametrize("case", KERNELS)
def test_kernels_are_watched_too(case: str, call: str, where: str) -> None:
    op, got, _ = KERNELS[case]
    kernel = getattr(torch.ops.readback_test, f"{case.replace(' ', '_')}_{where}")
    check_refused(op, got, lambda: (kernel if call == "packet" else kernel.default)(X))


def test_kernels_on_inference_tensors_are_watched_too() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
    for suffix in KEYS:
        kernel = getattr(torch.ops.readback_test, f"tolist_{suffix}")
        check_refused("Tensor.tolist", ReadBack, lambda kernel=kernel: kernel(x))
    check_refused("aten.nonzero", ValueDependentShape, lambda: torch.where(x > 0))
    check_refused("aten._local_scalar_dense", ReadBack, lambda: torch.ops.aten.is_nonzero(x[0]))


class Wrapped(Tensor):
    """Calls a custom op from its own dispatch, where no function mode is active."""

    @staticmethod
    def __new__(cls, inner: Tensor, op: Any) -> Any:
        self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        self.inner, self.op = inner, op
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[arg.op(arg.inner) if isinstance(arg, Wrapped) else arg for arg in args])


@pytest.mark.parametrize("where", KEYS)
def test_kernels_called_by_a_subclass_are_watched_too(where: str) -> None:
    wrapped = Wrapped(X, getattr(torch.ops.readback_test, f"tolist_{where}"))
    check_refused("Tensor.tolist", ReadBack, lambda: torch.mul(wrapped, 2))


def test_decorated_custom_ops_are_watched_too() -> None:
    check_refused("Tensor.tolist", ReadBack, lambda: decorated(X))


def test_an_autograd_function_is_watched_too() -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * len(x.tolist())

    check_refused("Tensor.tolist", ReadBack, lambda: Reads.apply(X))


def test_a_clean_kernel_is_one_op() -> None:
    x, mask = torch.ones(3), torch.tensor([True, False, True])

    def fn() -> tuple[Tensor, ...]:
        y = torch.ops.readback_test.kernel_with_defaults(x, 3, scale=2.0)
        torch.ops.readback_test.scalar_fill_(y, mask)
        return y, torch.ops.readback_test.kernel_with_defaults(x)

    engine = TapeEngine()
    graph = engine.capture(fn, pool=engine.new_pool(CPU), segment="segment 1")
    assert graph.num_ops == 3
    x.fill_(2)
    graph.replay()
    assert graph.outputs[0].tolist() == [3.0, 12.0, 3.0] and graph.outputs[1].tolist() == [4.0] * 3


def test_reading_is_free_outside_of_captures() -> None:
    with pytest.raises(ReadBack):
        record(lambda: X.tolist())
    assert ROWS.tolist() == [1, 0] and torch.tensor([1]).item() == 1 and X[X > 4].tolist() == [5.0]
