"""One thread, fixed seeds, and a printed count of what could not run without a GPU."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from boundary_ops import PrefillBatch

GPU_REASON = "needs a CUDA device"


def pytest_configure(config):
    # Bitwise comparisons at equal shapes hold for a fixed number of threads.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=GPU_REASON))


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_step_is_left_running():
    """A step that a test leaves running would serve, or fail, the calls of later tests."""
    yield
    assert PrefillBatch.peek() is None, "the test has left a `with batch:` block without ending it"


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    waiting = [report for report in skipped if GPU_REASON in str(report.longrepr)]
    terminalreporter.write_line(f"gpu tests skipped: {len(waiting)}")
