"""Lists the refusals of a traced graph: of its token count, and of ops that no cut can serve."""

from runners.errors import SplitError, TokenDimError

_DECLARE = 'declare it: boundary_ops.define(..., token_args={{"q": 0, "out": 0}})'
_TOKEN_DIM = "the token dim is the symbol that the boundary ops' arguments carry"


class NoBoundaryOp(TokenDimError):
    what = "the traced model calls no boundary op"
    expected, got = "at least one registered in-place attention/KV op", "none"
    rule = "graphs are cut at boundary ops"
    fix = (
        "declare the op with boundary_ops.define or boundary_ops.register, and call it in forward; "
        "for a transformers model use boundary_ops.huggingface.attach(model, cache)"
    )


class NoAnchorInput(TokenDimError):
    what = "no input has a dim of exactly the token count '{symbol}'"
    rule = "the count is read from an input's shape on each call"
    fix = "pass one tensor with a dim of num_tokens"


class NoCommonDim(TokenDimError):
    what = "the arguments of {where} have no symbolic dim in common"
    expected, got = "one token count in all of them", "inputs: {inputs}"
    rule = _TOKEN_DIM
    fix = _DECLARE


class FixedTokenCount(TokenDimError):
    what = "the arguments of {where} have no symbolic dim"
    expected, got = "a token count that stays symbolic", "sizes fixed by the example; inputs: {inputs}{fixed}"
    rule = "the token count must be traced as a symbol"
    fix = (
        "pass an example of two or more tokens, and remove what fixes the count (int(n), log(n), "
        "x.unbind(0), a slice of constant length){ints}"
    )


class SeveralDims(TokenDimError):
    what = "the arguments of {where} carry several symbolic dims ({names})"
    expected, got = "one token count", "inputs: {inputs}"
    rule = _TOKEN_DIM
    fix = _DECLARE + "; a [batch, seq] pair must be packed to [1, n]"


class NestedTuple(SplitError):
    what = "nested graph '{name}' is used as a whole tuple"
    rule = "values that cross a segment border are tensors and numbers"
    fix = "unpack its result in forward"


class WritesTwice(SplitError):
    what = "forward calls '{op}' at '{place}'"
    expected, got = "pages of its own for each call", "pages that an earlier call of the same forward writes"
    rule = "the pages of a layer hold one K and V for each token of a step"
    fix = (
        "in a model of your own give each call a layer of the cache; else do not attach the model, and call "
        "an op of your own, declared with boundary_ops.define, in its attention"
    )


class ReshapesInPlace(SplitError):
    what = "forward calls '{name}'{where}"
    rule = "a tensor keeps its shape and strides while graphs are cut out of forward"
    fix = "use the form without the trailing underscore, '{twin}'"
