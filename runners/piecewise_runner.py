"""Runs one graph segment: warm-ups, one capture per bucket, replay where captured, eager everywhere else.

Per bucket: ``COLD -> WARMING(n) -> CAPTURED | EAGER_ONLY(reason)``. A failed capture closes its own bucket
and leaves nothing behind [I8]. The runner knows neither its place in the model nor what a token is.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runners import errors
from runners.engine import CapturedGraph, GraphEngine, GraphPool
from runners.mode import is_eager_only


class BucketPhase(Enum):
    """Tells how far a bucket has come."""

    COLD = "cold"
    WARMING = "warming"
    CAPTURED = "captured"
    EAGER_ONLY = "eager only"


@dataclass(frozen=True, slots=True)
class BucketState:
    """Describes one bucket: its phase, the warm-ups made while WARMING, why it is EAGER_ONLY."""

    phase: BucketPhase
    num_warmups: int = 0
    reason: str = ""


COLD = BucketState(BucketPhase.COLD)
_log = logging.getLogger(__name__)
_OPEN = (BucketPhase.COLD, BucketPhase.WARMING)


class _Capture(NamedTuple):
    graph: CapturedGraph
    arguments: list[Any]


class PiecewiseRunner:
    """Runs one segment, from a graph where there is one for the bucket that reads these arguments.

    Args:
        fn: ``fn(padded_num_tokens, *args)`` returns the sequence of the segment's outputs.
        name: the segment in errors, such as ``"segment 3"``.
        pool: one of the engine's, shared with the other segments of the module.
        warmup_steps: warm-ups that a bucket needs before its capture, 0 or more.
        module_path: where the segment begins in the model, for errors; may be empty.
    """

    def __init__(
        self, fn: Callable[..., Sequence[Any]], *, name: str, engine: GraphEngine, pool: GraphPool,
        warmup_steps: int = 3, module_path: str = "",
    ) -> None:  # fmt: skip
        if warmup_steps < 0:
            raise errors.NegativeWarmUps(steps=warmup_steps)
        self.warmup_steps, self.function = warmup_steps, fn
        self.num_captures = self.num_replays = 0
        self._place = f"{name} ({module_path})" if module_path else name
        self._engine, self._pool = engine, pool
        self._states: dict[int, BucketState] = {}
        self._captures: dict[int, _Capture] = {}

    @property
    def captured(self) -> tuple[int, ...]:
        """Returns the buckets that have a graph, in the order of capture."""
        return tuple(self._captures)

    def state_for(self, padded_num_tokens: int) -> BucketState:
        """Returns the state of a bucket; COLD for one never seen."""
        return self._states.get(padded_num_tokens, COLD)

    def graph_for(self, padded_num_tokens: int) -> CapturedGraph | None:
        capture = self._captures.get(padded_num_tokens)
        return capture.graph if capture else None

    def warm_up(
        self, padded_num_tokens: int, args: Sequence[Any], *, fn: Callable[..., Sequence[Any]] | None = None
    ) -> tuple[Any, ...]:
        """Runs the segment, or its form `fn`, eagerly in a capture's modes, and counts a warm-up.

        Returns the outputs, owned by the caller.

        Raises:
            WrongBucketState: the bucket is captured, or its capture failed.
            CaptureError: the segment fails at this size.
        """
        state = self.state_for(padded_num_tokens)
        if state.phase not in _OPEN:
            raise self._wrong_state("warm-up", padded_num_tokens, "a bucket that is cold or warming")
        try:
            with torch.inference_mode(False), torch.no_grad():
                outputs = tuple((fn or self.function)(padded_num_tokens, *args))
        except Exception as error:
            raise self._failure(padded_num_tokens, error) from error
        self._states[padded_num_tokens] = BucketState(BucketPhase.WARMING, state.num_warmups + 1)
        return outputs

    def capture(
        self, padded_num_tokens: int, args: Sequence[Any], *, fn: Callable[..., Sequence[Any]] | None = None
    ) -> tuple[Any, ...]:
        """Captures the bucket's graph, of another form `fn` where one is given; later replays read `args` at
        the addresses they have now. Returns the graph's outputs: static memory, rewritten by each replay.

        Raises:
            WrongBucketState: too few warm-ups were made, or the bucket was captured or given up before.
            CaptureError: the segment cannot be captured. The bucket is EAGER_ONLY from then on, and no graph
                and no memory is left behind [I8].
        """
        state = self.state_for(padded_num_tokens)
        if state.phase not in _OPEN or state.num_warmups < self.warmup_steps:
            expected = f"a bucket after {self.warmup_steps} warm-ups"
            raise self._wrong_state("capture", padded_num_tokens, expected)
        arguments = _geometry(args)
        run = partial(fn or self.function, padded_num_tokens, *args)
        try:
            graph = self._engine.capture(run, pool=self._pool, segment=self._place)
        except errors.StateError:
            raise
        except Exception as error:
            failure = self._failure(padded_num_tokens, error)
            self._states[padded_num_tokens] = BucketState(BucketPhase.EAGER_ONLY, reason=str(failure))
            raise failure from error
        self._captures[padded_num_tokens] = _Capture(graph, arguments)
        self._states[padded_num_tokens] = BucketState(BucketPhase.CAPTURED)
        self.num_captures += 1
        _log.debug("captured %s at bucket %d: %d ops", self._place, padded_num_tokens, graph.num_ops)
        return graph.outputs

    def replay(self, padded_num_tokens: int) -> tuple[Any, ...]:
        """Replays the bucket's graph on its arguments' values of now; `WrongBucketState` without one.

        The returned outputs are static memory, valid until the next replay in this pool.
        """
        capture = self._captures.get(padded_num_tokens)
        if capture is None:
            raise self._wrong_state("replay", padded_num_tokens, "a captured bucket")
        capture.graph.replay()
        self.num_replays += 1
        return capture.graph.outputs

    def __call__(self, padded_num_tokens: int, *args: Any) -> tuple[Any, ...]:
        """Replays where args equal the capture's (tensors by address and geometry); else runs eagerly."""
        capture = self._captures.get(padded_num_tokens)
        if capture is None or is_eager_only() or capture.arguments != _geometry(args):
            return tuple(self.function(padded_num_tokens, *args))
        return self.replay(padded_num_tokens)

    def discard(self, padded_num_tokens: int, reason: str) -> None:
        """Drops a bucket's graph, if there is one, and serves it eagerly from now on, for `reason`."""
        capture = self._captures.pop(padded_num_tokens, None)
        if capture is not None:
            capture.graph.reset()
        self._states[padded_num_tokens] = BucketState(BucketPhase.EAGER_ONLY, reason=reason)

    def forget(self, padded_num_tokens: int) -> None:
        """Makes a bucket COLD again, whatever it was; its graph, if there is one, is reset."""
        self.discard(padded_num_tokens, "")
        del self._states[padded_num_tokens]

    def reset(self) -> None:
        """Resets all graphs; every bucket is COLD again. Idempotent."""
        for capture in self._captures.values():
            capture.graph.reset()
        self._captures.clear()
        self._states.clear()

    def _wrong_state(self, verb: str, padded_num_tokens: int, expected: str) -> errors.WrongBucketState:
        state = self.state_for(padded_num_tokens)
        got = {
            BucketPhase.COLD: "a cold one",
            BucketPhase.WARMING: f"one after {state.num_warmups} of {self.warmup_steps} warm-ups",
            BucketPhase.CAPTURED: "a captured one",
            BucketPhase.EAGER_ONLY: "one that runs eagerly only, as its capture failed",
        }[state.phase]
        return errors.WrongBucketState(
            expected=expected, got=got, verb=verb, segment=self._place, bucket=padded_num_tokens,
            steps=self.warmup_steps,
        )  # fmt: skip

    def _failure(self, padded_num_tokens: int, error: Exception) -> errors.CaptureError:
        if isinstance(error, errors.PiecewiseError):
            kept = (errors.Unrecordable, errors.NoOutputSequence)
            kind = type(error) if isinstance(error, kept) else errors.SegmentFailed
            where = f"bucket {padded_num_tokens}, {error.what}"
            return kind(where, expected=error.expected, got=error.got, rule=error.rule, fix=error.fix)
        found = f"{type(error).__name__}: {error}"
        return errors.SegmentFailed(segment=self._place, bucket=padded_num_tokens, got=found)


def _geometry(args: Sequence[Any]) -> list[Any]:
    """Describes arguments, tensors by address, shape, stride and dtype, for comparison with a capture's."""
    return [
        (each.data_ptr(), each.shape, each.stride(), each.dtype)
        if isinstance(each, Tensor)
        else (type(each), each)
        for each in args
    ]
