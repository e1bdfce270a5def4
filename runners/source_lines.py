"""Finds the user's line of code that an error in a capture comes from."""

import linecache
import os
import sys
import traceback
from types import FrameType

import torch

_NOT_USERS = tuple(os.path.dirname(each) + os.sep for each in (__file__, torch.__file__)) + ("<frozen",)
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def source_line() -> str:
    """Returns the innermost user's line, such as ", at model.py:3: `x.item()`"; empty where there is none."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name == "capture" and code.co_filename.startswith(_NOT_USERS[0]):
            return ""
        if _is_users(code.co_filename):
            return _shown_line(frame, line)
    return ""


def source_line_of(error: BaseException) -> str:
    """Finds the innermost such line that `error` passed through."""
    lines = traceback.walk_tb(error.__traceback__)
    users = [(frame, line) for frame, line in lines if _is_users(frame.f_code.co_filename)]
    return _shown_line(*users[-1]) if users else ""


def _is_users(filename: str) -> bool:
    is_library = filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename
    return not is_library and not filename.startswith(_NOT_USERS)


def _shown_line(frame: FrameType, line: int) -> str:
    name = frame.f_code.co_filename
    text = linecache.getline(name, line, frame.f_globals).strip()
    return f", at {name}:{line}" + (f": `{text}`" if text else "")
