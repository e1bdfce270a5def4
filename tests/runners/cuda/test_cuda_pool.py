"""What a pool hands out: aliases that own no memory. No device is needed."""

from __future__ import annotations

import gc

import torch
from torch import Tensor

from runners.cuda.pool import AliasBook


def test_aliases_share_memory_own_none_of_it_and_keep_geometry() -> None:
    base = torch.arange(24.0)
    outside = torch.zeros(3)
    owned = {base.untyped_storage().data_ptr()}
    book = AliasBook(lambda address: address in owned)
    strided, first = base.view(4, 6)[1:, ::2], book.aliased(base)
    second = book.aliased(strided)
    assert first is not base and first.data_ptr() == base.data_ptr() and torch.equal(first, base)
    assert second.shape == strided.shape and second.stride() == strided.stride()
    assert second.data_ptr() == strided.data_ptr()
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata != base.untyped_storage()._cdata
    assert book.aliased(second) is second and book.aliased(second[0]).data_ptr() == second.data_ptr()
    for passed in (outside, None, 3, torch.nn.Parameter(outside)):
        assert book.aliased(passed) is passed
    assert len(book) == 1
    first.add_(1)
    assert base[0] == 1.0


def test_only_the_book_keeps_the_memory() -> None:
    released: list[int] = []

    class Owner:
        """Counts when a storage goes: the array behind it is collected with it."""

        def __init__(self) -> None:
            import weakref

            import numpy

            self.array = numpy.zeros(8)
            weakref.finalize(self.array, released.append, 1)

        def tensor(self) -> Tensor:
            return torch.from_numpy(self.array)

    book = AliasBook(lambda address: True)
    owners = [Owner(), Owner(), Owner()]
    aliases = [book.aliased(owner.tensor()) for owner in owners]
    del owners
    gc.collect()
    assert released == [] and len(book) == 3
    book.keep_only([aliases[1][2:]])
    gc.collect()
    assert len(released) == 2 and len(book) == 1
    book.clear()
    gc.collect()
    assert len(released) == 3
