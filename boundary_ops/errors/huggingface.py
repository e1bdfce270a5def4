"""Lists which transformers models cannot be attached, and what an attached one does not do."""

from boundary_ops.errors import BoundaryOpError

_OWN_ATTENTION = "use this model with its own attention: detach it, or do not attach it"
_OWN_OP = (
    "do not attach this model; call an op of your own, declared with boundary_ops.define, in its attention: "
    "the rest is graphed as for any other model"
)


class NotAModel(BoundaryOpError):
    what, expected = "argument 'model'", "a transformers model"
    rule = "attach and detach change a model in place, and for_model reads its layers"
    fix = "pass the model itself, before piecewise.compile"


class NotACache(BoundaryOpError):
    what, expected = "{call}", "a PagedKVCache as 'cache'"
    rule = "the op keeps K and V in a paged cache"
    fix = "boundary_ops.PagedKVCache.for_model(model, num_tokens=...)"


class UnsupportedModel(BoundaryOpError):
    """A model has a part that the paged attention op cannot serve."""

    what = "{call}{place}"
    rule = "the op is causal self attention over a paged cache, the only state of each layer of one decoder"
    fix = _OWN_OP


class SeveralDecoders(BoundaryOpError):
    what, expected = "{call}", "one stack of attention layers"
    rule = "a cache serves one decoder"
    fix = _OWN_OP


class LayersDiffer(BoundaryOpError):
    what, expected = "{call}: {size} of '{path}'", "{ours}, as of '{first}'"
    rule = "the pools of all layers of a cache have the same shape, dtype and device"
    fix = _OWN_OP


class ValuesDiffer(BoundaryOpError):
    what, expected = "{call}: '{path}' ({layer})", "keys and values of one head size"
    rule = "no PagedKVCache fits: a cache and the paged op have one head size, for K and for V"
    fix = _OWN_OP


class CacheMismatch(BoundaryOpError):
    """A cache has other sizes, another dtype or another device than a model's K and V."""

    rule = "the cache holds each layer's K and V as the model computes them"
    fix = "boundary_ops.PagedKVCache.for_model(model, num_tokens=...) makes a cache that fits"


class PoolingHead(BoundaryOpError):
    what = "attach({model}, cache)"
    expected = (
        "the decoder alone, or a head that looks at each token alone ({heads}), or transformers' own "
        "ForSequenceClassification"
    )
    rule = "packed sequences are one row, so a head that pools would make one result of all of them"
    fix = "make the model without its pooler (add_pooling_layer=False)"


class AlreadyAttached(BoundaryOpError):
    what = "attach({model}, cache): the model is attached already"
    rule = "a model has one paged cache at a time"
    fix = "call boundary_ops.huggingface.detach(model) first"


class NotAttached(BoundaryOpError):
    what = "detach({model}): the model is not attached"
    rule = "detach undoes one attach"
    fix = "call it once, with the model that attach returned"


class ForwardReplaced(BoundaryOpError):
    what, expected = "detach({model}): forward of {owner} was replaced", "the forward that attach put there"
    rule = "changes are undone in the reverse order"
    fix = "undo the later change first, for example with piecewise.disable(model)"


class NameWithoutAttach(BoundaryOpError):
    what, expected, got = "attention of {layer}", "a module that attach has given its pools", "one without"
    rule = "the attention implementation '{name}' is set by attach alone"
    fix = "call boundary_ops.huggingface.attach(model, cache) instead of naming the implementation"


class SecondCache(BoundaryOpError):
    what = "model input '{name}'"
    expected, got = "none: K and V live in the attached PagedKVCache", "another cache"
    rule = "an attached model has one cache; a second one would be filled and never read"
    fix = "leave it out: the PrefillBatch knows the context. For generate(), detach the model first"


class NotPacked(BoundaryOpError):
    what, expected = "{place}", "one row of packed tokens, [1, num_tokens]"
    rule = "sequences are packed one after the other, not stacked and padded"
    fix = "ids = batch.pack(prompts), and call the model inside `with batch:`"


class MaskInTrace(BoundaryOpError):
    what, expected, got = "model input 'attention_mask'", "none while the model is traced", "a mask"
    rule = "a trace cannot look at a mask's values, and packed input needs no mask"
    fix = "leave attention_mask out"


class MaskHides(BoundaryOpError):
    what, expected = "model input 'attention_mask'", "none, or [1, num_tokens] of ones"
    rule = "attention is causal within each packed sequence; a mask cannot change that"
    fix = "pack the sequences without padding: batch.pack(prompts), and leave attention_mask out"


class MaskFunction(BoundaryOpError):
    what = "attention mask"
    expected, got = "causal, or causal within a sliding window", "a mask function of the model's own"
    rule = "the op has no other masks"
    fix = _OWN_ATTENTION


class OptionRefused(BoundaryOpError):
    """A model asks of its attention what the op does not do."""

    what = "{path}: attention argument '{name}'"
    rule = "what a model asks of its attention is honoured or refused, never dropped: {reason}"
    fix = _OWN_ATTENTION


class CalledTwice(BoundaryOpError):
    what = "{path}: attention"
    expected = "one call in a step"
    got = "a second one, as of a layer that is looped over, or that attends twice"
    rule = "the pages of a layer hold one K and V for each token"
    fix = _OWN_OP


class OtherKeys(BoundaryOpError):
    what, expected, got = "{path}: attention input 'key'", "as many rows as 'query'", "another number"
    rule = "the model passes the step's new K and V; older ones come from the pages"
    fix = "pass no cache to the model, and use no cross attention"


class NoGradient(BoundaryOpError):
    what, expected, got = "op 'piecewise::attn_inplace': backward", "a forward pass alone", "a backward pass"
    rule = "the op is for inference and has no gradient"
    fix = "call detach(model) to train, or run the forward under torch.no_grad()"


class GenerateRefused(BoundaryOpError):
    what, expected, got = "{model}.generate", "prefill calls of the model itself", "generate()"
    rule = "an attached model runs prefill steps; generate() brings a cache and masks of its own"
    fix = "call the model itself, with batch.pack(prompts) and batch.positions, or detach(model) first"


class LabelsRefused(BoundaryOpError):
    what, expected, got = "model input 'labels'", "none: an attached model runs prefill steps", "labels"
    rule = "a loss over packed sequences is not what the unpacked model gives"
    fix = "compute the loss from the scores, one row per sequence of the batch"
