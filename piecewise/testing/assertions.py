"""Asserts, in a test of the user's own, that a model is graphed, and that its replays equal eager calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from piecewise.api import GraphedModule
from piecewise.errors.gate import NotGraphed
from piecewise.errors.tools import IneffectiveOption
from piecewise.prefill_case import PrefillCase
from piecewise.settings.config import PiecewiseConfig
from piecewise.verify.report import VerifyReport

# Tokens of the call that is traced; any number of at least two serves.
_EXAMPLE = 8


def assert_graphed(
    model: nn.Module | GraphedModule,
    make_inputs: Callable[..., Any],
    *,
    min_coverage: float | None = None,
    max_segments: int | None = None,
    config: PiecewiseConfig | str | None = None,
    **settings: Any,
) -> VerifyReport:
    """Captures a model and asserts that every bucket has graphs and that replays equal eager calls.

    Each bucket is compared at the sizes around its edge, with poisoned padding, as `verify` does.

    Args:
        model: a module, compiled here with `config` and `settings`, whose graphs are then given back; or a
            compiled one, which is captured if it is not yet.
        make_inputs: `make_inputs(num_tokens)` returns `(args, kwargs)`, as in `PrefillCase`.
        min_coverage: least share of the model's ops in the graphs of each bucket, from 0 to 1.
        max_segments: most segments of the plan (graph, boundary and eager ones together).

    Returns:
        What was compared.

    Raises:
        NotGraphed: an `AssertionError` too; it lists all that is wrong.
        PiecewiseError: a setting is wrong, or the model cannot be traced.
    """
    if isinstance(model, GraphedModule):
        if config is not None or settings:
            options = ", ".join(settings or ("config",))
            raise IneffectiveOption(option=f"assert_graphed, {options}", needed="a module not yet compiled")
        graphed, is_ours = model, False
    else:
        graphed, is_ours = GraphedModule(model, PiecewiseConfig.from_any(config, **settings)), True
    case = PrefillCase(graphed.model, make_inputs)
    try:
        with torch.no_grad():
            if not graphed.report().captures:
                with case.inputs(_EXAMPLE) as (args, kwargs):
                    graphed.capture(*args, **kwargs)
            found = graphed.verify(make_inputs=case.make_inputs)
        problems = [*_plan_problems(graphed, min_coverage, max_segments), *_call_problems(graphed, found)]
    finally:
        if is_ours:
            graphed.release()
    if problems:
        raise NotGraphed(model=type(graphed.model).__name__, problems="; ".join(problems))
    return found


def _plan_problems(graphed: GraphedModule, min_coverage: float | None, max_segments: int | None) -> list[str]:
    report, problems = graphed.report(), []
    for capture in report.captures:
        for bucket in capture.buckets:
            if bucket.status != "captured":
                problems.append(f"bucket {bucket.bucket} is {bucket.status}: {bucket.reason}")
            elif min_coverage is not None and bucket.coverage < min_coverage:
                share = f"{bucket.coverage:.1%} of ops are in the graphs of bucket {bucket.bucket}"
                problems.append(f"{share}, not {min_coverage:.1%}")
    for plan in report.plans:
        if max_segments is not None and len(plan.segments) > max_segments:
            kinds = ", ".join(f"{count} {kind}" for kind, count in plan.summary()["segments"].items())
            problems.append(f"the plan has {len(plan.segments)} segments ({kinds}), not {max_segments}")
        short = min_coverage is not None and plan.coverage < min_coverage
        problems += [f"{op} runs outside of graphs" for op in plan.summary()["eager_ops"] if short]
    return problems


def _call_problems(graphed: GraphedModule, found: VerifyReport) -> list[str]:
    problems = [f"a call is not replayed: {check.num_tokens} tokens, {check.path}"
                for check in found.checks if check.path != "graph" and check.bucket is not None]  # fmt: skip
    if found.first_difference is not None:
        problems.append(f"a replay differs from the eager call: {found.first_difference}")
    compared = {check.bucket for check in found.checks}
    problems += [f"no call of bucket {bucket} was compared: make_inputs gave no input of its sizes"
                 for capture in graphed.report().captures for bucket in capture.captured
                 if bucket not in compared]  # fmt: skip
    return problems or ([] if found.num_compared else ["no call was replayed"])
