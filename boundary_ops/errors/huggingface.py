"""Lists which transformers models cannot be attached, and what an attached one does not do."""

from __future__ import annotations

from boundary_ops.errors import BoundaryOpError

_OWN_ATTENTION = "use this model with its own attention: detach it, or do not attach it"
_OWN_OP = (
    "do not attach this model; call an op of your own, declared with boundary_ops.define, in its attention: "
    "the rest is graphed as for any other model"
)


class NotAModel(BoundaryOpError):
    """A model was asked for, and something else than a module was given."""

    what = "argument 'model'"
    expected = "a transformers model"
    rule = "attach and detach change a model in place, and for_model reads its layers"
    fix = "pass the model itself, before piecewise.compile"


class NotACache(BoundaryOpError):
    """`attach` was given something else than a cache."""

    what = "{call}"
    expected = "a PagedKVCache as 'cache'"
    rule = "the op keeps K and V in a paged cache"
    fix = "boundary_ops.PagedKVCache.for_model(model, num_tokens=...)"


class UnsupportedModel(BoundaryOpError):
    """A model has a part that the paged attention op cannot serve."""

    what = "{call}{place}"
    rule = "the op is causal self attention over a paged cache, the only state of each layer of one decoder"
    fix = _OWN_OP


class SeveralDecoders(BoundaryOpError):
    """A model has several stacks of layers with attention."""

    what = "{call}"
    expected = "one stack of attention layers"
    rule = "a cache serves one decoder"
    fix = _OWN_OP


class LayersDiffer(BoundaryOpError):
    """The layers of a model make K and V of different sizes, dtypes or devices."""

    what = "{call}: {size} of '{path}'"
    expected = "{ours}, as of '{first}'"
    rule = "the pools of all layers of a cache have the same shape, dtype and device"
    fix = _OWN_OP


class ValuesDiffer(BoundaryOpError):
    """A model's values have another head size than its keys, as those of DeepSeek (MLA) have."""

    what = "{call}: '{path}' ({layer})"
    expected = "keys and values of one head size"
    rule = "no PagedKVCache fits: a cache and the paged op have one head size, for K and for V"
    fix = _OWN_OP


class CacheMismatch(BoundaryOpError):
    """A cache has other sizes, another dtype or another device than a model's K and V."""

    rule = "the cache holds each layer's K and V as the model computes them"
    fix = "boundary_ops.PagedKVCache.for_model(model, num_tokens=...) makes a cache that fits"


class PoolingHead(BoundaryOpError):
    """A model has a head that may pool in a way of its own."""

    what = "attach({model}, cache)"
    expected = (
        "the decoder alone, or a head that looks at each token alone ({heads}), or transformers' own "
        "ForSequenceClassification"
    )
    rule = "packed sequences are one row, so a head that pools would make one result of all of them"
    fix = "make the model without its pooler (add_pooling_layer=False)"


class AlreadyAttached(BoundaryOpError):
    """A model is attached a second time."""

    what = "attach({model}, cache): the model is attached already"
    rule = "a model has one paged cache at a time"
    fix = "call boundary_ops.huggingface.detach(model) first"


class NotAttached(BoundaryOpError):
    """`detach` was given a model that is not attached."""

    what = "detach({model}): the model is not attached"
    rule = "detach undoes one attach"
    fix = "call it once, with the model that attach returned"


class ForwardReplaced(BoundaryOpError):
    """Somebody has replaced the forward that `attach` put in place."""

    what = "detach({model}): forward of {owner} was replaced"
    expected = "the forward that attach put there"
    rule = "changes are undone in the reverse order"
    fix = "undo the later change first, for example with piecewise.disable(model)"


class NameWithoutAttach(BoundaryOpError):
    """A model names the paged attention without having been attached."""

    what = "attention of {layer}"
    expected = "a module that attach has given its pools"
    got = "one without"
    rule = "the attention implementation '{name}' is set by attach alone"
    fix = "call boundary_ops.huggingface.attach(model, cache) instead of naming the implementation"


class SecondCache(BoundaryOpError):
    """An attached model is called with a cache of its own kind."""

    what = "model input '{name}'"
    expected = "none: K and V live in the attached PagedKVCache"
    got = "another cache"
    rule = "an attached model has one cache; a second one would be filled and never read"
    fix = "leave it out: the PrefillBatch knows the context. For generate(), detach the model first"


class NotPacked(BoundaryOpError):
    """An attached model is called with a batch dimension."""

    what = "{place}"
    expected = "one row of packed tokens, [1, num_tokens]"
    rule = "sequences are packed one after the other, not stacked and padded"
    fix = "ids = batch.pack(prompts), and call the model inside `with batch:`"


class MaskInTrace(BoundaryOpError):
    """A model is traced with a mask."""

    what = "model input 'attention_mask'"
    expected = "none while the model is traced"
    got = "a mask"
    rule = "a trace cannot look at a mask's values, and packed input needs no mask"
    fix = "leave attention_mask out"


class MaskHides(BoundaryOpError):
    """A mask hides something that causal attention shows."""

    what = "model input 'attention_mask'"
    expected = "none, or [1, num_tokens] of ones"
    rule = "attention is causal within each packed sequence; a mask cannot change that"
    fix = "pack the sequences without padding: batch.pack(prompts), and leave attention_mask out"


class MaskFunction(BoundaryOpError):
    """A model makes its mask by a function of its own."""

    what = "attention mask"
    expected = "causal, or causal within a sliding window"
    got = "a mask function of the model's own"
    rule = "the op has no other masks"
    fix = _OWN_ATTENTION


class OptionRefused(BoundaryOpError):
    """A model asks of its attention what the op does not do."""

    what = "{path}: attention argument '{name}'"
    rule = "what a model asks of its attention is honoured or refused, never dropped: {reason}"
    fix = _OWN_ATTENTION


class CalledTwice(BoundaryOpError):
    """A model calls the attention of one layer several times in a step."""

    what = "{path}: attention"
    expected = "one call in a step"
    got = "a second one, as of a layer that is looped over, or that attends twice"
    rule = "the pages of a layer hold one K and V for each token"
    fix = _OWN_OP


class OtherKeys(BoundaryOpError):
    """A model passes keys of other tokens than the step's."""

    what = "{path}: attention input 'key'"
    expected = "as many rows as 'query'"
    got = "another number"
    rule = "the model passes the step's new K and V; older ones come from the pages"
    fix = "pass no cache to the model, and use no cross attention"


class NoGradient(BoundaryOpError):
    """A gradient of an attached model's result is asked for."""

    what = "op 'piecewise::attn_inplace': backward"
    expected = "a forward pass alone"
    got = "a backward pass"
    rule = "the op is for inference and has no gradient"
    fix = "call detach(model) to train, or run the forward under torch.no_grad()"


class GenerateRefused(BoundaryOpError):
    """`generate` of an attached model is called."""

    what = "{model}.generate"
    expected = "prefill calls of the model itself"
    got = "generate()"
    rule = "an attached model runs prefill steps; generate() brings a cache and masks of its own"
    fix = "call the model itself, with batch.pack(prompts) and batch.positions, or detach(model) first"


class LabelsRefused(BoundaryOpError):
    """A head over packed sequences is asked for a loss."""

    what = "model input 'labels'"
    expected = "none: an attached model runs prefill steps"
    got = "labels"
    rule = "a loss over packed sequences is not what the unpacked model gives"
    fix = "compute the loss from the scores, one row per sequence of the batch"
