"""Shows progress bars if the output is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any


def progress_bar(total: int, *, enabled: bool) -> Any:
    """Returns a bar over `total` items that take seconds each."""
    return _bar(None, enabled=enabled and total > 1, total=total)


def delayed_bar(
    items: Iterable[Any] | None, what: str, unit: str, *, enabled: bool, total: int | None = None
) -> Any:
    """Returns a bar over items that appears only after a second of work."""
    return _bar(items, enabled=enabled, desc=what, unit=f" {unit}", total=total, delay=1)


def _bar(items: Iterable[Any] | None, *, enabled: bool, **options: Any) -> Any:
    from tqdm import tqdm

    return tqdm(items, leave=False, disable=None if enabled else True, **options)  # None: only on a terminal


@contextmanager
def steps_bar(steps: Sequence[str], *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Shows a bar over named steps; yields a function to call when the next step begins."""
    names = iter(enumerate(steps))
    with closing(progress_bar(len(steps), enabled=enabled)) as bar:

        def begin() -> None:
            position, name = next(names)
            bar.set_description(name)
            bar.update(1 if position else 0)

        yield begin
