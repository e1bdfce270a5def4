"""On which line of a TOML file each table, key and list entry stands, for messages about them.

TOML parsers return values without places. This reads only the outline (headers, keys, brackets, strings,
comments) of text that a parser has accepted already, in one pass.
"""

from __future__ import annotations

import re
from itertools import islice

# Settings are tables of keys; deeper names are of no use, and there may be thousands.
_MAX_DEPTH = 3

# What can end or nest a value; everything else inside one is skipped, and white space between all of them.
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

Path = tuple[str, ...]


class TomlLines:
    """Line numbers, from 1, by the path of keys; a list entry's is under its position, such as ``"[2]"``."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Path, int] = {}
        table: Path = ()
        path: Path = ()
        statement = ""  # the key or header being read
        is_value, depth = False, 0  # brackets of a value; deeper entries are told by their outermost position
        is_list, index, is_fresh = False, 0, True
        line = 1
        for match in _TOKEN.finditer(text + "\n"):
            token, kind = match.group(), match.lastgroup
            start, line = line, line + token.count("\n")
            if is_value and kind == "newline":
                is_value = depth > 0
            elif is_value and kind == "close":
                depth -= 1
            elif is_value and kind == "comma":
                if depth == 1:
                    index, is_fresh = index + 1, True
            elif is_value and kind != "comment":
                if depth == 1 and is_list and is_fresh:
                    self._lines.setdefault((*path, f"[{index}]"), start)
                    is_fresh = False
                if kind == "open" and depth == 0:
                    is_list, index, is_fresh = token == "[", 0, True
                depth += kind == "open"
            elif kind == "newline":
                if statement.startswith("["):
                    table = _parts(statement.strip("[]"))
                    self._note_all(table, start)
                statement = ""
            elif kind == "equals":
                path = (*table, *_parts(statement))[:_MAX_DEPTH]
                self._note_all(path, start)
                is_value, statement = True, ""
            elif kind != "comment":
                statement += token

    def line_of(self, *path: str) -> int | None:
        """The line of the longest part of `path` that is in the file; None where none is."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return None

    def _note_all(self, path: Path, line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)


def _parts(dotted: str) -> Path:
    """The outer names of a dotted key, unquoted."""
    # A key with escapes is found under its spelling only; no key of ours has any.
    found = islice(_KEY_PART.finditer(dotted), _MAX_DEPTH)
    return tuple(match.group(1).strip("\"'") for match in found)
