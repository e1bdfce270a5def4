"""Lists what a paged cache and a step cannot be made of, and what they cannot do."""

from boundary_ops.errors import BoundaryOpError


class WrongPoolSize(BoundaryOpError):
    what, expected = "PagedKVCache, argument '{argument}'", "a positive int"
    rule = "a pool has at least one block of at least one token"
    fix = "PagedKVCache.for_model(model, num_tokens=...) takes the sizes from a transformers model"


class WrongPoolDtype(BoundaryOpError):
    what, expected = "PagedKVCache, argument 'dtype'", "a floating dtype"
    rule = "the pools hold K and V as the model computes them"
    fix = "pass the model's dtype, for example model.dtype"


class CacheExhaustedError(BoundaryOpError):
    """A `PagedKVCache` has too few free blocks; nothing was reserved and nothing was lost."""


class TooFewBlocks(CacheExhaustedError):
    what = "PagedKVCache, room for {requests}"
    expected = "{needed} free blocks of {block_size} tokens"
    got = "{free} free of {num_blocks}, held by {holders} requests"
    rule = "room is given to all tokens asked for, or to none; nothing was changed"
    fix = "free finished requests, run fewer tokens, or make a larger cache"


class WrongTokenCount(BoundaryOpError):
    what, expected = "{method}, {argument} of request {request!r}", "a positive int"
    rule = "tokens are counted in whole numbers, one or more of each request at a time"
    fix = "leave the request out when it has no new tokens"


class NoRoom(BoundaryOpError):
    what, expected = "PagedKVCache.append, request {request!r}", "at most {room} more tokens, which have room"
    rule = "only tokens that have room can have been written"
    fix = "call allocate({request!r}, ...) before the step that writes them"


class WrongTruncation(BoundaryOpError):
    what, expected = "PagedKVCache.truncate, request {request!r}", "0 to {written}, the tokens written"
    rule = "truncating keeps a leading part of what was written"
    fix = "pass the context length to go back to; `append` counts more tokens"


class UnknownLayer(BoundaryOpError):
    what, expected = "PagedKVCache.gather, argument 'layer'", "0 to {last}"
    rule = "layers are counted from 0"
    fix = "pass the attention layer's index"


class UnknownRequest(BoundaryOpError):
    what = "PagedKVCache, request {request!r}"
    expected, got = "a request that holds room", "an id that was never allocated, or was freed before"
    rule = "a request lives from its first allocate (or PrefillBatch.build) to its one free"
    fix = "check the id; `request_ids` lists the live ones"


class LengthsDiffer(BoundaryOpError):
    what = "PrefillBatch.build"
    expected, got = "as many query_lens as request_ids", "{num_ids} request_ids and {num_lens} query_lens"
    rule = "each sequence has one id and one number of new tokens"
    fix = "pass two lists of the same length"


class RepeatedRequest(BoundaryOpError):
    what, expected, got = "PrefillBatch.build, request {request!r}", "each request once", "the same id twice"
    rule = "one step extends a request once; two parts of it would not see each other"
    fix = "join its tokens into one query, or give the second sequence an id of its own"


class WrongPrompts(BoundaryOpError):
    """`pack` was given another number of prompts, or prompts of other lengths, than the step has."""

    rule = "the batch was built for exactly these requests and numbers of new tokens"
    fix = "pass for each request only its new tokens of this step, or build the batch for these prompts"


class NotTokenIds(BoundaryOpError):
    expected, got = "token ids, which are ints", "numbers of {dtype}"
    rule = "token ids count the rows of a table; a fraction would be cut off"
    fix = "pass the ints that the tokenizer gives"


class NoRunningBatch(BoundaryOpError):
    expected, got = "a running `with batch:` block", "none in this thread"
    rule = "attention reads lengths, pages and slots from the current PrefillBatch"
    fix = "PrefillBatch.build(cache, request_ids, query_lens), and call the model inside it"


class StaleBatch(BoundaryOpError):
    what = "PrefillBatch, request {request!r}"
    expected = "the {context} context tokens that the batch was built on"
    rule = "a step runs on the blocks it was planned for; they may be another's by now"
    fix = "build the batch again, from what the cache holds now"


class OtherCache(BoundaryOpError):
    expected, got = "one of the cache that the current PrefillBatch was built for", "a batch of another cache"
    rule = "slots and block tables mean nothing in another cache"
    fix = "build the batch with the cache that the model is attached to, or attach and capture it anew"


class WrongNumTokens(BoundaryOpError):
    expected = "{num_tokens} tokens, as the current PrefillBatch"
    rule = "a step runs exactly the tokens that its batch was built for, without padding"
    fix = "call the model with batch.pack(prompts) and batch.positions, inside the `with` block of that batch"
