"""Lists what the arguments of the attention ops, and the buffers of captured ones, cannot be."""

from boundary_ops.errors import BoundaryOpError


class WrongArgument(BoundaryOpError):
    """An argument of the attention op does not fit the others."""

    what = "op 'piecewise::attn_inplace', argument '{argument}'"
    rule = "q, k, v, out and the layer's pools agree in heads, head_dim, dtype and device"
    fix = "pass this layer's tensors, and make the cache with the model's sizes, dtype and device"


class WrongMetadata(BoundaryOpError):
    """Metadata of the captured attention op do not fit each other or the rows."""

    what = "op 'piecewise::attn_captured', argument '{argument}'"
    rule = "a captured step is bounded when it is captured"
    fix = "make the metadata as StepBuffers does, with max_num_tokens of the largest bucket"


class PositionsMissing(BoundaryOpError):
    what = "model input 'position_ids'"
    expected = "the positions of a packed or continued step"
    got = "none, with {num_seqs} sequences and context lengths {context_lens}"
    rule = "without position_ids a model numbers the tokens 0, 1, 2, ... as one new sequence"
    fix = "pass position_ids=batch.positions"


class WrongStepLimit(BoundaryOpError):
    what, expected = "StepBuffers, argument '{argument}'", "a positive int"
    rule = "a captured step is bounded when it is captured"
    fix = "take the bounds from the scheduler's limits, and the pools from the cache"


class StepTooLarge(BoundaryOpError):
    what, expected = "StepBuffers.load, {name} of the batch", "at most {limit}, the buffers' {bound}"
    rule = "a captured step is bounded when it is captured"
    fix = "run this step eagerly, or capture with a larger {bound}"


class BackendNotCaptured(BoundaryOpError):
    what = "StepBuffers, argument 'pools', attention_backend='{name}'"
    expected, got = "pools of a cache with attention_backend 'auto' or '{served}'", "{name!r}"
    rule = "a captured op is the Triton program or torch operators; no other back end steps in"
    fix = "make the cache with that, or keep the op between the graphs: boundary='eager'"
