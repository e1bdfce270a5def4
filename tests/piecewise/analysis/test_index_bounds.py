"""Index operands are refused where a CPU would refuse them, and pass where it would run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library

from piecewise.analysis.index_bounds import CheckedIndices, check_indices

TABLE = torch.arange(12.0).view(4, 3)
_library = Library("index_bounds_test", "DEF")
_library.define("pick(Tensor table, Tensor index) -> Tensor")
_library.impl("pick", lambda table, index: table[index], "CPU")

CALLS = {
    "embedding": lambda i: F.embedding(i, TABLE),
    "index": lambda i: TABLE[i],
    "index of the second dim": lambda i: TABLE.T.contiguous()[:, i],
    "index beside a mask": lambda i: TABLE.T.contiguous()[torch.tensor([True, False, True]), i],
    "index_put": lambda i: TABLE.clone().index_put_((i,), torch.zeros(3)),
    "setitem": lambda i: TABLE.clone().__setitem__(i, 0.0),
    "index_select": lambda i: TABLE.index_select(0, i),
    "index_select of a negative dim": lambda i: TABLE.T.contiguous().index_select(-1, i),
    "index_add": lambda i: TABLE.clone().index_add_(0, i, torch.ones(i.numel(), 3)),
    "index_copy": lambda i: TABLE.clone().index_copy_(0, i, torch.ones(i.numel(), 3)),
    "index_fill": lambda i: TABLE.clone().index_fill_(0, i, 1.0),
    "gather": lambda i: TABLE.gather(0, i[:, None]),
    "take_along_dim": lambda i: TABLE.take_along_dim(i[:, None], dim=0),
    "scatter": lambda i: TABLE.clone().scatter_(0, i[:, None], 1.0),
    "scatter_add": lambda i: TABLE.clone().scatter_add_(0, i[:, None], torch.ones(i.numel(), 1)),
    "scatter_reduce": lambda i: TABLE.scatter_reduce(0, i[:, None], torch.ones(i.numel(), 1), "amax"),
    "take": lambda i: TABLE[:, 0].contiguous().take(i),
    "put": lambda i: TABLE[:, 0].clone().put_(i, torch.ones(i.numel())),
    "custom op": lambda i: torch.ops.index_bounds_test.pick(TABLE, i),
}


def test_other_checks_of_values_are_made_ahead_of_the_kernel():
    ones = torch.ones(3)
    with CheckedIndices():
        torch.ops.aten._assert_async(torch.tensor(True))
        torch.multinomial(ones, 2)
        for call in (
            lambda: torch.ops.aten._assert_async(torch.tensor(False)),
            lambda: torch.multinomial(-ones, 2),
            lambda: torch.multinomial(ones * float("nan"), 2),
            lambda: torch.multinomial(ones * 0, 2),
            lambda: torch.bernoulli(ones * 2),
            lambda: torch.zeros(3).bernoulli_(-ones),
            lambda: F.binary_cross_entropy(ones * float("nan"), ones),
            lambda: torch.repeat_interleave(torch.tensor([1, -1])),
            lambda: torch.poisson(-ones),
        ):
            with pytest.raises(RuntimeError, match="its check of values fails"):
                call()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("index", [(0, 3), (3, 0), (-1, 2), (4, 0), (-5, 1), (2**40, 0), (-(2**40), 0)])
def test_the_checker_agrees_with_the_cpu(name: str, index: tuple[int, int]) -> None:
    def outcome(*, checked: bool) -> object:
        try:
            if not checked:
                return CALLS[name](torch.tensor(index))
            with CheckedIndices():
                return CALLS[name](torch.tensor(index))
        except (IndexError, RuntimeError) as error:
            return error

    expected, found = outcome(checked=False), outcome(checked=True)
    assert isinstance(found, IndexError) is isinstance(expected, Exception)
    if all(0 <= i < 4 for i in index):
        assert not isinstance(expected, Exception)
    if any(i not in range(-4, 4) for i in index) and name != "take_along_dim":  # which wraps them round
        assert isinstance(expected, Exception)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(expected, found)


def test_the_check_comes_before_the_kernel() -> None:
    """Called with the op's arguments alone: no kernel runs, so CUDA's assertion would not be reached."""
    with pytest.raises(IndexError, match="embedding: index 9 is out of range for 4 entries"):
        check_indices(torch.ops.aten.embedding.default, (TABLE, torch.tensor([1, 9])), {})
    with pytest.raises(IndexError, match="gather: index -1"):
        check_indices(torch.ops.aten.gather.default, (TABLE, 0), {"index": torch.tensor([[-1]])})
    check_indices(torch.ops.aten.embedding.default, (TABLE, torch.tensor([1, 3])), {})
    check_indices(torch.ops.aten.embedding.default, (TABLE, torch.tensor([], dtype=torch.int64)), {})
    check_indices(torch.ops.aten.add.Tensor, (TABLE, TABLE), {})


def test_an_ignored_target_passes() -> None:
    scores = torch.randn(3, 5)
    with CheckedIndices():
        F.cross_entropy(scores, torch.tensor([0, -100, 4]))
        with pytest.raises(IndexError, match="nll_loss_forward: index 5"):
            F.cross_entropy(scores, torch.tensor([0, 5, 4]))
