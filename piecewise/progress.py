"""Progress bars, silent where the output is no terminal: for captures, which take seconds each, and for work
that may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


class _NoBar:
    def set_description(self, text: str) -> None: ...
    def set_postfix_str(self, text: str) -> None: ...
    def update(self, count: int) -> None: ...
    def close(self) -> None: ...


def progress_bar(total: int, *, enabled: bool) -> Any:
    if not enabled or total < 2:
        return _NoBar()
    from tqdm import tqdm

    return tqdm(total=total, disable=None, leave=False)  # None: silent where the output is no terminal


@contextmanager
def steps_bar(steps: Sequence[str], *, enabled: bool) -> Iterator[Callable[[], None]]:
    """A bar over named steps; gives what is called when the next one begins."""
    bar, names = progress_bar(len(steps), enabled=enabled), iter(enumerate(steps))

    def begin() -> None:
        position, name = next(names)
        bar.set_description(name)
        bar.update(1 if position else 0)

    try:
        yield begin
    finally:
        bar.close()


class DelayedBars:
    """Progress bars that show up only where the work takes more than a second, on a terminal."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def over(self, items: Iterable[Item], what: str, unit: str) -> Iterable[Item]:
        if not self._enabled:
            return items
        from tqdm import tqdm

        return tqdm(items, desc=what, unit=f" {unit}", delay=1, leave=False, disable=None)

    @contextmanager
    def counting(self, total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
        """Gives what is told how many more items are done."""
        if not self._enabled:
            yield lambda count: None
            return
        from tqdm import tqdm

        with tqdm(total=total, desc=what, unit=f" {unit}", delay=1, leave=False, disable=None) as bar:
            yield bar.update
