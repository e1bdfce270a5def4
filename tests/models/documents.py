"""Reads the fenced blocks of README and guide, and runs a page's blocks in order, as a reader would.

Python blocks share one namespace. One that begins with a file's name, such as ``# my_model.py``, is written
to that file, too, so that commands can import it; a block of settings (TOML) is always written to the file
that it names, and must be valid. Of shell blocks the `piecewise` commands are run, in this process, and the
lines of a ``text`` block must all be in what the block before it printed, where ``…`` stands for anything.
A small random Llama stands in for each model that would be downloaded. A block below a line
``*Not run by the tests: …*`` is left out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from piecewise import PiecewiseConfig
from piecewise.tools import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"# (\w+\.(?:py|toml))\n")
_MARK = re.compile(r"\*Not run by the tests: .+\*\s*$")
# What a shell block may hold beside commands of `piecewise`; the tests' own environment is made by these.
_SET_UP = ("pip install ", "make ", "python examples/")


@dataclass(frozen=True)
class Block:
    """A fenced block, its language, and where its text begins."""

    language: str
    text: str
    line: int
    is_run: bool

    @property
    def file_name(self) -> str | None:
        found = _NAME.match(self.text)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that name a language."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        is_run = _MARK.search(text, 0, match.start()) is None
        found.append(Block(match[1], match[2], text.count("\n", 0, match.start(2)), is_run))
    return found


def small_llama(*args: Any, **kwargs: Any) -> transformers.PreTrainedModel:
    """Makes what `from_pretrained` would give: same class, fewer and smaller layers, random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(kwargs.get("dtype"))


@dataclass
class Reader:
    """Runs blocks in the working directory, and holds what they have defined and printed."""

    page: Path
    names: dict[str, Any] = field(default_factory=dict)
    printed: str = ""
    ran: list[str] = field(default_factory=list)

    def run(self, block: Block) -> None:
        getattr(self, f"_{block.language}")(block)
        if block.language != "text":
            self.ran.append(block.language)

    def _python(self, block: Block) -> None:
        if block.file_name:
            Path(block.file_name).write_text(block.text)
        # The page's own line numbers, in tracebacks and for Dynamo.
        source = block.text if block.file_name else "\n" * block.line + block.text
        with self._printing():
            exec(compile(source, Path(block.file_name or self.page).resolve(), "exec"), self.names)

    def _toml(self, block: Block) -> None:
        assert block.file_name, f"{self.page.name}:{block.line}: settings without a file's name"
        Path(block.file_name).write_text(block.text)
        if block.file_name != "pyproject.toml":
            PiecewiseConfig.from_toml(block.file_name)

    def _sh(self, block: Block) -> None:
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if line.startswith(_SET_UP) or not words:
                continue
            variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
            command = words[len(variables) :]
            assert command[0] == "piecewise", f"{self.page.name}:{block.line}: {line!r} is not run"
            self._piecewise(command[1:], variables, line)

    def _piecewise(self, arguments: list[str], variables: dict[str, str], line: str) -> None:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            with self._printing():
                code = cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
        assert not code, f"{line!r} ends with {code}:\n{self.printed}"

    def _text(self, block: Block) -> None:
        rest = _spaced(self.printed)
        for line in filter(str.strip, block.text.splitlines()):
            pattern = ".*?".join(re.escape(_spaced(part)) for part in line.strip().split("…"))
            found = re.search(pattern, rest)
            place = f"{self.page.name}:{block.line}"
            assert found, f"{place}: {line!r} was not printed, in this order:\n{self.printed}"
            rest = rest[found.end() :]

    @contextlib.contextmanager
    def _printing(self) -> Any:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                yield
        finally:
            self.printed = out.getvalue()


def _spaced(text: str) -> str:
    return re.sub(r"[ \t]+", " ", text)
