"""Traffic: every format, every error with its line, prefix-cache hits, chunks, packed steps, the recorder."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from traces import TRACES, needs_traces

from piecewise.capture.traffic_recorder import EXACT_UP_TO, TrafficRecorder
from piecewise.errors.tools import NoDecodeTimes, WrongTraffic
from piecewise.tools.buckets.steps import Histogram, chunked, decode_batches, packed
from piecewise.tools.buckets.traffic import FORMATS, PrefixCache, Requests, read_requests
from piecewise.tools.cli import TRAFFIC_FORMATS, _parser

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,480,10\n2023-11-16 18:17:05.0,0,2\n"
)
MOONCAKE = "".join(
    json.dumps({"timestamp": t, "input_length": n, "output_length": 5, "hash_ids": hashes}) + "\n"
    for t, n, hashes in (
        (0, 1200, [1, 2, 3]), (500, 1500, [1, 2, 4]), (1000, 1024, [1, 2]), (1500, 700, [1, 9]),
        (2500, 600, [1, 2]),
    )
)  # fmt: skip


def written(tmp_path, text, name="traffic.txt"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_command_line_offers_every_format():
    assert TRAFFIC_FORMATS == FORMATS


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("3\n 8 \n\n# pause\n5 # last\n", [3, 8, 5]),
        ("3\r\n8\r\n", [3, 8]),
        ("\ufeff3\n8", [3, 8]),
        ("# all\n4\n0\n4\n", [4, 4]),
        ("num_tokens\n3\n8\n", [3, 8]),
        ("whatever\n3\n8\n", [3, 8]),
        ("id,prompt_tokens\na,3\n\nb,8\n", [3, 8]),
        ('"id","input_tokens"\n"a, b",3\n', [3]),
        ('{"prompt_tokens": 3}\n\n{"prompt_tokens": 8, "id": "a"}\n', [3, 8]),
        (AZURE, [480, 3180]),
    ],
)
def test_formats_are_told_by_the_first_line(tmp_path, text, tokens):
    found = read_requests(written(tmp_path, text))
    assert found.num_tokens.tolist() == tokens and found.num_tokens.dtype == np.int64
    assert found.counts is None


def test_a_column_is_asked_for_by_name(tmp_path):
    table = written(tmp_path, "a,b\n1,2\n3,4\n")
    assert read_requests(table, column="b").num_tokens.tolist() == [2, 4]
    lines = written(tmp_path, '{"a": 1, "num_tokens": 2}\n')
    assert read_requests(lines, column="a").num_tokens.tolist() == [1]
    assert read_requests(lines, format="jsonl").num_tokens.tolist() == [2]


def test_azure_traces_have_times_and_outputs_in_order_of_arrival(tmp_path):
    found = read_requests(written(tmp_path, AZURE))
    assert found.output_tokens.tolist() == [10, 8] and found.context_tokens.tolist() == [480, 3180]
    assert found.arrival_s[1] - found.arrival_s[0] == pytest.approx(0.052)
    assert found.num_empty == 1


def test_mooncake_traces_lose_what_the_prefix_cache_holds(tmp_path):
    found = read_requests(written(tmp_path, MOONCAKE))
    # Two blocks of 512 are known to the second; to the third all is, but its last token must run; the fourth
    # has one known block; of the fifth two are known, but only one of them is whole.
    assert found.num_tokens.tolist() == [1200, 1500 - 1024, 1, 700 - 512, 600 - 512]
    assert found.context_tokens.tolist() == [1200, 1500, 1024, 700, 600]
    assert found.num_cached_tokens == 1024 + 1023 + 512 + 512
    assert found.arrival_s.tolist() == [0, 0.5, 1.0, 1.5, 2.5]


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=8), st.integers(1, 4))
def test_a_prefix_hit_is_a_run_of_whole_known_blocks_and_leaves_a_token(requests, block):
    cache, known = PrefixCache(block), set()
    for hashes in requests:
        num_tokens = max(len(hashes) * block - 1, 0)
        held = cache.admit(hashes, num_tokens)
        run = 0
        while run < len(hashes) and hashes[run] in known:
            run += 1
        assert held == min(run * block, (num_tokens // block) * block, max(num_tokens - 1, 0))
        known.update(hashes)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("3\nx\n", 2, "a whole number from 0 to 2147483647, got 'x'"),
        ("3\n-4\n", 2, "'-4'"),
        ("3\n\n4.5\n", 3, "'4.5'"),
        ("3\n99999999999\n", 2, "'99999999999'"),
        ("3\n" + "9" * 5000, 2, "999..."),
        ("3\n1_000\n", 2, "'1_000'"),
        ("3\n\u0663\n", 2, "whole number"),
        ("3 4\n", 1, "'3 4'"),
        ("a,b\n1,2\n", 1, "a column, one of num_tokens"),
        ("a,num_tokens\n1,2\n1\n", 3, "2 columns, got 1"),
        ("a,num_tokens\n1,2\n1,2,3\n", 3, "2 columns, got 3"),
        ("a,num_tokens\n1,\n", 2, "got ''"),
        ('{"x": 1}\n', 1, "a field, one of num_tokens"),
        ('{"num_tokens": 1}\n{"num_tokens": 1\n', 2, "a JSON object"),
        ('{"num_tokens": 1}\n[1]\n', 2, "a JSON object, got [1]"),
        ('{"num_tokens": true}\n', 1, "got True"),
        ('{"num_tokens": 1.0}\n', 1, "got 1.0"),
        ('{"num_tokens": 1' + "0" * 400 + "}\n", 1, "bits"),
        ('{"num_tokens": ' + "[" * 100_000, 1, "a JSON object"),
        (AZURE.replace("2023-11-16 18:17:03.9799600", "yesterday-1"), 3, "a time, got 'yesterday-1'"),
        ('{"input_length": 5, "hash_ids": "1", "timestamp": 0}\n', 1, "hash_ids, a list of ints"),
        ('{"input_length": 5, "hash_ids": [], "timestamp": 1e999}\n', 1, "a finite time"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, line, says):
    with pytest.raises(WrongTraffic) as caught:
        read_requests(written(tmp_path, text))
    message = str(caught.value)
    assert f"traffic.txt:{line}: " in message and says in message and "Fix:" in message
    assert len(message) < 1200


def test_the_fix_of_a_wrong_line_names_the_option_of_the_command(tmp_path):
    parser = _parser()
    for name in ("buckets", "plan"):
        (commands,) = [a for a in parser._actions if isinstance(a.choices, dict)]
        parser = commands.choices[name]
    options = set(parser._option_string_actions)
    with pytest.raises(WrongTraffic) as caught:
        read_requests(written(tmp_path, "x\ny\n"))
    assert set(re.findall(r"--[\w-]+", str(caught.value))) == {"--traffic-format", "--column"} <= options


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "at least one request"),
        ("\n\n", "at least one request"),
        ("0\n0\n", "none (2 empty ones)"),
        ("num_tokens\n", "at least one request"),
        (b"3\n\xff\n", "not UTF-8"),
        ('{"format": "piecewise-traffic", "version": 2, "counts": []}', "version 2"),
        ('{"format": "piecewise-traffic", "version": 1, "counts": []}', "at least one step"),
        ('{"format": "piecewise-traffic", "version": 1, "counts": [[4]]}', "graphed.traffic.save"),
        ('{"format": "piecewise-traffic", "version": 1, "counts": [[0, 4]]}', "a size or count of 0"),
        ('{"format": "piecewise-traffic", "version": 1, "counts": [[4, -1]]}', "got -1"),
        ('{"format": "piecewise-traffic", "version": 1', "graphed.traffic.save"),
    ],
)
def test_a_file_without_requests_is_told(tmp_path, text, says):
    with pytest.raises(WrongTraffic) as caught:
        read_requests(written(tmp_path, text))
    assert says in str(caught.value) and "traffic.txt" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(WrongTraffic, match="No such file"):
        read_requests(tmp_path / "missing.csv")
    with pytest.raises(WrongTraffic, match="directory"):
        read_requests(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_end_in_anything_but_requests_or_a_config_error(tmp_path_factory, content):
    path = written(tmp_path_factory.mktemp("noise"), content)
    try:
        assert len(read_requests(path)) > 0
    except WrongTraffic as error:
        assert "Fix:" in str(error)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_a_histogram_counts_each_step_once(steps):
    found = Histogram.of(np.array(steps))
    assert dict(zip(found.sizes.tolist(), found.counts.tolist(), strict=True)) == {
        size: steps.count(size) for size in steps
    }
    assert found.num_steps == len(steps) and found.num_tokens == sum(steps)
    twice = Histogram.merged([found, found])
    assert twice.sizes.tolist() == found.sizes.tolist() and twice.num_steps == 2 * len(steps)
    # Token counts far above their number are sorted instead of counted.
    far = Histogram.of(np.array(steps) * 1_000_000)
    assert (far.sizes // 1_000_000).tolist() == found.sizes.tolist()
    assert far.counts.tolist() == found.counts.tolist()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(50, 400), st.floats(0, 1))
@example([21, 21], 50, 1e-06)
def test_smoothing_moves_a_share_of_each_step_a_little_and_loses_none(steps, cover, share):
    before = Histogram.of(np.array(steps))
    after = before.smoothed(cover, share=share)
    scale = 1 if share == 0 else 2**20
    assert after.num_steps == pytest.approx(scale * len(steps), abs=len(after.sizes))
    weights = dict(zip(after.sizes.tolist(), after.counts.tolist(), strict=True))
    for size in after.sizes.tolist():
        assert any(seen * 0.95 - 1 <= size <= seen * 1.05 + 1 for seen in steps)
    for size, count in zip(before.sizes.tolist(), before.counts.tolist(), strict=True):
        least = count if size >= cover else count * (1 - share)
        assert weights.get(size, 0) >= scale * least - 1


def test_smoothing_by_hand():
    before = Histogram.of(np.array([100, 100, 200]))
    found = before.smoothed(200, share=0.5)
    weights = dict(zip(found.sizes.tolist(), (found.counts / 2**20).tolist(), strict=True))
    # Half of two steps over the twelve counts from 95 to 106; full steps stay.
    assert sorted(weights) == [*range(95, 107), 200]
    assert weights[95] == weights[106] == pytest.approx(1 / 12, abs=1e-5)
    assert weights[100] == pytest.approx(1 + 1 / 12, abs=1e-5) and weights[200] == 1.0
    assert before.smoothed(200, share=0) is before


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 200))
def test_chunks_are_full_but_for_the_last_and_sum_to_the_request(requests, chunk):
    steps = chunked(np.array(requests, np.int64), chunk).tolist()
    for tokens in requests:
        mine = []
        while sum(mine) < tokens:
            mine.append(steps.pop(0))
        assert sum(mine) == tokens and all(step == chunk for step in mine[:-1]) and 1 <= mine[-1] <= chunk
    assert steps == []


def requests_of(tokens, arrivals=None, outputs=None):
    return Requests(
        np.array(tokens, np.int64),
        np.array(arrivals, float) if arrivals is not None else None,
        np.array(outputs, np.int64) if outputs is not None else None,
    )


def test_steps_are_packed_in_order_of_arrival():
    waiting = requests_of([30, 50, 40, 10])
    assert packed(waiting, 64).tolist() == [64, 64, 2]
    assert packed(waiting, 64, max_num_seqs=1).tolist() == [30, 50, 40, 10]
    # The second one arrives while the first step runs, the third long after.
    timed = requests_of([30, 50, 40], [0.0, 0.5, 9.0])
    assert packed(timed, 64, step_s=lambda num_tokens: 1.0).tolist() == [30, 50, 40]
    assert packed(timed, 64, step_s=lambda num_tokens: 0.1).tolist() == [30, 50, 40]
    assert packed(requests_of([100, 50, 40], [0.0, 0.5, 9.0]), 64, step_s=lambda n: 1.0).tolist() == [
        64,
        64,
        22,
        40,
    ]
    # A step that takes longer for more tokens lets more requests wait.
    slow = requests_of([10, 10, 10], [0.0, 1.0, 2.0])
    assert packed(slow, 64, step_s=lambda num_tokens: 0.25 * num_tokens).tolist() == [10, 20]
    # Without a step time arrivals cannot matter.
    assert packed(timed, 64).tolist() == [64, 56]


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(0, 10)), min_size=1, max_size=30),
    st.integers(1, 128), st.none() | st.integers(1, 4), st.sampled_from([None, 0.01, 1.0]),
)  # fmt: skip
def test_packed_steps_are_within_their_bounds_and_lose_no_token(pairs, most, max_num_seqs, step_s):
    pairs.sort(key=lambda pair: pair[1])
    requests = requests_of([tokens for tokens, _ in pairs], [time for _, time in pairs])
    seen = []
    steps = packed(
        requests, most, max_num_seqs=max_num_seqs,
        step_s=None if step_s is None else lambda num_tokens: step_s, watch=seen.append,
    )  # fmt: skip
    assert steps.sum() == requests.num_tokens.sum() and 1 <= steps.min() and steps.max() <= most
    assert sum(seen) == len(requests) and len(seen) == len(steps)
    assert len(steps) <= len(chunked(requests.num_tokens, most))


def test_decode_batches_by_hand():
    # Steps of 1 s. First: 0..3. Second: 1..3. Third: from 10, one step.
    requests = requests_of([5, 5, 5], [100.0, 100.5, 110.0], [4, 3, 1])
    assert decode_batches(requests, step_s=1.0).tolist() == [1, 2, 2, 2, 1]
    # With one place the second waits for the first, until step 4.
    assert decode_batches(requests, step_s=1.0, max_num_seqs=1).tolist() == [1] * 8
    with pytest.raises(NoDecodeTimes, match="numbers of generated tokens"):
        decode_batches(requests_of([5], [0.0]), step_s=1.0)


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 9)), min_size=1, max_size=25),
    st.none() | st.integers(1, 4),
)
def test_decode_batches_generate_every_token_within_the_limit(pairs, max_num_seqs):
    pairs.sort()
    requests = requests_of([1] * len(pairs), [time for time, _ in pairs], [count for _, count in pairs])
    batches = decode_batches(requests, step_s=0.7, max_num_seqs=max_num_seqs)
    assert batches.sum() == requests.output_tokens.sum() and (batches >= 1).all()
    assert max_num_seqs is None or batches.max(initial=0) <= max_num_seqs


@needs_traces
@pytest.mark.parametrize(
    ("name", "count", "median", "share", "at"),
    [
        ("azure_llm_2023_conv.csv", 19_366, 1020, 0.86, 2048),
        ("azure_llm_2023_code.csv", 8_819, 1469, 0.62, 2048),
        ("mooncake_conversation.jsonl", 12_031, 2470, 0.20, 512),
    ],
)
def test_real_traces_have_the_published_shape(name, count, median, share, at):
    found = read_requests(TRACES / name)
    assert len(found) == count and np.median(found.num_tokens) == median
    assert (found.num_tokens <= at).mean() == pytest.approx(share, abs=0.01)
    assert found.output_tokens is not None and (np.diff(found.arrival_s) >= 0).all()


def test_what_a_recorder_saves_is_read_back(tmp_path):
    recorder = TrafficRecorder()
    for num_tokens in (7, 7, 3, 0, -1, 8192, 7):
        recorder.record(num_tokens)
    assert recorder.counts == {3: 1, 7: 3, 8192: 1} and list(recorder.counts) == [3, 7, 8192]
    assert recorder.num_calls == 5 and repr(recorder) == "TrafficRecorder(5 calls of 3 token counts)"
    path = tmp_path / "seen.json"
    recorder.save(path)
    recorder.save(path)
    found = read_requests(path)
    assert (found.num_tokens.tolist(), found.counts.tolist()) == ([3, 7, 8192], [1, 3, 1])
    assert Histogram.of(found.num_tokens, found.counts).num_steps == 5
    assert [entry.name for entry in tmp_path.iterdir()] == ["seen.json"]
    assert pickle.loads(pickle.dumps(recorder)).counts == recorder.counts
    recorder.reset()
    assert recorder.num_calls == 0


def test_a_recorder_stays_small_and_rounds_large_counts_up_by_little():
    recorder = TrafficRecorder()
    for num_tokens in range(1, 400_000):
        recorder.record(num_tokens)
    exact = [size for size in recorder.counts if size <= EXACT_UP_TO]
    assert exact == list(range(1, EXACT_UP_TO + 1))
    assert len(recorder.counts) <= EXACT_UP_TO + 256 * 6
    assert recorder.num_calls == 399_999
    for num_tokens in (8193, 16_383, 16_384, 100_001, 2**31 - 1):
        recorder.reset()
        recorder.record(num_tokens)
        (kept,) = recorder.counts
        assert num_tokens <= kept <= num_tokens * 1.004 + 1


def test_importing_piecewise_loads_no_planner():
    code = (
        "import sys, piecewise, piecewise.tools.cli;"
        "tools = 'piecewise.tools.buckets.';"
        "heavy = (tools + 'planner', tools + 'traffic', 'matplotlib');"
        "print(*[m for m in sys.modules if m in heavy])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == ""
