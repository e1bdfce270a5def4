"""Draws a plan: the steps, the buckets, and the padding by token count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from piecewise.tools.buckets.steps import Histogram
from piecewise.tools.plot import add_legend, add_notes, label_axis, line_style, new_panels


def plan_figure(
    steps: Histogram,
    lists: Mapping[str, tuple[int, ...]],
    *,
    title: str,
    unit: str,
    notes: Iterable[str] = (),
) -> Any:
    """Draws the steps with the plan's buckets, below them each list's padding, and that over the plan's.

    Args:
        lists: bucket lists by name; the last is the plan.
        unit: what a step's size counts.
        notes: lines below the picture.
    Raises:
        NoMatplotlib: it is not installed.
    """
    figure, (above, middle, below) = new_panels(title, (2, 2, 1.5))
    plan = list(lists.values())[-1]
    edges = np.linspace(0.5, plan[-1] + 0.5, min(plan[-1], 128) + 1)
    heights, _, _ = above.hist(steps.sizes, bins=edges, weights=steps.counts, color="0.7", label="steps")
    for index, bucket in enumerate(plan):
        label = "the plan's buckets" if index == 0 else None
        above.axvline(bucket, color="#D55E00", linewidth=0.8, linestyle="--", label=label)
    label_axis(above, "y", "steps", heights)
    sizes, of_plan = _padding(steps, plan)
    # The first few padded tokens make any ratio.
    clear = of_plan > 0.05 * of_plan.max(initial=0)
    ratios: list[float] = []
    for index, (name, buckets) in enumerate(lists.items()):
        inside, padding = _padding(steps, buckets)
        # Few markers on each line, at other places than on the next: equal lines hide each other's.
        style = line_style(index) | {"markevery": (0.02 * index, 0.1)}
        middle.plot(inside, 100 * padding, label=f"{name}: {len(buckets)} graphs", **style)
        if buckets is not plan:
            shared = np.flatnonzero(clear & np.isin(sizes, inside))  # a list may end below the plan's range
            ratio = padding[np.searchsorted(inside, sizes[shared])] / of_plan[shared]
            below.plot(sizes[shared], ratio, label=f"{name} ÷ plan", **style)
            ratios += ratio.tolist()
    below.axhline(1, color="0.4", linewidth=0.8, label="plan")
    label_axis(middle, "y", f"% of {unit} padded,\nup to this size", [])
    label_axis(below, "y", "ratio of paddings", ratios)
    label_axis(below, "x", f"{unit} in a step", [])
    for panel in (above, middle, below):
        add_legend(panel)
    add_notes(figure, notes)
    return figure


def _padding(steps: Histogram, buckets: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the sizes that the list serves, and all padding up to each as a share of the tokens."""
    listed = np.array(buckets)
    inside = steps.sizes <= listed[-1]
    sizes, counts = steps.sizes[inside], steps.counts[inside]
    padded = (listed[np.searchsorted(listed, sizes)] - sizes) * counts
    return sizes, np.cumsum(padded) / max(int(sizes @ counts), 1)
