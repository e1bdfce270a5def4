"""Adds to pytest what tests of graphed models need; an installed `piecewise-prefill` loads it by itself.

The fixture `no_fallbacks` fails the test if a call of any graphed model ran eagerly in it, except for reasons
given to `no_fallbacks.allow(code)`. The fixture `assert_graphed` is the function of that name. The marker
`piecewise_gpu` skips a test, with the reason, where torch finds no CUDA device.

A test that uses none of these pays nothing, and torch is imported for those that do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import piecewise
from runners.stats import CallStats, FallbackReason

MARKER = "piecewise_gpu"


class Fallbacks:
    """Counts, while a test runs, the calls that ran eagerly, by the code of their reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._explained: dict[str, str] = {}
        self._allowed: set[str] = set()

    def allow(self, *codes: str) -> None:
        """Lets calls run eagerly for these reasons; raises ValueError for an unknown code."""
        known = {reason.value for reason in FallbackReason}
        if unknown := set(codes) - known:
            raise ValueError(
                f"expected codes of {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}"
            )
        self._allowed |= set(codes)

    def note(self, reason: FallbackReason) -> None:
        self.counts[reason.value] += 1
        self._explained[reason.value] = f"{reason.explanation} {reason.fix}"

    def problems(self) -> list[str]:
        return [
            f"{count} calls ran eagerly, {code}: {self._explained[code]}"
            for code, count in self.counts.items()
            if code not in self._allowed
        ]


_FALLBACKS = pytest.StashKey[Fallbacks]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"{MARKER}: needs a CUDA device, and is skipped where torch finds none"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker(MARKER) is not None:
        torch = pytest.importorskip("torch", reason=f"{MARKER}: torch is not installed")
        if not torch.cuda.is_available():
            pytest.skip(f"{MARKER}: torch finds no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield
    found = item.stash.get(_FALLBACKS, None)
    if found is not None and (problems := found.problems()):
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture
def no_fallbacks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fallbacks:
    """Fails the test if a call of a graphed model ran eagerly in it."""
    found = request.node.stash[_FALLBACKS] = Fallbacks()
    count = CallStats.count_eager

    def count_and_note(stats: CallStats, reason: FallbackReason) -> None:
        count(stats, reason)
        found.note(reason)

    monkeypatch.setattr(CallStats, "count_eager", count_and_note)
    return found


@pytest.fixture
def assert_graphed() -> Callable[..., Any]:
    """Returns `piecewise.assert_graphed`."""
    return piecewise.assert_graphed
