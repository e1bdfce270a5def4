"""Records the results of a benchmark as JSON, a table and a plot.

Schema ``piecewise.bench/1`` (times in ms, sizes in bytes):

==============  ==========================================================================================
spec            where the case came from
environment     python, torch, transformers and triton versions, device, number of processors, commit, date
sizes, rounds   token counts measured; samples per size and variant
skipped         variant, or "variant, n tokens" → why it was not measured
variants        name → setup_s, and for graphed ones the capture report: buckets with capture_ms, num_graphs,
                num_ops, grown_bytes, device_bytes; pool_bytes, buffer_bytes, device_bytes, coverage; the
                same of a second capture, again, when all kernels were loaded and compiled
reference       what errors are measured against
memory          device_bytes of all buckets (free memory before minus after), of the largest alone, their
                ratio; of the second capture, since CUDA's memory for a kernel's code is the kernel's
results         num_tokens, variant, latency_ms and host_ms {median, low, high}; max_abs_error: the largest
                difference from the reference, its mean over num_draws inputs
ratios          num_tokens, quantity, of, over, median, low, high: per round, then the median over rounds; for
                errors the ratio of their means
==============  ==========================================================================================

`low` and `high` are the quartiles over rounds.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from piecewise.report.record import Record, table
from piecewise.settings.whole_file import replace_file
from piecewise.tools.buckets.plot import new_figure, save_figure

SCHEMA = "piecewise.bench/1"


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
    sizes: tuple[int, ...]
    rounds: int
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

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws latency over tokens, a line per variant; raises NoMatplotlib or, if unwritable, WrongPlot."""
        figure = new_figure(figsize=(7, 4.5), layout="tight")
        axes = figure.subplots()
        for name in self.variants:
            lines = [line for line in self.results if line["variant"] == name]
            tokens = [line["num_tokens"] for line in lines]
            median, low, high = (
                [line["latency_ms"][each] for line in lines] for each in ("median", "low", "high")
            )
            axes.plot(tokens, median, marker="o", label=name)
            axes.fill_between(tokens, low, high, alpha=0.2)
        title = f"{self.spec}\n{self.environment['device']}, torch {self.environment['torch']}"
        axes.set(xlabel="tokens", ylabel="ms, call to idle device", yscale="log", title=title)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
        save_figure(figure, path)


def environment(device: torch.device) -> dict[str, Any]:
    """Returns versions, device and commit of this run, with None for unknown ones."""
    is_cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "device": torch.cuda.get_device_name(device) if is_cuda else _processor(),
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


def _commit() -> str | None:
    """Returns the commit of this checkout, from a file if the checkout has no history."""
    root = Path(__file__).resolve().parents[3]
    if (root / "COMMIT").exists():
        return (root / "COMMIT").read_text().strip() or None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip() or None
