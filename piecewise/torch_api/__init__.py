"""Holds every private torch API that the compile-time half uses, for torch 2.11 to 2.14.

In: nothing of the package; no public equivalent exists for any of it.
Out: `from piecewise import torch_api`, then `torch_api.name`; a module is loaded when a name of it is first
used, since Dynamo takes longer to load than torch. `pattern_matcher.py`, slower still, is imported by itself.
Read first: `dynamo.py`; `tests/piecewise/torch_api` checks each name on the installed version.
A wing: the story of a call can be read without this room.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from piecewise.torch_api.dynamo import *  # noqa: F403
    from piecewise.torch_api.fakes import *  # noqa: F403
    from piecewise.torch_api.process import *  # noqa: F403

# Those that load in no time come first.
_MODULES = ("process", "fakes", "dynamo")


def __getattr__(name: str) -> Any:
    for module in _MODULES if not name.startswith("_") else ():
        found = vars(importlib.import_module(f"{__name__}.{module}")).get(name)
        if found is not None and not isinstance(found, ModuleType):
            globals()[name] = found
            return found
    raise AttributeError(f"torch_api has no {name}")
