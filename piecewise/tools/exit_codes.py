"""Defines the exit codes of the `piecewise` command, and decides on them in one place.

A command returns a code, or raises. An error of this project is printed without a traceback, since its rule
and fix are what helps. Any other error comes from the user's code or the libraries beneath, and keeps its
traceback; so does an error of this project that the user's own functions raise.
"""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable

from piecewise.errors.tools import comes_from_user_code


class ExitCode(enum.IntEnum):
    """Says how a command ended."""

    RIGHT = 0
    DIFFERENT = 1
    UNUSABLE = 2
    RAISED = 3
    NOTHING = 4
    # A shell's code for a process that SIGINT ended.
    INTERRUPTED = 130


HELP = (
    "Exit codes: 0, all is right; 1, something differs from what it should be (a result, a bucket out of"
    " reach); 2, the command line, a setting or an input cannot be used, and the message says why; 3, the"
    " model's code raised, and its traceback is shown; 4, nothing was measured or replayed; 130, interrupted."
)


def exit_code_of(find_command: Callable[[], Callable[[], int]]) -> ExitCode:
    """Runs a command, prints its error on the error stream, and returns its exit code.

    Args:
        find_command: parses the command line, and returns a function that runs the command.
    Raises:
        SystemExit: the command line is wrong (2), or asks for help or the version (0).
    """
    command: Callable[[], int] | None = None
    try:
        command = find_command()
        code = ExitCode(command())
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("piecewise: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except BaseException as error:  # user code may end in SystemExit, or in a class of its own
        if command is None and isinstance(error, SystemExit):
            raise
        # Errors of all our packages have a rule and a fix; importing their base classes takes torch.
        if hasattr(error, "rule") and hasattr(error, "fix") and not comes_from_user_code(error):
            print(f"piecewise: {error}", file=sys.stderr)
            return ExitCode.UNUSABLE
        traceback.print_exception(error, file=sys.stderr)
        print("piecewise: the code above raised; the command has no result", file=sys.stderr)
        return ExitCode.RAISED
