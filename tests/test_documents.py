"""What README and guide show runs, in the order in which a reader meets it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import documents
import guide_tables
import pytest
import torch
import transformers

import boundary_ops
import piecewise
import runners

ROOT = documents.ROOT
NAMES = [page.relative_to(ROOT).as_posix() for page in documents.PAGES]
# Page → the blocks that are marked as not run.
NOT_RUN: dict[str, int] = {}
# Page → the library that it is about.
NEEDS = {"docs/guide/adapters.md": "peft", "docs/guide/quantised.md": "torchao"}


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Runs a page's blocks in a directory of their own, and returns what they have left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", documents.small_llama)
    modules, is_grad_on = set(sys.modules), torch.is_grad_enabled()

    def run(name: str) -> documents.Reader:
        if name in NEEDS:
            pytest.importorskip(NEEDS[name])
        reader = documents.Reader(ROOT / name)
        for block in documents.blocks(reader.page):
            if block.is_run:
                reader.run(block)
        return reader

    yield run
    torch.set_grad_enabled(is_grad_on)
    for name in set(sys.modules) - modules:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == tmp_path:
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_blocks_of_a_page_run(name, read):
    names = read(name).names
    if name == "README.md":  # its quick start
        assert names["graphed"].stats.replays == 1 and names["graphed"].stats.eager_calls == 0
        assert names["next_tokens"].shape == (2,) and names["found"].ok


def test_blocks_that_are_not_run_are_few_and_say_why():
    left_out = {
        name: sum(not block.is_run for block in documents.blocks(page))
        for name, page in zip(NAMES, documents.PAGES, strict=True)
    }
    assert {name: count for name, count in left_out.items() if count} == NOT_RUN


def test_the_readme_and_its_quick_start_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    first = next(block for block in documents.blocks(ROOT / "README.md") if block.language == "python")
    assert len(first.text.splitlines()) <= 25


@pytest.mark.parametrize("package", [piecewise, boundary_ops, runners], ids=lambda each: each.__name__)
def test_the_reference_has_every_public_name(package):
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    missing = [
        name for name in package.__all__ if not re.search(rf"\b{package.__name__}\.{name}\b|`{name}`", pages)
    ]
    assert not missing


@pytest.mark.parametrize("page", [*documents.PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=str)
def test_links_to_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        assert (page.parent / target).exists(), target


def test_tables_of_the_guide_are_those_of_the_code():
    tables = 0
    for path in guide_tables.GUIDE.glob("*.md"):
        assert path.read_text() == guide_tables.page(path), "run tests/models/guide_tables.py"
        tables += path.read_text().count("<!-- end -->")
    assert tables == 2
    assert len([*guide_tables.settings()]) == len(guide_tables.FIELDS) + 1
