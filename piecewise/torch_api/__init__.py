"""Every private torch API that the compile-time half uses, in one place, for torch 2.11 to 2.14.

Others write `from piecewise import torch_api`, and `torch_api.name`. Inductor's pattern matcher takes long to
load: `pattern_matcher.py` is imported by its users. Nothing here has a public equivalent;
`tests/piecewise/torch_api` checks each of them on the installed version.
"""

# ruff: noqa: F401

from piecewise.torch_api.dynamo import (
    SeenGuard,
    compiled_object,
    current_guards,
    dynamo_is_disabled,
    forget_compilation,
    guard_kinds,
    mark_dynamic,
    names_in_sources,
    opaque_answer,
    source_name,
    sources_read,
    sources_to_be_written,
    tensor_attributes_set,
    traced_code,
    tracing_config,
    wraps_number,
)
from piecewise.torch_api.fakes import (
    fake_mode_of,
    fake_twin,
    forget_tensors,
    functional_aten_graph,
    has_dynamic_dims,
    holds_constant,
    is_composite,
    is_fake,
    new_fake_mode,
    python_dispatcher,
    static_fake,
    trace_aten,
)
from piecewise.torch_api.inductor import (
    compile_aten_graph,
    inductor_cache_counts,
    numeric_settings,
    start_compile_workers,
    without_autocast,
)
from piecewise.torch_api.ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    enter_autocast,
    exit_autocast,
    int_mm,
)
from piecewise.torch_api.process import (
    GlobalState,
    dict_numbers_tell,
    dispatch_keys,
    num_storage_users,
    number_dicts,
)
from piecewise.torch_api.subclasses import (
    below_torch_function,
    has_own_torch_function,
    has_torch_function,
    is_opaque,
    is_wrapper,
    trace_below,
)
from piecewise.torch_api.symbols import (
    SYMBOLIC,
    PythonReferenceAnalysis,
    ShapeEnv,
    asked_of_sizes,
    compile_expressions,
    expression,
    free_symbols,
    guard_expressions,
    holds_as_guard,
    is_unbacked,
    raw_guards,
    row_condition,
    shape_env_of,
    size_hint,
    source_of_symbol,
    specialisation_places,
    symbol_source,
    symbolic_count,
    symbolic_sizes,
    sympy_interp,
)
from piecewise.torch_api.trees import (
    SUPPORTED_NODES,
    compute_required_storage_length,
    is_non_overlapping_and_dense_or_false,
    make_contiguous_strides_for,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
