"""Builds the `StepPlan` that serves a bucket from a cut plan: here compile time meets run time.

For each bucket, in this order [I8, I9]: allocate static buffers for what graphs read but do not make; warm up
(`warm_up.py`); capture each graph segment on static memory; restore the model state that segments wrote.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from boundary_ops.declare.boundary_op import StepMetadata
from boundary_ops.declare.registry import declarations
from piecewise import torch_api
from piecewise.capture.faults import SegmentFault
from piecewise.capture.warm_up import WarmUp
from piecewise.cut.split import op_of, takers_of_any_strides
from piecewise.ir.plan import ComputedNumber, InputAt, Segment, SegmentPlan, ValueSpec, run_plan, state_tensor
from piecewise.lowering.lowering import Lowering
from piecewise.report.startup_times import StartupTimes
from piecewise.settings.config import PiecewiseConfig
from piecewise.streams.streams import StreamSchedules
from runners.bound_steps import CopyLaunch, DirectCall
from runners.buffers import StaticBuffers
from runners.engine import GraphEngine, GraphPool
from runners.engines import native_engine
from runners.errors import CaptureError
from runners.piecewise_runner import PiecewiseRunner
from runners.state.state_check import StateCheck, StateRef
from runners.step_plan import CallStep, ReplayStep, ResultItem, StaticArgument, StaticInput, StepPlan

# Value index → its tensor at fixed addresses.
_Tensors = dict[int, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureContext:
    """Holds what all captures of one graphed model share."""

    config: PiecewiseConfig
    engine: GraphEngine
    pool: GraphPool
    buffers: StaticBuffers
    lowering: Lowering


class PlanAssembler:
    """Captures the buckets of one cut plan, made from one trace; runners, pool and buffers outlive it.

    Args:
        functions: the function of each graph segment, by the segment's index.
        streams: which segments run on several streams.
    """

    def __init__(
        self, plan: SegmentPlan, context: CaptureContext,
        *, functions: Mapping[int, Callable[..., Sequence[Any]]], streams: StreamSchedules,
        leaves: Sequence[Any], check: StateCheck, step_metadata: Sequence[StepMetadata], times: StartupTimes,
    ) -> None:  # fmt: skip
        self.plan, self.functions, self.leaves, self.buffers = plan, functions, tuple(leaves), context.buffers
        self.outputs, self.pool, self.check, self.times = context.config.outputs, context.pool, check, times
        warmup_steps = context.config.warmup_steps
        self.step_metadata = tuple(step_metadata)
        self.num_leaves = len(self.leaves)
        self.runners = {
            segment.index: PiecewiseRunner(
                functions[segment.index], name=f"segment {segment.index}", engine=context.engine,
                pool=context.pool, warmup_steps=warmup_steps, module_path=segment.module_path,
            )
            for segment in plan.graph_segments()
            if not segment.views_only
        }  # fmt: skip
        self.streams, self.num_warm_ups = streams, warmup_steps
        read = [plan.values[index] for index in sorted(_read_by_graphs(plan))]
        self.copied_in = [value for value in read if value.origin in ("input", "eager")]
        self.graph_memory = {value.memory for value in plan.values if value.origin == "graph"}

    def capture(self, bucket: int, real_rows: int) -> StepPlan:
        """Warms up and captures every graph segment at `bucket` rows.

        Args:
            real_rows: how many rows of the warm-ups are real; the rest is poisoned.
        Raises:
            CaptureError: a segment cannot be captured, or its real rows change with its padding. Nothing
                of the bucket is left behind.
        """
        self.forget(bucket)  # it may have failed before
        self.pool.begin_bucket()
        static_inputs = {value.index: self._static_buffer(value, bucket) for value in self.copied_in}
        device = next(iter(static_inputs.values())).device if static_inputs else torch.device("cpu")
        random_state = native_engine(device).fork_random_state(device)
        segments = [segment for segment in self.plan.segments if segment.kind != "boundary"]
        memories = {memory for segment in segments for memory in segment.writes} - self.plan.step_memory
        written = [v for v in self.plan.values if v.origin == "state" and v.memory in memories]
        saved = [(tensor, tensor.clone()) for tensor in map(state_tensor, written)]
        try:
            with torch.inference_mode(False), torch.no_grad(), random_state:
                for metadata in self.step_metadata:
                    metadata.clear()
                with self.times.timed("warm_up"):
                    WarmUp(
                        self.plan, self.runners, self.leaves, self.function_for, self.num_warm_ups,
                        bucket, real_rows, static_inputs,
                    ).run()  # fmt: skip
                with self.times.timed("capture"):
                    static = self._capture_segments(bucket, static_inputs)
        except BaseException as error:
            for runner in self.runners.values():
                runner.discard(bucket, str(error))
            raise
        finally:
            with torch.inference_mode(False), torch.no_grad():
                for tensor, before in saved:
                    tensor.copy_(before)
            self.pool.end_bucket()
        return self._step_plan(bucket, static_inputs, static)

    def function_for(self, segment: Segment, bucket: int) -> Callable[..., Sequence[Any]]:
        """Returns the form of a graph segment that is warmed up and captured at a bucket."""
        on_streams = self.streams.form_for(segment, bucket, self.pool.streams)
        return on_streams or self.functions[segment.index]

    def _static_buffer(self, value: ValueSpec, bucket: int) -> torch.Tensor:
        assert value.sizes is not None and value.dtype is not None and value.device is not None
        sizes = value.sizes(bucket)
        strides = value.strides(bucket) if value.strides is not None else ()
        strides = strides or torch.empty(sizes, device="meta").stride()
        key = ("input", value.leaf) if value.origin == "input" else ("eager", value.index)
        return self.buffers.tensor(key, sizes, strides, value.dtype, value.device)

    def _capture_segments(self, bucket: int, static_inputs: _Tensors) -> _Tensors:
        static = dict(static_inputs)
        for buffer in static_inputs.values():
            buffer.zero_()

        def capture(segment: Segment, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            function = self.function_for(segment, bucket)
            try:
                return self.runners[segment.index].capture(bucket, arguments, fn=function)
            except CaptureError as error:
                # Graph-owned memory is freed with the bucket, and no graph has written it yet.
                given = [
                    torch.zeros_like(tensor) if self.plan.values[index].origin == "graph" else tensor
                    for index, tensor in zip(segment.inputs, arguments, strict=True)
                ]
                fault = SegmentFault(error, segment, function, given, bucket=bucket, real_rows=bucket)
                raise fault from error

        run_plan(
            self.plan, static, bucket, on_segment=capture,
            on_live=lambda live: self.pool.keep_only(static[index] for index in live),
        )  # fmt: skip
        return static

    def _slot(self, index: int) -> int:
        value = self.plan.values[index]
        if value.origin == "input" or (value.origin == "symbol" and value.dim < 0):
            return value.leaf
        return self.num_leaves + index

    def _step_plan(self, bucket: int, static_inputs: _Tensors, static: _Tensors) -> StepPlan:
        values = self.plan.values
        steps: list[ReplayStep | CallStep] = []
        taken: list[Segment] = []
        available = {value.index for value in self.copied_in if value.origin == "input"}
        for segment in self.plan.segments:
            if segment.kind == "graph":
                graph = None if segment.views_only else self.runners[segment.index].graph_for(bucket)
                if graph is not None and not graph.is_empty:
                    steps.append(ReplayStep(graph, segment.name))
                    taken.append(segment)
                continue
            taken.append(segment)
            steps.append(self._call_step(segment, static_inputs, static, available))
            available |= {index for index in segment.outputs if index in static_inputs}
        outside = (values[i] for segment in taken if segment.kind != "graph" for i in segment.inputs)
        looked_up = {self._slot(v.index): v.state for v in outside if v.origin == "state" and v.state}
        inputs = [value.index for value in self.copied_in if value.origin == "input"]
        copy_ins = self._static_inputs(inputs, static_inputs)
        symbols = (value for value in values if value.origin == "symbol" and value.dim >= 0)
        return StepPlan(
            bucket, self.num_leaves, len(values), copy_ins, tuple(steps),
            tuple(looked_up.items()), tuple((self._slot(v.index), v.leaf, v.dim) for v in symbols),
            tuple(self._result_item(leaf, static) for leaf in self.plan.result_leaves),
            self.check, self._check_before(taken), self.pool.begin_call,
            may_run_ahead=_are_repeatable(taken), step_metadata=self.step_metadata,
            copier=_copier_for(copy_ins[0].buffer.device) if copy_ins else None,
        )  # fmt: skip

    def _static_inputs(self, indices: Sequence[int], static_inputs: _Tensors) -> tuple[StaticInput, ...]:
        return tuple(StaticInput(self._slot(i), static_inputs[i], self.plan.values[i]) for i in indices)

    def _call_step(
        self, segment: Segment, static_inputs: _Tensors, static: _Tensors, available: set[int]
    ) -> CallStep:
        values = self.plan.values
        arguments = tuple(
            StaticArgument(static[value.index], value, value.memory in segment.writes)
            if value.origin == "graph"
            else self._slot(value.index)
            for value in (values[index] for index in segment.inputs)
        )
        renewed = [index for index in segment.outputs if index in static_inputs]
        renewed += [i for i in sorted(available - {*renewed}) if values[i].memory in segment.writes]
        copies = self._static_inputs(renewed, static_inputs)
        results = tuple(self._slot(index) for index in segment.outputs)
        taken = {values[index].memory for index in segment.inputs}
        made = enumerate(values[index] for index in segment.outputs)
        owned = tuple(at for at, value in made if value.is_tensor and value.memory not in taken)
        direct = self._direct_call(segment)
        return CallStep(segment.function, segment.name, arguments, results, copies, direct, owned)

    def _direct_call(self, segment: Segment) -> DirectCall | None:
        """Describes how to call the op itself, or returns None: only tensors that graphs own, and state whose
        geometry is checked, have the same geometry at each call of one row count."""
        call, op = segment.op_call, op_of(segment)
        origins = {self.plan.values[index].origin for index in segment.inputs}
        if call is None or op is None or origins - {"graph", "state"}:
            return None
        places = tuple((at, x.position) for at, x in enumerate(call.arguments) if isinstance(x, InputAt))
        arguments = tuple(None if isinstance(x, InputAt) else x for x in call.arguments)
        return DirectCall(op.bind, arguments, places)

    def _result_item(self, leaf: Any, static: _Tensors) -> ResultItem:
        if leaf.kind == "input":
            return ResultItem(lambda _: itemgetter(leaf.index))
        if leaf.kind == "state":
            return ResultItem(lambda _: lambda env: leaf.state.get())
        if leaf.kind == "const":
            return ResultItem(lambda _: lambda env: leaf.value)
        source = self.plan.result_values[leaf.index]
        if isinstance(source, ComputedNumber):
            compute, slots = source.compute, tuple(map(self._slot, source.indices))
            return ResultItem(lambda rows: lambda env: compute(rows, *(env[slot] for slot in slots))[0])
        value, copied = self.plan.values[source], self.outputs == "copy"
        if value.origin == "graph":
            return ResultItem(tensor=static[source], value=value, clone=copied, memory=value.memory)
        if value.origin == "state":
            state: Any = value.state
            return ResultItem(lambda _: lambda env: state.get())
        slot, number = self._slot(source), leaf.value
        if isinstance(number, type):  # a number that a tensor carries
            return ResultItem(lambda _: lambda env: number(_plain(env[slot])))
        if not copied or value.origin != "eager" or value.memory not in self.graph_memory:
            return ResultItem(lambda _: itemgetter(slot))
        return ResultItem(lambda _: lambda env: env[slot].clone(), None, value, slot, True, value.memory)

    def _check_before(self, segments: Sequence[Segment]) -> int:
        """Finds the first segment with lasting effects that an eager run would not simply write again."""
        if self.outputs == "view":  # an input may be an earlier result, whose memory the first segment writes
            return 0
        for position, segment in enumerate(segments):
            is_repeatable = _is_repeatable(segment)
            written = set(segment.writes) - self.plan.step_memory
            origins = {value.origin for value in self.plan.values if value.memory in written}
            lasting = origins - ({"graph", "state"} if is_repeatable else {"graph"})
            # An undeclared op may write memory that is none of its arguments.
            are_torchs = all("::" not in name or name.startswith("aten::") for name in segment.op_names)
            is_known = is_repeatable or segment.kind == "graph" or are_torchs
            # If random numbers were drawn here, the eager call would draw other ones.
            draws = any(reason.code in ("random", "control_flow") for reason in segment.reasons)
            if lasting or draws or not is_known:
                return position
        return len(segments)

    def forget(self, bucket: int) -> None:
        for runner in self.runners.values():
            runner.forget(bucket)

    def reset(self) -> None:
        for runner in self.runners.values():
            runner.reset()


def _copier_for(device: torch.device) -> Callable[..., CopyLaunch | None] | None:
    if not native_engine(device).has_triton:
        return None
    try:
        from piecewise.passes.kernels.copies import copier
    except ImportError:  # a torch without triton
        return None
    return copier


def _are_repeatable(segments: Sequence[Segment]) -> Callable[[], bool]:
    """Makes a check that the ops repeatable now still are: an op may be declared again."""
    # One segment of each op is enough.
    kinds = {segment.op_call.name: segment for segment in segments if segment.op_call is not None}
    repeatable = list(filter(_is_repeatable, kinds.values()))
    return lambda: all(map(_is_repeatable, repeatable))


def _is_repeatable(segment: Segment) -> bool:
    op = op_of(segment)
    return op is not None and op.repeatable


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def state_check_of(plan: SegmentPlan) -> StateCheck:
    """Records the state that the plan's graphs rely on, as it is now; to be called right after the trace."""
    in_graphs = _read_by_graphs(plan)
    tensors: dict[Any, StateRef] = {}
    looked_up: dict[Any, StateRef] = {}
    for value in plan.values:
        if value.state is not None:
            place = tensors if value.index in in_graphs else looked_up
            place[id(value.state.owner), value.state.key] = value.state
    facts, read = plan.state_facts, {*tensors, *looked_up}
    facts = dataclasses.replace(
        facts,
        values=facts.values + _ops_counted_on(plan),
        tensors=tuple(each for each in facts.tensors if (id(each[0].owner), each[0].key) not in read),
    )
    versions = torch_api.dict_versions if torch_api.dict_versions_tell() else None
    places = tuple(tensors.values()), tuple(looked_up.values())
    return StateCheck(tensors=places[0], looked_up=places[1], facts=facts, dict_versions=versions)


def _ops_counted_on(plan: SegmentPlan) -> tuple[tuple[StateRef, Any], ...]:
    """Lists ops inside graphs and stride-agnostic ops: a new declaration may change what they do or take."""
    declared = declarations()
    names = {name for segment in plan.graph_segments() if segment.captured_ops for name in segment.op_names}
    names |= takers_of_any_strides(plan.segments, plan.values)
    ops = [declared[name] for name in sorted(names) if name in declared]
    return tuple((StateRef(declared, op.name, f"the declaration of op '{op.name}'"), op) for op in ops)


def _read_by_graphs(plan: SegmentPlan) -> set[int]:
    return {index for segment in plan.graph_segments() for index in segment.inputs}
