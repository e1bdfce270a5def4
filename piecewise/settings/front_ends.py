"""Lists the front ends, so that settings are checked without importing a tracer.

Another front end takes a folder of `piecewise/trace/` and one entry here.
"""

from __future__ import annotations

# The value of the setting → its `FrontEnd`, as "package.module:function".
FRONT_ENDS = {"trace": "piecewise.trace.dynamo.front_end:trace_with_dynamo"}
# Known names that this version lacks.
LATER = ("record",)
