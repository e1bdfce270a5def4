"""Defines `PiecewiseConfig`: all settings of one graphed model, frozen, and checked together.

Each field's metadata holds its TOML table, its keys and the values that it accepts. A value that this version
cannot honour is an error that names the alternatives: nothing is accepted and then ignored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from piecewise.settings import kinds, sources, toml_file
from piecewise.settings.front_ends import FRONT_ENDS, LATER
from piecewise.settings.grids import Grid
from piecewise.settings.kinds import Check, Kind, Problem, optional, whole
from piecewise.settings.limits import Clamped, Clipping, Limit, clip, decode_limit, prefill_limit
from piecewise.settings.sources import Given, Setting, named, read_file
from piecewise.settings.whole_file import is_replaced
from runners.buckets import MAX_BUCKET, MAX_NUM_BUCKETS
from runners.engines import ENGINE_NAMES
from runners.errors import shown

# Most problems of one kind that an error lists for one setting.
_MAX_LISTED = 16

# From 32 on, each size is at most 1.5 times the one before: longer calls are padded to less than 1.5 times.
DEFAULT_BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def _setting(default: Any, table: str, kind: Kind, **keys: Check | None) -> Any:
    """Makes a field; `keys` are its keys in the TOML table, where these are not just its name."""
    return field(default=default, metadata={"row": (table, kind, keys)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseConfig:
    """Holds the settings of one graphed model; every instance is valid.

    Args:
        buckets: token counts that get graphs, strictly ascending; or a rule that makes the list: an engine's
            name ("tensorrt-llm", "sglang", "vllm") up to `max_num_tokens`, or {"step": 64, "max": 2048}. The
            default list ends at `max_num_tokens`.
        max_padding_ratio: calls whose bucket is more than this many times their tokens run eagerly; None: no
            limit.
        max_num_tokens: the most tokens of one call; a bucket above it is an error, never dropped.
        max_num_seqs: the most sequences of one call (in a file also `max_batch_size`).
        max_seq_len: the longest sequence, generated tokens included. Sizes that no call can reach under these
            three limits are not captured; `within_limits` returns them.
        decode_batch_sizes: batch sizes of decode steps that get graphs. This version checks, clips and plans
            them; `compile` warns that it does not capture them.
        max_signatures: how many kinds of call (structure, dtypes, static shapes) keep their graphs, where a
            kind counts once for each state of the model that it was captured in.
        warmup_steps: runs of each segment before its capture, each with another poison in the pad rows.
        capture: "startup" captures in `capture()`; "lazy" also at a bucket's third call: at most one bucket
            per call, and none while less than 5 % of a CUDA device's memory is free.
        engine: "cuda" (real graphs), "tape" (no GPU needed), or "auto" for the one of the model's device.
        num_streams: above 1, independent branches of a graph segment (q, k and v; gate and up) are captured
            on that many streams, at buckets of up to 512; without a GPU they run in another order.
        allow_eager: `capture()` returns, with a warning, where no listed bucket can be captured, so that all
            calls run eagerly; else this is an error.
        disable: the model runs as without this package, and `capture()` captures nothing. PIECEWISE_DISABLE=1
            in the environment wins over every other source.
        progress: show a bar while tracing, lowering and capturing.
        frontend: how the model becomes segments; this version has only "trace".
        lowering: what runs inside graph segments: "eager" (torch's own kernels) or "inductor" (each distinct
            segment is compiled, for any token count).
        compile_sizes: buckets for which "inductor" compiles each segment once more, for that size alone.
        fusions: rewrites of graph segments by name ("pack_linears", ...), or ("auto",) for those that help
            with `lowering`; () for none. Packed weights move in memory at capture.
        boundary_ops: names ("namespace::op") of the ops to cut at; None for all registered ones.
        boundary: "eager" runs boundary ops between the graphs; "captured" puts those declared capture_safe
            into the graphs: one graph per bucket if all are. Steps are then bounded by max_num_seqs,
            max_num_tokens (default: the largest bucket) and max_seq_len, which ops with a captured form, such
            as the built-in attention, need; larger steps run eagerly.
        min_coverage: least share of the model's ops in graphs, above 0 and at most 1, of the plan and of each
            captured bucket; less is an error at `capture()`, or once at the call that would capture.
        outputs: "copy" gives the caller its own tensors; "view" static memory, valid until the next call.
        strict: an op that would silently leave the graphs is an error instead.

    Raises:
        ConfigError: any setting is wrong; the message lists every problem.
    """

    buckets: tuple[int, ...] = _setting(
        DEFAULT_BUCKETS, "buckets", kinds.buckets, num_tokens=kinds.check_sizes, grid=kinds.check_grid
    )
    max_padding_ratio: float | None = _setting(
        None, "buckets", optional(kinds.number("a finite number of at least 1", lambda value: value >= 1))
    )
    max_num_tokens: int | None = _setting(None, "limits", optional(whole(1, MAX_BUCKET)))
    max_num_seqs: int | None = _setting(
        None, "limits", optional(whole(1, MAX_BUCKET)), max_num_seqs=None, max_batch_size=None
    )
    max_seq_len: int | None = _setting(None, "limits", optional(whole(2, MAX_BUCKET)))
    decode_batch_sizes: tuple[int, ...] | None = _setting(
        None, "decode", optional(kinds.sizes), batch_sizes=None
    )
    max_signatures: int = _setting(8, "limits", whole(1, 1024))
    warmup_steps: int = _setting(3, "capture", whole(1, 100))
    capture: str = _setting("startup", "capture", kinds.choice("startup", "lazy"))
    engine: str = _setting("auto", "capture", kinds.choice(*ENGINE_NAMES))
    num_streams: int = _setting(1, "capture", whole(1, 8))
    allow_eager: bool = _setting(False, "capture", kinds.flag)
    disable: bool = _setting(False, "capture", kinds.flag)
    progress: bool = _setting(True, "capture", kinds.flag)
    frontend: str = _setting("trace", "compile", kinds.choice(*FRONT_ENDS, later=LATER))
    lowering: str = _setting("eager", "compile", kinds.choice("eager", "inductor"))
    compile_sizes: tuple[int, ...] = _setting((), "compile", kinds.some_sizes)
    fusions: tuple[str, ...] = _setting((), "compile", kinds.fusions)
    boundary_ops: tuple[str, ...] | None = _setting(None, "compile", optional(kinds.op_names))
    boundary: str = _setting("eager", "compile", kinds.choice("eager", "captured"))
    min_coverage: float | None = _setting(
        None, "compile",
        optional(kinds.number("a number above 0 and at most 1", lambda value: 0 < value <= 1)),
    )  # fmt: skip
    outputs: str = _setting("copy", "compile", kinds.choice("copy", "view"))
    strict: bool = _setting(False, "compile", kinds.flag)

    def __post_init__(self) -> None:
        given = Given({name: getattr(self, name) for name in FIELDS})
        for name, value in _checked(given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> PiecewiseConfig:
        """Reads a TOML file; settings that the file lacks get their defaults. The environment is not read.

        Of a file named `pyproject.toml`, the tables inside `[tool.piecewise]` are read.

        Raises:
            ConfigError: the file cannot be read or parsed, is over 256 KiB, or has any wrong table, key or
                value; the message lists every problem.
        """
        return cls(**_checked(read_file(Path(path), FIELDS)))

    @classmethod
    def from_any(
        cls, source: PiecewiseConfig | str | os.PathLike[str] | None = None, /, **overrides: Any
    ) -> PiecewiseConfig:
        """Combines all sources: an argument wins over the environment, then the file, then the default.

        The file is `source`; without one, the nearest `pyproject.toml` with a table `[tool.piecewise]`, from
        the working directory up.

        Args:
            source: a config, whose settings all count as arguments, so neither the environment nor a file is
                read; the path of a TOML file; or None.
            overrides: fields by name.

        Raises:
            ConfigError: any name or value is wrong; the message lists every problem of all sources.
        """
        found, _ = read_settings(source, overrides)
        return source if isinstance(source, cls) and source == found else found

    def to_toml(self, path: str | os.PathLike[str], *, only: Sequence[str] | None = None) -> None:
        """Writes every setting that is not None, or `only` those named; the rest of the file stays as it is.

        Comments are kept, and so is another spelling of the same value (`grid`, `max_batch_size`). In a
        `pyproject.toml`, the settings go into `[tool.piecewise]`.

        Raises:
            ConfigError: the existing file is not a valid settings file; it stays unchanged.
        """
        target = Path(path)
        # An unknown table or key would make the result unreadable.
        there = read_file(target, FIELDS) if is_replaced(target) else Given()
        there.raise_problems()
        tables: dict[str, dict[str, Any]] = {}
        for name, row in FIELDS.items():
            if only is not None and name not in only:
                continue
            value, rule = getattr(self, name), there.values.get(name)
            if isinstance(rule, Grid) and rule.sizes(self.max_num_tokens) == value:
                continue
            first = next(iter(row.keys))
            table = tables.setdefault(row.table, {})
            table.update(dict.fromkeys(row.keys))
            table[first if name == "buckets" else there.keys.get(name, first)] = (
                list(value) if isinstance(value, tuple) else value
            )
        toml_file.write_tables(target, tables, root=sources.root_of(target))

    def prefill_sizes(self) -> Clipping:
        """Cuts the buckets at what one prefill step can hold."""
        names = "max_num_tokens", "max_num_seqs", "max_seq_len"
        return clip(self.buckets, prefill_limit(**{name: getattr(self, name) for name in names}))

    def decode_sizes(self, *, tokens_per_request: int = 1) -> Clipping | None:
        """Cuts the decode batch sizes at what one decode step can hold; returns None if none are listed."""
        if self.decode_batch_sizes is None:
            return None
        return clip(self.decode_batch_sizes, self.decode_limit(tokens_per_request=tokens_per_request))

    def decode_limit(self, *, tokens_per_request: int = 1) -> Limit:
        """Finds the most requests of one decode step."""
        limits = {"max_num_tokens": self.max_num_tokens, "max_num_seqs": self.max_num_seqs}
        return decode_limit(**limits, tokens_per_request=tokens_per_request)

    def within_limits(self) -> tuple[PiecewiseConfig, tuple[Clamped, ...]]:
        """Returns these settings with only the sizes that calls can reach, and the sizes left out."""
        prefill, decode = self.prefill_sizes(), self.decode_sizes()
        sizes, more = (decode.sizes, decode.clamped) if decode is not None else (None, ())
        if not prefill.clamped + more:
            return self, ()
        compiled = tuple(size for size in self.compile_sizes if size in prefill.sizes)
        left = replace(self, buckets=prefill.sizes, decode_batch_sizes=sizes, compile_sizes=compiled)
        return left, prefill.clamped + more


def _rows() -> dict[str, Setting]:
    found = {}
    for item in fields(PiecewiseConfig):
        table, kind, keys = item.metadata["row"]
        found[item.name] = Setting(table, kind, keys or {item.name: None})
    return found


# Each field's name → its row of the field table.
FIELDS: Mapping[str, Setting] = _rows()


def read_settings(source: object, overrides: Mapping[str, Any]) -> tuple[PiecewiseConfig, Given]:
    """Returns what `from_any` does, and what each source gave, with its place."""
    given = Given()
    if isinstance(source, PiecewiseConfig):
        given.values = {name: getattr(source, name) for name in FIELDS}
    elif source is None or isinstance(source, (str, os.PathLike)):
        path = sources.find_project_file() if source is None else Path(source)
        given = read_file(path, FIELDS) if path is not None else given
        found = sources.read_environment(FIELDS)
        given.values |= found.values
        given.where |= found.where
        given.problems += found.problems
    else:
        fix = "pass settings by name, such as buckets=[64, 128]"
        expected = "a PiecewiseConfig, the path of a TOML file, or None"
        given.refuse(named("config"), Problem(expected, shown(source), fix))
    for name, value in overrides.items():
        if name in FIELDS:
            given.add(name, value, named(name))
        else:
            given.refuse_unknown(named(f"option {name!r}"), name, dict(zip(FIELDS, FIELDS, strict=True)))
    switch = sources.read_environment({"disable": FIELDS["disable"]}, knows_all=False)
    if switch.values.get("disable", False) is not False:  # it wins
        given.add("disable", switch.values["disable"], switch.where["disable"])
    return PiecewiseConfig(**_checked(given)), given


def _checked(given: Given) -> dict[str, Any]:
    """Returns the normalised values, or raises WrongSettings with all problems, those in `given` included."""
    checked: dict[str, Any] = {}
    num_problems = len(given.problems)
    for name, row in FIELDS.items():
        if name in given.values:
            with given.refusing(given.place(name)):
                checked[name] = row.kind.check(given.values[name])
    if "buckets" in checked or "buckets" not in given.values:
        limit = given.place("max_num_tokens")("")
        given.refuse(given.place("buckets"), *_settle_buckets(checked, limit))
    if len(given.problems) == num_problems:
        for name, problems in (*_out_of_reach(checked), ("compile_sizes", _compiled_in_vain(checked))):
            given.refuse(given.place(name), *problems)
    given.raise_problems()
    return checked


def _settle_buckets(checked: dict[str, Any], place: str) -> list[Problem]:
    """Replaces a rule or the default by its list, and finds buckets above `max_num_tokens`, at `place`."""
    sizes, limit = checked.get("buckets", DEFAULT_BUCKETS), checked.get("max_num_tokens")
    if sizes is DEFAULT_BUCKETS:
        # The user did not ask for these sizes, so sizes above the user's limit are no error.
        if limit is not None and limit < sizes[-1]:
            checked["buckets"] = tuple(size for size in sizes if size <= limit) or (limit,)
        return []
    if isinstance(sizes, Grid):
        checked["buckets"] = sizes = sizes.sizes(limit)
        if not 0 < len(sizes) <= MAX_NUM_BUCKETS:
            got = "none: max_num_tokens is below its smallest size" if not sizes else "more"
            fix = "change max_num_tokens or the grid"
            return [Problem(f"a grid of 1 to {MAX_NUM_BUCKETS} sizes", got, fix)]
    above = [index for index, size in enumerate(sizes) if limit is not None and size > limit]
    fix = "remove the bucket or raise max_num_tokens"
    return [
        Problem(f"at most {place} = {limit}", f"{sizes[index]} (no call could reach it)", fix, f"[{index}]")
        for index in above[:_MAX_LISTED]
    ]


def _out_of_reach(checked: Mapping[str, Any]) -> list[tuple[str, list[Problem]]]:
    """Finds size lists without any size within the limits."""
    limits: dict[str, Any] = {name: checked.get(name) for name in ("max_num_tokens", "max_num_seqs")}
    found = []
    for name, limit in (
        ("buckets", prefill_limit(**limits, max_seq_len=checked.get("max_seq_len"))),
        ("decode_batch_sizes", decode_limit(**limits)),
    ):
        sizes = checked.get(name)
        if sizes and limit.size is not None and sizes[0] > limit.size:
            expected = f"a size of at most {limit.size} = {limit.reason}"
            got = f"{sizes[0]} as the smallest, so no call could reach any"
            found.append((name, [Problem(expected, got, "add a smaller size or raise the limit")]))
    return found


def _compiled_in_vain(checked: Mapping[str, Any]) -> list[Problem]:
    """Finds `compile_sizes` without effect: they are no buckets, or the lowering compiles nothing."""
    sizes, buckets = checked.get("compile_sizes", ()), checked.get("buckets", DEFAULT_BUCKETS)
    if sizes and checked.get("lowering", "eager") == "eager":
        fix = "set lowering to 'inductor', or leave compile_sizes out"
        return [Problem("() where lowering is 'eager'", str(list(sizes)), fix)]
    return [
        Problem("one of the buckets", str(size), "add the bucket, or leave it out", f"[{index}]")
        for index, size in enumerate(sizes)
        if size not in buckets
    ]
