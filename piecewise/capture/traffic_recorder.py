"""Records the token counts that a running server sees, in bounded memory, for its next bucket file."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from operator import index

from piecewise.settings.whole_file import replace_file

# Up to here every token count has its own entry; above, counts are rounded up to 9 significant bits, which is
# at most 0.4 % too much. So there are at most 8192 + 256 * 18 entries.
EXACT_UP_TO = 8192
_SIGNIFICANT_BITS = 9


class TrafficRecorder:
    """Keeps a histogram of the token counts of calls, without a lock: one thread at a time calls a module.

    Attributes:
        by_count: calls by token count; up to `EXACT_UP_TO`, adding here directly is allowed and faster.
    """

    __slots__ = ("by_count",)

    def __init__(self) -> None:
        self.by_count: defaultdict[int, int] = defaultdict(int)

    def record(self, num_tokens: int) -> None:
        """Counts one call; calls without tokens are not traffic."""
        num_tokens = index(num_tokens)  # any integer type is accepted; the file needs Python ints
        if num_tokens > EXACT_UP_TO:
            shift = num_tokens.bit_length() - _SIGNIFICANT_BITS
            num_tokens = -(-num_tokens >> shift) << shift
        if num_tokens > 0:
            self.by_count[num_tokens] += 1

    @property
    def counts(self) -> Mapping[int, int]:
        """Returns calls by token count, ascending; a copy."""
        return dict(sorted(self.by_count.copy().items()))

    @property
    def num_calls(self) -> int:
        return sum(self.by_count.copy().values())

    def reset(self) -> None:
        self.by_count.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `piecewise buckets plan --traffic` reads, atomically, even while serving."""
        pairs = [list(pair) for pair in self.counts.items()]
        content = {"format": "piecewise-traffic", "version": 1, "unit": "steps", "counts": pairs}
        replace_file(path, json.dumps(content) + "\n")

    def __repr__(self) -> str:
        return f"TrafficRecorder({self.num_calls} calls of {len(self.by_count)} token counts)"
