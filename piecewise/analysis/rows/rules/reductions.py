"""Ops that work along some dims of one tensor: those must be of fixed size, the others keep their layout."""

from __future__ import annotations

from piecewise.analysis.rows.layout import Dim, Layout, Mixes, met
from piecewise.analysis.rows.table import Call, Outcome, check_static, rule


@rule(
    "sum mean prod amax amin argmax argmin std var nansum logsumexp linalg_vector_norm count_nonzero aminmax "
    "max min max.dim min.dim median median.dim nanmedian nanmedian.dim kthvalue std_mean var_mean histc"
)
def reduced(call: Call) -> Outcome:
    layout, dims = call.layout(), call.dims()
    check_static(layout, dims, "it reduces")
    return Outcome([_without(layout, dims, call, len(sizes)) for sizes, _ in call.results])


@rule("all any all.dim any.dim all.dims any.dims")
def tested(call: Call) -> Outcome:
    """Over tokens nothing is known of the answer, until a check alone asks for it."""
    layout, dims = call.layout(), call.dims()
    if any(layout[dim].factors for dim in dims):
        return Outcome([None])
    return Outcome([_without(layout, dims, call, len(call.results[0][0]))])


def _without(layout: Layout, dims: tuple[int, ...], call: Call, rank: int) -> Layout:
    if rank == len(layout):
        one = Dim(call.known.constant(1))
        return tuple(one if at in dims else dim for at, dim in enumerate(layout))
    return tuple(dim for at, dim in enumerate(layout) if at not in dims)


@rule(
    "_softmax _log_softmax sort topk flip roll glu cummax cummin cumsum cumprod logcumsumexp renorm "
    "_safe_softmax"
)
def along(call: Call) -> Outcome:
    """A dim that stays, perhaps at another size."""
    layout = call.layout()
    name = call.name.partition(".")[0]
    if name == "renorm":
        dims = tuple(at for at in range(len(layout)) if at != call.dim())
    elif name in ("flip", "roll"):
        dims = call.dims("dims")
    else:
        dims = (call.dim(),)
    if len(dims) == 1 and name in _SCANS and layout and layout[dims[0]].factors:
        if not layout[dims[0]].is_single:
            raise Mixes("it goes through rows that do not lie in their order")
        return Outcome([layout] * len(call.results), keeps_real=False)
    check_static(layout, [dim for dim in dims if layout], "it works")
    made = [
        tuple(Dim(sizes[at]) if at in dims else dim for at, dim in enumerate(layout))
        for sizes, _ in call.results
    ]
    return Outcome(made)


# Each element is made of those before it.
_SCANS = frozenset({"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"})


@rule("native_layer_norm _fused_rms_norm")
def normed_in_rows(call: Call) -> Outcome:
    """Over dims that it is told as numbers, and so of fixed size."""
    layout = call.layout("input")
    count = len(call["normalized_shape"])
    stats = layout[: len(layout) - count]
    one = Dim(call.known.constant(1))
    return Outcome([layout, *(stats + (one,) * (len(sizes) - len(stats)) for sizes, _ in call.results[1:])])


@rule("native_group_norm", sizes="N HxW")
def normed_in_groups(call: Call) -> Outcome:
    layout = call.layout("input")
    check_static(layout, range(1, len(layout)), "it normalises")
    groups = Dim(call.known.constant(call["group"]))
    return Outcome([layout, (layout[0], groups), (layout[0], groups)])


@rule("_native_batch_norm_legit_no_training _native_batch_norm_legit.no_stats")
def normed_by_channel(call: Call) -> Outcome:
    """By what was gathered before, or each channel alone: `instance_norm` makes channels of rows."""
    layout = call.layout("input")
    rest = (at for at in range(len(layout)) if at != 1)
    check_static(layout, list(rest) if call["training"] else [1], "it normalises")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            met([layout[1], *call.layout(name)], layout[1].size)
    return Outcome([layout, *[None] * (len(call.results) - 1)])
