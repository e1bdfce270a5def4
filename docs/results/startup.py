"""Measures the start-up of the 8B-shaped Llama: `python -m docs.results.startup`.

Inductor, packed linears, eight buckets; each run is a process of its own, the first with empty compile
caches, the others with what it left there. Python's byte code of the libraries is made beforehand, as
installing them does; imports and the making of the model are not counted, imports that `capture()` causes
are. What a start-up does is Python, so each run also tells how fast the host is at that moment: microseconds
of a short loop. `--smoke` takes a tiny model, on whatever device there is.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

_LIBRARIES = ("torch", "triton", "sympy", "mpmath", "numpy", "transformers")
_OURS = ("piecewise", "runners", "boundary_ops")
LOOP = "sum(i * i for i in range(1000))"


def _measured(*, is_smoke: bool) -> dict[str, Any]:
    """One start-up, in this process."""
    import torch

    import piecewise
    from docs.results import llama_1b
    from piecewise.tools.bench.result import environment

    case = llama_1b.smoke() if is_smoke else llama_1b.llama_8b()
    buckets = (4, 8, 16) if is_smoke else llama_1b.BUCKETS
    graphed = piecewise.compile(
        case.model, buckets=buckets, lowering="inductor", fusions=("auto",), progress=False
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loop_us = min(timeit.repeat(LOOP, number=500, repeat=5)) / 500 * 1e6
    with case.inputs(buckets[-2]) as (args, kwargs), torch.inference_mode():
        began = time.perf_counter()
        report = graphed.capture(*args, **kwargs)
        seconds = time.perf_counter() - began
    found = report.asdict()
    return {
        "seconds": seconds,
        "loop_us": loop_us,
        "parts": found["times"],
        "layers": found["layers"],
        "bucket_ms": {str(bucket["bucket"]): bucket["capture_ms"] for bucket in found["buckets"]},
        "environment": environment(args[0].device if args else kwargs["input_ids"].device),
    }


def main() -> int:
    """Measures what the command line asks for and prints it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "startup.json")
    parser.add_argument("--warm", type=int, default=3, help="runs with filled caches")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measured(is_smoke=arguments.smoke)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        place = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "PYTHONPYCACHEPREFIX": f"{folder}/byte_code",
        }
        place.pop("PYTHONDONTWRITEBYTECODE", None)
        specs = filter(None, map(importlib.util.find_spec, (*_LIBRARIES, *_OURS)))
        folders = [os.path.dirname(str(spec.origin)) for spec in specs]
        made = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
        subprocess.run(made, env=place, stdout=subprocess.DEVNULL, check=False)
        command = [sys.executable, "-m", "docs.results.startup", "--one"]
        command += ["--smoke"] if arguments.smoke else []
        runs = []
        for index in range(1 + arguments.warm):
            printed = subprocess.run(command, env=place, check=True, capture_output=True, text=True).stdout
            runs.append({"cache": "warm" if index else "cold", **json.loads(printed.splitlines()[-1])})
            shown = ", ".join(f"{part} {took:.1f}" for part, took in runs[-1]["parts"].items())
            host = f"loop {runs[-1]['loop_us']:.0f} us"
            print(f"{runs[-1]['cache']}: {runs[-1]['seconds']:.1f} s: {shown}; {host}", flush=True)
    arguments.out.write_text(json.dumps({"runs": runs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
