"""Names the passes over graph segments, so that settings are checked without loading what rewrites graphs."""

from __future__ import annotations

import pkgutil
from pathlib import Path

# Each module here is a fusion pass of its name; one that is declared elsewhere adds its own.
_FOLDER = Path(__file__).parents[1] / "passes" / "fusions"

PASS_NAMES = ["clean_up", "pack_linears", *sorted(each.name for each in pkgutil.iter_modules([str(_FOLDER)]))]
