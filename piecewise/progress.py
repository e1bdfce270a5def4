"""A progress bar for captures, which take seconds each; silent where the output is no terminal."""

from __future__ import annotations

from typing import Any


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
