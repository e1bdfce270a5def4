"""An op made ready for calls that repeat: what depends on the arguments' look is worked out once.

A call through the dispatcher boxes every argument, enters Python again, finds the device and looks the call
up among those seen before: more host time than the launch itself takes. A caller that repeats one call, with
arguments of which it knows that only values and addresses change, asks for it once and then calls the
implementation itself.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BoundOp"]


class BoundOp:
    """One op for arguments of one look: shapes, strides, dtypes, devices and all that is no tensor.

    Attributes:
        function: called with the arguments that `BoundaryOp.bind` was given, in the same places; tensors may
            be others of the same look. To be read anew for each call: defining the op again replaces it.
            Grad mode must be off.
    """

    __slots__ = ("__weakref__", "function")

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
