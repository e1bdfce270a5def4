"""Which graph segments run on several streams, at which buckets and why, for reports."""

from __future__ import annotations

import dataclasses
from itertools import groupby


@dataclasses.dataclass(frozen=True, slots=True)
class BucketStreams:
    """How one kind of segment runs at one bucket.

    Attributes:
        kept: whether on several streams.
        one_stream_us, streams_us: what a replay was measured to take, None where it was not.
        reason: why it was not measured, or not kept; empty where it is faster.
    """

    bucket: int
    kept: bool
    one_stream_us: float | None = None
    streams_us: float | None = None
    reason: str = ""

    @property
    def detail(self) -> str:
        """Times and reason, as far as there are any."""
        told = [self.reason] if self.reason else []
        if self.streams_us is not None and self.one_stream_us is not None:
            told.append(f"{self.streams_us:.1f} µs against {self.one_stream_us:.1f}")
        return ": ".join(told)


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
        alike = f" and {self.num_alike} like it" if self.num_alike else ""
        if self.reason:
            return f"{self.segment}{alike}: one stream: {self.reason}"
        counts = " and ".join(map(str, self.branches))
        lines = [f"{self.segment}{alike}: {counts} independent branches, on {self.num_streams} streams"]
        for kept, verdict in ((True, "kept at"), (False, "one stream at")):
            found = [each for each in self.buckets if each.kept is kept]
            told = [
                f"{', '.join(str(each.bucket) for each in alike)} ({detail})"
                for detail, alike in groupby(found, key=lambda each: each.detail)
            ]
            lines += [f"  {verdict} {'; '.join(told)}"] if told else []
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
