"""See how a model would be cut, before anything is captured.

Three layers, each with one in-place attention op, give three boundary segments with a graph segment before,
between and after them. The plan is data: segments with a kind, a number of ops and a reason.
"""

import torch
from torch import nn

import boundary_ops
import piecewise

HIDDEN, LAYERS = 32, 3


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Single-head causal attention over one sequence's rows, [num_tokens, hidden], written into `out`."""
    mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~mask, float("-inf"))
    out.copy_(scores.softmax(-1) @ v)


attention = boundary_ops.define(
    "example01::causal_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()",
    causal_attention,
    token_args={"q": 0, "k": 0, "v": 0, "out": 0},
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.project = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        out = torch.empty_like(q)
        attention(q, k, v, out)
        return x + self.project(out)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).eval()
    graphed = piecewise.compile(model, buckets=[16, 32])
    x = torch.randn(12, HIDDEN)
    with torch.no_grad():
        plan = graphed.explain(x)
        print(plan)
        kinds = [segment.kind for segment in plan.segments]
        assert kinds == ["graph"] + ["boundary", "graph"] * LAYERS, kinds

        # Nothing was captured, so the call runs eagerly: the same result, and the reason is counted.
        torch.testing.assert_close(graphed(x), model(x), rtol=0, atol=0)
    assert graphed.stats.replays == 0 and graphed.stats.eager_calls == 1
    print(f"{len(kinds)} segments; the uncaptured call equals the model's")


if __name__ == "__main__":
    main()
