"""Lists why a cache or a call is not served by the back end that was named for it."""

from boundary_ops.errors import BoundaryOpError


class UnknownBackend(BoundaryOpError):
    what, expected = "PagedKVCache, argument 'attention_backend'", "one of {names}"
    rule = "a back end is chosen by its name, when the cache is made"
    fix = "leave it out: 'auto' takes what is there"


class BackendUnavailable(BoundaryOpError):
    """A back end is not installed, or does not serve such pools."""

    what = "PagedKVCache, attention_backend='{name}'"
    rule = "a back end that is named serves all calls of a cache, or none; no other one replaces it"
    fix = "change that, or leave attention_backend out: 'auto' takes what is there"


class CallNotServed(BoundaryOpError):
    """A back end lacks what a layer asks of its attention."""

    what = "op 'piecewise::attn_inplace', argument '{argument}', attention_backend='{name}'"
    rule = "a back end that was chosen by name serves a call, or refuses it; no other one steps in"
    fix = "make this model's cache with another attention_backend, for example 'auto'"
