"""[I1–I10] Whatever is drawn: eager's results, counts that add up, and no state left behind.

`fuzz_models.py` draws a model, how it is graphed, and a sequence of calls and changes. Each call is compared
with the model's own from the same state: result, structure, aliases, inputs, buffers, caches and random
numbers afterwards; bit for bit at a bucket's size and where the call runs eagerly, otherwise within
`TOLERANCE`. `PIECEWISE_FUZZ_EXAMPLES` sets how many cases are drawn.
"""

from __future__ import annotations

import dataclasses
import os

import fuzz_changes
import pytest
import torch
from fuzz_models import COUNTING, OPS, PARAMETERS, case_with, cases
from hypothesis import HealthCheck, given, settings
from inspection import inspect
from torch import nn
from toy_models import (
    assert_same,
    leaves_of,
    op_poison,
    overwrite_static_memory,
    padding_of_row,
    put_back,
    state_of,
)

import piecewise
from runners.stats import FallbackReason

# Taken out of the environment: a name with this prefix that is no setting is an error in `PiecewiseConfig`.
NUM_EXAMPLES = int(os.environ.pop("PIECEWISE_FUZZ_EXAMPLES", "40"))
# A program has at most nine ops between bounded values; each rounds, and a norm may stretch what came before.
TOLERANCE = {dtype: 2**12 * torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}
# A row of one or two tokens, sliced, is a shape of its own to torch.
SMALLEST_COMMON_SIZE = 3


class Session:
    """One case, acted out. `is_fresh` is false from a change of the model to the next capture."""

    def __init__(self, case):
        self.case, self.model = case, case.model()
        self.graphed = piecewise.compile(
            self.model, buckets=case.buckets, outputs=case.outputs, capture=case.capture,
            max_padding_ratio=case.max_padding_ratio, progress=False,
        )  # fmt: skip
        self.is_fresh, self.is_released, self.num_calls = True, False, 0
        self.kept, self.hooks = [], []

    def run(self):
        if self.case.capture == "startup":
            self.capture(self.case.example)
        poison = self.case.poison
        with op_poison(poison), padding_of_row(0 if poison is None else 1):
            for what, n in self.case.actions:
                getattr(self, what)(n)
        self.check_counts()
        for result, copied in self.kept:
            assert torch.equal(result.nan_to_num(7.0), copied.nan_to_num(7.0)), "a result changed afterwards"

    # Calls -------------------------------------------------------------------------------------------------

    def call(self, n, *, expected=None, has_bias=None, grad=False, by_keyword=False):
        where = f"{n} tokens, {self.case}"
        arguments = [self.case.arguments(n, has_bias=has_bias) for _ in range(2)]
        before = state_of(self.model)
        with torch.set_grad_enabled(grad):
            torch.manual_seed(11)
            want, error = _outcome(self.model, arguments[0], by_keyword)
            after, random_state = state_of(self.model), torch.get_rng_state()
            put_back(before)
            stats = self.graphed.stats.snapshot()
            if not inspect(self.graphed).is_released:
                overwrite_static_memory(self.graphed)
            torch.manual_seed(11)
            got, own_error = _outcome(self.graphed, arguments[1], by_keyword)
        self.num_calls += 1
        is_replay = self.graphed.stats.replays > stats.replays
        reason = next(iter(self.graphed.stats.reasons - stats.reasons), None)
        exact = not is_replay or n in self.case.buckets
        options = dict(exact=exact, tolerance=TOLERANCE[self.case.dtype])
        assert own_error is error, where
        if error is None:
            assert_same(got, want, where=where, **options)
            shared = _shared(want, arguments[0], after)
            assert _shared(got, arguments[1], after) == shared or self.case.outputs == "view", where
        for name, (tensor, _) in before.items():
            assert_same(tensor.detach(), after[name][1], where=f"{where}, state {name}", **options)
        assert_same(arguments[1], arguments[0], where=f"{where}, inputs afterwards", **options)
        assert torch.equal(torch.get_rng_state(), random_state), f"{where}: random numbers drawn"
        is_other = has_bias is not None or (by_keyword and self.hooks)
        self.check_path(n, is_replay, reason, expected, is_other)
        if error is None and is_replay and self.case.outputs == "copy":
            self.keep(got, arguments[1])
        put_back(before)

    def keep(self, got, arguments):
        """Results that are the caller's own must not change any more."""
        held = {_memory(tensor) for tensor in [*arguments, *_tensors_of(self.model)] if tensor is not None}
        for leaf in leaves_of(got).values():
            if isinstance(leaf, torch.Tensor) and _memory(leaf) not in held:
                self.kept.append((leaf, leaf.clone()))

    def check_path(self, n, is_replay, reason, expected, is_other):
        where = f"{n} tokens, {reason}, {self.case}"
        if expected is not None:
            assert reason is expected, where
        elif self.is_released:
            assert reason is FallbackReason.RELEASED, where
        elif self.is_fresh and self.case.capture == "startup" and not is_other:
            assert reason is self.expected_reason(n) or self.may_be_special(n, reason), where

    def expected_reason(self, n):
        """What a fresh plan does with the call; None for a replay."""
        bucket = next((size for size in self.case.buckets if size >= n), None)
        if n == 0:
            return FallbackReason.ZERO_TOKENS
        if bucket is None:
            return FallbackReason.ABOVE_LARGEST_BUCKET
        ratio = self.case.max_padding_ratio
        return FallbackReason.PADDING_RATIO if ratio is not None and bucket > ratio * n else None

    def may_be_special(self, n, reason):
        """Sizes at which eager takes another branch: the smallest, and all where the program has one."""
        branches = any(name in COUNTING for name, *_ in self.case.steps)
        small = n < SMALLEST_COMMON_SIZE or min(self.case.buckets) < SMALLEST_COMMON_SIZE
        codes = (FallbackReason.SHAPE_GUARD, FallbackReason.ONE_TOKEN_BRANCH)
        return (branches or small) and reason in codes

    def check_counts(self):
        stats = self.graphed.stats
        assert stats.replays + stats.eager_calls == self.num_calls
        assert stats.reasons.total() == stats.eager_calls
        assert stats.calls_by_bucket.total() == stats.replays
        assert set(stats.calls_by_bucket) <= set(self.case.buckets)

    # Actions -----------------------------------------------------------------------------------------------

    def eager_only(self, n):
        with piecewise.eager_only():
            self.call(n, expected=FallbackReason.EAGER_ONLY)

    def grad(self, n):
        self.call(n, expected=FallbackReason.GRAD_ENABLED, grad=True)

    def other_signature(self, n):
        self.call(n, has_bias=not self.case.has_bias)

    def keywords(self, n):
        """The same call, but for hooks of the root."""
        self.call(n, by_keyword=True)

    def hook(self, n):
        """A hook of the root that rewrites what was passed by position comes, or goes."""
        if self.hooks:
            self.hooks.pop().remove()
        else:
            self.hooks.append(self.model.register_forward_pre_hook(_halved))
        self.changed(n)

    def update(self, n):
        """In place: the next replay has the new values."""
        self.model.linear.weight.mul_(0.9)
        self.model.workspace.add_(0.1)
        self.call(n)

    def rebind(self, n):
        self.model.linear.weight = nn.Parameter(self.model.linear.weight * 1.1, requires_grad=False)
        self.changed(n)

    def rebind_buffer(self, n):
        self.model.workspace = self.model.workspace + 0.1
        self.changed(n)

    def flag(self, n):
        self.model.flag = not self.model.flag
        self.changed(n)

    def train(self, n):
        self.model.train(not self.model.training)
        self.changed(n)

    def change_state(self, n):
        """What guards ask about: an attribute, an item, a function's code, a class, a tuple of tensors."""
        which = self.case.changes[self.num_calls % len(self.case.changes)]
        fuzz_changes.CHANGES[which](self.model.held)
        self.changed(n)

    def changed(self, n):
        """The next call is right; graphs come back at once for some counts, else with a later action."""
        self.is_fresh = False
        self.call(n)
        if n % 3 == 0:
            self.refresh(n)

    def refresh(self, n):
        if self.graphed.refresh() is not None:
            self.is_fresh = True
        self.call(n)

    def release(self, n):
        self.graphed.release()
        self.is_released = True
        self.call(n)

    def capture(self, n):
        state = state_of(self.model)
        random_state = torch.get_rng_state()
        report = self.graphed.capture(*self.case.example_arguments())
        assert all(bucket.status != "failed" for bucket in report.buckets), (report, self.case)
        for name, (tensor, before) in state.items():
            assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0)), (name, self.case)
        assert torch.equal(torch.get_rng_state(), random_state), self.case
        self.is_fresh, self.is_released = True, False

    def verify(self, n):
        """Finds nothing, and changes nothing."""
        if n == 0:
            return
        state, stats = state_of(self.model), self.graphed.stats.asdict()
        report = self.graphed.verify(*self.case.arguments(n))
        assert report.first_difference is None, (report, self.case)
        assert self.graphed.stats.asdict() == stats
        for name, (tensor, before) in state.items():
            assert torch.equal(tensor.nan_to_num(7.0), before.nan_to_num(7.0)), (name, self.case)


def _halved(module, args):
    return (args[0], args[1] / 2, *args[2:]) if len(args) > 1 else None


def _outcome(call, arguments, by_keyword):
    """The result, or the class of the error."""
    try:
        if by_keyword:
            return call(**dict(zip(PARAMETERS, arguments, strict=True))), None
        return call(*arguments), None
    except (ArithmeticError, IndexError, RuntimeError, ValueError) as error:
        return None, type(error)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


def _tensors_of(model):
    return [*model.parameters(), *model.buffers(), model.cache]


def _shared(result, arguments, state):
    """Which leaves of the result share memory: with an earlier one, an input or the model's state."""
    places, found = {}, []
    held = [(f"input {i}", tensor) for i, tensor in enumerate(arguments) if tensor is not None]
    held += [(name, tensor) for name, (tensor, _) in state.items()]
    for name, tensor in held + [(path, leaf) for path, leaf in leaves_of(result).items()]:
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            found.append((name, places.setdefault(_memory(tensor), name)))
    return found


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def test_I6_whatever_is_drawn_equals_eager(case):
    with torch.no_grad():
        Session(case).run()


READERS = [function.__name__ for function in fuzz_changes.OPS if function.__name__.startswith("held")]


@pytest.mark.parametrize("which", range(len(fuzz_changes.CHANGES)))
def test_I10_each_change_of_state_is_noticed_by_a_program_that_reads_it(which):
    acts = ("call", 3), ("change_state", 5), ("call", 4), ("capture", 3), ("call", 5), ("change_state", 4)
    steps = tuple((name, 1, 0) for name in READERS)
    case = dataclasses.replace(case_with("average", seed=0), steps=steps, changes=(which,), actions=acts)
    with torch.no_grad():
        session = Session(case)
        session.run()
    stats = session.graphed.stats
    assert stats.reasons == {FallbackReason.MODULE_STATE_CHANGED: stats.eager_calls}, stats
    # The second change may bring the first state back, whose graphs were kept.
    assert (stats.replays, stats.eager_calls) in ((2, 3), (3, 2)), stats


@pytest.mark.parametrize("name", sorted(OPS))
def test_I3_a_program_that_begins_with_each_op_equals_eager(name):
    with torch.no_grad():
        session = Session(case_with(name, seed=sorted(OPS).index(name)))
        session.run()
    assert session.graphed.stats.replays >= 4 or any(op in COUNTING for op, *_ in session.case.steps)
