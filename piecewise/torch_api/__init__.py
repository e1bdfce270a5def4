"""Every private torch API that the compile-time half uses, in one place, for torch 2.11 to 2.14.

Only the pattern matcher, which takes long to load, is elsewhere (`passes/matcher.py`). Nothing here has a
public equivalent; `test_torch_internals.py` checks each of them on the installed version.
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
from piecewise.torch_api.process import (
    GlobalState,
    dict_versions,
    dict_versions_tell,
    dispatch_keys,
    is_transforming,
    num_storage_users,
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
)
