"""Reads and checks benchmark records and baselines, and writes baselines.

A baseline is a file with one record, the newest that was accepted, and the numbers of those before it: what
equal runs differ by, which a gate must know, shows only in several runs.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from piecewise.errors.gate import NoJsonschema, WrongRecord
from piecewise.tools.bench.result import bench_schema
from piecewise.tools.buckets.step_cost import BENCH_SCHEMA, read_json
from piecewise.tools.gate.quantities import quantities

BASELINE_SCHEMA = "piecewise.baseline/1"
# Runs whose numbers a baseline keeps.
MAX_RUNS = 20


@dataclass(frozen=True, slots=True)
class Baseline:
    """Holds the record to compare with, and the numbers of earlier runs of the same case on that machine.

    Attributes:
        history: of each earlier run, oldest first: date, commit, and values: name → [value, low, high].
    """

    record: Mapping[str, Any]
    history: tuple[Mapping[str, Any], ...] = ()

    def past(self, name: str) -> list[float]:
        """Returns a quantity's values in the earlier runs."""
        return [run["values"][name][0] for run in self.history if name in run["values"]]

    def followed_by(self, record: Mapping[str, Any], changed: Collection[str]) -> Baseline:
        """Makes the baseline whose record is a newer one of the same case and machine.

        Earlier values of the quantities in `changed` go, since the change is accepted. A run that is there
        already is not added again: equal numbers would pass for runs that do not differ.
        """
        new = run_of(record)
        runs = [run for run in (*self.history, run_of(self.record)) if run != new][-(MAX_RUNS - 1) :]
        kept = (
            {**run, "values": {name: each for name, each in run["values"].items() if name not in changed}}
            for run in runs
        )
        return Baseline(record, tuple(kept))

    def to_json(self) -> str:
        content = {"schema": BASELINE_SCHEMA, "record": self.record, "history": list(self.history)}
        return json.dumps(content, indent=1) + "\n"


def run_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a record as a line of a history."""
    environment = record["environment"]
    values = {
        name: [round(number, 6) for number in (each.value, each.low, each.high)]
        for name, each in quantities(record).items()
        if math.isfinite(each.value)  # JSON has no word for what is not
    }
    return {"date": environment["date"], "commit": environment["commit"], "values": values}


def read_record(path: str | Path) -> dict[str, Any]:
    """Reads a benchmark's record.

    Raises:
        WrongRecord: the file cannot be read, is truncated, of another schema version, or has a wrong value.
    """
    content = _read(path)
    _check(path, content)
    return content


def read_baseline(path: str | Path) -> Baseline:
    """Reads a baseline, or one record as a baseline without history; raises WrongRecord as `read_record`."""
    content = _read(path)
    if content.get("schema") != BASELINE_SCHEMA:
        _check(path, content)
        return Baseline(content)
    record, history = content.get("record"), content.get("history")
    if not isinstance(record, dict) or not isinstance(history, list):
        raise WrongRecord(where=path, wanted="a record and a history", found=", ".join(content))
    _check(f"{path}: record", record)
    for number, run in enumerate(history):
        if not _is_run(run):
            raise WrongRecord(where=f"{path}: history[{number}]", wanted="date, commit and values", found=run)
    return Baseline(record, tuple(history))


def _is_run(run: Any) -> bool:
    values = run.get("values") if isinstance(run, dict) and {"date", "commit"} <= run.keys() else None
    return isinstance(values, dict) and all(
        isinstance(each, list) and len(each) == 3
        and all(isinstance(x, (int, float)) and 0 <= x <= 1e18 for x in each) and each[1] <= each[2]
        for each in values.values()
    )  # fmt: skip


def _read(path: str | Path) -> dict[str, Any]:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    schemas = (BENCH_SCHEMA, BASELINE_SCHEMA)
    return read_json(path, schemas=schemas, refusal=WrongRecord, parse_constant=no_constant)


def _check(path: object, record: Mapping[str, Any]) -> None:
    try:
        jsonschema = importlib.import_module("jsonschema")
    except ImportError as error:
        raise NoJsonschema from error
    validator = jsonschema.Draft202012Validator(bench_schema())
    problem = jsonschema.exceptions.best_match(validator.iter_errors(record))
    if problem is not None:
        raise WrongRecord(
            where=f"{path}: {problem.json_path}", wanted="what schema.json says", found=problem.message
        )
    for part, keys in (
        ("results", ("num_tokens", "variant")),
        ("ratios", ("num_tokens", "quantity", "of", "over")),
    ):
        _require_distinct(f"{path}: {part}", [tuple(line[key] for key in keys) for line in record[part]])
    for number, line in enumerate(record["ratios"]):
        if line["quantity"] == "latency" and not (0 < float(line["median"]) < math.inf):
            where = f"{path}: $.ratios[{number}].median"
            raise WrongRecord(where=where, wanted="a finite ratio above 0", found=line["median"])
    for name, each in quantities(record).items():
        if each.low > each.high:
            raise WrongRecord(where=f"{path}: {name}", wanted="an interval from low to high", found=each[2:4])


def _require_distinct(where: str, rows: Sequence[tuple[Any, ...]]) -> None:
    twice = next((row for row in rows if rows.count(row) > 1), None)
    if twice is not None:
        raise WrongRecord(where=where, wanted="each row once", found=f"{twice} twice")
