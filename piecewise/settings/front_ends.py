"""Names the front ends, so that settings are checked without loading what traces models.

A front end beside Dynamo's is a folder of `piecewise/trace/` and one entry here.
"""

from __future__ import annotations

# What a configuration may say, and the `FrontEnd` of that name: "package.module:function".
FRONT_ENDS = {"trace": "piecewise.trace.dynamo.front_end:trace_with_dynamo"}
# Names that are known, and that this version lacks.
LATER = ("record",)
