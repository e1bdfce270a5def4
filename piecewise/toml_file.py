"""Reading and writing of a small TOML file by someone who may have made it by hand, or badly."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from piecewise.toml_lines import TomlLines
from runners.errors import ConfigError

# The longest valid bucket list takes 50 KB; parsers may take quadratic time on hostile input.
MAX_FILE_BYTES = 256 * 1024

_RULE = f"settings come from a UTF-8 TOML file of at most {MAX_FILE_BYTES // 1024} KiB"


def read_tables(path: Path) -> tuple[dict[str, Any], TomlLines]:
    """The parsed file, and where in it everything stands.

    Raises:
        ConfigError: the file is missing, not a regular file, too large or not TOML (says where).
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = _read_text(path)
    try:
        return tomllib.loads(text), TomlLines(text)
    except RecursionError as error:
        raise _unreadable(path, "nesting deeper than the parser allows") from error
    except ValueError as error:
        raise _unreadable(path, str(error)[:200]) from error


def write_tables(path: Path, tables: Mapping[str, Mapping[str, object]]) -> None:
    """Write the tables, over a file that may be there, whose comments, order and formatting stay.

    Args:
        path: an existing file must be valid TOML; it is replaced in one step, so a crash leaves the old one.
        tables: keys and plain values by table; a value of None removes its key.
    """
    # Its import takes as long as the rest of the package; only writing needs it.
    import tomlkit

    document = tomlkit.parse(_read_text(path)) if path.exists() else tomlkit.document()
    for name, values in tables.items():
        if name not in document:
            if all(value is None for value in values.values()):
                continue
            document[name] = tomlkit.table()
        table: Any = document[name]
        for key, value in values.items():
            if value is None:
                table.pop(key, None)
            elif key not in table or _differs(table[key], value):
                # Assigning an equal value would drop the comments inside a list.
                table[key] = value
    replace_text(path, tomlkit.dumps(document))


def _differs(item: Any, value: object) -> bool:
    return item != value or isinstance(item, bool) != isinstance(value, bool)


def replace_text(path: Path, text: str) -> None:
    """Write `text` in one step: a crash leaves the old file, or none. A pipe or a device is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        # mkstemp makes the file private; a settings file keeps its mode, or gets the usual one.
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise _unreadable(path, "no such file" if not path.exists() else "not a regular file")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise _unreadable(path, f"more than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, f"a byte that is not UTF-8 at offset {error.start}") from error
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _unreadable(path: Path, got: str) -> ConfigError:
    return ConfigError(
        f"settings file {path}",
        expected="a readable TOML file",
        got=got,
        rule=_RULE,
        fix="correct the file; PiecewiseConfig(...).to_toml(path) writes a valid one",
    )
