"""Settings: what is accepted, what wins, that every problem is listed at once, and that TOML round-trips."""

from __future__ import annotations

import array
import copy
import dataclasses
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import boundary_ops
from piecewise.errors.settings import UnreadableSettingsFile, WrongSettings
from piecewise.settings.config import PiecewiseConfig
from piecewise.settings.front_ends import FRONT_ENDS, LATER
from piecewise.settings.toml_file import MAX_FILE_BYTES
from runners.errors import ConfigError

FIELDS = {
    "buckets", "max_padding_ratio", "max_num_tokens", "max_num_seqs", "max_seq_len", "max_signatures",
    "warmup_steps", "capture", "engine", "num_streams", "progress", "frontend", "lowering", "fusions",
    "boundary_ops", "boundary", "min_coverage", "outputs", "strict", "decode_batch_sizes", "compile_sizes",
    "allow_eager", "disable",
}  # fmt: skip

valid_settings = st.fixed_dictionaries(
    {"buckets": st.sets(st.integers(1, 9000), min_size=1, max_size=30).map(sorted)},
    optional={
        "max_padding_ratio": st.none() | st.floats(1.0, 1e6),
        "max_num_tokens": st.none() | st.integers(9000, 2**31 - 1),
        "max_num_seqs": st.none() | st.integers(9000, 2**31 - 1),
        "max_seq_len": st.none() | st.integers(9000, 2**31 - 1),
        "decode_batch_sizes": st.none() | st.sets(st.integers(1, 9000), min_size=1, max_size=9).map(sorted),
        "max_signatures": st.integers(1, 1024),
        "warmup_steps": st.integers(1, 100),
        "capture": st.sampled_from(["startup", "lazy"]),
        "engine": st.sampled_from(["auto", "tape"]),
        "progress": st.booleans(),
        "boundary_ops": st.none()
        | st.lists(st.from_regex(r"[a-z_]{1,8}::[a-z_]{1,8}", fullmatch=True), min_size=1, unique=True),
        "outputs": st.sampled_from(["copy", "view"]),
        "strict": st.booleans(),
    },
)


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIECEWISE_")]:
        monkeypatch.delenv(name)


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "Rule:" in message and "Fix:" in message
    assert len(message) < 4000
    return message


def test_the_fields_are_those_that_are_fixed():
    assert {item.name for item in dataclasses.fields(PiecewiseConfig)} == FIELDS


def test_defaults_are_valid_and_frozen():
    config = PiecewiseConfig()
    assert (config.warmup_steps, config.lowering, config.frontend, config.capture) == (
        3,
        "eager",
        "trace",
        "startup",
    )
    assert (config.outputs, config.boundary, config.engine, config.max_signatures) == (
        "copy",
        "eager",
        "auto",
        8,
    )
    assert config.progress is True and config.strict is False and config.max_padding_ratio is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.strict = True
    with pytest.raises(TypeError):
        PiecewiseConfig((64, 128))


def test_values_are_normalised_hashed_copied_and_pickled():
    config = PiecewiseConfig(buckets=[8, 16], max_padding_ratio=2, boundary_ops=["toy::attn"])
    assert config.buckets == (8, 16) and config.boundary_ops == ("toy::attn",)
    assert isinstance(config.max_padding_ratio, float)
    assert hash(config) == hash(dataclasses.replace(config)) and pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("buckets", np.array([8, 16]), (8, 16)),
        ("buckets", np.array([8, 16], np.uint16), (8, 16)),
        ("buckets", torch.tensor([8, 16]), (8, 16)),
        ("buckets", [np.int64(8), torch.tensor(16)], (8, 16)),
        ("buckets", range(8, 25, 8), (8, 16, 24)),
        ("buckets", array.array("i", [8, 16]), (8, 16)),
        ("buckets", {"step": np.int64(8), "max": torch.tensor(16)}, (8, 16)),
        ("decode_batch_sizes", np.array([1, 2]), (1, 2)),
        ("compile_sizes", np.array([], np.int64), ()),
        ("max_num_tokens", np.int64(4096), 4096),
        ("max_signatures", np.uint8(5), 5),
        ("num_streams", torch.tensor(2), 2),
        ("warmup_steps", np.array(2), 2),
        ("max_padding_ratio", np.float32(1.5), 1.5),
        ("max_padding_ratio", np.int64(2), 2.0),
        ("min_coverage", torch.tensor(0.5), 0.5),
        ("progress", np.bool_(False), False),
        ("fusions", "auto", ("auto",)),
        ("fusions", "pack_linears", ("pack_linears",)),
        ("boundary_ops", "piecewise::attn_inplace", ("piecewise::attn_inplace",)),
        ("boundary_ops", boundary_ops.attn_inplace, ("piecewise::attn_inplace",)),
        ("boundary_ops", [boundary_ops.attn_inplace], ("piecewise::attn_inplace",)),
    ],
)
def test_what_is_meant_is_taken_in_other_words(name, value, meant, tmp_path):
    config = PiecewiseConfig(**{name: value})
    found = getattr(config, name)
    assert found == meant and type(found) is type(meant)
    assert not isinstance(found, tuple) or {type(item) for item in found} == {type(item) for item in meant}
    config.to_toml(tmp_path / "settings.toml")
    assert PiecewiseConfig.from_toml(tmp_path / "settings.toml") == config == copy.deepcopy(config)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("buckets", [], "empty"),
        ("buckets", [16, 8], "buckets[1]"),
        ("buckets", ["8"], "'8' (str)"),
        ("buckets", [8, -1], "buckets[1]: expected 1 to"),
        ("buckets", "8", "a list of ints"),
        ("buckets", np.array([8.0]), "buckets[0]: expected an int, got 8.0 (float)"),
        ("buckets", np.array([[8, 16]]), "(ndarray)"),
        ("buckets", np.array([True]), "True (bool)"),
        ("buckets", {8, 16}, "(set)"),
        ("buckets", 8, "8 (int)"),
        ("max_num_tokens", 64.0, "64.0 (float)"),
        ("max_num_tokens", np.float64(64), "from 1"),
        ("max_num_tokens", np.bool_(True), "from 1"),
        ("max_num_tokens", torch.tensor([64]), "from 1"),
        ("min_coverage", np.bool_(True), "at most 1"),
        ("strict", np.int64(1), "true or false"),
        ("fusions", "pack_linear", "did you mean 'pack_linears'"),
        ("fusions", 3, "3 (int)"),
        ("max_padding_ratio", 0.5, "at least 1"),
        ("max_padding_ratio", float("nan"), "finite"),
        ("max_padding_ratio", float("inf"), "finite"),
        ("max_padding_ratio", 10**400, "bits"),
        ("max_padding_ratio", True, "True (bool)"),
        ("max_padding_ratio", "2", "'2' (str)"),
        ("max_num_tokens", 0, "0 (int)"),
        ("max_num_tokens", 2.0, "2.0 (float)"),
        ("max_num_seqs", 0, "from 1"),
        ("max_seq_len", 1, "from 2"),
        ("decode_batch_sizes", [], "empty"),
        ("decode_batch_sizes", [4, 2], "decode_batch_sizes[1]"),
        ("decode_batch_sizes", "sglang", "a list of ints"),
        ("buckets", {"step": 0, "max": 8}, "from 1"),
        ("buckets", {"step": 9, "max": 8}, "a step of at most max"),
        ("buckets", {"step": 1, "max": 10**6}, "at most 4096 sizes"),
        ("buckets", {"step": 8}, "without 'max'"),
        ("buckets", {"step": 8, "max": 16, "min": 8}, "with 'min'"),
        ("buckets", "sglan", "a list of ints"),
        ("max_signatures", 0, "from 1"),
        ("warmup_steps", 0, "from 1"),
        ("warmup_steps", True, "True (bool)"),
        ("num_streams", 0, "from 1"),
        ("num_streams", 9, "to 8"),
        ("capture", "never", "'startup' or 'lazy'"),
        ("outputs", "move", "'copy' or 'view'"),
        ("outputs", None, "None (NoneType)"),
        ("progress", 1, "true or false"),
        ("strict", "yes", "true or false"),
        ("boundary", "graphed", "'eager' or 'captured'"),
        ("boundary_ops", "attn", "boundary_ops[0]"),
        ("boundary_ops", 3, "list of op names"),
        ("boundary_ops", [], "None for all registered"),
        ("boundary_ops", ["attn"], "boundary_ops[0]"),
        ("boundary_ops", ["a::b", "a::b"], "boundary_ops[1]"),
        ("boundary_ops", [3], "3 (int)"),
    ],
)
def test_a_wrong_value_is_named(name, value, says):
    message = refusal(PiecewiseConfig, **{name: value})
    assert message.startswith(name) and says in message


def test_each_front_end_can_be_named_and_one_for_later_is_refused_with_what_is_available():
    assert [PiecewiseConfig(frontend=name).frontend for name in FRONT_ENDS] == [*FRONT_ENDS]
    for name in set(LATER) - set(FRONT_ENDS):
        message = refusal(PiecewiseConfig, frontend=name)
        assert message.startswith("frontend: expected 'trace'") and "does not have yet" in message


@pytest.mark.parametrize("value", [0, 0.0, -0.1, 1.01, True, "0.9", float("nan"), float("inf")])
def test_a_share_is_above_0_and_at_most_1(value):
    message = refusal(PiecewiseConfig, min_coverage=value)
    assert message.startswith("min_coverage: expected a number above 0 and at most 1")


def test_min_coverage_from_a_file_the_environment_and_an_argument(tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text("[compile]\nmin_coverage = 0.9\n")
    assert PiecewiseConfig.from_toml(path).min_coverage == 0.9
    PiecewiseConfig(min_coverage=1).to_toml(tmp_path / "written.toml")
    assert PiecewiseConfig.from_toml(tmp_path / "written.toml").min_coverage == 1.0
    monkeypatch.setenv("PIECEWISE_MIN_COVERAGE", "0.75")
    assert PiecewiseConfig.from_any(path).min_coverage == 0.75
    assert PiecewiseConfig.from_any(path, min_coverage=None).min_coverage is None
    monkeypatch.setenv("PIECEWISE_MIN_COVERAGE", "75%")
    assert "PIECEWISE_MIN_COVERAGE" in refusal(PiecewiseConfig.from_any, None)


def test_all_problems_come_in_one_error():
    message = refusal(PiecewiseConfig, buckets=[8, 8], warmup_steps=-1, outputs="x", num_streams=9)
    assert message.startswith("4 settings are wrong:")
    for name in ("buckets[1]", "warmup_steps", "outputs", "num_streams"):
        assert f"\n  {name}: expected " in message


def test_a_bucket_above_max_num_tokens_is_an_error_not_dropped():
    message = refusal(PiecewiseConfig, buckets=[8, 16, 32, 64], max_num_tokens=31)
    assert message.startswith(
        "2 settings are wrong:\n  buckets[2]: expected at most max_num_tokens = 31, got 32"
    )
    assert "buckets[3]: expected at most max_num_tokens = 31, got 64" in message
    assert PiecewiseConfig(buckets=[8, 16], max_num_tokens=16).buckets == (8, 16)


@given(valid_settings)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_toml_round_trip_is_exact(tmp_path, values):
    config = PiecewiseConfig(**values)
    path = tmp_path / "settings.toml"
    path.unlink(missing_ok=True)
    config.to_toml(path)
    assert PiecewiseConfig.from_toml(path) == config
    # Over another file too, whose settings must not survive.
    PiecewiseConfig(buckets=[3], max_num_tokens=7, boundary_ops=["x::y"], strict=True).to_toml(path)
    config.to_toml(path)
    assert PiecewiseConfig.from_toml(path) == config


def test_a_file_groups_keys_in_tables(tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [16, 32]\nmax_padding_ratio = 2\n"
        "[limits]\nmax_num_tokens = 32\n[capture]\nwarmup_steps = 4\n[compile]\noutputs = 'view'\n"
    )
    assert PiecewiseConfig.from_toml(path) == PiecewiseConfig(
        buckets=(16, 32), max_padding_ratio=2.0, max_num_tokens=32, warmup_steps=4, outputs="view"
    )
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    assert PiecewiseConfig.from_toml(str(empty)) == PiecewiseConfig()


def test_writing_keeps_comments_order_and_equal_values(tmp_path):
    path = tmp_path / "buckets.toml"
    path.write_text(
        "# ours\n[capture]  # speed\nwarmup_steps = 3 # enough\n\n"
        "[buckets]\nnum_tokens = [\n    16, # short\n    32,\n]\n"
    )
    path.chmod(0o640)
    PiecewiseConfig(buckets=[16, 32], warmup_steps=5).to_toml(path)
    text = path.read_text()
    for kept in ("# ours\n", "# speed", "warmup_steps = 5 # enough", "    16, # short\n"):
        assert kept in text
    assert text.index("[capture]") < text.index("[buckets]")
    assert PiecewiseConfig.from_toml(path) == PiecewiseConfig(buckets=[16, 32], warmup_steps=5)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["buckets.toml"]


@pytest.mark.parametrize("text", ["[buckets\n", "[colour]\nred = 1\n", "[capture]\nwarmup = 3\n"])
def test_writing_over_a_file_that_is_not_ours_changes_nothing(tmp_path, text):
    path = tmp_path / "buckets.toml"
    path.write_text(text)
    refusal(PiecewiseConfig().to_toml, path)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[bucket]\nnum_tokens = [8]\n", "nearest is [buckets]"),
        ("[buckets]\nnum_token = [8]\n", "nearest is num_tokens in [buckets]"),
        ("[buckets]\nwarmup_steps = 3\n", "nearest is warmup_steps in [capture]"),
        ("num_tokens = [8]\n", "nearest is num_tokens in [buckets]"),
        ("buckets = [8]\n", "expected a table, [buckets]"),
        ("[[buckets]]\nnum_tokens = [8]\n", "expected a table, [buckets]"),
        ("[buckets]\nnum_tokens = ['8']\n", "[buckets] num_tokens[0]: expected an int"),
        ("[buckets]\nnum_tokens = [8, 8]\n", "duplicate"),
        ("[buckets]\nnum_tokens = 8\n", "a list of ints"),
        ("[buckets]\nnum_tokens = 2026-01-01\n", "(date)"),
        ("[buckets]\nnum_tokens = {step = 64}\n", "(dict)"),
        ("[buckets]\nnum_tokens = 'sglang'\n", "a list of ints"),
        ("[buckets]\ngrid = {step = 64}\n", "without 'max'"),
        ("[buckets]\ngrid = [64]\n", '"tensorrt-llm" or'),
        ("[buckets]\ngrid = 'TensorRT'\n", '"tensorrt-llm" or'),
        ("[buckets]\ngrid = 'sglang'\n[limits]\nmax_num_tokens = 3\n", "below its smallest size"),
        ("[buckets]\ngrid = {step = 64, max = 128}\n[limits]\nmax_num_tokens = 127\n", "[buckets] grid[1]"),
        ("[buckets]\ngrid = 'vllm'\nnum_tokens = [8]\n", "one setting of buckets"),
        ("[decode]\nbatch_sizes = [1, 'x']\n", "[decode] batch_sizes[1]: expected an int"),
        ("[buckets]\nnum_tokens = [8\n", "a readable TOML file"),
        ("[buckets]\nnum_tokens = [8]\nnum_tokens = [9]\n", "a readable TOML file"),
        ("[buckets]\nnum_tokens = [" + "9" * 5000 + "]\n", "a readable TOML file"),
        ("[buckets]\nnum_tokens = " + "[" * 100_000, "nesting deeper"),
        ("[" + "a." * 20_000 + "a]\n", "nesting deeper|unknown"),
        ("[limits]\nmax_batch_size = '4'\n", "[limits] max_batch_size: expected an int"),
        ("[limits]\nmax_batch_size = 4\nmax_num_seqs = 4\n", "one setting of max_num_seqs"),
        ("[compile]\nfrontend = 'tracer'\n", "[compile] frontend: expected 'trace'"),
        ("[compile]\ncompile_sizes = [8]\n", "[compile] compile_sizes: expected () where lowering"),
        ("[capture]\nprogress = 'yes'\n", "true or false"),
        ("# " + "x" * MAX_FILE_BYTES, f"more than {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_bad_file_is_one_readable_error(tmp_path, text, says):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    message = refusal(PiecewiseConfig.from_toml, path)
    assert any(each in message for each in says.split("|")), message
    assert "settings.toml" in message


def test_every_problem_of_a_file_is_listed(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[buckets]\nnum_tokens = [8, 4]\nsize = 3\n[capture]\nwarmup_steps = 'x'\n[what]\n")
    message = refusal(PiecewiseConfig.from_toml, path)
    assert message.startswith("4 settings are wrong:")
    for line, part in (
        (2, "[buckets] num_tokens[1]: expected more than 8, got 4 (out of order)"),
        (3, "[buckets] size: expected a known name"),
        (5, "[capture] warmup_steps: expected an int"),
        (6, "[what]: expected a known name"),
    ):
        assert f"settings.toml:{line}: {part}" in message


def test_every_entry_of_a_list_has_its_line(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(
        "# [buckets]\n[buckets]\nnum_tokens = [ # = [8]\n    16,\n    'x,]',\n    16, 0,\n\n    8\n]\n"
        "[decode]\nbatch_sizes = [4, 4]\n[limits]\nmax_num_tokens = 4.0\n"
    )
    message = refusal(PiecewiseConfig.from_toml, path)
    assert message.startswith("6 settings are wrong:")
    for line, part in (
        (5, "num_tokens[1]: expected an int, got 'x,]' (str)"),
        (6, "num_tokens[2]: expected more than 16, got 16 again (a duplicate)"),
        (6, "num_tokens[3]: expected 1 to 2147483647, got 0"),
        (8, "num_tokens[4]: expected more than 16, got 8 (out of order)"),
        (11, "batch_sizes[1]: expected more than 4, got 4 again"),
        (13, "max_num_tokens: expected an int"),
    ):
        assert f"settings.toml:{line}: " in message and part in message
        assert any(f":{line}: " in row and part in row for row in message.splitlines())


def test_a_file_of_thousands_of_problems_is_listed_in_part_and_soon(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("".join(f"k{index} = 1\n" for index in range(20_000)))
    with pytest.raises(WrongSettings, match="20000 settings are wrong") as caught:
        PiecewiseConfig.from_toml(path)
    assert "and 19900 more" in str(caught.value) and len(str(caught.value)) < 40_000


def test_a_grid_becomes_the_engine_s_list_up_to_the_limit(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text("[buckets]\ngrid = 'tensorrt-llm'\n[limits]\nmax_num_tokens = 600\n")
    assert PiecewiseConfig.from_toml(path).buckets == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    # The limit of the call wins, so the grid follows it.
    assert PiecewiseConfig.from_any(path, max_num_tokens=300).buckets[-2:] == (128, 256)
    path.write_text("[buckets]\ngrid = { step = 64, max = 200 }\n")
    assert PiecewiseConfig.from_toml(path).buckets == (64, 128, 192)
    assert PiecewiseConfig(buckets="sglang").buckets[-1] == 4096
    assert PiecewiseConfig(buckets="vllm").buckets[-1] == 512
    assert PiecewiseConfig(buckets={"step": 3, "max": 9}).buckets == (3, 6, 9)


def test_the_default_list_ends_at_the_limit():
    assert PiecewiseConfig(max_num_tokens=100).buckets == (16, 32, 48, 64, 96)
    assert PiecewiseConfig(max_num_tokens=5).buckets == (5,)


def test_writing_keeps_a_grid_and_the_user_s_own_key(tmp_path):
    path = tmp_path / "settings.toml"
    before = (
        "[buckets]\ngrid = 'sglang'  # as before\n[limits]\nmax_num_tokens = 64\nmax_batch_size = 4  # ours\n"
        "[decode]\nbatch_sizes = [\n  1,  # alone\n  2,\n]\n"
    )
    path.write_text(before)
    config = PiecewiseConfig.from_toml(path)
    config.to_toml(path, only=("buckets", "max_num_tokens", "max_num_seqs", "decode_batch_sizes"))
    assert path.read_text() == before
    dataclasses.replace(config, max_num_seqs=8).to_toml(path)
    assert "max_batch_size = 8  # ours" in path.read_text() and "max_num_seqs" not in path.read_text()
    dataclasses.replace(config, buckets=(7, 64)).to_toml(path, only=("buckets",))
    assert "grid" not in path.read_text() and "num_tokens = [7, 64]" in path.read_text()
    assert PiecewiseConfig.from_toml(path).buckets == (7, 64)


def test_limits_cut_what_cannot_be_reached_and_say_so():
    config = PiecewiseConfig(
        buckets=[8, 16, 64, 100],
        max_num_seqs=2,
        max_seq_len=33,
        max_num_tokens=100,
        decode_batch_sizes=[1, 2, 4],
    )
    assert config.buckets == (8, 16, 64, 100)
    kept, clamped = config.within_limits()
    assert kept.buckets == (8, 16, 64) and kept.decode_batch_sizes == (1, 2)
    assert [each.size for each in clamped] == [100, 4]
    assert "100 is above 64 = max_num_seqs 2 * (max_seq_len 33 - 1)" in str(clamped[0])
    assert "4 is above 2 = max_num_seqs" in str(clamped[1])
    assert kept.within_limits() == (kept, ())


def test_limits_that_leave_nothing_are_an_error():
    message = refusal(PiecewiseConfig, buckets=[64, 128], max_num_seqs=1, max_seq_len=32)
    assert message.startswith(
        "buckets: expected a size of at most 31 = max_num_seqs 1 * (max_seq_len 32 - 1)"
    )
    message = refusal(PiecewiseConfig, decode_batch_sizes=[8], max_num_seqs=4)
    assert message.startswith("decode_batch_sizes: expected a size of at most 4 = max_num_seqs")


def test_files_that_are_not_files(tmp_path):
    with pytest.raises(UnreadableSettingsFile, match="no such file"):
        PiecewiseConfig.from_toml(tmp_path / "missing.toml")
    assert "not a regular file" in refusal(PiecewiseConfig.from_toml, tmp_path)
    assert "not a regular file" in refusal(PiecewiseConfig.from_toml, "/dev/zero")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"[buckets]\n\xff\xfe")
    assert "not UTF-8 at offset 10" in refusal(PiecewiseConfig.from_toml, binary)


@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "ignore")))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_bytes_end_in_anything_but_a_config_or_a_config_error(tmp_path, content):
    path = tmp_path / "noise.toml"
    path.write_bytes(content)
    try:
        assert isinstance(PiecewiseConfig.from_toml(path), PiecewiseConfig)
    except ConfigError:
        pass


def test_argument_over_environment_over_file_over_default(tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text(
        "[buckets]\nnum_tokens = [10]\nmax_padding_ratio = 3.0\n"
        "[capture]\nwarmup_steps = 10\n[limits]\nmax_signatures = 10\n"
    )
    monkeypatch.setenv("PIECEWISE_BUCKETS", "20, 21")
    monkeypatch.setenv("PIECEWISE_WARMUP_STEPS", "20")
    monkeypatch.setenv("PIECEWISE_MAX_PADDING_RATIO", "none")
    config = PiecewiseConfig.from_any(path, buckets=[30])
    assert config.buckets == (30,)
    assert config.warmup_steps == 20 and config.max_padding_ratio is None
    assert config.max_signatures == 10
    assert config.outputs == "copy"
    assert PiecewiseConfig.from_any(None).buckets == (20, 21)
    # Written files and finished configs do not depend on where they are read.
    assert PiecewiseConfig.from_toml(path).buckets == (10,)
    done = PiecewiseConfig(buckets=[5])
    assert PiecewiseConfig.from_any(done) is done
    assert PiecewiseConfig.from_any(done, strict=True) == PiecewiseConfig(buckets=[5], strict=True)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("PIECEWISE_STRICT", "1", "strict", True),
        ("PIECEWISE_PROGRESS", "False", "progress", False),
        ("PIECEWISE_MAX_NUM_TOKENS", " 4096 ", "max_num_tokens", 4096),
        ("PIECEWISE_MAX_PADDING_RATIO", "1.5", "max_padding_ratio", 1.5),
        ("PIECEWISE_OUTPUTS", "view", "outputs", "view"),
        ("PIECEWISE_BOUNDARY_OPS", "a::b,c::d", "boundary_ops", ("a::b", "c::d")),
        ("PIECEWISE_FUSIONS", "", "fusions", ()),
        ("PIECEWISE_BUCKETS", "2048", "buckets", (2048,)),
        ("PIECEWISE_BUCKETS", "vllm", "buckets", PiecewiseConfig(buckets="vllm").buckets),
        ("PIECEWISE_DECODE_BATCH_SIZES", "1,2", "decode_batch_sizes", (1, 2)),
        ("PIECEWISE_MAX_NUM_SEQS", "64", "max_num_seqs", 64),
    ],
)
def test_environment_values(monkeypatch, variable, text, field, value):
    monkeypatch.setenv(variable, text)
    assert getattr(PiecewiseConfig.from_any(), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("PIECEWISE_BUCKET", "8", "nearest is PIECEWISE_BUCKETS"),
        ("PIECEWISE_BUCKETS", "8,x", "PIECEWISE_BUCKETS[1]: expected an int, got 'x'"),
        ("PIECEWISE_BUCKETS", "8,1_000", "'1_000'"),
        ("PIECEWISE_BUCKETS", "", "empty"),
        ("PIECEWISE_STRICT", "maybe", "'maybe' (str)"),
        ("PIECEWISE_WARMUP_STEPS", "9" * 5000, "PIECEWISE_WARMUP_STEPS"),
        ("PIECEWISE_MAX_PADDING_RATIO", "nan", "finite"),
        ("PIECEWISE_FRONTEND", "tracer", "expected 'trace'"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch, variable, text, says):
    monkeypatch.setenv(variable, text)
    message = refusal(PiecewiseConfig.from_any)
    assert variable in message and says in message


def test_unknown_options_and_sources():
    assert "nearest is buckets" in refusal(PiecewiseConfig.from_any, None, bukets=[8])
    assert "nearest is warmup_steps" in refusal(PiecewiseConfig.from_any, PiecewiseConfig(), warmup_step=1)
    assert "the path of a TOML file" in refusal(PiecewiseConfig.from_any, {"buckets": [8]})
    message = refusal(PiecewiseConfig.from_any, None, bukets=[8], strict="no", zzz=1)
    assert message.startswith("3 settings are wrong:") and "option 'zzz': expected a known name" in message


def test_an_argument_hides_a_wrong_variable_of_the_same_field(monkeypatch):
    monkeypatch.setenv("PIECEWISE_WARMUP_STEPS", "many")
    assert PiecewiseConfig.from_any(warmup_steps=2).warmup_steps == 2


def test_settings_need_no_model_libraries():
    code = (
        "import sys, piecewise.settings.config as c; c.PiecewiseConfig.from_any(None, buckets=[8]);"
        "print(*[m for m in ('transformers', 'triton', 'tomlkit') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == ""
