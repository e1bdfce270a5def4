"""The arguments of `piecewise buckets plan | check | show`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name

from piecewise.settings.grids import ENGINE_GRIDS
from piecewise.tools.exit_codes import HELP, ExitCode
from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS

# As `traffic.FORMATS`, which is not imported here: it takes numpy, and every command builds this parser.
TRAFFIC_FORMATS = ("auto", "numbers", "csv", "jsonl", "azure", "mooncake", "recorded")

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_buckets(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its three parts to the parser of `piecewise`."""
    buckets = commands.add_parser(
        "buckets",
        allow_abbrev=False,
        help="derive bucket files from traffic, check and show them",
        description="Bucket files: which token counts get graphs.",
        epilog=HELP,
    )
    parts = buckets.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_plan(parts)
    for name, text in (
        ("check", "list everything that is wrong with a file (exit code 2), and what in it cannot take"
         " effect (exit code 1)"),
        ("show", "print each bucket of a file: what it serves, its worst padding, whether it is"
         " reached"),
    ):  # fmt: skip
        part = parts.add_parser(name, allow_abbrev=False, help=text, description=f"{text.capitalize()}.",
                                epilog=HELP)  # fmt: skip
        part.add_argument("file", metavar="FILE", help="a TOML file of settings")
        part.add_argument(
            "--tokens-per-request", type=_whole, default=1, metavar="N",
            help="tokens of each request in a decode step: 1 and the draft tokens (default: 1)",
        )  # fmt: skip
        part.set_defaults(run=_lazily(f"piecewise.tools.buckets.show:run_{name}"))


def _add_plan(parts: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = parts.add_parser(
        "plan",
        allow_abbrev=False,
        help="find the bucket list that costs real traffic the least",
        description="Find, exactly, the list of at most --max-graphs buckets under which the traffic costs"
        f" the least, and compare it with the grids of {', '.join(ENGINE_GRIDS)}.",
        epilog=HELP,
    )
    _add_traffic(plan)
    _add_budget(plan)
    _add_decode(plan)
    out = plan.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="FILE",
                     help="write the list into this TOML file; its other settings and comments stay, and its"
                     " limits hold for the plan")  # fmt: skip
    out.add_argument("--format", choices=("text", "json"), default="text", help="how to print it")
    out.add_argument("--plot", metavar="IMAGE", help="draw histogram, buckets and waste (needs matplotlib)")
    out.add_argument("--no-progress", action="store_true", help="no bar")
    plan.set_defaults(run=_lazily("piecewise.tools.buckets.plan:run_plan"))


def _add_traffic(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("traffic")
    add = group.add_argument
    add("--traffic", nargs="+", required=True, metavar="FILE",
        help="requests or steps: one number a line, CSV, JSONL, an Azure or Mooncake trace, or what"
        " graphed.traffic.save wrote")  # fmt: skip
    add("--traffic-format", choices=TRAFFIC_FORMATS, default="auto", help="default: told by the first line")
    add("--column", metavar="NAME", help="the CSV column or JSONL field of token counts")
    add("--phase", choices=("prefill", "decode"), default="prefill", help="default: prefill")
    add("--chunk", type=_whole, metavar="N", help="cut each request into chunks of at most N tokens")
    add("--batching", action="store_true",
        help="pack requests into steps as a scheduler does: in order of arrival, at most --max-num-tokens (or"
        " --chunk) a step, the last one cut")  # fmt: skip
    add("--step-ms", type=partial(_number, high=1e6, what="milliseconds from 0 to 1000000"), metavar="MS",
        help="how long a step takes, which says who has arrived when the next one starts; 0: all wait from"
        " the start (default: the graphed latency of --cost, or 25)")  # fmt: skip
    add("--holdout", type=_share, metavar="SHARE", nargs="?", const=0.5,
        help="plan on the earlier traffic, judge on this last share of it (default: 0.5)")  # fmt: skip
    add("--smooth", type=partial(_number, high=1, what="a share from 0 to 1"), metavar="SHARE",
        help="spread this share of each step over counts within 5 %% of its own, so that the plan fits"
        " traffic to come (default: 0, with --holdout 0.3)")  # fmt: skip


def _add_budget(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("budget and cost")
    add = group.add_argument
    add(
        "--max-graphs",
        type=partial(_whole, most=MAX_NUM_BUCKETS),
        default=20,
        metavar="N",
        help="at most N buckets (default: 20)",
    )
    add(
        "--max-num-tokens",
        type=_whole,
        metavar="N",
        help="the most tokens of one step, written into the file",
    )
    add("--max-num-seqs", type=_whole, metavar="N", help="the most requests of one step")
    add("--cover", type=_whole, metavar="N",
        help="the largest bucket; larger steps run eagerly (default: the limits, else the largest step)",
    )  # fmt: skip
    add(
        "--cost",
        metavar="BENCH",
        help="latencies and memory measured by `piecewise bench`, instead of padded tokens",
    )
    add("--memory-budget", type=_bytes, metavar="SIZE", help="device memory for graphs, such as 2GiB")
    add("--bytes-per-graph", type=_bytes, metavar="SIZE", help="memory of one graph besides the shared pool")
    add(
        "--bytes-per-token",
        type=_bytes,
        metavar="SIZE",
        help="memory of the pool per token of the largest bucket",
    )


def _add_decode(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("decode (--phase decode)")
    add = group.add_argument
    add("--tokens-per-request", type=_whole, default=1, metavar="N",
        help="tokens of each request in a step: 1 and the draft tokens (default: 1)")  # fmt: skip
    add("--cache-bytes-per-token", type=_bytes, metavar="SIZE",
        help="KV cache of one token; with --bytes-per-graph, graphs are added while they save more padded"
        " slots than the cache they displace would serve")  # fmt: skip
    add("--cached-tokens", type=_whole, metavar="N",
        help="cached tokens of a request on average (default: from the trace)")  # fmt: skip


def _lazily(name: str) -> Callable[[argparse.Namespace], ExitCode]:
    """A command by "module:function", imported when it runs."""
    return lambda arguments: ExitCode(resolve_name(name)(arguments))


def _whole(text: str, most: int = MAX_BUCKET) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and 1 <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, got {text[:80]!r}")
    return int(text)


def _share(text: str) -> float:
    share = _number(text, high=1, what="a share between 0 and 1, such as 0.5")
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"expected a share between 0 and 1, got {text[:80]!r}")
    return share


def _number(text: str, *, high: float, what: str) -> float:
    """From 0 to `high`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= high:
        raise argparse.ArgumentTypeError(f"expected {what}, got {text[:80]!r}")
    return value


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", text.strip())
    if match is None or match.group(2).upper() not in _UNITS:
        raise argparse.ArgumentTypeError(f"expected a size such as 512MiB or 2GiB, got {text[:80]!r}")
    return round(float(match.group(1)) * _UNITS[match.group(2).upper()])
