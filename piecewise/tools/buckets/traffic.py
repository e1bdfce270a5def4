"""Reads requests and steps from traffic files of servers.

A *request* is the tokens of one prompt that a server still has to prefill; a *step* is the tokens of one call
of the model. `steps.py` makes steps of requests; the recorder of a running server writes steps.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from piecewise.errors.tools import WrongTraffic
from runners.buckets import MAX_BUCKET
from runners.errors import short

Ints = NDArray[np.int64]

FORMATS = ("auto", "numbers", "csv", "jsonl", "azure", "mooncake", "recorded")
RECORDED_FORMAT = "piecewise-traffic"

# Tokens of one prefix block; the Mooncake traces have a hash per block.
MOONCAKE_BLOCK = 512

# Searched in this order if no column is named.
_TOKEN_NAMES = (
    "num_tokens", "ContextTokens", "input_length", "prompt_tokens", "input_tokens", "prompt_len", "tokens",
    "batch_size",
)  # fmt: skip
_OUTPUT_NAMES = ("GeneratedTokens", "output_length", "completion_tokens", "output_tokens")
_TIME_NAMES = ("TIMESTAMP", "timestamp", "arrival_s")


@dataclass(frozen=True, slots=True)
class Requests:
    """Holds the requests of one file, in its order, without the empty ones.

    Attributes:
        num_tokens: int64, [num_requests], each from 1 up: the tokens to prefill.
        arrival_s: float64, [num_requests], ascending seconds; None where the file has no times.
        output_tokens: int64, [num_requests]: generated tokens; None if the file does not say.
        context_tokens: int64, [num_requests]: prompt tokens, those in a prefix cache included.
        num_empty: requests without tokens, left out.
        num_cached_tokens: prompt tokens that a prefix cache held, left out.
        counts: int64, [num_requests], how often each entry came; None for once each. Entries with counts are
            a recorder's steps, in no order.
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
        """Returns the requests from `start` up to `end`, in their order."""
        parts = self.num_tokens, self.arrival_s, self.output_tokens, self.context_tokens
        return Requests(*(each[start:end] if each is not None else None for each in parts))  # type: ignore[arg-type]


# A line's number, from 1, and its values by name.
_Row = tuple[int | None, dict[str, Any]]


class _Wrong(Exception):
    """Says what in a file does not fit its format; `line` counts from 1."""

    def __init__(self, line: int | None, wanted: str, found: str, fix: str | None = None) -> None:
        super().__init__(wanted)
        self.line, self.wanted, self.found, self.fix = line, wanted, found, fix


def read_requests(
    path: str | Path,
    *,
    format: str = "auto",
    column: str | None = None,
    watch: Callable[[Iterator[_Row]], Iterable[_Row]] = iter,
) -> Requests:
    """Reads the requests of one traffic file.

    Args:
        format: one of `FORMATS`; "auto" detects it from the file's first line.
        column: the CSV column or JSONL field of the token count; None for the well-known ones.
        watch: wraps the iteration over the rows, as a progress bar does.

    Raises:
        WrongTraffic: the file cannot be read, has no requests, or a line (named in the message) does not fit
            the format.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            found = _detected(file) if format == "auto" else format
            if found == "recorded":
                return _recorded(file)
            rows = _READERS[found](file)
            return _collected(watch(rows), None if found == "numbers" else column, found)
    except OSError as error:
        wrong = _Wrong(None, "a readable text file", error.strerror or str(error))
    except UnicodeDecodeError as error:
        wrong = _Wrong(None, "a text file", f"a byte that is not UTF-8: {error.reason}")
    except _Wrong as error:
        wrong = error
    where = f"{path}{f':{wrong.line}' if wrong.line is not None else ''}"
    raise WrongTraffic(where=where, wanted=wrong.wanted, found=wrong.found, fix=wrong.fix)


def _detected(file: TextIO) -> str:
    lines = (line.strip() for line in iter(partial(file.readline, 1 << 20), ""))
    text = next(filter(None, lines), "")
    file.seek(0)
    if text.startswith("{"):
        if f'"{RECORDED_FORMAT}"' in text or text == "{":
            return "recorded"
        return "mooncake" if '"hash_ids"' in text else "jsonl"
    if text.startswith("TIMESTAMP,ContextTokens"):
        return "azure"
    return "numbers" if text[:1].isdigit() or text[:1] in ("#", "-", "") else "csv"


def _numbers(file: TextIO) -> Iterator[_Row]:
    for line, text in enumerate(file, 1):
        text = text.partition("#")[0].strip()
        if text:
            yield line, {_TOKEN_NAMES[0]: text}


def _table(file: TextIO) -> Iterator[_Row]:
    reader = csv.reader(file)
    try:
        header = [name.strip() for name in next(reader, [])]
        for row in reader:
            if row and len(row) != len(header):
                raise _Wrong(reader.line_num, f"{len(header)} columns", f"{len(row)}")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise _Wrong(reader.line_num, "a line of CSV", str(error)[:200]) from error


def _json_lines(file: TextIO) -> Iterator[_Row]:
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _Wrong(line, "a JSON object", str(error)[:100] or "deep nesting") from error
        if not isinstance(row, dict):
            raise _Wrong(line, "a JSON object", short(row))
        yield line, row


_READERS = {
    "numbers": _numbers, "csv": _table, "azure": _table, "jsonl": _json_lines, "mooncake": _json_lines,
}  # fmt: skip


def _token_name(line: int | None, row: Mapping[str, Any], column: str | None, format: str) -> str:
    """Returns the column or field that was asked for, or a well-known one, or a table's only one."""
    names = _TOKEN_NAMES if column is None else (column,)
    is_table = _READERS[format] is _table
    only = list(row) if is_table and len(row) == 1 and column is None else []
    for name in (*only, *names):
        if name in row:
            return name
    what = "column" if is_table else "field"
    found = f"the {what}s {', '.join(map(str, list(row)[:20]))[:300] or 'none'}"
    fix = f"name the {what} with --column" if column is None else None
    raise _Wrong(1 if is_table else line, f"a {what}, one of {', '.join(names)}", found, fix)


def _collected(rows: Iterable[_Row], column: str | None, format: str) -> Requests:
    is_mooncake = format == "mooncake"
    cache = PrefixCache()
    found: list[tuple[int, int, float | None, int | None]] = []
    num_empty = 0
    for line, row in rows:
        count = _count(line, row[_token_name(line, row, column, format)])
        arrival, generated = (
            next((row[name] for name in names if name in row), None) for names in (_TIME_NAMES, _OUTPUT_NAMES)
        )
        time = _seconds(line, arrival, in_ms=is_mooncake) if arrival is not None else None
        output = _count(line, generated) if generated is not None else None
        hits = cache.admit(_hashes(line, row.get("hash_ids")), count) if is_mooncake else 0
        num_empty += count == 0
        if count:
            found.append((count - hits, count, time, output))
    if not found:
        raise _Wrong(None, "at least one request with tokens", f"none ({num_empty} empty ones)")
    tokens, whole, times, outputs = zip(*found, strict=True)
    order = np.argsort(np.array(times), kind="stable") if None not in times else slice(None)
    return Requests(
        np.array(tokens, np.int64)[order],
        np.array(times)[order] if None not in times else None,
        np.array(outputs, np.int64)[order] if None not in outputs else None,
        np.array(whole, np.int64)[order],
        num_empty,
        sum(whole) - sum(tokens),
    )


class PrefixCache:
    """Simulates a prefix cache of unbounded memory, which keeps the blocks of all earlier requests."""

    def __init__(self, block: int = MOONCAKE_BLOCK) -> None:
        self._block, self._known = block, set[int]()

    def admit(self, hashes: list[int], num_tokens: int) -> int:
        """Counts the cached leading tokens of a request, then caches its blocks.

        Only whole blocks count, and at least one token is left, since the model must run on the last token to
        answer.
        """
        hits = sum(1 for _ in takewhile(self._known.__contains__, hashes))
        self._known.update(hashes)
        held = min(hits, num_tokens // self._block) * self._block
        return held - 1 if held == num_tokens > 0 else held


def _recorded(file: TextIO) -> Requests:
    """Reads a file of `TrafficRecorder.save`."""
    try:
        content = json.load(file)
        pairs = content["counts"]
        if content["format"] != RECORDED_FORMAT or content["version"] != 1:
            raise ValueError(f"format {short(content['format'])}, version {short(content['version'])}")
        sizes = np.array([_count(None, size) for size, _ in pairs], np.int64)
        counts = np.array([_count(None, count, most=2**48) for _, count in pairs], np.int64)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        wanted = f"a file that graphed.traffic.save wrote ({RECORDED_FORMAT})"
        raise _Wrong(None, wanted, str(error)[:100]) from error
    if not len(sizes) or (sizes < 1).any() or (counts < 1).any():
        raise _Wrong(None, "at least one step with tokens", "none, or a size or count of 0")
    return Requests(sizes, counts=counts)


def _count(line: int | None, value: Any, *, most: int = MAX_BUCKET) -> int:
    """Reads a whole number, by default of tokens, from text or JSON."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) <= 10 else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise _Wrong(line, f"a whole number from 0 to {most}", short(value))
    return value


def _seconds(line: int | None, value: Any, *, in_ms: bool) -> float:
    try:
        if isinstance(value, str) and "-" in value[1:]:
            # Azure's times have seven digits of a second; Python takes six.
            return datetime.fromisoformat(value.strip()[:26]).timestamp()
        seconds = float(value) / (1000 if in_ms else 1)
    except (ValueError, TypeError, OverflowError) as error:
        raise _Wrong(line, "a time", short(value)) from error
    if not np.isfinite(seconds):
        raise _Wrong(line, "a finite time", short(value))
    return seconds


def _hashes(line: int | None, value: Any) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
        raise _Wrong(line, "hash_ids, a list of ints", short(value))
    return value
