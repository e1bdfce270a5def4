"""Reads and writes small TOML files, which may be written by hand and malformed."""

from __future__ import annotations

import re
import sys
import textwrap
from bisect import bisect_right
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from piecewise.errors.settings import UnreadableSettingsFile
from piecewise.settings.whole_file import is_replaced, replace_file

# The longest valid bucket list takes 50 KB; parsers may take quadratic time on hostile input.
MAX_FILE_BYTES = 256 * 1024

# Settings are tables of keys, in pyproject.toml inside of two more; deeper names have no use, and a hostile
# file may have thousands.
_MAX_DEPTH = 5

# Tokens that can end or nest a value; everything else inside a value is skipped, and so is white space.
_TOKEN = re.compile(
    r"""
    (?P<comment> \#[^\n]* )
  | (?P<string> \"\"\" (?: \\. | (?!\"\"\"). )* \"{3,5} | ''' (?: (?!'''). )* '{3,5}
              | " (?: \\. | [^"\\\n] )* " | ' [^'\n]* ' )
  | (?P<newline> \n )
  | (?P<open> [\[{] ) | (?P<close> [\]}] ) | (?P<comma> , ) | (?P<equals> = )
  | (?P<word> [^\#"'\n\[\]{},=\ \t\r]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_KEY_PART = re.compile(r"""\s*("(?:\\.|[^"\\])*"|'[^']*'|[A-Za-z0-9_-]+)\s*\.?""")


# The names that lead to a table or key, and the position of a list entry.
Keys = tuple[str, ...]


def read_tables(path: Path) -> tuple[dict[str, Any], TomlLines]:
    """Reads a file into tables and the line numbers of its keys.

    Raises:
        UnreadableSettingsFile: the file is missing, not a regular file, too large or not TOML (says where).
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    text = _read_text(path)
    try:
        return tomllib.loads(text), TomlLines(text)
    except (RecursionError, ValueError) as error:
        is_deep = isinstance(error, RecursionError)
        problem = "nesting deeper than the parser allows" if is_deep else str(error)[:200]
        raise _unreadable(path, problem) from error


def write_tables(path: Path, tables: Mapping[str, Mapping[str, Any]], *, root: Keys = ()) -> None:
    """Writes keys and plain values by table, inside the table `root`; a value of None removes its key.

    An existing file must be valid TOML; its comments, those inside a list too, order and formatting stay.
    """
    # Importing tomlkit takes as long as the rest of the package, and only writing needs it.
    import tomlkit

    document = tomlkit.parse(_read_text(path)) if is_replaced(path) else tomlkit.document()
    home: Any = document
    for name in root:
        home = home.setdefault(name, tomlkit.table(is_super_table=True))
    for name, values in tables.items():
        if name not in home and any(value is not None for value in values.values()):
            home[name] = tomlkit.table()
        table: Any = home.get(name, {})
        for key, value in values.items():
            if value is None:
                table.pop(key, None)
            elif table.get(key) != value or isinstance(table[key], bool) != isinstance(value, bool):
                # Assigning an equal value would reformat a list.
                is_list = isinstance(table.get(key), list) and isinstance(value, list)
                table[key] = tomlkit.value(_with_comments(value, table[key])) if is_list else value
    replace_file(path, tomlkit.dumps(document))


def _with_comments(new: list[Any], old: Any) -> str:
    """Writes a list in the lines of tomlkit's list `old`, whose comments stay.

    Comments tell ranges of sizes apart: a line holds what is at most as large as its last size was.
    """
    import tomlkit

    text, written = old.as_string(), [tomlkit.item(each).as_string() for each in new]
    if "\n" not in text:
        return f"[{', '.join(written)}]"
    indent = next(iter(re.findall(r"\n([ \t]+)[^\s\]]", text)), "")
    lines, values, comment, done, end = ["["], iter(old), "", 0, 0
    for match in _TOKEN.finditer(text[1:]):
        token, kind = match.group(), match.lastgroup
        if kind == "comment":
            comment = token.rstrip()
        elif kind in ("word", "string"):
            value = next(values)
            place = new.index(value) + 1 if value in new else 0
            end = max(end, bisect_right(new, value) if isinstance(value, int) else place)
        elif kind == "newline":
            lines.append(" ".join([*(f"{each}," for each in written[done:end]), comment]).strip())
            comment, done = "", end
    lines += textwrap.wrap(" ".join(f"{each}," for each in written[done:]), 100)
    first = f"{lines[0]} {lines[1]}".strip()
    return "\n".join([first, *(indent + line for line in lines[2:] if line), "]"])


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise _unreadable(path, "not a regular file" if path.exists() else "no such file")
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


def _unreadable(path: Path, problem: str) -> UnreadableSettingsFile:
    return UnreadableSettingsFile(path=path, problem=problem, limit=MAX_FILE_BYTES // 1024)


class TomlLines:
    """Finds line numbers by the path of keys, where a list entry is named by its position, such as ``"[2]"``.

    TOML parsers return values without line numbers. This class reads only the outline (headers, keys,
    brackets, strings, comments) of text that a parser has accepted already, in one pass.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[Keys, int] = {}
        table: Keys = ()
        path: Keys | None = None  # of the value being read; None in a key or header
        key, depth, entry = "", 0, 0  # nested entries count as their outermost one
        line = 1
        for match in _TOKEN.finditer(text + "\n"):
            token, kind = match.group(), match.lastgroup
            start, line = line, line + token.count("\n")
            if kind == "comment":
                continue
            if path is None:
                if kind == "newline" and key.startswith("["):
                    table = _parts(key.strip("[]"))
                    self._note(table, start)
                elif kind == "equals":
                    path, depth, entry = (*table, *_parts(key))[:_MAX_DEPTH], 0, 0
                    self._note(path, start)
                key = "" if kind in ("newline", "equals") else key + token
            elif kind == "newline":
                path = path if depth else None
            elif kind == "close":
                depth -= 1
            elif kind == "comma":
                entry += depth == 1
            else:
                if depth == 1:
                    self._lines.setdefault((*path, f"[{entry}]"), start)
                depth += kind == "open"

    def line_of(self, *path: str) -> int | None:
        """Returns the line of the longest leading part of `path` in the file, or None."""
        parts = (path[:length] for length in range(len(path), 0, -1))
        return next((self._lines[part] for part in parts if part in self._lines), None)

    def _note(self, path: Keys, line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)


def _parts(dotted: str) -> Keys:
    """Returns the outer names of a dotted key, unquoted."""
    # A key with escapes is found under its spelling only; no key of ours has any.
    found = islice(_KEY_PART.finditer(dotted), _MAX_DEPTH)
    return tuple(match.group(1).strip("\"'") for match in found)
