"""[I3] Whatever lines are drawn, what the table of rows claims of them together holds.

`row_programs.py` draws programs; `PIECEWISE_ROW_PROGRAMS` sets how many.
"""

from __future__ import annotations

import os

import pytest
from row_programs import draw

# Taken out of the environment: a name with this prefix that is no setting is an error in `PiecewiseConfig`.
NUM_PROGRAMS = int(os.environ.pop("PIECEWISE_ROW_PROGRAMS", "300"))
NUM_PARTS = 10

# Of what is drawn and not kept.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_I3_claims_of_random_programs_hold(part):
    seeds = range(part, NUM_PROGRAMS, NUM_PARTS)
    checks = [draw(seed).check(f"seed {seed}") for seed in seeds]
    # Most begin with lines that can be in graphs.
    assert sum(counts > 0 for _, counts in checks) >= len(seeds) // 2
