"""Requests and steps from the files that servers leave behind.

A *request* is one prompt's tokens that a server still has to prefill; a *step* is what one call of the model
carries. `batching.py` makes steps of requests; the recorder of a running server writes steps.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from runners.buckets import MAX_BUCKET
from runners.errors import ConfigError, short

Ints = NDArray[np.int64]

FORMATS = ("auto", "numbers", "csv", "jsonl", "azure", "mooncake", "recorded")
RECORDED_FORMAT = "piecewise-traffic"

# Tokens of one prefix block, whose hash the Mooncake traces give.
MOONCAKE_BLOCK = 512

# Looked for in this order where no column is named.
_TOKEN_NAMES = (
    "num_tokens", "ContextTokens", "input_length", "prompt_tokens", "input_tokens", "prompt_len", "tokens",
    "batch_size",
)  # fmt: skip
_OUTPUT_NAMES = ("GeneratedTokens", "output_length", "completion_tokens", "output_tokens")
_TIME_NAMES = ("TIMESTAMP", "timestamp", "arrival_s")

_RULE = "traffic files hold one whole number of tokens, from 0 up, per request or per step"


@dataclass(frozen=True, slots=True)
class Requests:
    """What one file holds, in its order, without the empty requests.

    Attributes:
        num_tokens: int64, [num_requests], each from 1 up: the tokens to prefill.
        arrival_s: float64, [num_requests], ascending seconds; None where the file has no times.
        output_tokens: int64, [num_requests]: tokens generated for each; None where the file does not say.
        context_tokens: int64, [num_requests]: prompt tokens with those a prefix cache held.
        num_empty: requests without tokens, left out.
        num_cached_tokens: prompt tokens that a prefix cache held, left out.
        counts: int64, [num_requests], how often each entry came; None for once each. What has counts are the
            steps of a recorder, in no order.
    """

    num_tokens: Ints
    arrival_s: NDArray[np.float64] | None = None
    output_tokens: Ints | None = None
    context_tokens: Ints | None = None
    num_empty: int = 0
    num_cached_tokens: int = 0
    counts: Ints | None = None

    def __len__(self) -> int:
        return len(self.num_tokens)

    def part(self, start: int, end: int) -> Requests:
        """The requests from `start` up to `end`, in their order."""
        cut = slice(start, end)
        return Requests(
            self.num_tokens[cut],
            self.arrival_s[cut] if self.arrival_s is not None else None,
            self.output_tokens[cut] if self.output_tokens is not None else None,
            self.context_tokens[cut] if self.context_tokens is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many steps carried each token count.

    Attributes:
        sizes: int64, [num_sizes], strictly ascending, from 1 up.
        counts: int64, [num_sizes], each from 1 up.
    """

    sizes: Ints
    counts: Ints

    @classmethod
    def of(cls, steps: Ints, counts: Ints | None = None) -> Histogram:
        """Of token counts, one per step or `counts` of each, in any order."""
        sizes, places = np.unique(steps, return_inverse=True)
        return cls(sizes.astype(np.int64), np.bincount(places, weights=counts).astype(np.int64))

    @classmethod
    def merged(cls, parts: list[Histogram]) -> Histogram:
        """The steps of all parts."""
        sizes = np.concatenate([part.sizes for part in parts])
        return cls.of(sizes, np.concatenate([part.counts for part in parts]))

    def smoothed(self, cover: int, *, share: float, width: float = 0.05) -> Histogram:
        """With this share of each step spread evenly over the counts near its own, up to `width` off.

        Traffic to come has other counts than traffic seen; a plan on this is less fitted to the very counts.
        Steps of `cover` tokens stay whole, for full chunks come at that count only. The counts are in small
        fractions of a step.
        """
        if share == 0:
            return self
        fixed = self.sizes >= cover
        low = np.maximum((self.sizes * (1 - width)).astype(np.int64), 1)
        high = np.minimum((self.sizes * (1 + width)).astype(np.int64) + 1, cover)
        high = np.maximum(high, low)
        moved = np.where(fixed, 0.0, share * self.counts)
        top = max(int(self.sizes.max()), cover)
        change = np.zeros(top + 2)
        np.add.at(change, low, moved / (high - low + 1))
        np.add.at(change, high + 1, -moved / (high - low + 1))
        counts = np.cumsum(change)[: top + 1]
        counts[self.sizes] += self.counts - moved
        # Fine enough for a step spread over a million sizes, and exact as a float in sum.
        scale = min(2**20, max(2**52 // self.num_steps, 1))
        # Sums are rounded, not counts: many small parts of a step add up to it.
        sums = np.maximum.accumulate(np.rint(np.cumsum(counts * scale)))
        scaled = np.diff(sums, prepend=0.0).astype(np.int64)
        sizes = np.flatnonzero(scaled > 0).astype(np.int64)
        return Histogram(sizes, scaled[sizes])

    @property
    def num_steps(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int(self.sizes @ self.counts)


class _Row(NamedTuple):
    """One request as its file has it; `line` counts from 1."""

    line: int
    num_tokens: Any
    arrival: Any = None
    output: Any = None
    hashes: Any = None


def read_requests(
    path: str | Path,
    *,
    format: str = "auto",
    column: str | None = None,
    watch: Callable[[Iterator[_Row]], Iterator[_Row]] | None = None,
) -> Requests:
    """The requests of one traffic file.

    Args:
        format: one of `FORMATS`; "auto" tells by the file's first line.
        column: the CSV column, or the JSONL field, that holds the token count; None for the well-known ones.
        watch: wraps the iteration over the rows, such as a progress bar does.

    Raises:
        ConfigError: the file cannot be read, has no requests, or a line is not what the format says (the
            message has the line).
    """
    path = Path(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = _detected(file) if format == "auto" else format
            if found == "recorded":
                return _recorded(path, file)
            rows = _READERS[found](path, file, column)
            return _collected(path, rows if watch is None else watch(rows), found == "mooncake")
    except OSError as error:
        raise _wrong(path, None, "a readable text file", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise _wrong(path, None, "a text file", f"a byte that is not UTF-8: {error.reason}") from error


def _detected(file: TextIO) -> str:
    first = ""
    while not first.strip():
        first = file.readline(1 << 20)
        if not first:
            break
    file.seek(0)
    text = first.strip()
    if text.startswith("{"):
        if f'"{RECORDED_FORMAT}"' in text or text == "{":
            return "recorded"
        return "mooncake" if '"hash_ids"' in text else "jsonl"
    if text.startswith("TIMESTAMP,ContextTokens"):
        return "azure"
    return "numbers" if text[:1].isdigit() or text[:1] in ("#", "-", "") else "csv"


def _numbers(path: Path, file: TextIO, column: str | None) -> Iterator[_Row]:
    for line, text in enumerate(file, 1):
        text = text.partition("#")[0].strip()
        if text:
            yield _Row(line, text)


def _table(path: Path, file: TextIO, column: str | None) -> Iterator[_Row]:
    reader = csv.reader(file)
    try:
        header = [name.strip() for name in next(reader, [])]
        tokens = _column(path, header, column)
        time, output = (
            next((header.index(name) for name in names if name in header), None)
            for names in (_TIME_NAMES, _OUTPUT_NAMES)
        )
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise _wrong(path, reader.line_num, f"{len(header)} columns", f"{len(row)}")
            yield _Row(
                reader.line_num,
                row[tokens],
                row[time] if time is not None else None,
                row[output] if output is not None else None,
            )
    except csv.Error as error:
        raise _wrong(path, reader.line_num, "a line of CSV", str(error)[:200]) from error


def _column(path: Path, header: list[str], column: str | None) -> int:
    """The position of the column that is asked for, or of a well-known one, or of the only one."""
    wanted = [column] if column is not None else [name for name in _TOKEN_NAMES if name in header]
    if len(header) == 1 and column is None:
        return 0
    if not wanted or wanted[0] not in header:
        names = ", ".join(header[:20])[:300] or "none"
        fix = "name the column with --column" if column is None else None
        what = repr(column) if column is not None else "one of " + ", ".join(_TOKEN_NAMES)
        raise _wrong(path, 1, f"a column {what}", f"the columns {names}", fix)
    return header.index(wanted[0])


def _json_lines(path: Path, file: TextIO, column: str | None) -> Iterator[_Row]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _wrong(path, line, "a JSON object", str(error)[:100] or "deep nesting") from error
        if not isinstance(row, dict):
            raise _wrong(path, line, "a JSON object", short(row))
        names = _TOKEN_NAMES if column is None else (column,)
        name = next((name for name in names if name in row), None)
        if name is None:
            got = f"the fields {', '.join(map(str, row))[:200]}"
            raise _wrong(path, line, f"a field {' or '.join(names)}", got, "name the field with --column")
        yield _Row(
            line,
            row[name],
            next((row[each] for each in _TIME_NAMES if each in row), None),
            next((row[each] for each in _OUTPUT_NAMES if each in row), None),
            row.get("hash_ids"),
        )


_READERS: dict[str, Callable[[Path, TextIO, str | None], Iterator[_Row]]] = {
    "numbers": _numbers,
    "csv": _table,
    "azure": _table,
    "jsonl": _json_lines,
    "mooncake": _json_lines,
}


def _collected(path: Path, rows: Iterator[_Row], is_mooncake: bool) -> Requests:
    tokens: list[int] = []
    whole: list[int] = []
    times: list[float] = []
    outputs: list[int] = []
    cache = PrefixCache()
    num_empty = num_cached = 0
    for row in rows:
        count = _count(path, row.line, row.num_tokens)
        if row.arrival is not None:
            time = _seconds(path, row.line, row.arrival, in_ms=is_mooncake)
        output = _count(path, row.line, row.output) if row.output is not None else None
        hits = cache.admit(_hashes(path, row.line, row.hashes), count) if is_mooncake else 0
        if count == 0:
            num_empty += 1
            continue
        tokens.append(count - hits)
        whole.append(count)
        num_cached += hits
        if row.arrival is not None:
            times.append(time)
        if output is not None:
            outputs.append(output)
    if not tokens:
        raise _wrong(path, None, "at least one request with tokens", f"none ({num_empty} empty ones)")
    has_times, has_outputs = len(times) == len(tokens), len(outputs) == len(tokens)
    order = np.argsort(np.array(times), kind="stable") if has_times else slice(None)
    return Requests(
        np.array(tokens, np.int64)[order],
        np.array(times)[order] if has_times else None,
        np.array(outputs, np.int64)[order] if has_outputs else None,
        np.array(whole, np.int64)[order],
        num_empty,
        num_cached,
    )


class PrefixCache:
    """Which prefix blocks earlier requests have left behind, without a bound on memory."""

    def __init__(self, block: int = MOONCAKE_BLOCK) -> None:
        self._block, self._known = block, set[int]()

    def admit(self, hashes: list[int], num_tokens: int) -> int:
        """The leading tokens of a request that are cached; its own blocks are cached after it.

        A block counts only where it is whole, and at least one token is always left, since the model must run
        on the last one to answer.
        """
        hits = 0
        for each in hashes:
            if each not in self._known:
                break
            hits += 1
        self._known.update(hashes)
        held = min(hits, num_tokens // self._block) * self._block
        return held - 1 if held == num_tokens > 0 else held


def _recorded(path: Path, file: TextIO) -> Requests:
    """What `TrafficRecorder.save` wrote."""
    try:
        content = json.load(file)
        pairs = content["counts"]
        if content["format"] != RECORDED_FORMAT or content["version"] != 1:
            raise ValueError(f"format {short(content['format'])}, version {short(content['version'])}")
        sizes = np.array([_count(path, None, size) for size, _ in pairs], np.int64)
        counts = np.array([_count(path, None, count, most=2**48) for _, count in pairs], np.int64)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _wrong(path, None, f"a file that graphed.traffic.save wrote ({RECORDED_FORMAT})",
                     str(error)[:100]) from error  # fmt: skip
    if not len(sizes) or (sizes < 1).any() or (counts < 1).any():
        raise _wrong(path, None, "at least one step with tokens", "none, or a size or count of 0")
    return Requests(sizes, counts=counts)


def _count(path: Path, line: int | None, value: Any, *, most: int = MAX_BUCKET) -> int:
    """A whole number from text or JSON, of tokens where not said otherwise."""
    if isinstance(value, str):
        text = value.strip()
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else None
    else:
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
    if number is None or not 0 <= number <= most:
        raise _wrong(path, line, f"a whole number from 0 to {most}", short(value))
    return number


def _seconds(path: Path, line: int, value: Any, *, in_ms: bool) -> float:
    try:
        if isinstance(value, str) and "-" in value[1:]:
            # Azure's times have seven digits of a second; Python takes six.
            return datetime.fromisoformat(value.strip()[:26]).timestamp()
        seconds = float(value) / (1000 if in_ms else 1)
    except (ValueError, TypeError, OverflowError) as error:
        raise _wrong(path, line, "a time", short(value)) from error
    if not np.isfinite(seconds):
        raise _wrong(path, line, "a finite time", short(value))
    return seconds


def _hashes(path: Path, line: int, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise _wrong(path, line, "hash_ids, a list of ints", short(value))
    return value


def _wrong(path: Path, line: int | None, expected: str, got: str, fix: str | None = None) -> ConfigError:
    return ConfigError(
        f"traffic file {path}{f':{line}' if line is not None else ''}",
        expected=expected,
        got=got,
        rule=_RULE,
        fix=fix or "correct the line, or say what the file is with --traffic-format and --column",
    )
