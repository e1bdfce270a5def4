"""Reports how a plan's graph segments were lowered, and which run on several streams."""

from __future__ import annotations

import dataclasses
from itertools import groupby


@dataclasses.dataclass(frozen=True, slots=True)
class KeptEager:
    """Names a segment that keeps eager kernels, and the reason."""

    segment: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class LoweringReport:
    """Describes how the graph segments of one plan were lowered.

    Attributes:
        lowering: the setting.
        num_segments, num_distinct: all graph segments except those that only make views; the distinct ones.
        num_compiled: functions compiled now; `num_from_disk` of them came from Inductor's cache.
        num_reused: functions kept from an earlier lowering of the same model.
        seconds: in all.
        kept_eager: segments that keep eager kernels although they were to be compiled.
        is_done: False for a preview, before anything is compiled.
    """

    lowering: str
    num_segments: int
    num_distinct: int
    num_compiled: int = 0
    num_from_disk: int = 0
    num_reused: int = 0
    seconds: float = 0.0
    kept_eager: tuple[KeptEager, ...] = ()
    is_done: bool = True

    def compiles(self, segment: str) -> bool:
        """Whether the graph segment of this name is or will be compiled."""
        return self.lowering != "eager" and all(kept.segment != segment for kept in self.kept_eager)

    def __str__(self) -> str:
        segments = f"{self.num_segments} graph segments, {self.num_distinct} distinct"
        if self.lowering == "eager":
            return f"{segments}, run by PyTorch's own kernels"
        text = f"{segments}, to be lowered by {self.lowering}"
        if self.is_done:
            text = (
                f"{segments}, lowered by {self.lowering} in {self.seconds:.1f} s: {self.num_compiled} "
                f"compiled, {self.num_from_disk} of them found on disk, {self.num_reused} kept from before"
            )
        return "\n".join([text, *(f"  eager kernels in {k.segment}: {k.reason}" for k in self.kept_eager)])


@dataclasses.dataclass(frozen=True, slots=True)
class BucketStreams:
    """Describes how one kind of segment runs at one bucket.

    Attributes:
        kept: whether on several streams.
        reason: why on one stream; empty if on several.
    """

    bucket: int
    kept: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SegmentStreams:
    """Describes the streams of graph segments that are the same program.

    Attributes:
        segment: the first of them; `num_alike` others are like it.
        branches: the number of independent branches, for each stretch of ops that has any.
        num_streams: the most that run at the same time.
        reason: why all ops run on one stream at every bucket; empty if there are branches.
        buckets: the outcome at each captured bucket, largest first.
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
    """Lists the kinds of a plan's graph segments, except those that only make views, under `num_streams`."""

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
