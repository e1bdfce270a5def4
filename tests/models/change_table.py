"""docs/CHANGES-BETWEEN-CALLS.md: what a change between two calls does to the next one, by chapters.

Rows come from what the code itself has, and from cases that tests act out. A new chapter is one more entry
of `CHAPTERS`. ``python tests/models/change_table.py`` writes the document;
`test_change_table.py` compares it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterable

import call_changes
import guard_changes
import subclass_changes

from piecewise import torch_api
from piecewise.trace.dynamo.guard_kinds import GUARD_KINDS, Rule

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "CHANGES-BETWEEN-CALLS.md"
INTRODUCTION = """\
# What a change between two calls does to the next one

Graphs hold what the model was when it was traced and captured. Each call compares it with what it is now. A
call that finds a change runs the model itself, counts a reason, and says in `report()` what differs; it never
gives an old result. `capture()` and `refresh()` capture the model as it is now. A change that is put back
replays again.

`tests/models/change_table.py` writes this file, from tables of the code and from cases that tests act out.
"""
# What the next call does where a guard of a rule no longer holds.
OUTCOMES = {
    Rule.TENSOR: "`moved_address` where graphs read it, else `module_state_changed`",
    Rule.PROCESS: "`global_state_changed`, `grad_enabled` or `nested_tracing`",
    Rule.NO_EFFECT: "replays",
    Rule.SIZES: "`unseen_signature` or `shape_guard`",
    Rule.REFUSED: "`capture()` raises `TraceError`, which names it",
}


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A heading, text below it, and a table."""

    title: str
    text: str
    columns: tuple[str, ...]
    rows: Callable[[], Iterable[tuple[str, ...]]]

    def lines(self) -> list[str]:
        bar = "|".join(["---"] * len(self.columns))
        table = [f"| {' | '.join(self.columns)} |", f"|{bar}|"]
        return [
            f"## {self.title}",
            "",
            self.text,
            "",
            *table,
            *(f"| {' | '.join(row)} |" for row in self.rows()),
        ]


def guard_kinds() -> Iterable[tuple[str, ...]]:
    for kind, entry in GUARD_KINDS.items():
        name = "read without a guard" if kind == torch_api.SeenGuard.UNGUARDED else f"`{kind}`"
        if kind == torch_api.SeenGuard.UNGUARDED:
            versions = "all"
        else:
            versions = f"{entry.since} to {entry.until}" if entry.since < entry.until else entry.since
        outcome = OUTCOMES.get(entry.rule, "`module_state_changed`")
        yield name, versions, entry.asks, entry.rule.value, outcome


def changes_of_state() -> Iterable[tuple[str, ...]]:
    for what, case in guard_changes.CHANGES.items():
        yield (
            what,
            f"`{case.kind}`" if case.kind not in ("", torch_api.SeenGuard.UNGUARDED) else "none",
            f"`{case.outcome}`",
        )


def hooks() -> Iterable[tuple[str, ...]]:
    return [(what, f"`{case.outcome}`") for what, case in call_changes.HOOKS.items()]


def adapters() -> Iterable[tuple[str, ...]]:
    return [(what, f"`{case.outcome}`") for what, case in call_changes.ADAPTERS.items()]


def subclasses() -> Iterable[tuple[str, ...]]:
    return [(change.__doc__, f"`{outcome}`") for change, outcome in subclass_changes.CHANGES.items()]


HOOKS = """\
Hooks are traced with forward. One that cannot be traced, since it stores something, prints, or is a full
backward hook, is an error of `capture()`. Where the model itself has hooks, the form of a call is part of its
kind."""
ADAPTERS = """\
What was captured in one state of the model is kept when it changes, up to `max_signatures` signatures in all,
and replays when that state is back. `capture()` captures the state of now beside the others."""
SUBCLASSES = """\
A parameter that is a tensor subclass, such as a quantised weight, is compared with all that is inside of it.
What is written into its tensors in place is replayed with."""
GUARDS = """\
Dynamo guards what it read while tracing. Each kind of guard of torch 2.11 to 2.14 is here, with what a call
compares of it; a kind that is not here is a refusal of the trace."""
STATE = """\
Each of these is acted out by a test: what changed, the guard that names it, and the reason that the next call
counts. Where no guard does, what forward looked at, and the code that it ran, is compared all the same."""

CHAPTERS = [
    Chapter(
        "Guard kinds",
        GUARDS,
        ("kind", "torch", "Dynamo asks", "a call compares", "the next call, where it differs"),
        guard_kinds,
    ),
    Chapter("Changes of Python state", STATE, ("what changes", "guard", "the next call"), changes_of_state),
    Chapter("Hooks", HOOKS, ("what changes", "the next call"), hooks),
    Chapter("Adapters", ADAPTERS, ("what changes", "the next call"), adapters),
    Chapter("Tensor subclasses", SUBCLASSES, ("what changes", "the next call"), subclasses),
]


def document() -> str:
    """The whole text."""
    return "\n\n".join([INTRODUCTION.rstrip(), *("\n".join(chapter.lines()) for chapter in CHAPTERS)]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
