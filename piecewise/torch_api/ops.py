"""Exports classes of ops, the mode that sees each op before its kernel does, and pytree functions."""

# ruff: noqa: F401

from __future__ import annotations

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_unflatten

# The product of two int8 matrices, in int32.
int_mm = torch._int_mm
