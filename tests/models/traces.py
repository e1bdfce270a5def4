"""Where the real traces are: in a folder beside the repository, or in the one that TRAFFIC_TRACES names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("TRAFFIC_TRACES", ROOT.parent / "shared" / "data"))

needs_traces = pytest.mark.skipif(
    not (TRACES / "azure_llm_2023_conv.csv").exists(),
    reason=f"the public traces are not in {TRACES}; name their folder with TRAFFIC_TRACES",
)
