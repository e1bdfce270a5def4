"""Serves heads of transformers models over packed tokens: those that see tokens alone, and one that pools.

Packed sequences are one row, so a head that picks the last token of each row, or averages over it, would make
one result of all of them. transformers' `GenericForSequenceClassification`, which most decoders share, is
served: its scores are made for every token as ever, and `last_tokens` picks one row per sequence of the
running step. Any other head must be known to look at each token alone, or it is refused by name.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from boundary_ops.errors import refuse
from boundary_ops.errors.huggingface import LabelsRefused, PoolingHead
from boundary_ops.errors.step import WrongNumTokens
from boundary_ops.step.batch import PrefillBatch

__all__ = ["find_pooling_head", "pooled"]

NAME = "piecewise::last_tokens"
# By the class that defines forward: a subclass with a forward of its own may do anything.
TOKEN_WISE = (
    "ForCausalLM",
    "LMHeadModel",
    "ForConditionalGeneration",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "last_tokens(Tensor rows, Tensor? ids, int? pad_token_id) -> Tensor",
    tags=(torch.Tag.dynamic_output_shape,),
)


def _last_tokens(rows: torch.Tensor, ids: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor:
    """Picks each sequence's last token that is no padding, or its first where all are, as transformers does.

    rows are [1, num_tokens, ...], ids int64 [1, num_tokens]; without ids or pad_token_id every token counts.
    """
    batch, num_tokens = PrefillBatch.peek(), rows.shape[1]
    if batch is None or batch.num_tokens != num_tokens:
        got = "none" if batch is None else f"one of {batch.num_tokens}"
        raise WrongNumTokens(f"op '{NAME}'", expected=f"a running batch of {num_tokens} tokens", got=got)
    last = batch.last_token_indices
    if ids is not None and pad_token_id is not None and num_tokens:
        places = torch.arange(num_tokens, device=rows.device)
        counted = torch.where(ids[0] != pad_token_id, places, -1)
        last = torch.maximum(counted.cummax(0).values[last], batch.cu_seqlens_q[:-1].to(torch.int64))
    return rows[0, last]


def _last_tokens_on_fakes(
    rows: torch.Tensor, ids: torch.Tensor | None, pad_token_id: int | None
) -> torch.Tensor:
    return rows.new_empty((torch.library.get_ctx().new_dynamic_size(), *rows.shape[2:]))


# Attached models are for inference, so no gradient is recorded behind autograd's back.
_library.impl("last_tokens", torch.no_grad()(_last_tokens), "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _last_tokens_on_fakes, lib=_library)


def find_pooling_head(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """Returns the pooling head around the decoder, or None; raises BoundaryOpError for unknown pooling."""
    path = next(path for path, module in model.named_modules() if module is decoder)
    names = path.split(".") if path else []
    around = [model.get_submodule(".".join(names[:depth])) for depth in range(len(names))]
    found = None
    for module in (*around, decoder):
        owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
        if vars(owner)["forward"] is _generic_forward():
            found = module
        elif isinstance(getattr(module, "pooler", None), nn.Module):
            _refuse_head(model, f"{type(module).__name__} with a 'pooler'", path)
        elif module is not decoder and not _is_token_wise(module, owner):
            _refuse_head(model, f"{type(module).__name__}, whose forward is {owner.__name__}'s own", path)
    return found


def _is_token_wise(module: Any, owner: type) -> bool:
    name = owner.__name__
    is_base = owner.__module__.startswith("transformers.") and name.endswith("Model")
    # Containers of the decoder have no forward; adapters hand on what the model that they wrap returns.
    is_passive = isinstance(module, (nn.ModuleList, nn.ModuleDict)) or hasattr(module, "peft_config")
    return name.endswith(TOKEN_WISE) or (is_base and not name.endswith("DoubleHeadsModel")) or is_passive


def _refuse_head(model: nn.Module, got: str, path: str) -> None:
    how = "batch.last_token_indices or batch.cu_seqlens_q"
    fix = f"attach the decoder, model.{path}, and pool its last_hidden_state by {how}" if path else None
    raise PoolingHead(model=type(model).__name__, heads=", ".join(TOKEN_WISE), got=got, fix=fix)


@functools.cache
def _generic_forward() -> Any:
    try:
        from transformers.modeling_layers import GenericForSequenceClassification
    except ImportError:
        return None
    return GenericForSequenceClassification.forward


def pooled(inner_forward: Any) -> Any:
    """Makes a pooling head's forward that gives one row of scores per sequence of the running step."""
    function = getattr(inner_forward, "__func__", inner_forward)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = tuple(each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import SequenceClassifierOutputWithPast

        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if arguments.pop("labels", None) is not None:
            refuse(LabelsRefused)
        is_dict = arguments.pop("return_dict", None)
        outputs = getattr(self, self.base_model_prefix)(**arguments)
        scores = self.score(outputs.last_hidden_state)
        pad_token_id = self.config.get_text_config().pad_token_id
        result = SequenceClassifierOutputWithPast(
            logits=torch.ops.piecewise.last_tokens(scores, arguments.get("input_ids"), pad_token_id),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
        is_dict = self.config.return_dict if is_dict is None else is_dict
        return result if is_dict else result.to_tuple()

    forward._paged_guard = True  # type: ignore[attr-defined]
    return forward
