"""The planner against brute force, and on real traces against the grids of the engines."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from traces import TRACES, needs_traces

from piecewise.errors.tools import PlanTooLarge, WrongBenchFile
from piecewise.settings.grids import ENGINE_GRIDS, Grid
from piecewise.tools.buckets.planner import BucketPlans, SlotRate, _layer, evaluate, padded_slots
from piecewise.tools.buckets.step_cost import PADDED_TOKENS, GraphMemory, StepCost, read_bench
from piecewise.tools.buckets.steps import Histogram, chunked, packed
from piecewise.tools.buckets.traffic import read_requests

CHUNK = 2048


def plan_buckets(steps: Histogram, *, max_graphs: int, cover: int, cost=None) -> tuple[int, ...]:
    return BucketPlans(steps, cover=cover, cost=cost or PADDED_TOKENS).of(max_graphs)


def histogram(counts: dict[int, int]) -> Histogram:
    return Histogram(np.array(sorted(counts)), np.array([counts[size] for size in sorted(counts)]))


def cost_of(buckets, counts, graphed) -> float:
    """By the definition: each step pays its smallest bucket that holds it."""
    return sum(count * graphed(min(b for b in buckets if b >= size)) for size, count in counts.items())


def brute_force(counts, cover, max_graphs, graphed) -> float:
    inner = range(1, cover)
    return min(
        cost_of((*chosen, cover), counts, graphed)
        for num in range(min(max_graphs, cover))
        for chosen in combinations(inner, num)
    )


small = st.dictionaries(st.integers(1, 9), st.integers(1, 50), min_size=1, max_size=9)


@given(small, st.integers(1, 5), st.integers(9, 10))
@settings(deadline=None)
def test_the_plan_costs_what_the_best_of_all_lists_costs(counts, max_graphs, cover):
    found = plan_buckets(histogram(counts), max_graphs=max_graphs, cover=cover)
    assert found[-1] == cover and len(found) <= max_graphs
    assert cost_of(found, counts, float) == brute_force(counts, cover, max_graphs, float)
    if len(found) > 1:
        fewer = plan_buckets(histogram(counts), max_graphs=len(found) - 1, cover=cover)
        assert cost_of(found, counts, float) < cost_of(fewer, counts, float), "no bucket is idle"


curves = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 30)),
    min_size=1,
    max_size=6,
    unique_by=lambda point: point[0],
).map(sorted)


# A size that costs more than a larger one would lead the search astray.
@example({1: 22, 2: 37, 3: 28, 4: 12, 5: 32}, 2, [(1, 6), (2, 12), (3, 18), (4, 26), (5, 13)])
@example({1: 55, 2: 42, 3: 33, 4: 3, 5: 31}, 2, [(1, 1), (2, 39), (3, 5), (4, 18), (5, 6), (10, 60)])
@given(small, st.integers(1, 4), curves)
@settings(deadline=None)
def test_a_measured_curve_that_falls_and_rises_is_planned_exactly_too(counts, max_graphs, points):
    sizes, times = (np.array(each) for each in zip(*points, strict=True))
    cost = StepCost(sizes, times.astype(float), times.astype(float))
    graphed = {size: float(cost.graphed(np.array([size]))[0]) for size in range(1, 11)}
    found = plan_buckets(histogram(counts), max_graphs=max_graphs, cover=10, cost=cost)
    assert found[-1] == 10 and len(found) <= max_graphs
    best = brute_force(counts, 10, max_graphs, graphed.get)
    assert cost_of(found, counts, graphed.get) == pytest.approx(best, rel=1e-9)


def test_rows_far_apart_are_searched_as_those_near_by():
    """Large problems take another way through a layer: against the plain recursion."""
    rng = np.random.default_rng(1)
    counts = {int(size): int(rng.integers(1, 9)) for size in rng.choice(9000, 4500, replace=False) + 1}
    steps, sizes = histogram(counts), np.array(sorted({*counts, 9000}))
    prefix = np.concatenate([[0], np.cumsum([counts.get(int(size), 0) for size in sizes])]).astype(float)
    best = np.concatenate([[0], prefix[1:] * sizes])
    for num_graphs in range(2, 5):
        best = np.concatenate(
            [[0], [(best[:j] + (prefix[j] - prefix[:j]) * sizes[j - 1]).min() for j in range(1, len(prefix))]]
        )
        found = plan_buckets(steps, max_graphs=num_graphs, cover=9000)
        assert evaluate(found, steps).cost * steps.num_steps == pytest.approx(best[-1], rel=1e-12)


def test_every_row_of_a_layer_has_its_least_column():
    rng = np.random.default_rng(2)
    num_rows = 4103
    prefix = np.cumsum(rng.integers(0, 5, num_rows)).astype(float)
    price = np.cumsum(rng.integers(1, 4, num_rows)).astype(float)
    prefix[0] = 0.0
    best = prefix * price
    floor = np.zeros(num_rows, np.int32)
    for _ in range(3):
        better, choice = _layer(best, prefix, price, floor)
        for row in range(1, num_rows):
            costs = best[:row] + (prefix[row] - prefix[:row]) * price[row]
            assert better[row] == costs.min() == costs[choice[row]]
        best, floor = better, choice


def test_every_step_up_to_cover_is_served_and_larger_ones_play_no_part():
    steps = histogram({10: 5, 20: 5, 5000: 1000})
    assert plan_buckets(steps, max_graphs=3, cover=64) == (10, 20, 64)
    # The top is a bucket though nothing was seen there, and though one graph would do without it.
    assert plan_buckets(steps, max_graphs=1, cover=64) == (64,)
    found = evaluate((10, 20, 64), steps)
    assert (found.padding, found.graphed_steps) == (0.0, 10 / 1010)
    assert found.graphed_tokens == 150 / (150 + 5000 * 1000)


def test_more_graphs_than_sizes_are_not_made():
    assert plan_buckets(histogram({3: 1, 7: 2}), max_graphs=4096, cover=7) == (3, 7)


def test_a_table_beyond_memory_is_refused_before_it_is_made():
    steps = Histogram(np.arange(1, 1_000_001), np.ones(1_000_000, np.int64))
    with pytest.raises(PlanTooLarge, match="--chunk"):
        plan_buckets(steps, max_graphs=4096, cover=1_000_000)


def test_an_outcome_by_hand():
    steps = histogram({1: 2, 3: 1, 4: 1, 6: 4, 9: 2})
    found = evaluate((4, 8), steps, memory=GraphMemory(100, 7))
    # 1, 1, 3, 4 → 4 each; 6 → 8 each; 9 eager.
    assert found.padding == pytest.approx((16 + 32) / (9 + 24) - 1)
    assert found.worst_padding == 4.0
    assert (found.graphed_steps, found.graphed_tokens) == (8 / 10, 33 / 51)
    assert found.cost == pytest.approx((16 + 32 + 18) / 10)
    assert (found.num_graphs, found.memory_bytes) == (2, 814)
    limited = evaluate((4, 8), steps, max_padding_ratio=2.0)
    assert limited.graphed_steps == 6 / 10 and limited.worst_padding == pytest.approx(4 / 3)
    assert evaluate((4,), histogram({9: 1})).graphed_steps == 0.0


@pytest.mark.parametrize(
    ("budget", "num_graphs"), [(1000, 0), (1009, 0), (1010, 1), (1019, 1), (1020, 2), (1100, 10)]
)
def test_a_memory_budget_pays_the_pool_first_and_then_each_graph(budget, num_graphs):
    memory = GraphMemory(bytes_per_token=10, bytes_per_graph=10)
    assert memory.most_graphs(largest=100, budget_bytes=budget) == num_graphs
    if num_graphs:
        assert memory.of(tuple(range(101 - num_graphs, 101))) <= budget


def test_graphs_without_a_share_of_their_own_are_bounded_by_the_pool_only():
    memory = GraphMemory(bytes_per_token=10, bytes_per_graph=0)
    assert memory.most_graphs(largest=100, budget_bytes=1000) > 10**6
    assert memory.most_graphs(largest=100, budget_bytes=999) == 0


def test_latencies_are_interpolated_and_continued():
    cost = StepCost(np.array([10, 20, 40]), np.array([1.0, 2.0, 3.0]), np.array([5.0, 5.0, 4.0]))
    assert cost.graphed(np.array([1, 10, 15, 40, 60])).tolist() == [1, 1, 1.5, 3, 4]
    assert cost.eager(np.array([60])).tolist() == [4], "a falling end is not continued below zero"
    alone = StepCost(np.array([10]), np.array([1.0]), np.array([5.0]))
    assert alone.graphed(np.array([1, 99])).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("graphed", "size"),
    [([1.0, 2.0, 3.0], None), ([1.0, 2.0, 6.0], 27), ([6.0, 1.0, 6.0], 30), ([9.0, 9.0, 9.0], 10)],
)
def test_from_where_on_graphs_do_not_pay(graphed, size):
    cost = StepCost(np.array([10, 20, 40]), np.array(graphed), np.array([5.0, 3.0, 4.0]))
    found = cost.break_even()
    assert (found is None) == (size is None)
    if found is not None:
        every = np.arange(found, 41)
        assert (cost.graphed(every) >= cost.eager(every)).all()
        before = np.array([found - 1])
        assert found == 10 or cost.graphed(before)[0] < cost.eager(before)[0]


def bench_file(tmp_path, **changes):
    def line(n, variant, ms):
        return {"num_tokens": n, "variant": variant, "latency_ms": {"median": ms, "low": ms, "high": ms}}

    content = {
        "schema": "piecewise.bench/1",
        "results": [
            line(64, "graphed", 2.0), line(16, "graphed", 1.0), line(16, "eager", 9.0),
            line(64, "eager", 9.5), line(128, "eager", 9.9), line(64, "floor", 1.9),
        ],
        "memory": {"device_bytes": 1300, "largest_alone_device_bytes": 1100, "buckets": [16, 32, 64]},
    } | changes  # fmt: skip
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    return path


def test_a_bench_file_gives_the_curves_and_the_memory(tmp_path):
    cost, memory = read_bench(bench_file(tmp_path))
    assert cost.knots.tolist() == [16, 64], "only sizes measured both ways"
    assert cost.graphed(np.array([16, 40, 64])).tolist() == [1.0, 1.5, 2.0]
    assert cost.eager(np.array([64])).tolist() == [9.5]
    assert memory == GraphMemory(bytes_per_token=1000 / 64, bytes_per_graph=100)
    assert memory.of((16, 32, 64)) == 1300 and memory.of((64,)) == 1100
    assert read_bench(bench_file(tmp_path, memory={}))[1] is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "other/1"}, "the schema 'piecewise.bench/2', got 'other/1'"),
        ({"results": 3}, "a list of results"),
        ({"results": [3]}, "results[0]: expected an object"),
        ({"results": []}, "a size with both 'graphed' and 'eager'"),
        ({"results": [{"num_tokens": 8, "variant": []}]}, "a size with both 'graphed' and 'eager'"),
        ({"results": [{"num_tokens": 0, "variant": "eager"}]}, "results[0]: expected num_tokens from 1"),
        (
            {"results": [{"num_tokens": 8, "variant": "eager"}]},
            "latency_ms.median: expected a number above 0",
        ),
        ({"memory": {"largest_alone_device_bytes": -1}}, "memory.largest_alone_device_bytes"),
        (
            {"memory": {"largest_alone_device_bytes": 9, "device_bytes": 9, "buckets": [2, 1]}},
            "memory.buckets",
        ),
    ],
)
def test_a_wrong_bench_file_is_told(tmp_path, changes, says):
    with pytest.raises(WrongBenchFile) as caught:
        read_bench(bench_file(tmp_path, **changes))
    assert says in str(caught.value) and "bench.json" in str(caught.value)


def test_a_graph_is_added_while_it_saves_more_slots_than_its_memory_displaces():
    steps = histogram({size: 10 for size in range(1, 65)})

    def plan_of(num_graphs):
        return plan_buckets(steps, max_graphs=num_graphs, cover=64)

    for bytes_per_graph in (1, 1_000, 30_000, 10_000_000):
        rate = SlotRate(bytes_per_graph, cache_bytes_per_token=10, tokens_per_request=1000)
        best = rate.best(steps, plan_of, 64)
        totals = [padded_slots(steps, plan_of(n)) + rate.slots(n) for n in range(1, 65)]
        assert padded_slots(steps, best) + rate.slots(len(best)) == pytest.approx(min(totals))
    assert len(SlotRate(1, 10, 1000).best(steps, plan_of, 64)) == 64
    assert len(SlotRate(10**7, 10, 1000).best(steps, plan_of, 64)) == 1
    assert SlotRate(1_000, 10, 500).cache_tokens(3) == 300
    assert padded_slots(steps, (32, 64)) == pytest.approx(15.5)


@pytest.mark.parametrize(("name", "top", "head"), [
    ("tensorrt-llm", 600, (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)),
    ("sglang", 48, (4, 8, 12, 16, 20, 24, 28, 32, 48)),
    ("vllm", 40, (1, 2, 4, 8, 16, 24, 32, 40)),
])  # fmt: skip
def test_the_engines_grids(name, top, head):
    assert Grid(name).sizes(top) == head
    assert Grid(name, max_size=top).sizes(10**6) == head, "a grid's own end wins"


def test_the_engines_grids_further_up():
    assert Grid("tensorrt-llm").sizes()[-2:] == (2816, 3072)
    sglang = Grid("sglang").sizes(8192)
    assert len(sglang) == 58 and sglang[-9:-6] == (4096, 4608, 5120) and sglang[-1] == 8192
    vllm = Grid("vllm").sizes(512)
    assert len(vllm) == 51 and vllm[32:36] == (240, 248, 256, 272)
    assert all(sizes(0) == () for sizes in ENGINE_GRIDS.values())
    assert len(Grid("vllm").sizes(2**31 - 1)) == 4097, "one too many, which settings refuse"


def served(name, kind):
    """The trace as prefill steps: each request alone in chunks, or packed by a scheduler."""
    requests = read_requests(TRACES / name)
    return requests, (
        (lambda part: Histogram.of(chunked(part.num_tokens, CHUNK)))
        if kind == "alone"
        else (lambda part: Histogram.of(packed(part, CHUNK, step_s=lambda num_tokens: 0.025)))
    )


NAMES = ("azure_llm_2023_conv.csv", "azure_llm_2023_code.csv", "mooncake_conversation.jsonl")


@needs_traces
@pytest.mark.parametrize(("name", "padding"), list(zip(NAMES, (0.025, 0.022, 0.0061), strict=True)))
def test_twenty_graphs_pad_real_traffic_by_less_than_three_percent(name, padding):
    found = []
    for kind in ("alone", "packed"):
        requests, steps_of = served(name, kind)
        steps = steps_of(requests)
        assert steps.num_tokens == requests.num_tokens.sum()
        buckets = plan_buckets(steps, max_graphs=20, cover=CHUNK)
        outcome = evaluate(buckets, steps)
        assert outcome.graphed_steps == 1.0 and len(buckets) <= 20
        found.append(outcome.padding)
    assert found[0] <= padding <= 0.03 and found[1] <= found[0]


@needs_traces
@pytest.mark.parametrize("kind", ["alone", "packed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_plan_pads_no_more_than_any_engine_s_grid_of_its_size(name, kind):
    requests, steps_of = served(name, kind)
    steps, middle = steps_of(requests), len(requests) // 2
    seen, unseen = steps_of(requests.part(0, middle)), steps_of(requests.part(middle, len(requests)))
    for engine in ENGINE_GRIDS:
        for top in (512, 1024, CHUNK):
            grid = Grid(engine).sizes(top)
            plan = plan_buckets(steps, max_graphs=len(grid), cover=grid[-1])
            assert len(plan) <= len(grid) and plan[-1] == grid[-1]
            assert evaluate(plan, steps).padding <= evaluate(grid, steps).padding
            smoothed = seen.smoothed(grid[-1], share=0.3)
            trained = plan_buckets(smoothed, max_graphs=len(grid), cover=grid[-1])
            assert len(trained) <= len(grid) and trained[-1] == grid[-1]
            assert evaluate(trained, unseen).padding <= 1.02 * evaluate(grid, unseen).padding, (engine, top)


def test_padded_tokens_cost_their_bucket_graphed_and_themselves_eager():
    sizes = np.array([3, 8])
    assert PADDED_TOKENS.graphed(sizes).tolist() == PADDED_TOKENS.eager(sizes).tolist() == [3.0, 8.0]
