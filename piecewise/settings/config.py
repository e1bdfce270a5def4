"""How a model is to be graphed: one frozen value, checked as a whole, from arguments, environment or TOML.

Every field carries its TOML table and its check in its metadata, so a name, its default, where it is written
and what it accepts stand in one place. A value that this version cannot honour is refused with what it can do
instead: nothing here is accepted and then ignored. This module is the only reader of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from piecewise.settings import checks as checks
from piecewise.settings import toml_file
from piecewise.settings.checks import Place, Problem, Refused, raise_problems
from piecewise.settings.grids import Grid
from piecewise.settings.limits import Clamped, Clipping, Limit, clip, decode_limit, prefill_limit
from runners.buckets import MAX_NUM_BUCKETS
from runners.engines import ENGINE_NAMES
from runners.errors import shown

ENVIRONMENT_PREFIX = "PIECEWISE_"

# Of one kind of problem in one setting.
_MAX_LISTED = 16

# Each is at most 1.5 times the one before from 32 on, so longer calls are padded to less than 1.5 times.
DEFAULT_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def _setting(default: Any, table: str, check: Callable[[Any], Any], *keys: str) -> Any:
    """A field: its default, its TOML table, its check, and its keys there where they are not its name."""
    return field(default=default, metadata={"table": table, "check": check, "keys": keys})


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseConfig:
    """Settings of one graphed model; an instance that exists is valid.

    Args:
        buckets: token counts that get graphs, strictly ascending; or a rule for them, which is replaced by
            its list: an engine's name ("tensorrt-llm", "sglang", "vllm") up to `max_num_tokens`, or
            {"step": 64, "max": 2048}. The default list ends at `max_num_tokens`.
        max_padding_ratio: a call whose bucket is more than this many times its tokens runs eagerly; None for
            no limit.
        max_num_tokens: the most tokens of one call; a bucket above it is an error, never dropped.
        max_num_seqs: the most sequences of one call (in a file also `max_batch_size`).
        max_seq_len: the longest sequence, generated tokens included. Sizes that these limits put out of reach
            are not captured; `within_limits` returns them.
        decode_batch_sizes: batch sizes of decode steps that get graphs. This version checks, clips and plans
            them; `compile` warns that it does not capture them.
        max_signatures: how many kinds of call (structures, dtypes, static shapes), each in the states of the
            model that it was captured in, are kept.
        warmup_steps: runs of each segment before its capture, each with another poison in the pad rows.
        capture: "startup" captures in `capture()`; "lazy" also at the third call of a bucket: one bucket in a
            call, and none where less than 5 % of a CUDA device's memory is free then.
        engine: "auto" takes what the model's device has: "cuda" (real graphs) or "tape" (no GPU needed).
        num_streams: with more than 1, branches of a graph segment that do not depend on each other (q, k
            and v; gate and up) are captured on so many streams, at buckets of up to 512; without a GPU they
            run in another order.
        progress: show a bar while tracing, lowering and capturing.
        frontend: how the model becomes segments; only "trace" is available in this version.
        lowering: what runs inside graph segments: "eager" (torch's own kernels) or "inductor" (each distinct
            segment is compiled, for any token count).
        compile_sizes: buckets for which "inductor" compiles each segment once more, for that size alone.
        fusions: rewrites of graph segments by name ("pack_linears", ...), or ("auto",) for those that help
            with `lowering`; () for none. Packed weights change their place in memory at capture.
        boundary_ops: names ("namespace::op") of the ops to cut at; None for all that are registered.
        boundary: "eager" runs boundary ops between the graphs; "captured" puts those that are declared
            capture_safe into the graphs, one graph per bucket where all are. A step is then bounded by
            max_num_seqs, max_num_tokens (without one: the largest bucket) and max_seq_len, which ops with a
            captured form need, as the built-in attention; larger steps run eagerly.
        min_coverage: least share of the model's ops in graphs, above 0 and at most 1, in the plan and in each
            bucket that is captured; less is an error at `capture()`, or once at the call that would capture.
        outputs: "copy" gives the caller its own tensors; "view" static memory, valid until the next call.
        strict: an op that would silently leave the graphs is an error instead.

    Raises:
        ConfigError: any setting is wrong; the message lists every problem.
    """

    buckets: tuple[int, ...] = _setting(DEFAULT_BUCKETS, "buckets", checks.buckets, "num_tokens", "grid")
    max_padding_ratio: float | None = _setting(None, "buckets", checks.optional(checks.at_least(1.0)))
    max_num_tokens: int | None = _setting(None, "limits", checks.optional(checks.whole(1, 2**31 - 1)))
    max_num_seqs: int | None = _setting(
        None, "limits", checks.optional(checks.whole(1, 2**31 - 1)), "max_num_seqs", "max_batch_size"
    )
    max_seq_len: int | None = _setting(None, "limits", checks.optional(checks.whole(2, 2**31 - 1)))
    decode_batch_sizes: tuple[int, ...] | None = _setting(
        None, "decode", checks.optional(checks.sizes), "batch_sizes"
    )
    max_signatures: int = _setting(8, "limits", checks.whole(1, 1024))
    warmup_steps: int = _setting(3, "capture", checks.whole(1, 100))
    capture: str = _setting("startup", "capture", checks.choice("startup", "lazy"))
    engine: str = _setting("auto", "capture", checks.choice(*ENGINE_NAMES))
    num_streams: int = _setting(1, "capture", checks.whole(1, 8))
    progress: bool = _setting(True, "capture", checks.flag)
    frontend: str = _setting("trace", "compile", checks.choice("trace", later=("record",)))
    lowering: str = _setting("eager", "compile", checks.choice("eager", "inductor"))
    compile_sizes: tuple[int, ...] = _setting((), "compile", checks.some_sizes)
    fusions: tuple[str, ...] = _setting((), "compile", checks.fusions)
    boundary_ops: tuple[str, ...] | None = _setting(None, "compile", checks.optional(checks.op_names))
    boundary: str = _setting("eager", "compile", checks.choice("eager", "captured"))
    min_coverage: float | None = _setting(None, "compile", checks.optional(checks.share))
    outputs: str = _setting("copy", "compile", checks.choice("copy", "view"))
    strict: bool = _setting(False, "compile", checks.flag)

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

    def to_toml(self, path: str | os.PathLike[str], *, only: Sequence[str] | None = None) -> None:
        """Write every setting that is not None; comments and order of a file that is there already are kept.

        A file that spells a setting in another way of equal meaning (`grid`, `max_batch_size`) keeps its own.

        Args:
            only: the fields to write, by name; the others stay as the file has them. None for all.
        Raises:
            ConfigError: the file that is there is not a valid settings file; it is left as it was.
        """
        target = Path(path)
        there: dict[str, object] = {}
        spelled: dict[str, Place] = {}
        if target.exists():
            # A table or key that is unknown would make the result unreadable.
            there, spelled, problems = _file_values(target)
            raise_problems(problems)
        tables: dict[str, dict[str, object]] = {}
        for item in fields(self):
            if only is not None and item.name not in only:
                continue
            value = getattr(self, item.name)
            rule = there.get(item.name)
            if isinstance(rule, Grid) and rule.sizes(self.max_num_tokens) == value:
                continue
            keys = _keys(item)
            kept = spelled[item.name].path[-1] if item.name in spelled and item.name != "buckets" else keys[0]
            for key in keys:
                tables.setdefault(item.metadata["table"], {})[key] = None
            tables[item.metadata["table"]][kept] = list(value) if isinstance(value, tuple) else value
        toml_file.write_tables(target, tables)

    def prefill_sizes(self) -> Clipping:
        """The buckets cut at what one prefill step can hold; `clamped` has the rest, each with its reason."""
        return clip(self.buckets, self.prefill_limit())

    def decode_sizes(self, *, tokens_per_request: int = 1) -> Clipping | None:
        """The decode batch sizes cut at what one decode step can hold; None where none are listed."""
        if self.decode_batch_sizes is None:
            return None
        return clip(self.decode_batch_sizes, self.decode_limit(tokens_per_request=tokens_per_request))

    def prefill_limit(self) -> Limit:
        """The most tokens of one prefill step under these limits."""
        return prefill_limit(
            max_num_tokens=self.max_num_tokens, max_num_seqs=self.max_num_seqs, max_seq_len=self.max_seq_len
        )

    def decode_limit(self, *, tokens_per_request: int = 1) -> Limit:
        """The most requests of one decode step under these limits."""
        return decode_limit(
            max_num_tokens=self.max_num_tokens,
            max_num_seqs=self.max_num_seqs,
            tokens_per_request=tokens_per_request,
        )

    def within_limits(self) -> tuple[PiecewiseConfig, tuple[Clamped, ...]]:
        """These settings with only the sizes that can be reached, and those left out, each with a reason."""
        prefill, decode = self.prefill_sizes(), self.decode_sizes()
        sizes, clamped = None, prefill.clamped
        if decode is not None:
            sizes, clamped = decode.sizes, clamped + decode.clamped
        if not clamped:
            return self, ()
        compiled = tuple(size for size in self.compile_sizes if size in prefill.sizes)
        left = replace(self, buckets=prefill.sizes, decode_batch_sizes=sizes, compile_sizes=compiled)
        return left, clamped

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
        where: dict[str, Place] = {}
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
                    got=shown(source),
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


def environment() -> dict[str, str]:
    """The process's environment as it is now; for a model whose forward reads it."""
    return dict(os.environ)


def _built(
    values: Mapping[str, object], where: Mapping[str, Place], problems: list[Problem]
) -> PiecewiseConfig:
    checked, more = _checked(values, where)
    raise_problems([*problems, *more])
    return PiecewiseConfig(**checked)


def _checked(
    values: Mapping[str, object], where: Mapping[str, Place]
) -> tuple[dict[str, Any], list[Problem]]:
    """The normalised values and every problem; `where` says how the user spelled a field."""
    checked: dict[str, Any] = {}
    problems: list[Problem] = []
    for item in fields(PiecewiseConfig):
        if item.name not in values:
            continue
        try:
            checked[item.name] = item.metadata["check"](values[item.name])
        except Refused as refused:
            problems += refused.problems_at(where.get(item.name, Place(item.name)))
    place = where.get("buckets", Place("buckets"))
    if "buckets" in checked or "buckets" not in values:
        problems += _settle_buckets(checked, place)
    if not problems:
        problems += _out_of_reach(checked, where)
        place = where.get("compile_sizes", Place("compile_sizes"))
        problems += checks.compiled_in_vain(checked, checked.get("buckets", DEFAULT_BUCKETS), place)
    return checked, problems


def _settle_buckets(checked: dict[str, Any], place: Place) -> list[Problem]:
    """Puts the list in place of a rule or of the default, and compares it with `max_num_tokens`."""
    sizes, limit = checked.get("buckets", DEFAULT_BUCKETS), checked.get("max_num_tokens")
    if sizes is DEFAULT_BUCKETS:
        # Nobody asked for these sizes, so those above a limit that somebody set are not an error.
        if limit is not None and limit < sizes[-1]:
            checked["buckets"] = tuple(size for size in sizes if size <= limit) or (limit,)
        return []
    if isinstance(sizes, Grid):
        checked["buckets"] = listed = sizes.sizes(limit)
        if not 0 < len(listed) <= MAX_NUM_BUCKETS:
            got = "none: max_num_tokens is below its smallest size" if not listed else "more"
            expected = f"a grid of 1 to {MAX_NUM_BUCKETS} sizes"
            return [Problem(place.shown(), expected, got, "change max_num_tokens or the grid")]
        sizes = listed
    above = [index for index, size in enumerate(sizes) if limit is not None and size > limit]
    return [
        Problem(
            place.shown(f"[{index}]"),
            expected=f"at most max_num_tokens = {limit}",
            got=f"{sizes[index]} (no call could reach it)",
            fix="remove the bucket or raise max_num_tokens",
        )
        for index in above[:_MAX_LISTED]
    ]


def _out_of_reach(checked: Mapping[str, Any], where: Mapping[str, Place]) -> list[Problem]:
    """Size lists of which the limits leave nothing."""
    limits: dict[str, Any] = {name: checked.get(name) for name in ("max_num_tokens", "max_num_seqs")}
    found = []
    for name, limit in (
        ("buckets", prefill_limit(**limits, max_seq_len=checked.get("max_seq_len"))),
        ("decode_batch_sizes", decode_limit(**limits)),
    ):
        sizes = checked.get(name)
        if sizes and limit.size is not None and sizes[0] > limit.size:
            place = where.get(name, Place(name))
            expected = f"a size of at most {limit.size} = {limit.reason}"
            got = f"{sizes[0]} as the smallest, so no call could reach any"
            found.append(Problem(place.shown(), expected, got, "add a smaller size or raise the limit"))
    return found


def _keys(item: Any) -> tuple[str, ...]:
    """The TOML keys of a field; the first is the one that is written."""
    return item.metadata["keys"] or (item.name,)


def _file_values(path: Path) -> tuple[dict[str, object], dict[str, Place], list[Problem]]:
    """Field values of a TOML file, where it has each, and what it says that no field knows."""
    tables: dict[str, dict[str, str]] = {}
    for item in fields(PiecewiseConfig):
        for key in _keys(item):
            tables.setdefault(item.metadata["table"], {})[key] = item.name
    values: dict[str, object] = {}
    where: dict[str, Place] = {}
    problems: list[Problem] = []
    content, lines = toml_file.read_tables(path)
    for table, keys in content.items():
        place = Place(f"[{table}]", file=str(path), path=(table,), lines=lines)
        if table not in tables:
            problems.append(_unknown(place.shown(), table, _places(tables), count=len(problems)))
            continue
        if not isinstance(keys, dict):
            label = Place(table, file=str(path), path=(table,), lines=lines).shown()
            problems.append(Problem(label, f"a table, [{table}]", shown(keys)))
            continue
        for key, value in keys.items():
            place = Place(f"[{table}] {key}", file=str(path), path=(table, key), lines=lines)
            name = tables[table].get(key)
            if name is None:
                problems.append(_unknown(place.shown(), key, _places(tables), count=len(problems)))
            elif name in values:
                problems.append(
                    Problem(place.shown(), f"one setting of {name}", "a second one under another key")
                )
            else:
                try:
                    values[name] = _KEY_CHECKS[key](value) if key in _KEY_CHECKS else value
                    where[name] = place
                except Refused as refused:
                    problems += refused.problems_at(place)
    return values, where, problems


# Two keys of one field, each with its own form.
_KEY_CHECKS: dict[str, Callable[[Any], Any]] = {"num_tokens": checks.sizes, "grid": checks.grid}


def _places(tables: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Each valid key or table, and how to write it."""
    keys = {key: f"{key} in [{table}]" for table, known in tables.items() for key in known}
    return {**keys, **{table: f"[{table}]" for table in tables}}


def _environment_values(
    environ: Mapping[str, str],
) -> tuple[dict[str, object], dict[str, Place], list[Problem]]:
    """Field values of the `PIECEWISE_*` variables, their names, and those that no field knows."""
    by_variable = {ENVIRONMENT_PREFIX + item.name.upper(): item for item in fields(PiecewiseConfig)}
    values: dict[str, object] = {}
    where: dict[str, Place] = {}
    problems: list[Problem] = []
    for variable in sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX)):
        item = by_variable.get(variable)
        if item is None:
            problems.append(_unknown(f"environment variable {variable}", variable, list(by_variable)))
            continue
        values[item.name] = checks.from_text(environ[variable], like=str(item.type))
        where[item.name] = Place(variable)
    return values, where, problems


def _unknown(where: str, name: str, valid: list[str] | dict[str, str], *, count: int = 0) -> Problem:
    """A name that no field has, with the nearest one that exists; `count` problems were found before it."""
    places = valid if isinstance(valid, dict) else {each: each for each in valid}
    # The search is slow, and a hostile file may have thousands of names, of which most are not listed.
    nearest = get_close_matches(name[:100], places, n=1, cutoff=0.5) if count < checks.MAX_LISTED else []
    listed = ", ".join(dict.fromkeys(places.values()))
    return Problem(
        where if len(where) < 200 else where[:200] + "...",
        expected="a known name",
        got="an unknown one" + (f"; the nearest is {places[nearest[0]]}" if nearest else ""),
        fix=f"the names are {listed}",
    )
