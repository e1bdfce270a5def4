"""Pictures: plain numbers at the ticks, log scales named, lines told apart, who is left out and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from piecewise.errors.tools import WrongBenchFile
from piecewise.tools import cli
from piecewise.tools.bench.result import BenchResult
from piecewise.tools.bench.variants import DEFAULT_VARIANTS, PEERS
from piecewise.tools.buckets.plot import plan_figure
from piecewise.tools.buckets.steps import Histogram

pytest.importorskip("matplotlib")

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
LLAMA = RESULTS / "llama_1b.json"


def ticks(axis):
    """The labels of the ticks inside of an axis' limits."""
    axis.axes.figure.canvas.draw()
    low, high = axis.get_view_interval()
    found = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for at, label in found if low <= at <= high]


def below(figure):
    return figure.get_supxlabel()


def labels(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


def looks(panel):
    """How each labelled line looks without its colour."""
    lines = [line for line in panel.lines if not line.get_label().startswith("_")]
    return [(line.get_marker(), line.get_linestyle()) for line in lines]


def with_changes(**changes):
    return dataclasses.replace(BenchResult.read(LLAMA), **changes)


def test_a_benchmarks_axes_have_plain_numbers_and_name_their_scales():
    latency, ratio = BenchResult.read(LLAMA).figure().axes
    assert ticks(ratio.xaxis) == ["16", "128", "512", "1024", "2048"]
    assert ratio.get_xscale() == "log" and ratio.get_xlabel() == "tokens in the call (log scale)"
    assert latency.get_yscale() == "log" and latency.get_ylabel() == "ms, call to idle device (log scale)"
    assert ticks(latency.yaxis) == ["2", "5", "10", "20"]
    assert not list(latency.yaxis.get_minorticklocs()) and not list(ratio.xaxis.get_minorticklocs())
    assert ratio.get_yscale() == "linear" and "log" not in ratio.get_ylabel()


def test_a_benchmarks_title_has_device_model_and_date():
    title = BenchResult.read(LLAMA).figure().get_suptitle()
    for said in ("docs.results.llama_1b:llama_1b", "NVIDIA H200", "torch 2.11.0+cu130", "2026-11-30"):
        assert said in title


@pytest.mark.parametrize("name", ["llama_1b", "llama_8b"])
def test_no_two_lines_look_alike_without_colours(name):
    result = BenchResult.read(RESULTS / f"{name}.json")
    for panel in result.figure().axes:
        assert len(set(looks(panel))) == len(looks(panel)) > 5
    names = dict.fromkeys((*DEFAULT_VARIANTS, *PEERS), {})
    graphed = [line for line in result.results if line["variant"] == "graphed"]
    everything = tuple(line | {"variant": name} for name in names for line in graphed)
    crowded = dataclasses.replace(result, variants=names, results=everything)
    assert len(set(looks(crowded.figure().axes[0]))) == len(names)


def test_the_panel_of_ratios_tells_close_lines_apart():
    result = BenchResult.read(LLAMA)
    latency, ratio = result.figure().axes
    drawn = {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in ratio.lines}
    for of, over in (
        ("graphed", "floor"),
        ("graphed-captured", "floor"),
        ("graphed-fused", "floor-inductor"),
    ):
        for n in result.sizes:
            assert drawn[f"{of} ÷ {over}"][n] == result.ratio(of, over, n)
    low, high = ratio.get_ylim()
    # In 250 pixels, two per cent are ten.
    assert high - low < 0.5 and low < 1 < high
    assert (
        "eager ÷ floor, up to 4.81" in below(result.figure()) and max(drawn["eager ÷ floor"].values()) > high
    )
    assert labels(latency) == list(result.variants)


def test_without_floors_ratios_are_over_the_graphed_variant_and_without_it_over_the_first():
    result = BenchResult.read(LLAMA)
    for names, expected in (
        (("eager", "graphed"), ["eager ÷ graphed"]), (("eager", "graphed-fused"), ["graphed-fused ÷ eager"]),
    ):  # fmt: skip
        found = with_changes(variants={name: result.variants[name] for name in names})
        assert labels(found.figure().axes[1]) == expected
    alone = with_changes(variants={"graphed": result.variants["graphed"]}).figure()
    assert len(alone.axes) == 1 and ticks(alone.axes[0].xaxis)[-1] == "2048"
    assert not with_changes(variants={}).figure().axes[0].lines


def test_far_lines_keep_their_room_where_most_are_far():
    result = BenchResult.read(LLAMA)
    far = tuple(
        line | {"median": 8.0} if line["of"].startswith("graphed") else line for line in result.ratios
    )
    figure = with_changes(
        ratios=far, variants={k: v for k, v in result.variants.items() if "floor-" not in k}
    ).figure()
    assert figure.axes[1].get_ylim()[1] > 8 and "log scale" in figure.axes[1].get_ylabel()


def test_skipped_variants_are_named_in_the_picture_with_their_reason():
    skipped = {"compile": "no compiler " + "here " * 80, "floor, 16 tokens": "16 is no captured bucket"}
    text = below(with_changes(skipped=skipped).figure())
    assert "compile left out: no compiler here" in text and "floor, 16 tokens left out: 16 is no" in text
    assert "reduce-overhead left out: not asked for" in text
    assert len(text.splitlines()) < 9 and max(map(len, text.splitlines())) <= 125


def test_many_sizes_leave_labels_out_where_they_would_touch():
    result = BenchResult.read(LLAMA)
    sizes = range(8, 2049, 8)
    line = next(line for line in result.results if line["variant"] == "eager")
    results = tuple(line | {"num_tokens": size} for size in sizes)
    found = ticks(with_changes(sizes=tuple(sizes), results=results).figure().axes[-1].xaxis)
    assert 5 < len(found) < 20 and found[-1] == "2048"


def test_a_picture_is_drawn_again_from_a_file(capsys, tmp_path):
    image = tmp_path / "again.svg"
    assert cli.main(["bench", "--from", str(LLAMA), "--plot", str(image)]) == 0
    assert "latency, graphed ÷ floor" in capsys.readouterr().out
    assert "<svg" in image.read_text()
    assert cli.main(["bench", "--from", str(LLAMA), "--tokens", "4"]) == 2
    assert "--tokens: expected to be used with SPEC" in capsys.readouterr().err
    read = BenchResult.read(LLAMA).asdict()
    assert read == {"settings": {}, "seconds": {}} | json.loads(LLAMA.read_text())


def broken(content, *path, value=None):
    *places, last = path
    for place in places:
        content = content[place]
    if value is None:
        del content[last]
    else:
        content[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec",), None), (("environment", "device"), None), (("results", 0, "latency_ms", "low"), "fast"),
        (("results", 3, "num_tokens"), None), (("ratios",), 3), (("skipped",), ["compile"]),
        (("schema",), "piecewise.bench/0"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_result_is_refused(capsys, tmp_path, path, value):
    content = json.loads(LLAMA.read_text())
    broken(content, *path, value=value)
    file = tmp_path / "broken.json"
    file.write_text(json.dumps(content))
    with pytest.raises(WrongBenchFile, match="piecewise.bench/2"):
        BenchResult.read(file)
    assert cli.main(["bench", "--from", str(file)]) == 2 and "Fix:" in capsys.readouterr().err


STEPS = Histogram.of(np.random.default_rng(0).integers(1, 2049, 4000))
LISTS = {"coarse": (512, 1024, 2048), "short": (64, 256), "plan": (256, 600, 1000, 1500, 2048)}


def test_a_plans_picture_says_what_it_shows():
    figure = plan_figure(STEPS, LISTS, title="5 graphs\n2026", unit="tokens", notes=["odd left out: none"])
    above, middle, ratio = figure.axes
    assert figure.get_suptitle() == "5 graphs\n2026" and "odd left out: none" in below(figure)
    assert ratio.get_xlabel() == "tokens in a step" and ratio.get_xscale() == "linear"
    assert all(label.isdigit() for label in ticks(ratio.xaxis))
    drawn = [line.get_xdata()[0] for line in above.lines]
    assert drawn == list(LISTS["plan"])
    assert labels(middle) == ["coarse: 3 graphs", "short: 2 graphs", "plan: 5 graphs"]
    assert labels(ratio) == ["coarse ÷ plan", "short ÷ plan", "plan"]
    for panel in (middle, ratio):
        assert len(set(looks(panel))) == len(looks(panel))
    coarse, short, _ = ratio.lines
    assert coarse.get_xdata()[-1] == STEPS.sizes[-1] and short.get_xdata()[-1] <= 256
    padding = middle.lines[0].get_ydata()[-1] / middle.lines[2].get_ydata()[-1]
    assert coarse.get_ydata()[-1] == pytest.approx(padding)


def test_a_wide_range_of_steps_is_logarithmic_and_says_so():
    steps = Histogram(np.array([3, 40]), np.array([1, 20_000]))
    above = plan_figure(steps, {"plan": (8, 64)}, title="", unit="requests").axes[0]
    assert above.get_yscale() == "log" and above.get_ylabel() == "steps (log scale)"
    assert "10000" in ticks(above.yaxis) and "10" in ticks(above.yaxis)
    steps = Histogram(np.array([3, 40]), np.array([5, 6]))
    above, _, ratio = plan_figure(steps, {"plan": (8, 64)}, title="", unit="requests").axes
    assert above.get_ylabel() == "steps" and "2" in ticks(above.yaxis)


def test_a_plan_without_padding_or_beside_a_perfect_list_is_drawn():
    steps = Histogram(np.array([1, 2]), np.array([1, 1]))
    plan_figure(steps, {"other": (1,), "plan": (1, 2)}, title="", unit="tokens").canvas.draw()
    plan_figure(steps, {"other": (1, 2), "plan": (2,)}, title="", unit="tokens").canvas.draw()


def test_the_command_draws_a_plan_with_its_cost_and_the_grids_that_are_left_out(tmp_path, monkeypatch):
    from piecewise.tools.buckets import plan

    drawn = []
    monkeypatch.setattr(plan, "save_figure", lambda figure, path: drawn.append(figure))
    (tmp_path / "sizes.txt").write_text("1\n2\n3\n3\n")
    traffic = ["buckets", "plan", "--traffic", str(tmp_path / "sizes.txt"), "--no-progress"]
    assert cli.main([*traffic, "--plot", "plan.png"]) == 0
    assert cli.main([*traffic, "--plot", "plan.png", "--cost", str(LLAMA)]) == 0
    assert "graphs for sizes.txt" in drawn[0].get_suptitle() and "padded tokens, 2" in drawn[0].get_suptitle()
    assert "sglang left out: no size up to 3" in below(drawn[0])
    assert "llama_1b:llama_1b on NVIDIA H200" in drawn[1].get_suptitle()
