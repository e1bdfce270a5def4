"""The document on changes between calls is what the code and the acted cases say."""

from __future__ import annotations

import call_changes
import change_table
import pytest


def test_the_document_is_what_the_generator_writes():
    assert change_table.DOCUMENT.read_text() == change_table.document(), (
        "run python tests/models/change_table.py"
    )


@pytest.mark.parametrize("chapter", change_table.CHAPTERS, ids=lambda chapter: chapter.title)
def test_each_chapter_has_whole_rows(chapter):
    rows = list(chapter.rows())
    assert rows and all(len(row) == len(chapter.columns) and all(row) for row in rows)
    assert len({row[0] for row in rows}) == len(rows)
    assert not any("|" in cell or "\n" in cell for row in rows for cell in row)


ACTED = {**call_changes.HOOKS, **call_changes.ADAPTERS}


@pytest.mark.parametrize("what", ACTED)
def test_I10_hooks_and_adapters_that_come_and_go_do_what_the_table_says(what):
    assert ACTED[what].act() == ACTED[what].outcome
