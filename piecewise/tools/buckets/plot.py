"""Draws a plan: the steps, the buckets, and the padding by token count."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from piecewise.errors.tools import NoMatplotlib, WrongPlot
from piecewise.tools.buckets.steps import Histogram


def new_figure(**options: Any) -> Any:
    """Makes an empty matplotlib figure, or raises NoMatplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib() from error
    figure = Figure(**options)
    FigureCanvasAgg(figure)
    return figure


def draw(path: str | os.PathLike[str], steps: Histogram, lists: Mapping[str, tuple[int, ...]]) -> None:
    """Draws the histogram with the last list's buckets, and below it each list's padded tokens.

    Args:
        path: of the image; its ending, such as .png or .svg, sets the format.
        lists: bucket lists by name; the last is the plan.

    Raises:
        NoMatplotlib, WrongPlot: matplotlib is not installed, or cannot write there.
    """
    figure = new_figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    plan = list(lists.values())[-1]
    edges = np.linspace(0, max(plan[-1], int(steps.sizes[-1])), 129)
    above.hist(steps.sizes, bins=edges, weights=steps.counts, color="0.6")
    for index, bucket in enumerate(plan):
        above.axvline(bucket, color="C3", linewidth=0.8, label="buckets of the plan" if index == 0 else None)
    above.set_yscale("log")
    above.set_ylabel("steps")
    above.legend(loc="upper left")
    for name, buckets in lists.items():
        listed = np.array(buckets)
        inside = steps.sizes <= listed[-1]
        sizes, counts = steps.sizes[inside], steps.counts[inside]
        waste = (listed[np.searchsorted(listed, sizes)] - sizes) * counts
        share = np.cumsum(waste) / max(int(sizes @ counts), 1)
        label = f"{name}: {len(buckets)} graphs"
        below.plot(sizes, 100 * share, label=label, linewidth=2 if buckets is plan else 1)
    below.set_ylabel("padding up to this size, % of tokens")
    below.set_xlabel("tokens of a step")
    below.legend(loc="upper left", fontsize=8)
    save_figure(figure, path)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure in the format of the path's ending; raises WrongPlot if that fails."""
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise WrongPlot(path=path, problem=str(error)[:200]) from error
