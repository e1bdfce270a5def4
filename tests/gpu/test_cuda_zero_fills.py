"""[I2, I3] On real graphs: memory whose padding is proven inert is not filled, whatever the pool held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_models import compiled, inputs, make
from inspection import inspect
from torch import Tensor

from piecewise.cut.split import ZeroFills
from runners.cuda import pool as cuda_pool

pytestmark = pytest.mark.gpu

LAYERS = 3
# In float32: NaN, about 1e38, a denormal; each also a large or a negative integer.
GARBAGE = {"nan": 0x7FFF, "huge": 0x7F00, "tiny": 0x0001, "negative": -0x0001}


def num_nodes(graphed: Any, bucket: int = 16) -> int:
    runners = inspect(graphed).runners
    return sum(runner.graph_for(bucket).num_ops for runner in runners)


@pytest.mark.parametrize("lowering, fusions", [("eager", ()), ("eager", ("auto",)), ("inductor", ("auto",))])
def test_one_kernel_less_per_layer(monkeypatch: pytest.MonkeyPatch, lowering: str, fusions: Any) -> None:
    graphed, report = compiled(make(num_layers=LAYERS), lowering=lowering, fusions=fusions)
    assert report.ok and graphed.report().plans[0].fills == {"needless": LAYERS}

    def keeps(self: ZeroFills, node: Any, **rest: Any) -> bool:
        self.found["all are kept"] += 1
        return True

    with monkeypatch.context() as patch:
        patch.setattr(ZeroFills, "needs", keeps)
        filled, report = compiled(make(num_layers=LAYERS), lowering=lowering, fusions=fusions)
    assert report.ok and filled.report().plans[0].fills == {"all are kept": LAYERS}
    fewer = num_nodes(filled) - num_nodes(graphed)
    # Inductor may fill in a kernel that it has anyway.
    assert fewer == LAYERS if lowering == "eager" else 0 <= fewer <= LAYERS


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_whatever_the_pool_held_real_rows_are_the_same(
    monkeypatch: pytest.MonkeyPatch, lowering: str, garbage: str
) -> None:
    monkeypatch.setattr(cuda_pool, "_GARBAGE_WORD", GARBAGE[garbage])
    graphed, report = compiled(make(num_layers=LAYERS), lowering=lowering)
    assert report.ok
    for n in (2, 5, 9, 31):
        args = inputs(n)
        found: list[Tensor] = []
        with torch.no_grad():
            for _ in range(2):
                inspect(graphed).pool.overwrite_with_garbage()
                found.append(graphed(*args))
        assert torch.equal(*found) and bool(found[0].isfinite().all())
        verified = graphed.verify(*args)
        assert verified.ok, verified


def test_looked_up_by_an_index_made_of_it() -> None:
    """An index of any range is eager and sees real rows; one that its op bounds may be made of garbage."""
    table = torch.randn(50, 64, device="cuda")

    def converted(x: Tensor) -> Tensor:
        size = torch.nan_to_num(x).abs()
        index = torch.where(size >= 1e4, 0.0, size).long()
        return x + table[index[:, 0], : x.shape[1]]

    def chosen(x: Tensor) -> Tensor:
        return x + table[x[:, :50].argmax(-1), : x.shape[1]]

    for inner, num_eager in ((converted, LAYERS), (chosen, 0)):
        graphed, report = compiled(make(num_layers=LAYERS, inner=inner))
        plan = graphed.report().plans[0]
        assert report.ok and plan.fills == {"needless": LAYERS}
        assert plan.count("eager") == num_eager
        verified = graphed.verify(*inputs(5))
        assert verified.ok, verified
