"""How a model is to be graphed: one frozen value, checked as a whole, from arguments, environment or TOML.

Every field carries its TOML table and its check in its metadata, so a name, its default, where it is written
and what it accepts stand in one place. A value that this version cannot honour is refused with what it can do
instead: nothing here is accepted and then ignored. This module is the only reader of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from piecewise import config_checks as checks
from piecewise.config_checks import Problem, Refused, raise_problems

ENVIRONMENT_PREFIX = "PIECEWISE_"

# Each is at most 1.5 times the one before from 32 on, so longer calls are padded to less than 1.5 times.
DEFAULT_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def _setting(table: str, check: Callable[[Any], Any], *keys: str) -> dict[str, Any]:
    """Field metadata: the TOML table, the check, and the keys where they are not the field's name."""
    return {"table": table, "check": check, "keys": keys}


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseConfig:
    """Settings of one graphed model; an instance that exists is valid.

    Args:
        buckets: token counts that get graphs, strictly ascending.
        max_padding_ratio: a call whose bucket is more than this many times its tokens runs eagerly; None for
            no limit.
        max_num_tokens: the most tokens of one call; a bucket above it is an error, never dropped.
        max_num_seqs: the most sequences of one call; only None is available in this version.
        max_seq_len: the longest sequence; only None is available in this version.
        max_signatures: how many kinds of call (structures, dtypes, static shapes) are traced and captured.
        warmup_steps: runs of each segment before its capture, each with another poison in the pad rows.
        capture: "startup" captures in `capture()`; "lazy" also at the third call of a bucket.
        engine: "auto" takes what the model's device has: "cuda" (real graphs) or "tape" (no GPU needed).
        num_streams: streams to capture on; only 1 is available in this version.
        progress: show a bar while capturing.
        frontend: how the model becomes segments; only "trace" is available in this version.
        lowering: what runs inside graph segments; only "eager" (torch's own kernels) in this version.
        fusions: rewrites applied to graph segments; only () is available in this version.
        boundary_ops: names ("namespace::op") of the ops to cut at; None for all that are registered.
        boundary: how boundary ops run; only "eager" is available in this version.
        min_coverage: least share of ops in graphs; only None is available in this version.
        outputs: "copy" gives the caller its own tensors; "view" static memory, valid until the next call.
        strict: an op that would silently leave the graphs is an error instead.

    Raises:
        ConfigError: any setting is wrong; the message lists every problem.
    """

    buckets: tuple[int, ...] = field(
        default=DEFAULT_BUCKETS, metadata=_setting("buckets", checks.buckets, "num_tokens")
    )
    max_padding_ratio: float | None = field(
        default=None, metadata=_setting("buckets", checks.optional(checks.number(at_least=1.0)))
    )
    max_num_tokens: int | None = field(
        default=None, metadata=_setting("limits", checks.optional(checks.whole(1, 2**31 - 1)))
    )
    max_num_seqs: int | None = field(
        default=None, metadata=_setting("limits", checks.only(None), "max_num_seqs", "max_batch_size")
    )
    max_seq_len: int | None = field(default=None, metadata=_setting("limits", checks.only(None)))
    max_signatures: int = field(default=8, metadata=_setting("limits", checks.whole(1, 1024)))
    warmup_steps: int = field(default=3, metadata=_setting("capture", checks.whole(1, 100)))
    capture: str = field(default="startup", metadata=_setting("capture", checks.choice("startup", "lazy")))
    engine: str = field(default="auto", metadata=_setting("capture", checks.choice("auto", "tape", "cuda")))
    num_streams: int = field(default=1, metadata=_setting("capture", checks.only(1)))
    progress: bool = field(default=True, metadata=_setting("capture", checks.flag))
    frontend: str = field(
        default="trace", metadata=_setting("compile", checks.choice("trace", later=("record",)))
    )
    lowering: str = field(
        default="eager", metadata=_setting("compile", checks.choice("eager", later=("inductor",)))
    )
    fusions: tuple[str, ...] = field(default=(), metadata=_setting("compile", checks.only(())))
    boundary_ops: tuple[str, ...] | None = field(
        default=None, metadata=_setting("compile", checks.optional(checks.op_names))
    )
    boundary: str = field(
        default="eager", metadata=_setting("compile", checks.choice("eager", later=("captured",)))
    )
    min_coverage: float | None = field(default=None, metadata=_setting("compile", checks.only(None)))
    outputs: str = field(default="copy", metadata=_setting("compile", checks.choice("copy", "view")))
    strict: bool = field(default=False, metadata=_setting("compile", checks.flag))

    def __post_init__(self) -> None:
        values, problems = _checked({item.name: getattr(self, item.name) for item in fields(self)}, {})
        raise_problems(problems)
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> PiecewiseConfig:
        """The settings of a TOML file; what it leaves out is the default. The environment is not read.

        Raises:
            ConfigError: the file cannot be read or parsed, is over 256 KiB, or any table, key or value in it
                is wrong; the message lists every problem.
        """
        return _built(*_file_values(Path(path)))

    def to_toml(self, path: str | os.PathLike[str]) -> None:
        """Write every setting that is not None; comments and order of a file that is there already are kept.

        Raises:
            ConfigError: the file that is there is not a valid settings file; it is left as it was.
        """
        from piecewise import toml_file

        target = Path(path)
        if target.exists():
            # A table or key that is unknown would make the result unreadable.
            raise_problems(_file_values(target)[2])
        tables: dict[str, dict[str, object]] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            for key in _keys(item)[1:]:
                tables.setdefault(item.metadata["table"], {})[key] = None
            written = list(value) if isinstance(value, tuple) else value
            tables.setdefault(item.metadata["table"], {})[_keys(item)[0]] = written
        toml_file.write_tables(target, tables)

    @classmethod
    def from_any(
        cls, source: PiecewiseConfig | str | os.PathLike[str] | None = None, /, **overrides: Any
    ) -> PiecewiseConfig:
        """The settings of a call: an argument wins over the environment, then the file, then the default.

        Args:
            source: a finished config, whose settings all count as arguments, so the environment is not read;
                or the path of a TOML file; or None.
            overrides: fields by name.

        Raises:
            ConfigError: any name or value is wrong; the message lists every problem of all sources.
        """
        values: dict[str, object] = {}
        where: dict[str, str] = {}
        problems: list[Problem] = []
        if isinstance(source, PiecewiseConfig):
            if not overrides:
                return source
            values = {item.name: getattr(source, item.name) for item in fields(source)}
        elif source is None or isinstance(source, (str, os.PathLike)):
            if source is not None:
                values, where, problems = _file_values(Path(source))
            found, variables, unknown = _environment_values(os.environ)
            values, where, problems = {**values, **found}, {**where, **variables}, [*problems, *unknown]
        else:
            problems.append(
                Problem(
                    "config",
                    expected="a PiecewiseConfig, the path of a TOML file, or None",
                    got=checks.shown(source),
                    fix="pass settings by name, such as buckets=[64, 128]",
                )
            )
        names = [item.name for item in fields(cls)]
        for name, value in overrides.items():
            where.pop(name, None)
            if name in names:
                values[name] = value
            else:
                problems.append(_unknown(f"option {name!r}", name, names))
        return _built(values, where, problems)


def _built(
    values: Mapping[str, object], where: Mapping[str, str], problems: list[Problem]
) -> PiecewiseConfig:
    checked, more = _checked(values, where)
    raise_problems([*problems, *more])
    return PiecewiseConfig(**checked)


def _checked(values: Mapping[str, object], where: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The normalised values and every problem; `where` says how the user spelled a field."""
    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    for item in fields(PiecewiseConfig):
        if item.name not in values:
            continue
        try:
            checked[item.name] = item.metadata["check"](values[item.name])
        except Refused as refused:
            label = where.get(item.name, item.name)
            problems.append(Problem(label + refused.part, refused.expected, refused.got, refused.fix))
    sizes, limit = checked.get("buckets", ()), checked.get("max_num_tokens")
    above = [index for index, size in enumerate(sizes) if limit is not None and size > limit]
    if above:
        problems.append(
            Problem(
                f"{where.get('buckets', 'buckets')}[{above[0]}]",
                expected=f"at most max_num_tokens = {limit}",
                got=f"{sizes[above[0]]} (no call could reach it)",
                fix="remove the bucket or raise max_num_tokens",
            )
        )
    return checked, problems


def _keys(item: Any) -> tuple[str, ...]:
    """The TOML keys of a field; the first is the one that is written."""
    return item.metadata["keys"] or (item.name,)


def _file_values(path: Path) -> tuple[dict[str, object], dict[str, str], list[Problem]]:
    """Field values of a TOML file, how the file spells each, and what it says that no field knows."""
    from piecewise import toml_file

    tables: dict[str, dict[str, str]] = {}
    for item in fields(PiecewiseConfig):
        for key in _keys(item):
            tables.setdefault(item.metadata["table"], {})[key] = item.name
    values: dict[str, object] = {}
    where: dict[str, str] = {}
    problems: list[Problem] = []
    for table, content in toml_file.read_tables(path).items():
        if table not in tables:
            problems.append(_unknown(f"{path}: [{table}]", table, _places(tables)))
            continue
        if not isinstance(content, dict):
            problems.append(Problem(f"{path}: {table}", f"a table, [{table}]", checks.shown(content)))
            continue
        for key, value in content.items():
            label = f"{path}: [{table}] {key}"
            name = tables[table].get(key)
            if name is None:
                problems.append(_unknown(label, key, _places(tables)))
            elif name in values:
                problems.append(Problem(label, f"one setting of {name}", "a second one under another key"))
            else:
                values[name], where[name] = value, label
    return values, where, problems


def _places(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Each valid key or table, and how to write it."""
    keys = {key: f"{key} in [{table}]" for table, known in tables.items() for key in known}
    return {**keys, **{table: f"[{table}]" for table in tables}}


def _environment_values(
    environ: Mapping[str, str],
) -> tuple[dict[str, object], dict[str, str], list[Problem]]:
    """Field values of the `PIECEWISE_*` variables, their names, and those that no field knows."""
    by_variable = {ENVIRONMENT_PREFIX + item.name.upper(): item for item in fields(PiecewiseConfig)}
    values: dict[str, object] = {}
    where: dict[str, str] = {}
    problems: list[Problem] = []
    for variable in sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX)):
        item = by_variable.get(variable)
        if item is None:
            problems.append(_unknown(f"environment variable {variable}", variable, list(by_variable)))
            continue
        values[item.name] = checks.from_text(environ[variable], like=str(item.type))
        where[item.name] = variable
    return values, where, problems


def _unknown(where: str, name: str, valid: list[str] | dict[str, str]) -> Problem:
    """A name that no field has, with the nearest one that exists."""
    places = valid if isinstance(valid, dict) else {each: each for each in valid}
    nearest = get_close_matches(name[:100], places, n=1, cutoff=0.5)
    listed = ", ".join(dict.fromkeys(places.values()))
    return Problem(
        where if len(where) < 200 else where[:200] + "...",
        expected="a known name",
        got="an unknown one" + (f"; the nearest is {places[nearest[0]]}" if nearest else ""),
        fix=f"the names are {listed}",
    )
