"""Objects whose dicts are watched, and the Pythons on which version tags of dicts tell of every write."""

from __future__ import annotations

import pytest

from piecewise import torch_api


class Thing:
    pass


class Other(Thing):
    pass


def thing(**attributes):
    made = Thing()
    made.__dict__.update(attributes)
    return made


needs_numbers = pytest.mark.skipif(
    not torch_api.dict_versions_tell(), reason="this Python's dict numbers do not tell of all writes"
)
