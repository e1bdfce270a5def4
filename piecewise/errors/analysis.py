"""Lists the refusals of a traced graph: of its token count, and of ops that no cut can serve."""

from __future__ import annotations

from runners.errors import SplitError, TokenDimError

_DECLARE = 'declare it: boundary_ops.define(..., token_args={{"q": 0, "out": 0}})'
_TOKEN_DIM = "the token dim is the symbol that the boundary ops' arguments carry"


class NoBoundaryOp(TokenDimError):
    """Forward calls no boundary op, so that nothing says which dim is the tokens'."""

    what = "the traced model calls no boundary op"
    expected = "at least one registered in-place attention/KV op"
    got = "none"
    rule = "graphs are cut at boundary ops"
    fix = (
        "declare the op with boundary_ops.define or boundary_ops.register, and call it in forward; "
        "for a transformers model use boundary_ops.huggingface.attach(model, cache)"
    )


class NoAnchorInput(TokenDimError):
    """The token count is computed from sizes of inputs, and is none of them."""

    what = "no input has a dim of exactly the token count '{symbol}'"
    rule = "the count is read from an input's shape on each call"
    fix = "pass one tensor with a dim of num_tokens"


class NoCommonDim(TokenDimError):
    """The arguments of a boundary op carry symbols, and none in common."""

    what = "the arguments of {where} have no symbolic dim in common"
    expected = "one token count in all of them"
    got = "inputs: {inputs}"
    rule = _TOKEN_DIM
    fix = _DECLARE


class FixedTokenCount(TokenDimError):
    """The trace has fixed the token count at the example's size."""

    what = "the arguments of {where} have no symbolic dim"
    expected = "a token count that stays symbolic"
    got = "sizes fixed by the example; inputs: {inputs}{fixed}"
    rule = "the token count must be traced as a symbol"
    fix = (
        "pass an example of two or more tokens, and remove what fixes the count (int(n), log(n), "
        "x.unbind(0), a slice of constant length){ints}"
    )


class SeveralDims(TokenDimError):
    """The arguments of a boundary op carry several symbols, each of which may be the token count."""

    what = "the arguments of {where} carry several symbolic dims ({names})"
    expected = "one token count"
    got = "inputs: {inputs}"
    rule = _TOKEN_DIM
    fix = _DECLARE + "; a [batch, seq] pair must be packed to [1, n]"


class NestedTuple(SplitError):
    """A nested graph's result is passed on as a tuple."""

    what = "nested graph '{name}' is used as a whole tuple"
    rule = "values that cross a segment border are tensors and numbers"
    fix = "unpack its result in forward"


class WritesTwice(SplitError):
    """Forward calls an attention op twice on the same pages, as where it loops over its layers."""

    what = "forward calls '{op}' at '{place}'"
    expected = "pages of its own for each call"
    got = "pages that an earlier call of the same forward writes"
    rule = "the pages of a layer hold one K and V for each token of a step"
    fix = (
        "in a model of your own give each call a layer of the cache; else do not attach the model, and call "
        "an op of your own, declared with boundary_ops.define, in its attention"
    )


class ReshapesInPlace(SplitError):
    """Forward changes the shape or the strides of a tensor in place."""

    what = "forward calls '{name}'{where}"
    rule = "a tensor keeps its shape and strides while graphs are cut out of forward"
    fix = "use the form without the trailing underscore, '{twin}'"
