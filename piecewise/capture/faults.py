"""Finds why a segment failed in a warm-up or a capture, so that the plan is cut anew:

own kernels agree on all paddings   ─▶ the segment keeps its own kernels
a node's real rows change           ─▶ that node runs eagerly, and the graph is cut again
a node cannot be recorded           ─▶ likewise
no node found, or after three cuts  ─▶ the whole segment runs eagerly
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from piecewise.analysis.classify import Verdict
from piecewise.capture.placeholders import are_same, checked_indices, poison_padding_, real_results
from piecewise.cut.segment_writer import SegmentWriter
from piecewise.cut.split import Splitter
from piecewise.ir.nodes import makes_empty, source_line, target_name
from piecewise.ir.plan import Segment, ValueSpec
from piecewise.ir.tensors import tensors_in
from piecewise.report.caller_warning import warn_caller
from runners.engine import GraphEngine, GraphPool
from runners.engines import engine_for, native_engine
from runners.errors import CaptureError, one_line
from runners.rows import narrow_to

MAX_CUTS = 3
LOWERING = "padding reached real rows in its compiled, fused or scheduled form"


@dataclasses.dataclass(eq=False)
class SegmentFault(Exception):
    """Describes a segment that failed in a warm-up or a capture.

    Attributes:
        error: the error for users.
        function: the form of the segment that ran.
        arguments: its arguments at `bucket` rows, of which `real_rows` are real.
        variant: the padding with which it failed; None if it failed while being recorded.
    """

    error: CaptureError
    segment: Segment
    function: Callable[..., Any]
    arguments: Sequence[Tensor]
    _: dataclasses.KW_ONLY
    bucket: int
    real_rows: int
    variant: int | None = None

    def __str__(self) -> str:
        return str(self.error)


class FaultFinder:
    """Finds the cause of a fault in the segment of one cut; `nodes` are that segment's."""

    def __init__(self, splitter: Splitter, values: Sequence[ValueSpec], fault: SegmentFault) -> None:
        self._splitter, self._values, self._fault = splitter, values, fault
        self._writer: SegmentWriter = splitter.writers[fault.segment.index]
        self.nodes = self._writer.nodes
        self._specs = [values[index] for index in fault.segment.inputs]

    def blames_lowering(self) -> bool:
        """Whether the segment's own kernels are right where a compiled or fused form of them failed."""
        own, variant = self._fault.segment.own_function, self._fault.variant
        if own is None or self._fault.function is own or variant is None:
            return False
        try:
            first, second = (self._real_results(own, each) for each in (0, variant))
        except Exception:
            return False
        return all(are_same(rows, second[index]) for index, rows in first.items())

    def is_the_models(self) -> bool:
        """Whether the segment fails on real rows alone, too."""
        own = self._fault.segment.own_function
        are_prefixes = all(spec.padded.is_prefix for spec in self._specs)
        if own is None or self._fault.variant is None or not are_prefixes:
            return False
        rows = self._fault.real_rows
        pairs = zip(self._specs, self._fault.arguments, strict=True)
        given = [spec.real_rows(tensor, rows).clone() for spec, tensor in pairs]
        try:
            with checked_indices(given):
                own(rows, *given)
        except Exception:
            return True
        return False

    def first_wrong_node(self) -> tuple[fx.Node, Verdict] | None:
        """Finds the first node that cannot be recorded or whose real rows change with padding, if any."""
        return self._first_unrecordable() if self._fault.variant is None else self._first_mixing()

    def _real_results(self, function: Callable[..., Any], variant: int) -> dict[int, Tensor]:
        with checked_indices(self._fault.arguments):
            outputs = function(self._fault.bucket, *self._given(variant))
        return real_results(self._fault.segment, self._values, outputs, self._fault.real_rows)

    def _given(self, variant: int) -> list[Tensor]:
        copies = [tensor.clone() for tensor in self._fault.arguments]
        for spec, tensor in zip(self._specs, copies, strict=True):
            poison_padding_(tensor, spec, self._fault.real_rows, self._fault.bucket, variant=variant)
        return copies

    def _first_mixing(self) -> tuple[fx.Node, Verdict] | None:
        assert self._fault.variant is not None
        runs = [self._steps(self._given(each)) for each in (0, self._fault.variant)]
        with checked_indices(self._fault.arguments):
            for (node, first, is_mode), (_, second, _) in zip(*runs, strict=True):
                try:
                    values = [first(), None if is_mode else second()]
                except Exception as error:
                    return self._faulty(node, f"it fails on padded rows: {one_line(error)}")
                if node is not None and makes_empty(node):
                    for garbage in tensors_in(values):  # garbage differs in each run
                        garbage.zero_()
                if node is not None and not self._agrees(node, values):
                    return self._faulty(node, "its real rows change with padded ones")
        return None

    def _faulty(self, node: fx.Node | None, seen: str) -> tuple[fx.Node, Verdict] | None:
        if node is None:
            return None
        text = f"the rule of '{target_name(node)}' ({source_line(node)}) does not hold: {seen}"
        warn_caller(
            f"piecewise: {text}; it runs eagerly. Correct what declare_rows said of it, or report this."
        )
        return node, Verdict("eager", "mixes_tokens", text)

    def _agrees(self, node: fx.Node, values: Sequence[Any]) -> bool:
        rows_of = self._splitter.classifier.rows
        if not rows_of.is_prefix(node):
            return True
        counts = self._splitter.classifier.judge.known.counts
        index = int(counts.searchsorted(self._fault.real_rows))
        for rows, left, right in zip(rows_of.rows_of(node), *map(tensors_in, values), strict=True):
            real = [int(size.values[index]) for size in rows.sizes]
            if not are_same(narrow_to(left, real), narrow_to(right, real)):
                return False
        return True

    def _first_unrecordable(self) -> tuple[fx.Node, Verdict] | None:
        """Records each node alone. Fakes do not show what a user's kernel does inside, such as reading values
        back; the tape does. What only CUDA refuses, a capture shows."""
        device = next((tensor.device for tensor in self._fault.arguments), torch.device("cpu"))
        names = dict.fromkeys(("tape", native_engine(device).name))
        engines = [engine_for(name, device) for name in names]
        pools = [(engine, engine.new_pool(device)) for engine in engines]
        try:
            for node, call, is_mode in self._steps([tensor.clone() for tensor in self._fault.arguments]):
                for engine, pool in pools if node is not None and not is_mode else ():
                    assert node is not None
                    why = _refusal(call, node.name, engine, pool)
                    if why is not None:
                        return node, Verdict("eager", "not_recordable", why)
                with checked_indices(self._fault.arguments):
                    call()
        finally:
            for _, pool in pools:
                pool.release()
        return None

    def _steps(self, inputs: Sequence[Tensor]) -> Iterator[tuple[fx.Node | None, Callable[[], Any], bool]]:
        """Yields (traced node, call to run it, whether it only changes modes); make each call before the next
        step."""
        writer = self._writer
        originals = {copy: node for node, copy in writer.copies.items() if isinstance(copy, fx.Node)}
        runs = fx.Interpreter(fx.GraphModule(writer.modules, writer.graph))
        runs.args_iter = iter([self._fault.bucket, *inputs])
        for copy in writer.graph.nodes:

            def call(copy: fx.Node = copy) -> Any:
                runs.env[copy] = runs.run_node(copy)
                return runs.env[copy]

            if copy.op.startswith("call"):
                yield originals.get(copy), call, "autocast" in str(copy.target)
            elif copy.op != "output":
                call()


def _refusal(call: Callable[[], Any], name: str, engine: GraphEngine, pool: GraphPool) -> str | None:
    try:
        engine.capture(lambda: [call()], pool=pool, segment=name).reset()
    except CaptureError as error:
        return f"{error.what}: {error.got}" if error.got else error.what
    except RuntimeError as error:
        return f"cannot be captured: {str(error).splitlines()[0]}"
    finally:
        pool.end_bucket()
    return None
