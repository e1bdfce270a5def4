"""Says what the exit code of the `piecewise` command means, and decides it in one place.

A command returns a code, or raises. An error of this project is its message, for its rule and its fix are
what helps; whatever else is raised comes from the code that the command was pointed at, or from what lies
beneath it, and is shown with its traceback. So is an error of ours that the user's own functions raise.
"""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Callable

from piecewise.errors.tools import comes_from_user_code


class ExitCode(enum.IntEnum):
    """How a command ended."""

    RIGHT = 0
    DIFFERENT = 1
    UNUSABLE = 2
    RAISED = 3
    NOTHING = 4
    # As a shell says it of a process that the signal ended.
    INTERRUPTED = 130


HELP = (
    "Exit codes: 0, all is right; 1, something differs from what it should be (a result, a bucket out of"
    " reach); 2, the command line, a setting or an input cannot be used, and the message says why; 3, the"
    " model's code raised, and its traceback is shown; 4, nothing was measured or replayed; 130, interrupted."
)


def exit_code_of(find_command: Callable[[], Callable[[], int]]) -> ExitCode:
    """Runs a command and returns the code that it ends with; what is wrong is told on the error stream.

    Args:
        find_command: reads the command line, and returns what runs the command.
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
        # Errors of this project, of each package, have a rule and a fix; to import their roots takes torch.
        if hasattr(error, "rule") and hasattr(error, "fix") and not comes_from_user_code(error):
            print(f"piecewise: {error}", file=sys.stderr)
            return ExitCode.UNUSABLE
        traceback.print_exception(error, file=sys.stderr)
        print("piecewise: the code above raised; the command has no result", file=sys.stderr)
        return ExitCode.RAISED
