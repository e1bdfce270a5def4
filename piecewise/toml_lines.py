"""On which line of a TOML file each table, key and list entry stands, for messages about them.

TOML parsers return values without places. This reads only the outline (headers, keys, brackets, strings,
comments) of text that a parser has accepted already, in one pass.
"""

from __future__ import annotations

import re
from itertools import islice

# Settings are tables of keys; deeper names are of no use, and there may be thousands.
_MAX_DEPTH = 3

# What can end or nest a value; everything else inside one is skipped.
_TOKEN = re.compile(
    r"""
    (?P<comment> \#[^\n]* )
  | (?P<string> \"\"\" (?: \\. | (?!\"\"\"). )* \"{3,5} | ''' (?: (?!'''). )* '{3,5}
              | " (?: \\. | [^"\\\n] )* " | ' [^'\n]* ' )
  | (?P<newline> \n )
  | (?P<mark> [\[\]{},=] )
  | (?P<space> [\ \t\r]+ )
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
        self._path: Path = ()
        self._read(text + "\n")

    def line_of(self, *path: str) -> int | None:
        """The line of the longest part of `path` that is in the file; None where none is."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return None

    def _note_all(self, path: Path, line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)

    def _read(self, text: str) -> None:
        table: Path = ()
        line = 1
        statement: list[str] = []  # the tokens of the key or header being read
        frames: list[_Frame] = []  # the value being read, outermost first; empty while in a key
        is_value = False
        for match in _TOKEN.finditer(text):
            token, kind = match.group(), match.lastgroup
            start, line = line, line + token.count("\n")
            if is_value:
                if kind == "newline" and not frames:
                    is_value, statement = False, []
                elif kind in ("string", "word", "mark"):
                    self._read_value(token, kind, start, frames)
            elif kind == "newline":
                if statement and statement[0] == "[":
                    table = _parts("".join(statement).strip("[] \t"))
                    self._note_all(table, start)
                statement = []
            elif token == "=" and kind == "mark":
                self._path = (*table, *_parts("".join(statement)))[:_MAX_DEPTH]
                self._note_all(self._path, start)
                is_value, frames = True, []
            elif kind != "comment" and not (kind == "space" and not statement):
                statement.append(token)

    def _read_value(self, token: str, kind: str | None, line: int, frames: list[_Frame]) -> None:
        if kind == "mark" and token in "]}" and frames:
            frames.pop()
            return
        if frames and kind == "mark" and token == ",":
            frames[-1].next()
            return
        # Deeper entries are told by their outermost position.
        if len(frames) == 1 and frames[0].is_list and frames[0].is_fresh:
            self._lines.setdefault((*self._path, f"[{frames[0].index}]"), line)
            frames[0].is_fresh = False
        if kind == "mark" and token in "[{":
            frames.append(_Frame(is_list=token == "["))


class _Frame:
    """An open bracket of a value."""

    def __init__(self, *, is_list: bool) -> None:
        self.is_list, self.index, self.is_fresh = is_list, 0, True

    def next(self) -> None:
        self.index, self.is_fresh = self.index + 1, True


def _parts(dotted: str) -> Path:
    """The outer names of a dotted key, unquoted."""
    # A key with escapes is found under its spelling only; no key of ours has any.
    found = islice(_KEY_PART.finditer(dotted), _MAX_DEPTH)
    return tuple(match.group(1).strip("\"'") for match in found)
