"""The pytest plugin: tests that use it fail and are skipped as they should; others load no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_models import Toy, make_ids

import piecewise
from piecewise.capture.build_plan import PlanAssembler
from piecewise.errors.gate import NotGraphed
from piecewise.errors.tools import IneffectiveOption

ROOT = Path(__file__).resolve().parents[3]

MODEL = """
import pytest, torch, piecewise
from toy_models import Toy, make_ids

@pytest.fixture
def graphed():
    found = piecewise.compile(Toy().eval(), buckets=[4, 8], progress=False)
    with torch.no_grad():
        found.capture(make_ids(4))
        yield found
"""


def ran(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs tests in a process of its own, with the plugin named as the installed entry point names it."""
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "piecewise.testing.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-o", f"pythonpath={ROOT} {ROOT}/tests/models"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)], capture_output=True, text=True, env=environment
    )


def test_a_fallback_fails_the_test_and_an_allowed_one_does_not(tmp_path: Path) -> None:
    found = ran(
        tmp_path,
        MODEL
        + """
def test_replays(graphed, no_fallbacks):
    graphed(make_ids(3))

def test_falls_back(graphed, no_fallbacks):
    graphed(make_ids(3))
    graphed(make_ids(9))

def test_may_fall_back(graphed, no_fallbacks):
    no_fallbacks.allow("above_largest_bucket")
    graphed(make_ids(9))

def test_does_not_ask(graphed):
    graphed(make_ids(9))

def test_an_error_of_its_own_is_kept(graphed, no_fallbacks):
    graphed(make_ids(9))
    raise KeyError("mine")

def test_a_wrong_code(no_fallbacks):
    with pytest.raises(ValueError):
        no_fallbacks.allow("nothing")
""",
    )
    outcomes = {
        line.split("::")[1].split()[0]: line.split()[0] for line in found.stdout.splitlines() if "::" in line
    }
    assert outcomes == {
        "test_replays": "PASSED", "test_may_fall_back": "PASSED", "test_does_not_ask": "PASSED",
        "test_a_wrong_code": "PASSED", "test_falls_back": "FAILED",
        "test_an_error_of_its_own_is_kept": "FAILED",
    }, found.stdout + found.stderr  # fmt: skip
    assert "1 calls ran eagerly, above_largest_bucket" in found.stdout and "KeyError: 'mine'" in found.stdout


def test_a_case_for_gpus_is_skipped_with_the_reason(tmp_path: Path) -> None:
    found = ran(tmp_path, "import pytest\n@pytest.mark.piecewise_gpu\ndef test_on_gpu():\n    assert False\n")
    assert found.returncode == 0 and "torch finds no CUDA device" in found.stdout, found.stdout + found.stderr


def test_tests_that_do_not_use_it_load_no_torch(tmp_path: Path) -> None:
    text = (
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    found = ran(tmp_path, text)
    assert found.returncode == 0, found.stdout + found.stderr


def inputs(n: int) -> tuple[tuple[torch.Tensor, ...], dict[str, object]]:
    return (make_ids(n),), {}


def test_assert_graphed_returns_what_was_compared() -> None:
    model = Toy().eval()
    found = piecewise.assert_graphed(
        model, inputs, buckets=[4, 8], min_coverage=0.9, max_segments=8, progress=False
    )
    assert found.ok and found.num_compared >= 4
    graphed = piecewise.compile(model, buckets=[4, 8], progress=False)
    piecewise.assert_graphed(graphed, inputs)
    with torch.no_grad():
        graphed(make_ids(3))
    assert graphed.stats.replays == 1  # the graphs of a compiled model stay


def sorts(model: Toy, x: torch.Tensor) -> torch.Tensor:
    return x + 0 * x.sort(0).values


@pytest.mark.parametrize(
    ("model", "limits", "text"),
    [
        (lambda: Toy(sorts), {"min_coverage": 1.0}, "sort"),
        (lambda: Toy(), {"max_segments": 2}, "segments"),
        (lambda: Toy(lambda m, x: m.nothing(x) if x.shape[0] > 9 else x), {}, "bucket 16 is"),
    ],
)
def test_assert_graphed_lists_what_is_wrong(model, limits, text) -> None:
    with pytest.raises(NotGraphed, match=text) as error:
        piecewise.assert_graphed(model().eval(), inputs, buckets=[4, 16], progress=False, **limits)
    assert isinstance(error.value, AssertionError)


def test_assert_graphed_names_a_bucket_that_no_input_reached() -> None:
    with pytest.raises(NotGraphed, match="bucket 4 was compared"):
        piecewise.assert_graphed(Toy().eval(), lambda n: inputs(5), buckets=[4, 8], progress=False)


def test_assert_graphed_takes_no_settings_for_a_compiled_model() -> None:
    graphed = piecewise.compile(Toy().eval(), buckets=[4], progress=False)
    with pytest.raises(IneffectiveOption, match="buckets"):
        piecewise.assert_graphed(graphed, inputs, buckets=[4, 8])


def test_assert_graphed_names_a_replay_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PlanAssembler.function_for

    def doubled(self, segment, bucket):
        function = right(self, segment, bucket)
        if segment.index != 2:
            return function
        return lambda n, *inputs: tuple(x * 2 for x in function(n, *inputs))

    monkeypatch.setattr(PlanAssembler, "function_for", doubled)
    with pytest.raises(NotGraphed, match="differs"):
        piecewise.assert_graphed(Toy().eval(), inputs, buckets=[4], progress=False)
