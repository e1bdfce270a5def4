"""Records the results of a benchmark as JSON, a table and a plot.

The schema is `schema.json` beside this file, which describes each field; times are in ms, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from piecewise.errors.tools import WrongBenchFile
from piecewise.report.record import Record, table
from piecewise.settings.whole_file import replace_file
from piecewise.tools.bench.variants import DEFAULT_VARIANTS, PEERS
from piecewise.tools.buckets.step_cost import BENCH_SCHEMA, read_json
from piecewise.tools.plot import add_legend, add_notes, label_axis, line_style, new_panels, save_figure
from runners.errors import one_line

_INDUCTORS_KERNELS = ("compile", "reduce-overhead", "graphed-fused", "graphed-inductor", "floor-inductor")
# The largest ratio that must have room in the panel of ratios.
_MOST_CLOSE = 1.5
_RESAMPLES = 1000


def bench_schema() -> dict[str, Any]:
    """Reads the JSON Schema (draft 2020-12) of a benchmark's record."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))
    return found


def interval(samples: Sequence[float], share: float = 0.95) -> list[float]:
    """Estimates by bootstrap in which interval the median of the samples lies with the given probability."""
    values = np.asarray(samples, dtype=float)
    drawn = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), ((1 - share) / 2, (1 + share) / 2))
    return [round(float(low), 5), round(float(high), 5)]


class Spread(NamedTuple):
    """Holds the median and the quartiles of samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) < 2:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def asdict(self) -> dict[str, float]:
        return {name: round(value, 5) for name, value in self._asdict().items()}


@dataclasses.dataclass(frozen=True, slots=True)
class BenchResult(Record):
    """Holds the results of one run; the fields are those of the schema above."""

    schema: str
    spec: str
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    sizes: tuple[int, ...]
    rounds: int
    seconds: Mapping[str, float]
    skipped: Mapping[str, str]
    variants: Mapping[str, Mapping[str, Any]]
    reference: str
    memory: Mapping[str, Any]
    results: tuple[Mapping[str, Any], ...]
    ratios: tuple[Mapping[str, Any], ...]

    @property
    def has_measured_nothing(self) -> bool:
        """Whether no variant, or none of the requested graphed ones, was measured."""
        asked = {*self.variants, *(name.split(",")[0] for name in self.skipped)}
        graphed = {name for name in asked if name.startswith("graphed")}
        return not (graphed or asked) & {line["variant"] for line in self.results}

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> BenchResult:
        """Reads what `write` wrote; raises WrongBenchFile for anything else."""
        content = {"settings": {}, "seconds": {}} | read_json(path)  # the first schema lacks them
        try:
            found = cls(**{each.name: content[each.name] for each in dataclasses.fields(cls)})
            # Both take apart all that a picture needs.
            str(found), found.title, [found._spreads(name) for name in found.variants]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            wanted = f"all of the schema {BENCH_SCHEMA!r}"
            raise WrongBenchFile(where=path, wanted=wanted, found=one_line(error)) from error
        return found

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON in one step."""
        replace_file(path, self.to_json() + "\n")

    def ratio(self, of: str, over: str, num_tokens: int, *, quantity: str = "latency") -> float | None:
        """Returns the median of one ratio, or None if it was not measured."""
        wanted = {"num_tokens": num_tokens, "quantity": quantity, "of": of, "over": over}
        return next((line["median"] for line in self.ratios if wanted.items() <= line.items()), None)

    def __str__(self) -> str:
        """Formats median latency and host time in ms by size and variant, and the ratios, as Markdown."""
        names = [name for name in self.variants if any(line["variant"] == name for line in self.results)]
        cells = {(line["num_tokens"], line["variant"]): line for line in self.results}
        rows = [["tokens", *(f"{name}, ms (host)" for name in names)]]
        for n in self.sizes:
            found = [cells.get((n, name)) for name in names]
            times = [(c["latency_ms"]["median"], c["host_ms"]["median"]) if c else None for c in found]
            rows.append([str(n), *("{:.3f} ({:.3f})".format(*pair) if pair else "–" for pair in times)])
        ratios = [["ratio", *map(str, self.sizes)]]
        for quantity, of, over in dict.fromkeys((x["quantity"], x["of"], x["over"]) for x in self.ratios):
            values = [self.ratio(of, over, n, quantity=quantity) for n in self.sizes]
            shown = ["–" if value is None else f"{value:.3f}" for value in values]
            ratios.append([f"{quantity}, {of} ÷ {over}", *shown])
        left_out = [f"\n{name} left out: {reason}" for name, reason in self.skipped.items()]
        return "\n".join([table(rows, markdown=True), "", table(ratios, markdown=True), *left_out])

    @property
    def title(self) -> str:
        return "\n".join([self.spec, "{device}, torch {torch}, {date}".format_map(self.environment)])

    def figure(self) -> Any:
        """Draws latency over tokens, a line per variant, and below it ratios, which tell close lines apart.

        Raises:
            NoMatplotlib: it is not installed.
        """
        lines = {name: spreads for name in self.variants if (spreads := self._spreads(name))}
        ratios = {pair: found for pair in _compared(list(lines)) if (found := self._quotients(*pair))}
        figure, panels = new_panels(self.title, (3, 2) if ratios else (3,))
        notes = [*self._left_out(), f"Medians of {self.rounds} rounds; the bands are quartiles."]
        if any(over.startswith("floor") for _, over in ratios):
            notes.append(
                "A floor runs the same kernels in one graph: a ratio is what cuts and host work cost."
            )
        for name, spreads in lines.items():
            median, low, high = zip(*spreads.values(), strict=True)
            panels[0].plot(list(spreads), median, label=name, **_style(name))
            panels[0].fill_between(list(spreads), low, high, alpha=0.15, color=_style(name)["color"])
        medians = [each.median for spreads in lines.values() for each in spreads.values()]
        label_axis(panels[0], "y", "ms, call to idle device", medians)
        label_axis(panels[-1], "x", "tokens in the call", self.sizes, self.sizes)
        if ratios:
            notes += _draw_ratios(panels[1], ratios)
        for panel in panels:
            add_legend(panel)
        add_notes(figure, notes)
        return figure

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Writes `figure()` to an image; raises NoMatplotlib or, if unwritable, WrongPlot."""
        save_figure(self.figure(), path)

    def _spreads(self, variant: str) -> dict[int, Spread]:
        lines = (line for line in self.results if line["variant"] == variant)
        return {line["num_tokens"]: Spread(*map(float, line["latency_ms"].values())) for line in lines}

    def _quotients(self, of: str, over: str) -> dict[int, float]:
        """Returns the ratio at each size: per round where the run formed it, else that of the medians."""
        above, below = self._spreads(of), self._spreads(over)
        return {n: self.ratio(of, over, n) or above[n].median / below[n].median for n in above if n in below}

    def _left_out(self) -> list[str]:
        """Says why each variant that could be measured is not in the results."""
        known = {*self.variants, *(name.split(",")[0] for name in self.skipped)}
        unasked = [name for name in DEFAULT_VARIANTS if name not in known]
        return [
            *(f"{name} left out: {reason}" for name, reason in self.skipped.items()),
            *([f"{', '.join(unasked)} left out: not asked for"] if unasked else []),
        ]


def _style(variant: str) -> dict[str, Any]:
    """Returns the look of a variant's lines, the same in all pictures."""
    known = (*DEFAULT_VARIANTS, *PEERS)
    return line_style(known.index(variant) if variant in known else len(known))


def _draw_ratios(panel: Any, ratios: Mapping[tuple[str, str], Mapping[int, float]]) -> list[str]:
    """Draws the lines of a panel, and names those that leave it: few that are far away, since with room for
    them close ones would be one line."""
    num_near = sum(min(found.values()) <= _MOST_CLOSE for found in ratios.values())
    limit = _MOST_CLOSE if num_near > len(ratios) / 2 else inf
    close = [ratio for found in ratios.values() for ratio in found.values() if ratio <= limit]
    for (of, over), found in ratios.items():
        panel.plot(list(found), list(found.values()), label=f"{of} ÷ {over}", **_style(of))
    panel.axhline(1, color="0.4", linewidth=0.8)
    margin = 0.05 * max(max(close) - min(close), 0.02)
    panel.set_ylim(min(*close, 1) - margin, max(*close, 1) + margin)
    label_axis(panel, "y", "ratio of latencies", close)
    far = {f"{of} ÷ {over}": max(found.values()) for (of, over), found in ratios.items()}
    return [f"Above the lower panel: {label}, up to {top:.2f}." for label, top in far.items() if top > limit]


def _compared(variants: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields each variant, and the one that its latency is divided by: the same kernels in one graph, if
    measured, else the graphed variant or the first one."""
    default = "graphed" if "graphed" in variants else next(iter(variants), "")
    for name in variants:
        floor = "floor-inductor" if name in _INDUCTORS_KERNELS else "floor"
        over = floor if floor in variants else default
        if name != over:
            yield name, over


def environment(device: torch.device) -> dict[str, Any]:
    """Returns versions, device and the working directory's commit, with None for what is unknown."""
    is_cuda = device.type == "cuda"
    commit = Path("COMMIT")  # of a copy without history
    changes = _asked("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit.read_text().strip() if commit.exists() else _asked("git", "rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "piecewise": _version("piecewise-prefill"),
        "device": torch.cuda.get_device_name(device) if is_cuda else _processor(),
        "driver": _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        if is_cuda
        else None,
        "num_processors": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "transformers": _version("transformers"),
        "triton": _version("triton"),
    }


def _processor() -> str:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _asked(*command: str) -> str | None:
    """Runs a command and returns what it prints; None if it fails."""
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()
