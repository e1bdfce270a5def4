"""Runs `piecewise explain` and `piecewise verify` on the case that a spec names."""

from __future__ import annotations

import argparse
from functools import partial

import torch

from piecewise.api import GraphedModule
from piecewise.prefill_case import load_case, unless_the_model_raises
from piecewise.settings.config import PiecewiseConfig
from piecewise.tools.exit_codes import ExitCode
from piecewise.verify.report import VerifyReport


def run_explain(arguments: argparse.Namespace) -> ExitCode:
    """Prints the plan for one call of the case."""
    config, case = _config(arguments), load_case(arguments.spec)
    graphed = GraphedModule(case.model, config)
    with case.inputs(arguments.tokens) as (args, kwargs), torch.no_grad():
        plan = unless_the_model_raises(case, arguments.tokens, partial(graphed.explain, *args, **kwargs))
    written = {"json": plan.to_json, "markdown": plan.to_markdown}
    print(written[arguments.format]() if arguments.format in written else plan.to_text(full=arguments.full))
    return ExitCode.RIGHT


def run_verify(arguments: argparse.Namespace) -> ExitCode:
    """Captures the case and prints how its replays compare with eager calls."""
    config, case = _config(arguments), load_case(arguments.spec)
    graphed, size = GraphedModule(case.model, config), max(2, min(32, max(config.buckets)))

    def verified() -> VerifyReport:
        with case.inputs(size) as (args, kwargs), torch.no_grad():
            graphed.capture(*args, **kwargs)
        return graphed.verify(make_inputs=case.make_inputs)

    report = unless_the_model_raises(case, size, verified)
    if not report.num_compared:
        case.run(size)  # raises the model's own error, if that is why nothing was compared
    print(report)
    if arguments.json is not None:
        arguments.json.write(report.to_json() + "\n")
    if not report.num_compared:
        return ExitCode.NOTHING
    return ExitCode.RIGHT if report.ok else ExitCode.DIFFERENT


def _config(arguments: argparse.Namespace) -> PiecewiseConfig:
    overrides = {} if arguments.buckets is None else {"buckets": arguments.buckets}
    return PiecewiseConfig.from_any(arguments.config, **overrides)
