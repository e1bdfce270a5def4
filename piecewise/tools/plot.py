"""Draws pictures over token counts, all in one style: panels above each other, legends beside, notes below.

Lines differ in marker and dashes as well as in colour, so they can be told apart in black and white too.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterable, Sequence
from math import log
from typing import Any

from piecewise.errors.tools import NoMatplotlib, WrongPlot
from piecewise.settings.whole_file import replace_file
from piecewise.tools.command_output import image_format

# The palette of Okabe and Ito, with two of Tol's for yellow: safe for colour-blind people, dark on white.
_COLORS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#882255", "#999933",
)  # fmt: skip
_MARKERS = "osD^vPX*<>p"
_DASHES = "-", "--", "-.", ":"
# Values that span more than this many times are drawn on a logarithmic scale.
_LINEAR_SPAN = 4
# Labels of ticks closer than this share of the axis would touch.
_TICK_SHARE = 1 / 18


def new_panels(title: str, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """Makes a figure with one panel per relative height, over one axis of token counts.

    Raises:
        NoMatplotlib: it is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib() from error
    figure = Figure(figsize=(9, 1 + 1.4 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure, list(panels)


def add_notes(figure: Any, notes: Iterable[str]) -> None:
    """Writes lines below the panels, for which the figure grows."""
    lines = [line for note in notes for line in textwrap.wrap(note, 125, max_lines=2, placeholder=" …")]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.16 * len(lines))


def line_style(index: int) -> dict[str, Any]:
    """Returns the look of the line with this number."""
    looks = {"color": _COLORS, "linestyle": _DASHES, "marker": _MARKERS}
    return {name: each[index % len(each)] for name, each in looks.items()} | {
        "markersize": 5,
        "linewidth": 1.3,
    }


def label_axis(
    panel: Any, which: str, what: str, values: Sequence[float], ticks: Sequence[float] = ()
) -> None:
    """Labels the "x" or "y" axis, in plain numbers; a wide one becomes logarithmic, and says so.

    Args:
        values: what is drawn.
        ticks: where the axis gets ticks, if not everywhere; some are left out where labels would touch.
    """
    from matplotlib import ticker

    axis = getattr(panel, f"{which}axis")
    shown = [value for value in values if value > 0]
    is_log = bool(shown) and max(shown) > _LINEAR_SPAN * min(shown)
    if is_log:
        getattr(panel, f"set_{which}scale")("log")
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    elif which == "x" or len(values) and all(float(value).is_integer() for value in values):
        axis.set_major_locator(ticker.MaxNLocator(8, integer=True))
    if ticks:
        axis.set_major_locator(ticker.FixedLocator(_apart(ticks, is_log=is_log)))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:.10g}"))
    getattr(panel, f"set_{which}label")(f"{what} (log scale)" if is_log else what)


def _apart(ticks: Sequence[float], *, is_log: bool) -> list[float]:
    """Leaves ticks out, from the largest down, that lie too close to the one before."""
    places = {tick: log(tick) if is_log else tick for tick in sorted(ticks, reverse=True)}
    least = (max(places.values()) - min(places.values())) * _TICK_SHARE
    found: list[float] = []
    for tick, place in places.items():
        if not found or places[found[-1]] - place >= least:
            found.append(tick)
    return found[::-1]


def add_legend(panel: Any) -> None:
    """Adds a legend to the right of a panel, where it hides no line."""
    if panel.get_legend_handles_labels()[0]:
        place = {"loc": "upper left", "bbox_to_anchor": (1.005, 1.0), "borderaxespad": 0}
        panel.legend(fontsize=8, handlelength=3.5, **place)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes an image whole, in the format of the path's ending; raises WrongPlot if that fails."""
    kind, image = image_format(path), io.BytesIO()
    try:
        figure.savefig(image, dpi=110, format=kind)
        replace_file(path, image.getvalue())
    except (OSError, ValueError) as error:
        raise WrongPlot(path=os.fspath(path), problem=str(error)[:200]) from error
