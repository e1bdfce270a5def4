"""The gate: planted regressions are named, equal records pass, and what cannot be compared is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
from torch import Tensor, nn

import boundary_ops
import piecewise
from piecewise.errors.gate import (
    AnotherCase,
    DirtyBaseline,
    NoJsonschema,
    WrongRecord,
    WrongThreshold,
)
from piecewise.tools import cli
from piecewise.tools.bench.latency import LatencyBench
from piecewise.tools.bench.result import bench_schema, interval
from piecewise.tools.cli import main
from piecewise.tools.gate import regress
from piecewise.tools.gate.baseline import (
    BASELINE_SCHEMA,
    MAX_RUNS,
    Baseline,
    read_baseline,
    read_record,
    run_of,
)
from piecewise.tools.gate.compare import Comparison, compare, judge
from piecewise.tools.gate.outputs import junit
from piecewise.tools.gate.quantities import RULES, Quantity, quantities

HIDDEN = 8
Record = dict[str, Any]
Plant = Callable[[Record], None]


def _sum(x: Tensor, out: Tensor) -> None:
    out.copy_(x.cumsum(0))


_sum_op = boundary_ops.define("gate_test::sum(Tensor x, Tensor(a!) out) -> ()", _sum)


class Model(nn.Module):
    """Two linears of one input around a boundary op; each fault is a way to write or break it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.one, self.two = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "wrong row":
            x = x * 1.05
        if self.fault == "no fusion":
            y = self.one(x) + self.two(x * 1.0)
        else:
            y = self.one(x) + self.two(x)
        if self.fault == "eager segment":
            y = y + 0 * y.sort(0).values
        if self.fault != "no boundary":
            inner = torch.empty_like(y)
            _sum_op(y, inner)
            y = inner.relu()
        out = torch.empty_like(y)
        _sum_op(y, out)
        return out


def measured(fault: str = "") -> Record:
    torch.manual_seed(0)
    unmodified, model = Model().bfloat16().eval(), Model(fault).bfloat16().eval()
    model.load_state_dict(unmodified.state_dict())

    def inputs(n: int) -> Any:
        x = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(n))
        return (x.bfloat16(),), {}

    case = piecewise.PrefillCase(model, inputs, piecewise.PrefillCase(unmodified, inputs))
    config = piecewise.PiecewiseConfig(buckets=(4, 8), progress=False, fusions=("pack_linears",))
    bench = LatencyBench(
        case, spec="here:case", sizes=[4, 8], variants=["eager", "graphed", "floor"], config=config,
        rounds=3,
    )  # fmt: skip
    record: Record = json.loads(bench.run().to_json())
    return steady(record)


def steady(record: Record) -> Record:
    """Replaces all times: what is measured here is noise, and nothing is timed in a test."""
    for line in record["results"]:
        for quantity in ("latency_ms", "host_ms"):
            line[quantity] = {"median": 2.0, "low": 1.99, "high": 2.01}
    for line in record["ratios"]:
        if line["quantity"] == "latency":
            line |= {"median": 1.5, "low": 1.49, "high": 1.51, "interval": [1.495, 1.505]}
    for variant in record["variants"].values():
        if variant["capture"]:
            variant["capture"]["times"] = dict.fromkeys(variant["capture"]["times"], 1.0)
    record["environment"] |= {"dirty": False, "commit": "0123456789abcdef"}
    return record


def run(base: Record, number: int) -> Record:
    """The same record of another day."""
    return base | {"environment": base["environment"] | {"date": f"2026-01-{number + 1:02}"}}


@pytest.fixture(scope="module")
def base() -> Record:
    return measured()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(content: Any, name: str = "record.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return written


def compared(base: Record, current: Record) -> Comparison:
    return compare(Baseline(base), current)


def regressions(base: Record, current: Record) -> dict[str, str]:
    return {finding.name: finding.cause for finding in compared(base, current).of("regression")}


def test_the_schema_is_a_schema_and_describes_what_is_measured(base: Record) -> None:
    jsonschema.Draft202012Validator.check_schema(bench_schema())
    jsonschema.validate(base, bench_schema())
    for name in ("environment", "results", "ratios", "variants", "memory", "seconds", "settings"):
        wrong = copy.deepcopy(base)
        del wrong[name]
        with pytest.raises(jsonschema.ValidationError, match=name):
            jsonschema.validate(wrong, bench_schema())


def test_equal_records_have_no_difference(base: Record) -> None:
    found = compared(base, copy.deepcopy(base))
    assert not found.regressed and {finding.verdict for finding in found.findings} == {"same"}
    kinds = {finding.kind for finding in found.findings}
    assert kinds >= {"over-floor", "over-eager", "error", "memory", "buckets", "boundary ops", "fusions"}


# Each of these is a model of its own: the fault is in what was captured, not in a file.
@pytest.mark.parametrize(
    ("fault", "name", "cause"),
    [
        ("no boundary", "graphed: boundary ops, gate_test::sum", "in a graph segment, or gone"),
        ("eager segment", "graphed: eager ops, sort (mixes_tokens)", "run outside of graphs"),
        ("eager segment", "graphed: ops outside of graphs, share at the worst bucket", "became"),
        ("wrong row", "error of graphed ÷ eager, 8 tokens", "became"),
        ("no fusion", "graphed: fusions, pack_linears", "matches 1 fewer times"),
    ],
)
def test_a_planted_fault_of_the_model_is_named(base: Record, fault: str, name: str, cause: str) -> None:
    found = regressions(base, measured(fault))
    assert name in found, found
    assert cause in found[name]


def _drop_bucket(record: Record) -> None:
    capture = record["variants"]["graphed"]["capture"]
    capture["captured"].remove(8)
    lost = next(each for each in capture["buckets"] if each["bucket"] == 8)
    lost |= {"status": "failed", "reason": "the device had no memory", "num_graphs": 0}


def _fall_back(record: Record) -> None:
    record["results"] = [x for x in record["results"] if (x["variant"], x["num_tokens"]) != ("graphed", 8)]
    record["skipped"]["graphed, 8 tokens"] = "calls ran eagerly: {'moved_address': 9}"


def _double_memory(record: Record) -> None:
    capture = record["variants"]["graphed"]["capture"]
    capture["again"]["device_bytes"] = 2 * capture["again"]["device_bytes"] + 64 * 2**20


def _slow_a_segment(record: Record) -> None:
    for line in record["ratios"]:
        if (line["of"], line["over"]) == ("graphed", "floor"):
            line |= {"median": 1.68, "low": 1.67, "high": 1.69, "interval": [1.675, 1.685]}


def _lose_compile_cache(record: Record) -> None:
    (lowering,) = record["variants"]["graphed"]["capture"]["lowerings"]
    lowering |= {"num_compiled": 4, "num_from_disk": 0}


def _cached(record: Record) -> None:
    (lowering,) = record["variants"]["graphed"]["capture"]["lowerings"]
    lowering |= {"num_compiled": 4, "num_from_disk": 4}


@pytest.mark.parametrize(
    ("plant", "name", "cause"),
    [
        (_drop_bucket, "graphed: bucket 8", "it is failed: the device had no memory"),
        (_fall_back, "graphed, 8 tokens", "moved_address"),
        (_double_memory, "graphed: graph memory", "became"),
        (_slow_a_segment, "graphed ÷ floor, 8 tokens", "1.5 became 1.68"),
        (_lose_compile_cache, "graphed: share compiled anew", "0 became 1"),
    ],
)
def test_a_planted_fault_of_the_record_is_named(base: Record, plant: Plant, name: str, cause: str) -> None:
    was, now = copy.deepcopy(base), copy.deepcopy(base)
    _cached(was)
    _cached(now)
    plant(now)
    found = regressions(was, now)
    assert name in found, found
    assert cause in found[name]
    assert not compared(now, was).regressed  # the way back is no regression


def test_a_change_inside_the_measured_spread_does_not_count(base: Record) -> None:
    was, now = copy.deepcopy(base), copy.deepcopy(base)
    _slow_a_segment(now)
    for record in (was, now):
        for line in record["ratios"]:
            if line["quantity"] == "latency":
                line["interval"] = [line["median"] - 0.2, line["median"] + 0.2]
    found = compared(was, now)
    assert not found.regressed
    assert {x.name for x in found.of("within the spread")} == {f"graphed ÷ floor, {n} tokens" for n in (4, 8)}


def test_what_equal_runs_differ_by_widens_the_limit(base: Record) -> None:
    runs = []
    for ratio in (1.3, 1.5, 1.7, 1.4, 1.6):
        record = copy.deepcopy(base)
        for line in record["ratios"]:
            line["median"] = ratio
        runs.append(run_of(record))
    now = copy.deepcopy(base)
    _slow_a_segment(now)
    assert compare(Baseline(base), now).regressed
    assert not compare(Baseline(base, tuple(runs)), now).regressed


# A baseline of a few runs that differ by 2 %, as those of an H200 do.
@pytest.mark.parametrize("past", [(1.0, 1.03), (1.0, 1.03, 0.98, 1.01)])
def test_a_few_runs_in_the_baseline_do_not_hide_a_tenth(past: tuple[float, ...]) -> None:
    def verdict(value: float) -> str:
        before, now = (Quantity("over-floor", each, each, each) for each in (1.01, value))
        return judge("graphed ÷ floor", before, now, past, RULES["over-floor"]).verdict

    assert verdict(1.115) == "regression"
    assert verdict(1.05) == "same" and verdict(1.07) == "within the spread"


@pytest.mark.parametrize(("drift", "soon"), [(0.04, 8), (0.02, 12), (0.01, 19)])
def test_a_slow_drift_that_each_update_accepts_is_found(drift: float, soon: int) -> None:
    values = [(1 + drift) ** number for number in range(soon)]
    before, now = (Quantity("over-floor", each, each, each) for each in values[-2:])
    found = judge("graphed ÷ floor", before, now, values[:-2], RULES["over-floor"])
    assert found.verdict == "regression"


def test_times_of_another_machine_are_not_compared_but_ratios_are(base: Record) -> None:
    now = copy.deepcopy(base)
    now["environment"]["driver"] = "another"
    for line in now["results"]:
        line["latency_ms"] = {"median": 9.0, "low": 8.9, "high": 9.1}
    found = compared(base, now)
    assert not found.regressed
    skipped = {finding.kind for finding in found.of("not compared")}
    assert skipped == {"latency", "host", "startup"}
    assert "driver" in str(found)
    _slow_a_segment(now)
    assert compared(base, now).regressed


def test_a_slower_call_on_the_same_machine_is_a_regression(base: Record) -> None:
    now = copy.deepcopy(base)
    for line in now["results"]:
        line["latency_ms"] = {"median": 2.9, "low": 2.89, "high": 2.91}
    assert set(regressions(base, now)) == {f"latency of graphed, {n} tokens" for n in (4, 8)}


def _is_nan(record: Record) -> None:
    record["results"][0]["latency_ms"]["median"] = float("nan")


def _is_zero(record: Record) -> None:
    record["results"][0]["latency_ms"]["median"] = 0.0


def _is_twice(record: Record) -> None:
    record["results"].append(record["results"][0])


def _is_a_ratio_of_infinity(record: Record) -> None:
    record["ratios"][0]["median"] = "inf"


def _has_an_interval_at_zero(record: Record) -> None:
    record["ratios"][0]["interval"] = [0, 1.5]


def _has_an_interval_turned_around(record: Record) -> None:
    record["ratios"][1]["interval"] = [1.505, 1.495]


def _is_beyond_floats(record: Record) -> None:
    record["variants"]["graphed"]["capture"]["again"]["device_bytes"] = 10**400


def _has_wrong_fusions(record: Record) -> None:
    record["variants"]["graphed"]["capture"]["fusions"]["matches"] = [["pack_linears", None]]


def _has_wrong_lowerings(record: Record) -> None:
    record["variants"]["graphed"]["capture"]["lowerings"][0]["num_compiled"] = "inf"


def _is_of_another_version(record: Record) -> None:
    record["schema"] = "piecewise.bench/1"


def _is_incomplete(record: Record) -> None:
    del record["variants"]["graphed"]["capture"]["plan"]


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (_is_nan, "NaN"),
        (_is_zero, "results[0]"),
        (_is_twice, "twice"),
        (_is_a_ratio_of_infinity, "ratios[0]"),
        (_has_an_interval_at_zero, "interval"),
        (_has_an_interval_turned_around, "low to high"),
        (_is_beyond_floats, "device_bytes"),
        (_has_wrong_fusions, "matches"),
        (_has_wrong_lowerings, "num_compiled"),
        (_is_of_another_version, "piecewise.bench/2"),
        (_is_incomplete, "plan"),
    ],
)
def test_a_wrong_record_is_refused(base: Record, write: Callable[..., str], spoil: Plant, part: str) -> None:
    wrong = copy.deepcopy(base)
    spoil(wrong)
    with pytest.raises(WrongRecord) as error:
        read_record(write(wrong))
    assert part in str(error.value)


@pytest.mark.parametrize("line", [[10**400, 1, 1], [-1, 1, 1], ["inf", 1, 1], [1.5, 1.6, 1.4], [1, 1], None])
def test_a_wrong_history_is_refused(base: Record, write: Callable[..., str], line: Any) -> None:
    run: Record = {"date": "", "values": {} if line is None else {"graphed ÷ floor, 8 tokens": line}}
    run |= {} if line is None else {"commit": ""}
    with pytest.raises(WrongRecord, match="history"):
        read_baseline(write({"schema": BASELINE_SCHEMA, "record": base, "history": [run]}))


def test_an_error_without_bound_leaves_files_that_can_be_read(
    base: Record, write: Callable[..., str], tmp_path: Path
) -> None:
    wrong = copy.deepcopy(base)
    for line in wrong["results"]:
        line["max_abs_error"] = "inf"
    baseline, benchmark = str(tmp_path / "baseline.json"), tmp_path / "benchmark.json"
    for _ in range(2):
        assert main(["regress", baseline, write(wrong), "--update", "--benchmark", str(benchmark)]) == 0
    assert main(["regress", baseline, write(wrong)]) == 0
    assert "Infinity" not in benchmark.read_text()
    assert "error of graphed, 8 tokens" in regressions(base, wrong)


def test_control_characters_in_a_name_leave_junit_readable(base: Record) -> None:
    now = copy.deepcopy(base)
    now["skipped"] = {"floor": "a \x1b[31mred\x1b[0m reason\x00 & <more>"}
    now["results"] = [line for line in now["results"] if line["variant"] != "floor"]
    failure = ElementTree.fromstring(junit(compared(base, now)).encode()).find(".//failure")
    assert failure is not None and "red" in failure.attrib["message"]


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": 3}', "[" * 100_000, "\xff\xfe"])
def test_a_file_that_is_no_record_is_refused(write: Callable[..., str], text: str) -> None:
    with pytest.raises(WrongRecord):
        read_record(write(text))
    with pytest.raises(WrongRecord):
        read_baseline(write(text))


def test_a_truncated_record_and_a_missing_one_are_refused(base: Record, write: Callable[..., str]) -> None:
    with pytest.raises(WrongRecord, match="readable"):
        read_record(write(json.dumps(base)[:-100]))
    with pytest.raises(WrongRecord, match="readable"):
        read_record("/nowhere/at/all.json")


@pytest.mark.parametrize(("key", "value"), [("spec", "another:case"), ("settings", {"buckets": [4, 8, 16]})])
def test_another_model_or_other_settings_are_refused(base: Record, key: str, value: Any) -> None:
    other = copy.deepcopy(base)
    other[key] = value
    with pytest.raises(AnotherCase, match="another:case|buckets"):
        compared(base, other)


def test_records_without_a_common_quantity_are_refused(base: Record) -> None:
    other = copy.deepcopy(base)
    other |= {"results": [], "ratios": [], "variants": {}}
    with pytest.raises(AnotherCase, match="no quantity"):
        compared(other, copy.deepcopy(base))


def test_a_record_that_measured_less_cannot_be_compared(base: Record) -> None:
    other = copy.deepcopy(base)
    other["results"] = [line for line in other["results"] if line["variant"] != "floor"]
    with pytest.raises(AnotherCase, match="floor, 4 tokens not asked for now"):
        compared(base, other)
    other["skipped"]["floor"] = "it needs a device"
    assert regressions(base, other)["floor, 4 tokens"] == "it needs a device"


def test_without_the_library_records_are_not_taken_unchecked(
    base: Record, write: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(NoJsonschema, match="pip install"):
        read_record(write(base))


def test_the_command_accepts_compares_and_writes(
    base: Record, write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    current, baseline = write(base, "current.json"), str(tmp_path / "baseline.json")
    assert main(["regress", baseline, current]) == 2
    for number in range(MAX_RUNS + 3):
        for _ in range(2):  # one run is one of the history, however often it is accepted
            assert main(["regress", baseline, write(run(base, number)), "--update"]) == 0
        assert len(read_baseline(baseline).history) == min(number, MAX_RUNS - 1)
    assert len(read_baseline(baseline).history) == MAX_RUNS - 1
    assert main(["regress", baseline, current]) == 0
    capsys.readouterr()

    slower = copy.deepcopy(base)
    _slow_a_segment(slower)
    files = {option: str(tmp_path / option) for option in ("junit", "benchmark", "json")}
    options = [f"--{option}={path}" for option, path in files.items()]
    assert main(["regress", baseline, write(slower, "slow.json"), *options]) == 1
    out = capsys.readouterr().out
    assert "graphed ÷ floor, 8 tokens" in out and "+12.0%" in out
    assert main(["regress", baseline, write(slower, "slow.json"), "--threshold", "over-floor=0.2"]) == 0

    text = summary.read_text()
    assert (
        text.startswith("before\n") and "❌ piecewise regress: here:case" in text and "| regression |" in text
    )
    suites = ElementTree.parse(files["junit"]).getroot()
    failures = [case.get("name") for case in suites.iter("testcase") if case.find("failure") is not None]
    assert failures == ["graphed ÷ floor, 4 tokens", "graphed ÷ floor, 8 tokens"]
    lines = json.loads(Path(files["benchmark"]).read_text())
    assert {"name", "value", "unit", "extra"} <= lines[0].keys() and len(lines) == len(quantities(slower))
    assert json.loads(Path(files["json"]).read_text())["regressed"] is True


def test_an_accepted_change_is_the_new_normal(
    base: Record, write: Callable[..., str], tmp_path: Path
) -> None:
    baseline, slower = str(tmp_path / "baseline.json"), copy.deepcopy(base)
    for line in slower["ratios"]:
        if line["of"] == "graphed" and line["quantity"] == "latency":
            line |= {"median": 3.0, "interval": [2.99, 3.01]}
    for number in range(5):
        assert main(["regress", baseline, write(run(base, number)), "--update"]) == 0
    assert main(["regress", baseline, write(slower)]) == 1
    assert main(["regress", baseline, write(slower), "--update"]) == 0
    assert main(["regress", baseline, write(slower)]) == 0
    values = [run["values"] for run in read_baseline(baseline).history]
    assert not any("graphed ÷ floor, 8 tokens" in each for each in values)
    assert all("graphed ÷ eager, 8 tokens" in each for each in values)


def test_an_update_to_another_case_begins_a_new_history(
    base: Record, write: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = str(tmp_path / "baseline.json")
    other = copy.deepcopy(base)
    other["spec"] = "another:case"
    for record in (base, base, other):
        assert main(["regress", baseline, write(record), "--update"]) == 0
    assert "begins anew" in capsys.readouterr().err
    found = read_baseline(baseline)
    assert found.record["spec"] == "another:case" and not found.history


def test_a_baseline_with_uncommitted_changes_warns_and_is_refused_if_strict(
    base: Record, write: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    dirty = copy.deepcopy(base)
    dirty["environment"]["dirty"] = True
    paths = [write(dirty, "dirty.json"), write(base, "clean.json")]
    assert main(["regress", *paths]) == 0
    assert "uncommitted" in capsys.readouterr().out
    assert main(["regress", *paths, "--strict"]) == 2
    with pytest.raises(DirtyBaseline):
        regress.run(cli._parser().parse_args(["regress", *paths, "--strict"]))
    # A clean record replaces it; a dirty one becomes no baseline, not even the first.
    assert main(["regress", *paths, "--strict", "--update"]) == 0
    assert main(["regress", paths[0], write(dirty), "--strict", "--update"]) == 2
    assert main(["regress", f"{paths[0]}.new", write(dirty), "--strict", "--update"]) == 2
    assert not read_baseline(paths[0]).record["environment"]["dirty"]


@pytest.mark.parametrize(
    "given", ["over-floor", "over-floor=x", "over-floor=-1", "nothing=0.1", "over-floor=inf"]
)
def test_a_wrong_threshold_is_refused(base: Record, write: Callable[..., str], given: str) -> None:
    path = write(base)
    with pytest.raises(WrongThreshold, match="over-floor"):
        regress.run(cli._parser().parse_args(["regress", path, path, "--threshold", given]))


def test_a_plot_has_a_panel_for_each_ratio(base: Record, write: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    path = write(base)
    image = tmp_path / "history.png"
    assert main(["regress", path, path, "--plot", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")


def test_each_quantity_has_a_rule_and_is_better_when_smaller(base: Record) -> None:
    found = quantities(base)
    assert {each.kind for each in found.values()} <= RULES.keys()
    eager = next(each for name, each in found.items() if name == "graphed ÷ eager, 8 tokens")
    assert eager.value == pytest.approx(1 / 1.5) and eager.low < eager.value < eager.high


def test_an_interval_covers_the_median_and_narrows_with_samples() -> None:
    few, many = [1.0, 1.2, 0.9, 1.1, 1.0], [1.0, 1.2, 0.9, 1.1, 1.0] * 20
    low, high = interval(few)
    assert low <= 1.0 <= high
    closer = interval(many)
    assert closer[1] - closer[0] < high - low
    assert interval([2.0]) == [2.0, 2.0]


def test_help_of_the_command_imports_no_torch() -> None:
    code = """
import sys
from piecewise.tools.cli import main
try: main(["regress", "--help"])
except SystemExit: pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
