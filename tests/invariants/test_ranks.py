"""Two processes with a collective in the model: one replays, one does not [I11]."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "models" / "rank_models.py"


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_I11_a_rank_that_replays_and_one_that_runs_eagerly_exchange_the_same_rows(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(tmp_path / "meeting")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
    for number, (rank, text) in enumerate(zip(ranks, told, strict=True)):
        assert rank.returncode == 0 and f"rank {number} done" in text, text
