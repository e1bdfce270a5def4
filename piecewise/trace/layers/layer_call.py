"""What a layer is called with, as the graph around it says: compared, and made up for a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from piecewise import torch_api
from piecewise.calls.binder import CallBinder
from piecewise.calls.structure import PLAIN
from piecewise.trace.dynamo.run import ExampleCall


class NotReused(Exception):
    """All is to be traced at once; the text says why."""


def geometry(fake: torch.Tensor, shape_env: Any) -> tuple[Any, ...]:
    """Sizes, strides and offset, as far as is known of their symbols now."""
    numbers = (*fake.shape, *fake.stride(), fake.storage_offset())
    return tuple(torch_api.expression(number, shape_env) for number in numbers)


class LayerCall:
    """The arguments of one call of a layer.

    Attributes:
        nodes: the tensors among them, each once, by number.
    Raises:
        NotReused: one of them is neither a tensor, a plain value nor a tuple of such.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], shape_env: Any) -> None:
        self._args, self._shape_env = tuple(args), shape_env
        self._kwargs = kwargs
        self.nodes: list[fx.Node] = []
        self._constants = self._described((self._args, *self._kwargs.items()))

    def _described(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(self._described, value))
        if not isinstance(value, fx.Node):
            if not isinstance(value, (int, *PLAIN)):  # a list or a dict could be written
                raise NotReused(f"a layer is given a {type(value).__name__}")
            return type(value), repr(value) if isinstance(value, (float, complex)) else value  # -0.0 == 0.0
        fake: Any = value.meta.get("example_value")
        is_plain = torch_api.is_fake(fake) and not isinstance(fake, torch.nn.Parameter)
        if not is_plain or fake.requires_grad or fake.layout != torch.strided:
            raise NotReused("a layer is given something that is no plain tensor")
        # By its fake, as Dynamo tells whether two values are one object: an op in place returns its input.
        number = next((i for i, known in enumerate(self.fakes()) if known is fake), len(self.nodes))
        self.nodes += [value] if number == len(self.nodes) else []
        return number

    def key(self) -> Any:
        """Equal for calls of which one trace may serve both, as far as is known of the sizes now."""
        tensors = [(fake.dtype, fake.device, *geometry(fake, self._shape_env)) for fake in self.fakes()]
        return self._constants, tensors

    def fakes(self) -> list[Any]:
        """The tensors, by number."""
        return [node.meta["example_value"] for node in self.nodes]

    def example(self, binder: CallBinder) -> tuple[ExampleCall, dict[int, tuple[int, ...]], dict[int, int]]:
        """The call on tensors made up, which dims get no symbol, and leaf index → number of the tensor."""
        made = {id(fake): _made(fake) for fake in self.fakes()}
        args, kwargs = fx.node.map_arg(
            (self._args, self._kwargs), lambda node: made[id(node.meta["example_value"])]
        )
        example = ExampleCall.from_call(binder, args, kwargs)
        by_tensor = {id(tensor): number for number, tensor in enumerate(made.values())}
        static: dict[int, tuple[int, ...]] = {}
        numbers: dict[int, int] = {}
        for index, leaf in enumerate(example.leaves):
            static[index] = ()
            if isinstance(leaf, torch.Tensor):
                numbers[index] = by_tensor[id(leaf)]
                sizes = [torch_api.expression(n, self._shape_env) for n in self.fakes()[numbers[index]].shape]
                static[index] = tuple(dim for dim, size in enumerate(sizes) if size is None or size.is_number)
        return example, static, numbers


def _made(fake: torch.Tensor) -> torch.Tensor:
    hint = torch_api.size_hint
    sizes, strides = [hint(size) for size in fake.shape], [hint(stride) for stride in fake.stride()]
    return torch.empty_strided(sizes, strides, dtype=fake.dtype, device=fake.device)
