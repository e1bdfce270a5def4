"""Lists the passes over graph segments, so that settings are checked without importing the passes."""

from __future__ import annotations

import pkgutil
from pathlib import Path

# Each module in this folder is a fusion pass of its name; a pass declared elsewhere adds its own name.
_FOLDER = Path(__file__).parents[1] / "passes" / "fusions"

PASS_NAMES = ["clean_up", "pack_linears", *sorted(each.name for each in pkgutil.iter_modules([str(_FOLDER)]))]
