"""Progress bars, silent where the output is no terminal: for captures, which take seconds each, and for work
that may."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


def progress_bar(total: int, *, enabled: bool) -> Any:
    return _bar(total=total, enabled=enabled and total > 1)


def _bar(*, enabled: bool, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(**options, leave=False, disable=None if enabled else True)  # None: as the output is


@contextmanager
def steps_bar(steps: Sequence[str], *, enabled: bool) -> Iterator[Callable[[], None]]:
    """A bar over named steps; gives what is called when the next one begins."""
    names = iter(enumerate(steps))
    with closing(progress_bar(len(steps), enabled=enabled)) as bar:

        def begin() -> None:
            position, name = next(names)
            bar.set_description(name)
            bar.update(1 if position else 0)

        yield begin


class DelayedBars:
    """Progress bars that show up only where the work takes more than a second, on a terminal."""

    def __init__(self, *, enabled: bool) -> None:
        self._options: dict[str, Any] = {"enabled": enabled, "delay": 1}

    def over(self, items: Iterable[Item], what: str, unit: str) -> Iterable[Item]:
        return _bar(iterable=items, desc=what, unit=f" {unit}", **self._options)

    @contextmanager
    def counting(self, total: int, what: str, unit: str) -> Iterator[Callable[[int], object]]:
        """Gives what is told how many more items are done."""
        with _bar(total=total, desc=what, unit=f" {unit}", **self._options) as bar:
            yield bar.update
