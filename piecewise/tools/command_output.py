"""Writes commands' output to streams whose reader may close them, and to files that may not be writable."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from piecewise.errors.tools import UnwritableOutput


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


def check_writable(option: str, path: str | os.PathLike[str] | None) -> None:
    """Raises UnwritableOutput, before any work is done, for a path that no file can be written to."""
    if path is None:
        return
    target = os.path.abspath(path)
    with writing(option, path):
        if os.path.isdir(target):
            raise IsADirectoryError("it is a folder")
        folder = os.path.dirname(target)
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder}")
        if os.path.exists(target) and not os.path.isfile(target):
            return  # a pipe or a device: only writing shows it
        # A trial, since permissions do not show that a file system takes no files.
        with tempfile.TemporaryFile(dir=folder):
            pass


@contextmanager
def writing(option: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises UnwritableOutput if a block cannot write the file that an option names."""
    try:
        yield
    except (OSError, UnicodeEncodeError) as error:
        raise _unwritable(f"{option} {os.fspath(path)}", error) from error


def _unwritable(what: str, error: Exception) -> UnwritableOutput:
    return UnwritableOutput(what, got=getattr(error, "strerror", None) or str(error))
