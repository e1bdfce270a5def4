"""Which graph segments run on several streams, at which buckets and why, for reports."""

from __future__ import annotations

import dataclasses
from itertools import groupby


@dataclasses.dataclass(frozen=True, slots=True)
class BucketStreams:
    """How one kind of segment runs at one bucket.

    Attributes:
        kept: whether on several streams.
        reason: why on one; empty where it is on several.
    """

    bucket: int
    kept: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentStreams:
    """Graph segments that are the same program.

    Attributes:
        segment: the first of them; `num_alike` others are like it.
        branches: of each stretch with independent branches, how many there are.
        num_streams: the most that run at the same time.
        reason: why all run on one stream at every bucket; empty where there are branches.
        buckets: what came out where it was captured, largest first.
    """

    segment: str
    num_alike: int
    branches: tuple[int, ...] = ()
    num_streams: int = 1
    reason: str = ""
    buckets: tuple[BucketStreams, ...] = ()

    def __str__(self) -> str:
        others = f" and {self.num_alike} like it" if self.num_alike else ""
        if self.reason:
            return f"{self.segment}{others}: one stream: {self.reason}"
        counts = " and ".join(map(str, self.branches))
        lines = [f"{self.segment}{others}: {counts} independent branches, on {self.num_streams} streams"]
        for reason, alike in groupby(self.buckets, key=lambda each: each.reason):
            verdict = f"one stream ({reason})" if reason else "several streams"
            lines.append(f"  {verdict} at {', '.join(str(each.bucket) for each in alike)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True)
class StreamReport:
    """The kinds of graph segments of one plan, without those that make views only.

    Attributes:
        num_streams: the setting.
    """

    num_streams: int
    segments: tuple[SegmentStreams, ...]

    def __str__(self) -> str:
        with_branches = sum(not segment.reason for segment in self.segments)
        text = (
            f"up to {self.num_streams} streams: {with_branches} of {len(self.segments)} distinct graph "
            "segments have independent branches"
        )
        lines = [line for segment in self.segments for line in str(segment).splitlines()]
        return "\n".join([text, *(f"  {line}" for line in lines)])
