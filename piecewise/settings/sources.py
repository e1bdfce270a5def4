"""Finds and reads settings in TOML files and environment variables; no other module does.

The field table says where each field is written and which values it accepts. Problems are collected, not
raised at once, so that one error lists all of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from piecewise.errors.settings import WrongSettings
from piecewise.settings.kinds import Check, Kind, Problem, Refused
from piecewise.settings.toml_file import Keys, read_tables
from runners.errors import shown

_log = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "PIECEWISE_"

# A project's file, and the table in it that holds the tables of a settings file.
_PROJECT_FILE, _PROJECT_TABLE = "pyproject.toml", ("tool", "piecewise")

# Most problems that an error lists: a hostile file may have thousands.
_MAX_LISTED = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """Holds a field's row of the field table: its TOML table, its kind, and its keys in that table.

    The key to write comes first; each key may have a narrower check of its own.
    """

    table: str
    kind: Kind
    keys: Mapping[str, Check | None]


# Describes where the user wrote a setting, given a position inside the value, such as "[2]".
Place = Callable[[str], str]


def named(label: str) -> Place:
    """Makes the place of a setting without a line number."""
    return lambda part: f"{label if len(label) <= 120 else label[:120] + '...'}{part}"


@dataclass(slots=True)
class Given:
    """Holds settings as the user gave them, their places and problems, and the keys of those from `file`."""

    values: dict[str, object] = field(default_factory=dict)
    where: dict[str, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=dict)
    file: Path | None = None

    def add(self, name: str, value: object, place: Place) -> None:
        self.values[name], self.where[name] = value, place

    def place(self, name: str) -> Place:
        return self.where.get(name, named(name))

    def refuse(self, place: Place, *problems: Problem) -> None:
        self.problems += [replace(each, where=place(each.part)) for each in problems]

    @contextmanager
    def refusing(self, place: Place) -> Iterator[None]:
        """Records the problems of a Refused that the block raises."""
        try:
            yield
        except Refused as refused:
            self.refuse(place, *refused.problems)

    def refuse_unknown(self, place: Place, name: str, valid: Mapping[str, str], listed: str = "") -> None:
        """Records an unknown name; `valid` maps each known one to how users write it; `listed` has all."""
        # The search is slow, and most of a hostile file's names are not listed.
        few = len(self.problems) < _MAX_LISTED
        nearest = get_close_matches(name[:100], valid, n=1, cutoff=0.5) if few else []
        got = "an unknown one" + (f"; the nearest is {valid[nearest[0]]}" if nearest else "")
        fix = f"the names are {listed or ', '.join(dict.fromkeys(valid.values()))}"
        self.refuse(place, Problem("a known name", got, fix))

    def raise_problems(self) -> None:
        """Raises one `WrongSettings` that lists all problems, if there are any."""
        if not self.problems:
            return
        first = self.problems[:_MAX_LISTED]
        fix = "; ".join(dict.fromkeys(each.fix for each in first if each.fix)) or None
        if len(self.problems) == 1:
            only = first[0]
            raise WrongSettings(only.where, expected=only.expected, got=only.got, fix=fix)
        lines = [f"{len(self.problems)} settings are wrong:", *map(str, first)]
        if len(self.problems) > len(first):
            lines.append(f"and {len(self.problems) - len(first)} more")
        raise WrongSettings("\n  ".join(lines), fix=fix)


def root_of(path: Path) -> Keys:
    """Returns the table of a file that holds the tables of settings; the file itself is ()."""
    return _PROJECT_TABLE if path.name == _PROJECT_FILE else ()


def find_project_file() -> Path | None:
    """Finds the nearest `pyproject.toml` with a table `[tool.piecewise]`, from the working directory up.

    Files without the word are not parsed, and those that cannot be opened are passed by.

    Raises:
        UnreadableSettingsFile: a file with the word is no TOML, or too large.
    """
    with suppress(OSError):  # the working directory may be gone
        here = Path.cwd()
        for folder in (here, *here.parents):
            path = folder / _PROJECT_FILE
            with suppress(OSError):
                if path.is_file() and b"piecewise" in path.read_bytes():
                    tool = read_tables(path)[0].get("tool")
                    if isinstance(tool, dict) and "piecewise" in tool:
                        _log.info("settings come from %s", path)
                        return path
    return None


def read_file(path: Path, table_of_fields: Mapping[str, Setting]) -> Given:
    """Reads a TOML file, of a `pyproject.toml` the tables in `[tool.piecewise]`.

    Raises:
        UnreadableSettingsFile: as `read_tables` says.
    """
    names = {(row.table, key): name for name, row in table_of_fields.items() for key in row.keys}
    tables: dict[str, list[str]] = {}
    for table, key in names:
        tables.setdefault(table, []).append(key)
    given, root = Given(file=path), root_of(path)
    content, lines = read_tables(path)

    def labelled(*tables: str) -> str:
        return f"[{'.'.join((*root, *tables))}]"

    def place(label: str, *keys: str) -> Place:
        shown_part = named(label)
        return lambda part: f"{path}:{lines.line_of(*root, *keys, part)}: {shown_part(part)}"

    valid = {key: f"{key} in {labelled(table)}" for table, key in names}
    valid |= {name: labelled(name) for name in tables}
    listed = "; ".join(f"{', '.join(keys)} in {labelled(table)}" for table, keys in tables.items())
    for part in root:
        content = content.get(part, {}) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        given.refuse(place(labelled()), Problem(f"a table, {labelled()}", shown(content)))
        return given
    for table, keys in content.items():
        if table not in tables:
            given.refuse_unknown(place(labelled(table), table), table, valid, listed)
        elif not isinstance(keys, dict):
            given.refuse(place(table, table), Problem(f"a table, {labelled(table)}", shown(keys)))
        else:
            for key, value in keys.items():
                at, name = place(f"{labelled(table)} {key}", table, key), names.get((table, key))
                if name is None:
                    given.refuse_unknown(at, key, valid, listed)
                elif name in given.values:
                    given.refuse(at, Problem(f"one setting of {name}", "a second one under another key"))
                else:
                    check = table_of_fields[name].keys[key]
                    given.keys[name] = key
                    with given.refusing(at):
                        given.add(name, check(value) if check is not None else value, at)
    return given


def read_environment(table_of_fields: Mapping[str, Setting], *, knows_all: bool = True) -> Given:
    """Reads the `PIECEWISE_*` variables, fields' names in capitals; with `knows_all`, others are refused."""
    given = Given()
    fields = {ENVIRONMENT_PREFIX + name.upper(): name for name in table_of_fields}
    for variable in sorted(name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX)):
        name = fields.get(variable)
        if name is None and knows_all:
            same = dict(zip(fields, fields, strict=True))
            given.refuse_unknown(named(f"environment variable {variable}"), variable, same)
        elif name is not None:
            text = os.environ[variable].strip()
            given.add(name, table_of_fields[name].kind.read(text), named(variable))
    return given


def environment() -> dict[str, str]:
    """Returns the process's environment as it is now, for models whose forward reads the environment."""
    return dict(os.environ)
