"""Writes commands' output to streams whose reader may close them, and to files that may not be writable."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from piecewise.errors.tools import NoMatplotlib, UnwritableOutput, WrongPlot
from piecewise.settings.whole_file import check_replaceable, is_replaced, replace_file


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Drops output after the standard streams' readers have gone, and writes unencodable characters as "?".

    So `piecewise verify SPEC | head` ends with the comparison's exit code. Any other failure to write, such
    as a full disk, raises UnwritableOutput.
    """
    with ExitStack() as stack:
        if sys.stdout is not None:
            stack.enter_context(redirect_stdout(_Stream(sys.stdout, "the standard output")))  # type: ignore[type-var]
            stack.callback(_finish, sys.stdout)
        if sys.stderr is not None:
            stack.enter_context(redirect_stderr(_Stream(sys.stderr)))  # type: ignore[type-var]
        yield


def _finish(stream: TextIO) -> None:
    with suppress(UnwritableOutput):  # reported already when the command wrote
        stream.flush()


class _Stream:
    """Wraps a text stream of the process; a failed write is an error only if the stream has a `name`."""

    def __init__(self, stream: TextIO, name: str | None = None) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, errors="replace").decode(encoding)
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except OSError as error:
            # Buffered text would fail again when the interpreter ends, and change the exit code.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._name is not None and not isinstance(error, BrokenPipeError):
                raise _unwritable(self._name, error) from error


@dataclass(frozen=True, slots=True)
class OutputFile:
    """Holds the path of a file that a command is to write, and the option that names it."""

    option: str
    path: str
    is_image: bool = False

    def __fspath__(self) -> str:
        return self.path

    def check(self) -> None:
        """Raises UnwritableOutput, WrongPlot or NoMatplotlib where this shows before any work is done."""
        with self.writing():
            check_replaceable(self.path)
        if self.is_image:
            image_format(self.path)

    def write(self, text: str) -> None:
        """Writes the file whole; where that fails, prints the text, so that no work is lost, and raises."""
        with self.writing():
            try:
                replace_file(self.path, text)
            except OSError:
                print(text)
                raise

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises UnwritableOutput if the block cannot write the file."""
        try:
            yield
        except (OSError, UnicodeEncodeError) as error:
            is_missing = isinstance(error, FileNotFoundError)
            folder = shlex.quote(os.path.dirname(os.path.realpath(self.path)))
            fix = f"mkdir -p {folder}, or name a file in a folder that exists" if is_missing else None
            raise _unwritable(f"{self.option} {self.path}", error, fix) from error


def image_format(path: str | os.PathLike[str]) -> str:
    """Returns the image format that a path's ending names; a pipe or device without one gets PNG.

    Raises:
        NoMatplotlib: it is not installed.
        WrongPlot: matplotlib does not write this format.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise NoMatplotlib() from error
    known = FigureCanvasAgg.get_supported_filetypes()
    ending = os.path.splitext(path)[1].lstrip(".").lower()
    if not ending and os.path.exists(path) and not is_replaced(path):
        return "png"
    if ending not in known:
        problem = f"the ending {f'.{ending}' if ending else ''!r}; known are .{', .'.join(sorted(known))}"
        raise WrongPlot(path=os.fspath(path), problem=problem)
    return ending


def _unwritable(what: str, error: Exception, fix: str | None = None) -> UnwritableOutput:
    return UnwritableOutput(what, got=getattr(error, "strerror", None) or str(error), fix=fix)
