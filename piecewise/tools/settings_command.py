"""Runs `piecewise config`: prints each setting, and the source that it came from."""

from __future__ import annotations

import argparse
import json

from piecewise.report.record import plain, table
from piecewise.settings.config import DEFAULT_BUCKETS, FIELDS, read_settings
from piecewise.tools.exit_codes import ExitCode


def run(arguments: argparse.Namespace) -> ExitCode:
    """Prints a row per setting; a wrong setting of any source is a `ConfigError`."""
    config, given = read_settings(arguments.file, {})
    values = {name: plain(getattr(config, name)) for name in FIELDS}
    origins = {name: given.where[name]("") if name in given.where else "default" for name in FIELDS}
    if "buckets" not in given.where and config.buckets != DEFAULT_BUCKETS:
        origins["buckets"] = "default, up to max_num_tokens"
    file = None if given.file is None else str(given.file)
    if arguments.json:
        found = {name: {"value": values[name], "from": origins[name]} for name in FIELDS}
        print(json.dumps({"file": file, "settings": found}, indent=1))
        return ExitCode.RIGHT
    print(f"Settings file: {file or 'none, and no pyproject.toml with a table [tool.piecewise]'}\n")
    rows = [("setting", "from", "value")]
    for name, value in values.items():
        short = origins[name] if given.file is None else origins[name].replace(str(file), given.file.name, 1)
        rows.append((name, short, "none" if value is None else json.dumps(value)))
    print(table(rows))
    return ExitCode.RIGHT
