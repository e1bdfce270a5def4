"""Runs `piecewise config`: prints each setting, and the source that it came from."""

from __future__ import annotations

import argparse
import json
from typing import Any

from piecewise.report.record import plain, table
from piecewise.settings.config import DEFAULT_BUCKETS, FIELDS, read_settings
from piecewise.tools.exit_codes import ExitCode

# Most entries of a list that a row has.
_MAX_SHOWN = 16


def run(arguments: argparse.Namespace) -> ExitCode:
    """Prints a row per setting; a wrong setting of any source is a `ConfigError`."""
    config, given = read_settings(arguments.file)
    values = {name: plain(getattr(config, name)) for name in FIELDS}
    origins = {name: given.where[name]("") if name in given.where else "default" for name in FIELDS}
    if origins["buckets"] == "default" and config.buckets != DEFAULT_BUCKETS:
        origins["buckets"] = "default, up to max_num_tokens"
    if arguments.json:
        found = {name: {"value": values[name], "from": origins[name]} for name in FIELDS}
        print(
            json.dumps({"file": None if given.file is None else str(given.file), "settings": found}, indent=1)
        )
        return ExitCode.RIGHT
    print(f"Settings file: {given.file or 'none, and no pyproject.toml with a table [tool.piecewise]'}\n")
    path, name = ("", "") if given.file is None else (f"{given.file}:", f"{given.file.name}:")
    rows = [(each, origins[each].replace(path, name, 1), _shown(values[each])) for each in FIELDS]
    print(table([("setting", "from", "value"), *rows]))
    return ExitCode.RIGHT


def _shown(value: Any) -> str:
    """Formats a value as in a settings file; of a long list the first entries."""
    if not isinstance(value, list):
        return "none" if value is None else json.dumps(value)
    more = f", ... ({len(value)} in all)" if len(value) > _MAX_SHOWN else ""
    return f"[{', '.join(map(_shown, value[:_MAX_SHOWN]))}{more}]"
