"""[I3] Small attached mixtures of experts of random sizes: every bucket is captured, and results are eager's.

The rows of all tokens are sorted by expert, and an example may hide it: its tokens may all choose one expert.
So examples have two to five tokens, often the same one, and other tokens are called.

A router turns a last bit into another expert where two of its scores nearly tie, and a bucket's matmul rounds
otherwise than that of fewer rows: such a difference is not one of padding. So the model's own call tells by
how much the chosen experts of each row win. Tokens are drawn again where that is below `TIE` for any row: a
hundred times what float32 rounds, and met in one row of thousands. In bfloat16, drawn on a GPU alone, ties
are common. There a model has one layer, so that a row's expert reaches no other row, and the rows that tie
are left out of the comparison.

`PIECEWISE_EXPERTS_EXAMPLES` sets how many models are drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import traceback
import warnings
from typing import Any

import pytest
import torch
from toy_models import assert_same, op_poison, overwrite_static_memory, padding_of_row, put_back, state_of

import boundary_ops
import piecewise
from boundary_ops import PagedKVCache, PrefillBatch

transformers = pytest.importorskip("transformers")

from families import NAME, attend  # noqa: E402

# Taken out of the environment: a name with this prefix that is no setting is an error in `PiecewiseConfig`.
NUM_EXAMPLES = int(os.environ.pop("PIECEWISE_EXPERTS_EXAMPLES", "5"))
VOCAB = 61
TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.06}
# The least gap, between the last chosen score and the best of the others, of a row that is compared.
TIE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
MAX_DRAWS = 20
FAMILIES = ("GptOss", "Mixtral", "Qwen3Moe")
RULE_WARNING = "piecewise: the rule of"


@dataclasses.dataclass(frozen=True)
class Case:
    """A random mixture of experts, how it is captured, and which calls are compared.

    Attributes:
        calls: the lengths of the sequences that are packed into each call.
        hides: whether all tokens of the example are the same.
    """

    family: str
    num_experts: int
    top_k: int
    hidden: int
    expert_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    example: int
    hides: bool
    buckets: tuple[int, ...]
    calls: tuple[tuple[int, ...], ...]
    seed: int
    dtype: torch.dtype = torch.float32

    @property
    def is_attached(self) -> bool:
        return self.family in FAMILIES

    def settings(self) -> dict[str, Any]:
        """The arguments of the config's class."""
        found: dict[str, Any] = dict(
            vocab_size=VOCAB, hidden_size=self.hidden, intermediate_size=self.expert_size,
            num_hidden_layers=self.num_layers, num_attention_heads=self.num_heads, head_dim=8,
            num_key_value_heads=self.num_kv_heads, num_experts_per_tok=self.top_k,
            max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        names = dict(Qwen3Moe="num_experts", DeepseekV3="n_routed_experts")
        found[names.get(self.family, "num_local_experts")] = self.num_experts
        if self.family in ("Qwen3Moe", "DeepseekV3"):
            found["moe_intermediate_size"] = self.expert_size
        if self.family == "GptOss":
            found["sliding_window"] = 4
        if self.family == "DeepseekV3":
            del found["head_dim"]
            found |= dict(
                q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
                n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=0,
            )  # fmt: skip
        return found

    def model(self, device: str) -> torch.nn.Module:
        """Makes the model; all its weights are random, those that choose among the experts included."""
        config = getattr(transformers, f"{self.family}Config")(**self.settings())
        config._attn_implementation = "eager" if self.is_attached else NAME
        torch.manual_seed(self.seed)
        model: torch.nn.Module = getattr(transformers, f"{self.family}ForCausalLM")(config)
        model = model.eval().requires_grad_(False)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                torch.nn.init.uniform_(tensor, 0.5, 1.5)
            elif "inv_freq" not in name:
                torch.nn.init.normal_(tensor, std=0.3)
        return model.to(device=device, dtype=self.dtype)


def draw(chance: random.Random, device: str = "cpu") -> Case:
    """Draws a case."""
    num_experts = chance.randint(2, 8)
    is_rounded = device != "cpu" and chance.random() < 0.5
    buckets = tuple(sorted(chance.sample(range(2, 25), chance.randint(2, 3))))
    edges = sorted({max(bucket + d, 1) for bucket in buckets for d in (-1, 0, 1)})
    calls = []
    for count in chance.sample(edges, min(4, len(edges))) + [chance.randint(1, buckets[-1])]:
        cut = chance.randint(0, count - 1)
        calls.append((cut, count - cut) if cut else (count,))
    num_kv_heads = chance.choice([1, 2])
    return Case(
        family=chance.choice(FAMILIES),
        num_experts=num_experts,
        top_k=chance.randint(1, min(num_experts, 4)),
        hidden=chance.choice([16, 32, 48]),
        expert_size=chance.choice([16, 32]),
        num_layers=1 if is_rounded else chance.choice([1, 1, 2]),
        num_heads=num_kv_heads * chance.choice([1, 2]),
        num_kv_heads=num_kv_heads,
        example=chance.choice([2, 3, 5]),
        hides=chance.random() < 0.5,
        buckets=buckets,
        calls=tuple(calls),
        seed=chance.randrange(10**6),
        dtype=torch.bfloat16 if is_rounded else torch.float32,
    )


class Session:
    """One case, captured and called; counts what it has done."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        self.case, self.device, self.num_calls = case, device, 0
        self.model, self.cache = case.model(device), None
        if case.is_attached:
            self.cache = PagedKVCache(
                num_layers=case.num_layers, num_blocks=32, block_size=4, num_kv_heads=case.num_kv_heads,
                head_dim=8, dtype=case.dtype, device=device, attention_backend="torch",
            )  # fmt: skip
            boundary_ops.huggingface.attach(self.model, self.cache)
        self.graphed = piecewise.compile(self.model, buckets=case.buckets, progress=False)
        self.generator = torch.Generator().manual_seed(case.seed)

    def run(self) -> None:
        """Captures with the example, checks that no bucket is lost, and compares all calls."""
        case = self.case
        ids = self.tokens(case.example)
        ids = torch.full_like(ids, 7) if case.hides else ids
        report = self.graphed.capture(**self.arguments(ids))
        assert report.ok and report.captured == case.buckets, report
        with op_poison(float("nan")), padding_of_row(1):
            for number, lengths in enumerate(case.calls):
                self.call(lengths, names=[f"{number}.{at}" for at in range(len(lengths))])
        within = sum(sum(lengths) <= max(case.buckets) for lengths in case.calls)
        assert self.graphed.stats.replays == within, self.graphed.stats

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randint(3, VOCAB, (1, count), generator=self.generator).to(self.device)

    def arguments(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> dict[str, Any]:
        if not self.case.is_attached:
            return dict(input_ids=ids, use_cache=False)
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return dict(input_ids=ids, position_ids=positions)

    def call(self, lengths: tuple[int, ...], names: list[str]) -> None:
        """Calls the model and its graphs from the same state, and compares logits, caches and weights."""
        before, how = state_of(self.model), dict(exact=False, tolerance=TOLERANCE[self.case.dtype])
        batch = PrefillBatch.build(self.cache, names, lengths) if self.cache is not None else None
        with batch if batch is not None else contextlib.nullcontext():
            arguments, want, is_clear = self.drawn(sum(lengths), batch)
            after = state_of(self.model)
            put_back(before)
            overwrite_static_memory(self.graphed)
            got = self.graphed(**arguments).logits
        self.num_calls += 1
        where = f"{lengths} of {self.case}"
        assert_same(got[0, is_clear], want[0, is_clear], where=where, **how)
        if not is_clear.all():  # the keys and values of those rows are the same, but for rounding
            assert self.case.num_layers == 1, where
        for name, (tensor, _) in before.items():
            assert_same(tensor.detach(), after[name][1], where=f"{where}, state {name}", **how)
        for name in names if self.cache is not None else ():
            self.cache.free(name)

    def drawn(self, count: int, batch: PrefillBatch | None) -> tuple[dict[str, Any], Any, torch.Tensor]:
        """The arguments of a call, the model's own logits, and which rows have no near tie in a router."""
        case, before = self.case, state_of(self.model)
        for _ in range(MAX_DRAWS):
            arguments = self.arguments(self.tokens(count), batch.positions if batch is not None else None)
            put_back(before)
            with _router_gaps(self.model, case.top_k) as gaps:
                want = self.model(**arguments).logits
            assert len(gaps) == case.num_layers
            is_clear = torch.stack(gaps).amin(0) > TIE[case.dtype]
            if is_clear.all() or case.dtype is torch.bfloat16:
                return arguments, want, is_clear
        raise AssertionError(f"no call of {count} tokens without a near tie: {case}")


@contextlib.contextmanager
def _router_gaps(model, top_k):
    """Collects by how much the chosen experts of each row win, once for each layer, while the block runs."""
    gaps: list[torch.Tensor] = []

    def note(module, inputs):
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        bias, correction = (getattr(module, name, None) for name in ("bias", "e_score_correction_bias"))
        scores = torch.nn.functional.linear(rows, module.weight, bias).float()
        if correction is not None:
            scores = scores.sigmoid() + correction
        scores = torch.nn.functional.pad(scores.sort(-1, descending=True)[0], (0, 1), value=-torch.inf)
        gaps.append(scores[:, top_k - 1] - scores[:, top_k])

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("router")]
    hooks = [router.register_forward_pre_hook(note) for router in routers]
    try:
        yield gaps
    finally:
        for hook in hooks:
            hook.remove()


def run_examples(examples: int, seed: int, device: str) -> dict[str, Any]:
    """Draws so many models, and returns how many calls were made and replayed, and a text for each fault."""
    chance = random.Random(seed)
    counts = {"examples": 0, "calls": 0, "replays": 0}
    faults: list[str] = []
    for _ in range(examples):
        case = draw(chance, device)
        counts["examples"] += 1
        session = None
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.filterwarnings("error", message=RULE_WARNING)
                session = Session(case, device)
                session.run()
        except Exception:
            faults.append(f"{case}\n{traceback.format_exc()[-3000:]}")
        if session is not None:
            counts["calls"] += session.num_calls
            counts["replays"] += session.graphed.stats.replays
    return {**counts, "faults": faults}


def test_I3_attached_experts_of_random_sizes_equal_eager():
    found = run_examples(NUM_EXAMPLES, seed=0, device="cpu")
    assert not found["faults"], "\n".join(found["faults"])
    assert found["examples"] == NUM_EXAMPLES and found["replays"] >= 3 * NUM_EXAMPLES


@pytest.mark.parametrize(("example", "seed"), [(2, 0), (2, 1), (3, 2), (3, 3)])
def test_I3_one_expert_of_four_that_a_random_bias_corrects(example, seed):
    """DeepSeek V3 scatters its choices among the experts, and few tokens of an example may all choose one."""
    case = Case(
        family="DeepseekV3", num_experts=4, top_k=1, hidden=32, expert_size=16, num_layers=1, num_heads=2,
        num_kv_heads=2, example=example, hides=seed % 2 == 1, buckets=(4, 8),
        calls=((2,), (3,), (4,), (7,), (8,)), seed=seed,
    )  # fmt: skip
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=RULE_WARNING)
        session = Session(case)
        bias = next(b for name, b in session.model.named_buffers() if name.endswith("correction_bias"))
        assert bias.abs().amin() > 0
        session.run()


def test_the_boundary_op_of_these_models_is_registered():
    assert boundary_ops.lookup(attend) is not None
