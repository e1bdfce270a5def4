"""Ops that work along some dims of one tensor: those must be of fixed size, the others keep their layout."""

from __future__ import annotations

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, met
from piecewise.analysis.rows.table import Claim, OpOnRows, check_static, rule


@rule(
    "sum mean prod amax amin argmax argmin std var nansum logsumexp linalg_vector_norm count_nonzero aminmax "
    "max min max.dim min.dim median median.dim nanmedian nanmedian.dim kthvalue std_mean var_mean histc"
)
def reduced(call: OpOnRows) -> Claim:
    check_static(call.layout(), call.dims(), "it reduces")
    return _without(call)


@rule("all any all.dim any.dim all.dims any.dims")
def tested(call: OpOnRows) -> Claim:
    """Over tokens nothing is known of the answer, until a check alone asks for it."""
    layout = call.layout()
    return Claim([None]) if any(layout[dim].factors for dim in call.dims()) else _without(call)


def _without(call: OpOnRows) -> Claim:
    """The layout without the dims that are named, or with these of size 1."""
    layout, dims, one = call.layout(), call.dims(), Dim(call.known.constant(1))
    kept = tuple(one if at in dims else dim for at, dim in enumerate(layout))
    left = tuple(dim for at, dim in enumerate(layout) if at not in dims)
    return Claim([kept if len(sizes) == len(layout) else left for sizes, _ in call.results])


# Each element is made of those before it.
_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})


@rule(
    "_softmax _log_softmax sort topk flip roll glu cummax cummin cumsum cumprod logcumsumexp renorm "
    "_safe_softmax"
)
def along(call: OpOnRows) -> Claim:
    """A dim that stays, perhaps at another size."""
    layout, name = call.layout(), call.name.partition(".")[0]
    dims = call.dims("dims") if name in ("flip", "roll") else (call.dim(),)
    if name == "renorm":
        dims = tuple(at for at in range(len(layout)) if at not in dims)
    if len(dims) == 1 and name in _SCANS and layout and layout[dims[0]].factors:
        if not layout[dims[0]].is_single:
            raise Mixes("it goes through rows that do not lie in their order")
        return Claim([layout] * len(call.results), keeps_real=False)
    check_static(layout, dims if layout else (), "it works")
    return Claim([
        tuple(Dim(sizes[at]) if at in dims else dim for at, dim in enumerate(layout))
        for sizes, _ in call.results
    ])  # fmt: skip


@rule("native_layer_norm _fused_rms_norm")
def normed_in_rows(call: OpOnRows) -> Claim:
    """Over dims that it is told as numbers, and so of fixed size."""
    layout = call.layout("input")
    stats = layout[: len(layout) - len(call["normalized_shape"])]
    one = Dim(call.known.constant(1))
    return Claim([layout, *(stats + (one,) * (len(sizes) - len(stats)) for sizes, _ in call.results[1:])])


@rule("native_group_norm", sizes="N HxW")
def normed_in_groups(call: OpOnRows) -> Claim:
    layout = call.layout("input")
    check_static(layout, range(1, len(layout)), "it normalises")
    groups = Dim(call.known.constant(call["group"]))
    return Claim([layout, (layout[0], groups), (layout[0], groups)])


@rule("_native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats")
def normed_by_channel(call: OpOnRows) -> Claim:
    """By what was gathered before, or each channel alone: `instance_norm` makes channels of rows."""
    layout: Layout = call.layout("input")
    rest = [at for at in range(len(layout)) if at != 1]
    check_static(layout, rest if call["training"] else [1], "it normalises")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            met([layout[1], *call.layout(name)], layout[1].size)
    return Claim([layout, *[None] * (len(call.results) - 1)])
