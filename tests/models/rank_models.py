"""One rank of two that share a model's all-reduce: `python rank_models.py RANK FILE`; used by test_ranks.py.

Rank 0 replays at a bucket of 8, rank 1 runs the same calls eagerly. A collective inside a graph would have 8
rows on one side and fewer on the other.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import boundary_ops
import piecewise

SIZES = (5, 3, 8, 7)


def _mix(x, out):
    out.copy_(x.cumsum(0))


mix = boundary_ops.define("rank_models::mix(Tensor x, Tensor(a!) out) -> ()", _mix)


class Model(nn.Module):
    """Linear, boundary op, linear; the result is summed over ranks."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        out = torch.empty_like(x)
        mix(x, out)
        out = self.last(out)
        dist.all_reduce(out)
        return out + x


def reasons_of(graphed):
    (plan,) = graphed.report().plans
    return plan.reasons()


def main():
    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = Model().eval()
    graphed = piecewise.compile(model, buckets=[8], progress=False)
    with torch.no_grad():
        assert graphed.capture(torch.randn(4, 8)).ok
        assert reasons_of(graphed)["collective"] >= 1, reasons_of(graphed)
        for n in SIZES:
            x = torch.randn(n, 8) + rank
            expected = model(x)
            if rank == 0:
                found = graphed(x)
            else:
                with piecewise.eager_only():
                    found = graphed(x)
            torch.testing.assert_close(found, expected)
    assert graphed.stats.replays == (len(SIZES) if rank == 0 else 0), graphed.stats.reasons
    dist.destroy_process_group()
    print("rank", rank, "done")


if __name__ == "__main__":
    main()
