"""Changes of a tensor subclass, or inside of one, between two calls; their docstrings are rows of a table in
the documents, and `test_subclass_changes.py` acts each out."""

from __future__ import annotations

import torch
from subclass_models import Quantised, set_parameter
from torch import nn


def rebound(weight, model):
    """a parameter of a subclass is replaced by another one"""
    set_parameter(model, "blocks.0.qkv.weight", Quantised.of(torch.randn(weight.shape)))


def swapped(weight, model):
    """`torch.utils.swap_tensors`, as `.to()` does it"""
    torch.utils.swap_tensors(
        weight, nn.Parameter(Quantised.of(torch.randn(weight.shape)), requires_grad=False)
    )


def inner_rebound(weight, model):
    """a tensor inside of one is replaced"""
    weight.scales = weight.scales * 2


def inner_moved(weight, model):
    """`.data` of a tensor inside of one is set"""
    weight.scales.data = weight.scales * 2


def another_class(weight, model):
    """a parameter of a subclass is replaced by a plain tensor"""
    set_parameter(model, "blocks.0.qkv.weight", torch.randn(weight.shape))


def attribute(weight, model):
    """another attribute is replaced"""
    weight.options = {"factors": [3.0]}


def inside_an_attribute(weight, model):
    """an item inside of an attribute is replaced"""
    weight.options["factors"][0] = 3.0


def longer_list(weight, model):
    """a list inside of an attribute grows"""
    weight.options["factors"].insert(0, 3.0)


def another_key(weight, model):
    """an attribute that is a dict gets one more key"""
    weight.options = {"more": 1, **weight.options}


CHANGES = {
    rebound: "moved_address",
    swapped: "moved_address",
    inner_rebound: "moved_address",
    inner_moved: "moved_address",
    another_class: "moved_address",
    attribute: "module_state_changed",
    inside_an_attribute: "module_state_changed",
    longer_list: "module_state_changed",
    another_key: "module_state_changed",
}
