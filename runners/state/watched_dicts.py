"""Tells whether dicts that a recorded graph relies on were written: one C call for many.

CPython gives each state of a dict a version (a tag, or a watcher from 3.12 on). A dict whose version is
unchanged has unchanged contents, and comparing it costs 7 to 14 ns however many values it has. How versions
are read is the caller's to say, since torch does it with the compiler's guards. A new version says only that
something was written. Then the values are compared one by one, and new versions are taken; each time that was
in vain, the next one waits longer.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

# Called with dicts, objects and the objects' classes, it gives a function that is true while no dict is
# written, no object gets another `__dict__`, and each is of its class. Writes that were taken back count.
DictVersions: TypeAlias = Callable[[Sequence[dict], Sequence[Any], Sequence[type]], Callable[[], bool]]


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


# What is expected where a dict has no such key: it is not even None.
NOTHING: Any = _Nothing()
# Dicts whose versions are taken together: fewer mean more calls, more mean a longer pause to take them anew.
_GROUP_SIZE = 64
_attributes_of = operator.attrgetter("__dict__")
# Comparisons by value between two attempts to go by versions.
_LONGEST_WAIT = 1023


class WatchedDicts:
    """Compares values, keys and members of plain dicts, and objects with their present attributes.

    All dicts and objects are held; nothing is compared when it is added. Without `dict_versions`, values are
    compared each time.
    """

    def __init__(self, dict_versions: DictVersions | None) -> None:
        self._dict_versions = dict_versions
        self._groups: list[_DictGroup] = []
        self._group_of: dict[int, _DictGroup] = {}

    def add_object(self, item: Any, cls: type) -> None:
        """Adds an object: `type(item)` must stay `cls`, and `item.__dict__` the dict that it is now."""
        attributes = item.__dict__
        group = self._group(attributes)
        for column, entry in zip(group.objects, (item, cls, attributes), strict=True):
            column.append(entry)

    def add_value(self, owner: dict, key: Any, value: Any) -> tuple[list[Any], int]:
        """Adds a value that `owner.get(key, NOTHING)` must stay; returns the list and index that keep it."""
        group = self._group(owner)
        for column, item in zip((group.owners, group.keys, group.values), (owner, key, value), strict=True):
            column.append(item)
        return group.values, len(group.values) - 1

    def add_answer(self, owner: dict, ask: Callable[[], Any], answer: Any) -> None:
        """Adds a question, which depends on the keys of `owner` only: `ask()` must stay equal to `answer`."""
        self._group(owner).answers.append((ask, answer))

    def are_unchanged(self) -> bool:
        """Compares all, by version where that is known."""
        for group in self._groups:
            versions_are_same = group.versions_are_same
            if (versions_are_same is None or not versions_are_same()) and not group.are_unchanged():
                return False
        return True

    def _group(self, owner: dict) -> _DictGroup:
        group = self._group_of.get(id(owner))
        if group is None:
            if not self._groups or len(self._groups[-1].dicts) == _GROUP_SIZE:
                self._groups.append(_DictGroup(self._dict_versions))
            group = self._group_of[id(owner)] = self._groups[-1]
            group.dicts.append(owner)
        return group


class _DictGroup:
    """Holds some dicts, what is expected in them, and once that was found, how to compare their versions."""

    def __init__(self, dict_versions: DictVersions | None) -> None:
        self._dict_versions = dict_versions
        self.dicts: list[dict] = []
        self.objects: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self.owners: list[dict] = []
        self.keys: list[Any] = []
        self.values: list[Any] = []
        self.answers: list[tuple[Callable[[], Any], Any]] = []
        self.versions_are_same: Callable[[], bool] | None = None
        self._wait, self._waited = 0, 0

    def are_unchanged(self) -> bool:
        """Compares one by one, where versions are not known or not the same."""
        if self.versions_are_same is not None:
            self.versions_are_same = None
            self._wait, self._waited = min(2 * self._wait + 1, _LONGEST_WAIT), 0
        if not self._are_same():
            return False
        self._waited += 1
        if self._waited > self._wait and self._dict_versions is not None:
            versions_are_same = self._dict_versions(self.dicts, self.objects[0], self.objects[1])
            if self._are_same():  # another thread may have written before the versions were taken
                self.versions_are_same = versions_are_same
        return True

    def _are_same(self) -> bool:
        items, classes, attributes = self.objects
        found = map(dict.get, self.owners, self.keys, itertools.repeat(NOTHING))
        return (
            all(map(operator.is_, found, self.values))
            and all(map(operator.is_, map(type, items), classes))
            and all(map(operator.is_, map(_attributes_of, items), attributes))
            and all(ask() == answer for ask, answer in self.answers)
        )
