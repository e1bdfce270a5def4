"""Shows progress bars, which are silent where the output is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any


def progress_bar(total: int, *, enabled: bool) -> Any:
    """Returns a bar over `total` things that take seconds each."""
    return _bar(None, enabled=enabled and total > 1, total=total)


def delayed_bar(
    items: Iterable[Any] | None, what: str, unit: str, *, enabled: bool, total: int | None = None
) -> Any:
    """Returns a bar over items, which shows up only where the work takes more than a second."""
    return _bar(items, enabled=enabled, desc=what, unit=f" {unit}", total=total, delay=1)


def _bar(items: Iterable[Any] | None, *, enabled: bool, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(items, leave=False, disable=None if enabled else True, **options)  # None: as the output is


@contextmanager
def steps_bar(steps: Sequence[str], *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows a bar over named steps; gives what is called when the next one begins."""
    names = iter(enumerate(steps))
    with closing(progress_bar(len(steps), enabled=enabled)) as bar:

        def begin() -> None:
            position, name = next(names)
            bar.set_description(name)
            bar.update(1 if position else 0)

        yield begin
