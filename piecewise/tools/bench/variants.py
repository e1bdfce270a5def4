"""Prepares the variants of one model that a benchmark compares, each as a call without arguments.

=================  ====================================================================================
eager              the case's baseline: the unmodified model, where the case has one
compile            the baseline under `torch.compile`, one graph for all sizes
reduce-overhead    the same with torch's own CUDA graphs
graphed            the case's model, boundary ops eager
graphed-captured   the same with the boundary ops captured; limits that the settings leave out are 16
                   sequences, and twice the largest bucket for one sequence
graphed-inductor   graphed, its segments lowered by Inductor
graphed-fused      the same with fusions=("auto",): packed linears, q and k rotated in one kernel
floor              the kernels of the graphed plan in one graph: what the cuts cost is above it
floor-captured     the same of graphed-captured
floor-inductor     the same of graphed-inductor: the compiled model in one graph
breakable          the case's model through the package `breakable-cuda-graphs`, cut at the same ops
=================  ====================================================================================

A variant that this version or machine cannot run is left out, with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import boundary_ops
import piecewise
from piecewise.api import graphs_of
from piecewise.ir.plan import SegmentPlan, arguments_of, run_plan, state_tensor
from piecewise.prefill_case import PrefillCase
from piecewise.settings.config import PiecewiseConfig
from runners.engines import native_engine
from runners.errors import PiecewiseError, one_line

Call = Callable[[], Any]
# The fused variant comes first: it moves weights, and graphs read weights at their addresses at capture.
GRAPHED = ("graphed-fused", "graphed", "graphed-captured", "graphed-inductor")
# Each floor → the variant whose kernels it runs.
FLOORS = {"floor": "graphed", "floor-captured": "graphed-captured", "floor-inductor": "graphed-inductor"}
DEFAULT_VARIANTS = ("eager", "compile", "reduce-overhead", *GRAPHED, *FLOORS)
PEERS = ("breakable",)
_WARM_UPS = 3
_MAX_NUM_SEQS = 16


class Unavailable(Exception):
    """Says why a variant cannot be run here."""


@contextmanager
def _unavailable_after(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise Unavailable(one_line(error)) from error


@dataclasses.dataclass(slots=True)
class Prepared:
    """Holds a variant that is ready to be called.

    Attributes:
        uses_baseline: whether the variant runs the case's baseline, and takes the baseline's inputs.
        prepare: returns a call with inputs, made before, of num_tokens tokens.
        setup_s: seconds spent before the first call: tracing, compiling, capturing.
        capture: the outcome of each bucket, for graphed variants.
        close: frees the variant's memory.
        holds_inputs: whether calls read the inputs' values of preparation, so that new ones need another,
            expensive preparation.
        fallbacks: returns how many calls since the last preparation ran eagerly, by reason.
    """

    name: str
    uses_baseline: bool
    prepare: Callable[[int, tuple[Any, ...], dict[str, Any]], Call]
    setup_s: float = 0.0
    capture: dict[str, Any] | None = None
    close: Callable[[], None] = lambda: None
    holds_inputs: bool = False
    fallbacks: Callable[[], dict[str, int]] = dict


class VariantMaker:
    """Prepares variants of one case; a graphed variant is made once, and its floor uses its plan."""

    def __init__(self, case: PrefillCase, config: PiecewiseConfig, sizes: Sequence[int]) -> None:
        self.case, self.config, self.sizes = case, config, tuple(sizes)
        self._made: dict[str, tuple[piecewise.GraphedModule, Any]] = {}

    def prepare(self, name: str) -> Prepared:
        """Compiles or captures the variant.

        Raises:
            Unavailable: this version, the machine or the model lacks what it needs.
        """
        began = time.perf_counter()
        if name in GRAPHED:
            made = self._graphed(name)
        elif name in FLOORS:
            made = self._floor(name)
        elif name == "eager":
            model = (self.case.baseline or self.case).model
            made = Prepared(name, True, lambda n, args, kwargs: lambda: model(*args, **kwargs))
        else:
            made = _breakable(self.case) if name in PEERS else _compiled(self.case, name, self.sizes)
        made.setup_s = time.perf_counter() - began
        return made

    def _captured(self, name: str) -> tuple[piecewise.GraphedModule, Any]:
        if name not in self._made:
            with _unavailable_after(PiecewiseError):
                graphed = piecewise.compile(self.case.model, self._config_of(name))
                with self.case.inputs(max(min(self.sizes), 2)) as (args, kwargs):
                    report = graphed.capture(*args, **kwargs)
            if not (plans := graphed.report().plans):  # graphs are switched off
                raise Unavailable(report.buckets[0].reason)
            segments = plans[0].segments
            if name == "graphed-captured" and not any(segment.captured_ops for segment in segments):
                notes = next(segment.notes() for segment in segments if segment.kind == "boundary")
                raise Unavailable(notes[0])
            self._made[name] = graphed, report
        return self._made[name]

    def _config_of(self, name: str) -> PiecewiseConfig:
        config = self.config
        if name == "graphed-captured":
            limits = {
                "max_num_seqs": config.max_num_seqs or _MAX_NUM_SEQS,
                "max_seq_len": config.max_seq_len or 2 * max(config.buckets),
            }
            return PiecewiseConfig.from_any(config, boundary="captured", **limits)
        if name in ("graphed-inductor", "graphed-fused"):
            fusions = ("auto",) if name == "graphed-fused" else ()
            return PiecewiseConfig.from_any(config, lowering="inductor", fusions=fusions)
        return config

    def _graphed(self, name: str) -> Prepared:
        graphed, report = self._captured(name)
        before: Counter[Any] = Counter()

        def fallbacks() -> dict[str, int]:
            return {str(reason): count for reason, count in (graphed.stats.reasons - before).items()}

        def prepare(n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            before.clear()
            before.update(graphed.stats.reasons)
            graphed(*args, **kwargs)
            if fell := fallbacks():
                raise Unavailable(f"{n} tokens ran eagerly: {fell}")
            return lambda: graphed(*args, **kwargs)

        plan = graphed.report().plans[0]
        capture = {**report.asdict(), "coverage": plan.coverage, "plan": plan.summary()}
        # A second capture, now that the kernels of every bucket are loaded and compiled.
        graphed.suspend()
        again = graphed.resume()
        if again is not None:
            capture["again"] = {key: again.asdict()[key] for key in ("buckets", "device_bytes", "pool_bytes")}
        return Prepared(name, False, prepare, capture=capture, close=graphed.release, fallbacks=fallbacks)

    def _floor(self, name: str) -> Prepared:
        graphed, _ = self._captured(FLOORS[name])
        device = device_of(self.case)
        engine = native_engine(device)
        pool = engine.new_pool(device)
        graphs: list[Any] = []

        def prepare(n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
            (signature,) = graphs_of(graphed).signatures
            matched = signature.match(signature.binder.bind(*args, **kwargs))
            if matched is None or n not in signature.served:
                raise Unavailable(f"{n} is no captured bucket")
            plan, leaves = signature.served[n].plan, matched[1]
            for metadata in signature.served[n].steps.step_metadata:
                metadata.load()
            functions = next(a.functions for a in signature.assemblers if a.plan is plan)
            floor = functools.partial(run_floor, plan, functions, leaves, n)
            for _ in range(_WARM_UPS):
                floor()
            with _unavailable_after(Exception):
                graph = engine.capture(floor, pool=pool, segment=f"whole model, {n} tokens")
            pool.end_bucket()
            graphs.append(graph)

            def call() -> Any:
                graph.replay()
                return graph.outputs

            return call

        def close() -> None:
            _reset(graphs)
            pool.release()

        return Prepared(name, False, prepare, close=close, holds_inputs=True)


def run_floor(
    plan: SegmentPlan, functions: Mapping[int, Callable[..., Any]], leaves: Sequence[Any], num_tokens: int
) -> list[Any]:
    """Runs all segments of a plan without padding, with `functions` as its graph segments.

    Returns:
        The result's tensors.
    """
    values = plan.values
    env = {value.index: value.number_in(leaves) for value in values if value.origin in ("input", "symbol")}
    run_plan(
        plan, env, num_tokens,
        on_segment=lambda segment, arguments: functions[segment.index](num_tokens, *arguments),
        on_boundary=lambda segment: segment.function(num_tokens, *arguments_of(segment, values, env)),
    )  # fmt: skip
    results = [index for index in plan.result_values if isinstance(index, int)]
    return [env[index] if index in env else state_tensor(values[index]) for index in results]


def device_of(case: PrefillCase) -> torch.device:
    """Returns the device of the case's model."""
    first = next(case.model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def wait_for(device: torch.device) -> None:
    """Waits until the device is idle."""
    native_engine(device).synchronize(device)


def _reset(graphs: Sequence[Any]) -> None:
    for graph in graphs:
        graph.reset()


def _compiled(case: PrefillCase, name: str, sizes: Sequence[int]) -> Prepared:
    source = case.baseline or case
    if name == "reduce-overhead" and native_engine(device_of(case)).device_type is None:
        raise Unavailable("needs a device with graphs of its own")
    torch.compiler.reset()
    mode = "reduce-overhead" if name == "reduce-overhead" else None
    compiled = torch.compile(source.model, dynamic=True, mode=mode)

    def prepare(n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*args, **kwargs)

        return call

    with _unavailable_after(Exception):
        for n in sizes:
            with source.inputs(n) as (args, kwargs):
                for _ in range(_WARM_UPS):
                    prepare(n, args, kwargs)()
                wait_for(device_of(case))
    return Prepared(name, True, prepare)


class _BreakAtBoundaries(TorchFunctionMode):
    """Wraps each called boundary op."""

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self._wrap = wrap

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_boundary = boundary_ops.lookup(func) is not None
        return (self._wrap(func) if is_boundary else func)(*args, **(kwargs or {}))


def _breakable(case: PrefillCase) -> Prepared:
    with _unavailable_after(ImportError):
        peer = importlib.import_module("breakable_cuda_graphs")
    if native_engine(device_of(case)).device_type is None:
        raise Unavailable("needs a device with graphs of its own")
    graphs: list[Any] = []

    def prepare(n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        for _ in range(_WARM_UPS):
            case.model(*args, **kwargs)
        graph = peer.BreakableCUDAGraph(pool=graphs[0].pool() if graphs else None)
        breaks = _BreakAtBoundaries(peer.no_graph)
        with _unavailable_after(Exception), breaks, peer.breakable_graph(graph):
            result = case.model(*args, **kwargs)
        graphs.append(graph)

        def call() -> Any:
            graph.replay()
            return result

        return call

    return Prepared("breakable", False, prepare, close=functools.partial(_reset, graphs))
