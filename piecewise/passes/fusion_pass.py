"""Declares fusion passes, which replace patterns of aten ops, and the ops that they make.

Such an op (`piecewise::rms_norm`) has a reference, a fake and a kernel. The reference, in torch operators, is
the tests' oracle and runs where there is no GPU or no triton; it rounds where the unfused model does, so that
fusing adds no error. Results own their memory, with the strides that `empty_like` of the first input gives.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from piecewise.settings.fusions import PASS_NAMES
from piecewise.torch_api.pattern_matcher import PatternSet
from runners.engines import native_engine
from runners.tensors import tensors_in

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FLOAT8 = 448.0  # the largest float8_e4m3fn
MAX_WIDTH = 16384

_library = torch.library.Library("piecewise", "FRAGMENT")


def fused_op(
    schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], kernel: str | None = None
) -> Any:
    """Defines and returns the op `piecewise::<schema>`.

    Args:
        schema: as `torch.library` takes it, without a namespace.
        reference: computes the op with torch operators.
        fake: makes results of the right sizes and strides.
        kernel: "package.module:function" with the op's arguments, imported at its first run on a device that
            has Triton; where the import fails, the reference runs.
    """
    name = schema.partition("(")[0]
    # The op has no gradient, so the torch operators inside must record none.
    plain = torch.no_grad()(reference)
    _library.define(schema)
    _library.impl(name, plain, "CPU")
    # On any other device, whose engine knows whether it has Triton.
    _library.impl(name, lambda *args: _on_device(kernel, plain, args)(*args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecewise::{name}", fake, lib=_library)
    return getattr(torch.ops.piecewise, name).default


def _on_device(kernel: str | None, plain: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    device = next(tensors_in(arguments)).device
    return (native_engine(device).has_triton and _kernel(kernel)) or plain


@functools.cache
def _kernel(path: str | None) -> Any:
    module, _, name = (path or "").partition(":")
    try:
        return getattr(importlib.import_module(module), name) if path else None
    except ImportError:
        return None


@dataclasses.dataclass(eq=False)
class FusionPass:
    """Declares the decorated function, which adds its patterns to a `PatternSet`, as the pass of this name.

    Attributes:
        expects: names the ops that one would expect to match, for a note where nothing does: nodes that call
            one of `ops` and satisfy `where`.
        needs: passes that must run before this one.
        auto: the values of `lowering` for which ``fusions=("auto",)`` has this pass. Inductor fuses norms and
            gated units with the ops around them, which a fused op would prevent.
        then: called on the graph after each walk that found a match.
    """

    name: str
    _: dataclasses.KW_ONLY
    expects: str
    ops: Collection[Any]
    where: Callable[[fx.Node], bool] = lambda node: True
    needs: Sequence[str] = ()
    auto: Collection[str] = ("eager",)
    then: Callable[[fx.Graph], None] = lambda graph: None

    def __call__(self, fill: Callable[[PatternSet], None]) -> FusionPass:
        self.fill = fill
        FUSIONS[self.name] = self
        if self.name not in PASS_NAMES:
            PASS_NAMES.append(self.name)
        return self

    @functools.cached_property
    def patterns(self) -> PatternSet:
        made = PatternSet(self.name)
        self.fill(made)
        return made

    def sweep(self, module: fx.GraphModule) -> int:
        if found := self.patterns.sweep(module):
            self.then(module.graph)
        return found

    def trigger(self, graph: fx.Graph) -> str | None:
        """Returns `expects` where the graph has ops that one would expect to match; else None."""
        found = any(node.target in self.ops and self.where(node) for node in graph.nodes)
        return self.expects if found else None


fusion_pass = FusionPass
FUSIONS: dict[str, FusionPass] = {}
