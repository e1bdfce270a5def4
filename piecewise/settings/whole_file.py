"""Writes files whole: whoever reads one sees the old content or the new, never a part."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# Names of streams that the process holds open; opening such a name again may truncate the file behind it.
_STREAM = re.compile(r"/dev/(stdin|stdout|stderr)|(?:/dev|/proc/self)/fd/([0-9]+)")


def replace_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file in one step, through a link too; writes into a pipe, a device or a stream as it is.

    A crash leaves the old file or none. An existing file keeps its mode.
    """
    content = content.encode() if isinstance(content, str) else content
    number, target = _stream_number(path), Path(os.path.realpath(path))
    if number is not None:
        print(end="", flush=True)  # what was printed before comes first
        with os.fdopen(os.dup(number), "wb") as stream:
            stream.write(content)
    elif target.exists() and not target.is_file():
        target.write_bytes(content)
    else:
        partial, file = _open_partial(target)
        try:
            with file:
                file.write(content)
            if target.exists():
                partial.chmod(target.stat().st_mode & 0o777)
            partial.replace(target)
        except BaseException:
            partial.unlink()
            raise


def check_replaceable(path: str | os.PathLike[str]) -> None:
    """Raises the OSError that `replace_file` would raise, as far as one shows before there is content."""
    if (number := _stream_number(path)) is not None:
        os.fstat(number)
        return
    target = Path(os.path.realpath(path))
    if target.is_dir() or not os.path.basename(path):
        raise IsADirectoryError("it is a folder")
    with suppress(FileNotFoundError):
        mode = os.stat(target).st_mode
        if not os.access(target, os.W_OK):
            raise PermissionError("it may not be written to")
        if not stat.S_ISREG(mode):
            return
    # A trial, since permissions do not show that a file system takes no files.
    partial, file = _open_partial(target)
    file.close()
    partial.unlink()


def is_replaced(path: str | os.PathLike[str]) -> bool:
    """Tells whether `replace_file` would replace a file, whose content can be read before."""
    return _stream_number(path) is None and Path(path).is_file()


def _stream_number(path: str | os.PathLike[str]) -> int | None:
    match = _STREAM.fullmatch(os.fspath(path))
    if match is None:
        return None
    return int(match.group(2) or ("stdin", "stdout", "stderr").index(match.group(1)))


def _open_partial(target: Path) -> tuple[Path, BinaryIO]:
    """Makes an empty file in the folder of `target`, so that to rename it is one step."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent}")
    partial = target.with_name(f".piecewise-{os.urandom(8).hex()}.partial")
    return partial, partial.open("xb")
