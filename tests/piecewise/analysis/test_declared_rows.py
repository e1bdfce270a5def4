"""Rows of ops without a rule: what may be declared, what a check refutes, what the judge makes of it. What is
shipped of libraries is held against those that are installed."""

from __future__ import annotations

import contextlib
import importlib
import warnings

import pytest
import torch
from row_cases import anything, check_claims, judge, real

from boundary_ops import check_rows, declare_rows
from boundary_ops._torch import op_names
from boundary_ops.declare import rows
from boundary_ops.declare.library_rows import LIBRARY_ROWS
from boundary_ops.declare.schema import find_overload
from boundary_ops.errors.declare import (
    RowsNotDeclared,
    RowsOfTorchOp,
    RowsOfWritingOp,
    RowsRefuted,
    UnknownArgument,
    UnknownOp,
    WrongPadded,
    WrongRowsArgument,
    WrongTokenDim,
    WrongTokenResults,
)

F16, F32, F8 = torch.float16, torch.float32, torch.float8_e4m3fn
I8, U8 = torch.int8, torch.uint8
TOYS = torch.library.Library("row_toys", "DEF")


def toy(schema):
    """Makes an op of a function."""

    def define(function):
        TOYS.define(schema)
        TOYS.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
        return getattr(torch.ops.row_toys, schema.partition("(")[0].partition(".")[0])

    return define


@toy("scaled(Tensor x, Tensor weight, float power=1.0) -> Tensor")
def scaled(x, weight, power=1.0):
    return x * weight if power == 1.0 else x * weight + x.mean(0)


@toy("joined(Tensor x, Tensor y) -> Tensor")
def joined(x, y):
    return x + y


@toy("shifted(Tensor x, Tensor y) -> Tensor")
def shifted(x, y):
    return x + y.mean(0)


@toy("quantised(Tensor x, bool outliers=False) -> (Tensor, Tensor, Tensor?)")
def quantised(x, outliers=False):
    scale = x.abs().amax(-1)
    return (x / scale[..., None] * 127).round().to(I8), scale, x.amax(0) if outliers else None


@toy("dequantised(Tensor x, Tensor scale) -> Tensor")
def dequantised(x, scale):
    return x * scale.reshape(*x.shape[:-1], 1)


@toy("centred(Tensor x) -> Tensor")
def centred(x):
    return x - x.mean(0)


@toy("within(Tensor x) -> Tensor")
def within(x):
    return x - x.mean(1, keepdim=True)


@toy("summed(Tensor x) -> Tensor")
def summed(x):
    return x.cumsum(0)


@toy("turned(Tensor x) -> Tensor")
def turned(x):
    return x.mT.contiguous()


@toy("parts(Tensor x) -> Tensor[]")
def parts(x):
    return [x * 2, x[:, 0] + 1]


@toy("unpacked(Tensor packed) -> Tensor")
def unpacked(packed):
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


@toy("written(Tensor(a!) x) -> Tensor")
def written(x):
    return x.add_(1).clone()


@toy("several.one(Tensor x) -> Tensor")
def several(x):
    return x.clone()


@pytest.fixture(autouse=True)
def own_declarations(monkeypatch):
    monkeypatch.setattr(rows, "_declared", dict(rows._declared))


def floats(*shape, dtype=F32):
    return torch.randn(shape).to(dtype)


RIGHT = {
    "one dim": ("scaled", {"x": 0}, (0,), [floats(6, 4), floats(4)]),
    "leading dims": ("scaled", {"x": "leading"}, ("leading",), [floats(2, 3, 4), floats(4)]),
    "a row for all": ("joined", {"x": 0, "y": 0}, (0,), [floats(6, 4), floats(1, 4)]),
    "one operand for all": ("joined", {"x": "leading", "y": "all"}, ("leading",),
                            [floats(1, 6, 4), floats()]),
    "another dim": ("turned", {"x": 1}, (0,), [floats(4, 6)]),
    "scales": ("quantised", {"x": "leading"}, ("leading", "all", None), [floats(1, 6, 4)]),
    "scales of their own shape": ("dequantised", {"x": "leading", "scale": "all"}, ("leading",),
                                  [floats(2, 3, 4), floats(6)]),
    "a list": ("parts", {"x": 0}, (0, 0), [floats(6, 4)]),
    "no tokens": ("unpacked", {}, (None,), [torch.arange(8, dtype=U8)]),
    "the only overload": ("several", {"x": 0}, (0,), [floats(6, 4)]),
    "float8": ("several", {"x": 0}, (0,), [floats(6, 4, dtype=F8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_right_declarations_pass(name):
    op, token_args, token_results, example = RIGHT[name]
    declare_rows(f"row_toys::{op}", token_args=token_args, token_results=token_results)
    check_rows(f"row_toys::{op}", example)


def test_an_example_may_be_given_by_name_and_holds_the_values_that_were_said():
    declare_rows("row_toys::scaled", token_args={"x": 0}, only={"power": 1.0})
    check_rows("row_toys::scaled", {"weight": floats(4), "x": floats(6, 4)})
    with pytest.raises(RowsRefuted, match=r"row_toys::scaled.*expected power=1.0, got 2.0"):
        check_rows("row_toys::scaled", [floats(6, 4), floats(4), 2.0])


COUNTED = {
    "parity": lambda x: x * (1 + x.shape[0] % 2),
    "size": lambda x: x * (1 + (x.shape[0] > 7)),
    "infinity": lambda x: x + torch.isinf(x).any(),
    "half": lambda x: x + (0.05 * torch.tanh(x.abs().amax())).to(x.dtype),
    "neighbours": lambda x: torch.cat([x[:1], x[1:] + x[:-1]]),
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_result_that_depends_on_other_rows_or_on_their_number_is_refuted(name):
    with torch.library._scoped_library("row_counts", "FRAGMENT") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", COUNTED[name], "CompositeExplicitAutograd")
        declare_rows("row_counts::op", token_args={"x": 0})
        dtype = torch.bfloat16 if name == "half" else torch.float32
        with pytest.raises(RowsRefuted, match="real rows of result 0"):
            check_rows("row_counts::op", [floats(8, 4).to(dtype)])


def test_an_op_that_goes_through_rows_in_order_stays_where_they_lie_in_order():
    declare_rows("row_toys::summed", token_args={"x": 0}, padded="anything")
    ordered, blocks = (
        judge(lambda x, at=at: torch.ops.row_toys.summed(at(x)), (anything("n", 4),))
        for at in (lambda x: x, lambda x: torch.cat([x, x]))
    )
    assert ordered.judged.mixes is None and "order" in blocks.judged.mixes.detail


@pytest.mark.parametrize("arguments", [
    dict(name=3, token_args={"x": 0}), dict(name="row_toys::scaled", token_args=["x"]),
    dict(name="row_toys::scaled", token_args={"x": 0}, token_results=0),
    dict(name="row_toys::scaled", token_args={"x": 0}, only=["power"]),
], ids=repr)  # fmt: skip
def test_what_is_no_declaration_is_refused(arguments):
    with pytest.raises(WrongRowsArgument, match="declare_rows"):
        declare_rows(**arguments)


@pytest.mark.parametrize("example", [
    None, [floats(6, 4)] * 9, {"no": 1}, [floats(6, 4)], [floats(6, 4), "four"]
], ids=["none", "many", "unknown", "few", "wrong"])  # fmt: skip
def test_what_is_no_call_of_the_op_is_refuted(example):
    declare_rows("row_toys::scaled", token_args={"x": 0})
    with pytest.raises(RowsRefuted, match="row_toys::scaled"):
        check_rows("row_toys::scaled", example)


REFUTED = {
    "rows mix": ("centred", {"x": 0}, (0,), "real", [floats(6, 4)], "real rows of result 0.* got NaN"),
    "rows mix along one leading dim": ("within", {"x": "leading"}, ("leading",), "real", [floats(2, 3, 4)],
                                       "real rows of result 0"),
    "a result without tokens": ("scaled", {"x": 0}, (None,), "real", [floats(6, 4), floats(4)], "result 0"),
    "another value": ("scaled", {"x": 0}, (0,), "real", [floats(6, 4), floats(4), 2.0],
                      "real rows of result 0"),
    "rows before it": ("summed", {"x": 0}, (0,), "real", [floats(6, 4)],
                       "real rows of result 0.* got other rows or another order"),
    "no such dim": ("scaled", {"x": 2}, (0,), "real", [floats(6, 4), floats(4)],
                    "'x' with a dim 2, got shape"),
    "no such dim of a result": ("scaled", {"x": 0}, (2,), "real", [floats(6, 4), floats(4)],
                                "result 0 with a dim 2"),
    "another dim of a result": ("turned", {"x": 0}, (0,), "real", [floats(6, 4)],
                                "6 rows in result 0, got 4"),
    "rows of another number": ("joined", {"x": 0, "y": "all"}, (0,), "real", [floats(6, 4), floats(4)],
                               "6 rows in 'y', got 4"),
    "one row": ("scaled", {"x": 0}, (0,), "real", [floats(1, 4), floats(4)], "2 rows in 'x', got 1"),
    "fewer in a list": ("parts", {"x": 0}, (0,), "real", [floats(6, 4)], "1 results, got 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUTED)
def test_wrong_declarations_are_refuted(name):
    op, token_args, token_results, padded, example, words = REFUTED[name]
    declare_rows(f"row_toys::{op}", token_args=token_args, token_results=token_results, padded=padded)
    with pytest.raises(RowsRefuted, match=f"op 'row_toys::{op}'.*{words}") as raised:
        check_rows(f"row_toys::{op}", example)
    assert "Rule: the op treats each token row alone" in str(raised.value)
    assert "Fix:  correct the declaration, or take it back by token_args=None" in str(raised.value)


def test_rows_that_hold_anything_need_not_be_real():
    declare_rows("row_toys::summed", token_args={"x": 0}, padded="anything")
    check_rows("row_toys::summed", [floats(6, 4)])


@pytest.mark.parametrize(("refusal", "op", "given", "words", "fix"), [
    pytest.param(
        UnknownOp, "row_toys::scald", {}, "'row_toys::scald' does not exist",
        "did you mean 'row_toys::scaled'",
        id="no such op",
    ),
    pytest.param(
        UnknownOp, "nobody::op", {}, "'nobody::op' does not exist", "import the library",
        id="no such library",
    ),
    pytest.param(
        UnknownArgument, "row_toys::scaled", {"token_args": {"wieght": 0}}, "token_args 'wieght'",
        "did you mean 'weight'",
        id="no such argument",
    ),
    pytest.param(
        UnknownArgument, "row_toys::scaled", {"token_args": {"power": 0}},
        "token_args 'power'.*got float", "",
        id="no tensor",
    ),
    pytest.param(
        WrongTokenDim, "row_toys::scaled", {"token_args": {"x": -1}}, "token_args 'x'.*got -1",
        "count the dim",
        id="a dim below 0",
    ),
    pytest.param(
        WrongTokenDim, "row_toys::scaled", {"token_args": {"x": True}}, "token_args 'x'.*got True",
        "count the dim",
        id="no dim",
    ),
    pytest.param(
        WrongTokenDim, "row_toys::scaled", {"token_args": {"x": "first"}},
        "token_args 'x'.*'leading' or 'all', got 'first'", "count the dim",
        id="no such word",
    ),
    pytest.param(
        WrongTokenResults, "row_toys::scaled", {"token_results": (0, 0)},
        r"token_results: expected one for each of 1 results, got \(0, 0\)",
        r"for example \(0,\)",
        id="too many results",
    ),
    pytest.param(
        WrongTokenResults, "row_toys::parts", {"token_results": ()}, r"token_results.*got \(\)", "",
        id="no results",
    ),
    pytest.param(
        WrongTokenDim, "row_toys::scaled", {"token_results": (-1,)}, "token_results 0.*got -1",
        "count the dim",
        id="a result below 0",
    ),
    pytest.param(
        WrongPadded, "row_toys::scaled", {"padded": "zeros"},
        "padded: expected 'real' or 'anything', got 'zeros'", "leave it out",
        id="no such padding",
    ),
    pytest.param(
        UnknownArgument, "row_toys::scaled", {"only": {"powr": 1}}, "only 'powr'.*one of the arguments",
        "did you mean 'power'",
        id="no such value",
    ),
    pytest.param(
        RowsOfTorchOp, "aten::linear", {"token_args": {"input": 0}}, "aten::linear.*got one of torch's own",
        "declare an op of your own",
        id="torch's own",
    ),
    pytest.param(
        RowsOfWritingOp, "row_toys::written", {}, "written.*writes into none of its arguments.*a!",
        "boundary_ops.register",
        id="a write",
    ),
])  # fmt: skip
def test_what_cannot_be_declared_is_refused(refusal, op, given, words, fix):
    with pytest.raises(refusal, match=words) as raised:
        declare_rows(op, **{"token_args": {"x": 0}} | given)
    assert "Rule: " in str(raised.value) and raised.match("Fix: .*" + fix)


def test_what_nobody_declared_is_not_tested():
    with pytest.raises(
        RowsNotDeclared, match=r"'row_toys::joined': nothing was declared[\s\S]*declare_rows\("
    ):
        check_rows("row_toys::joined", [floats(6, 4), floats(6, 4)])
    with pytest.raises(UnknownOp, match="does not exist"):
        check_rows("row_toys::nothing", [])


def test_a_declaration_is_replaced_and_taken_back():
    op = find_overload("row_toys::scaled")
    assert rows.declared_rows(op) is None
    assert declare_rows("row_toys::scaled", token_args={"x": 0}) == rows.declared_rows(op)
    declare_rows("row_toys::scaled", token_args={"x": 1}, padded="anything")
    assert rows.declared_rows(op).token_args == {"x": 1}
    assert declare_rows("row_toys::scaled", token_args=None) is None
    assert rows.declared_rows(op) is None


# What the judge makes of declarations.


X, X3, W = real("n", 4), real(1, "n", 4), real(4)
BYTES = real(8, dtype=U8)
FLAT = (lambda x, s: torch.ops.row_toys.dequantised(x, s), {"x": "leading", "scale": "all"}, ("leading",))
JOINED = (lambda x, y: torch.ops.row_toys.joined(x, y), {"x": "leading", "y": "leading"}, ("leading",))
JUDGED = {
    "one dim": (lambda x, w: scaled(x, w), {"x": 0}, (0,), X, W, "n,4 real"),
    "leading of two": (lambda x, w: scaled(x, w), {"x": "leading"}, ("leading",), X, W, "n,4 real"),
    "leading of three": (lambda x, w: scaled(x, w), {"x": "leading"}, ("leading",), X3, W, "1,n,4 real"),
    "leading, heads": (lambda x, w: scaled(x, w), {"x": "leading"}, ("leading",), real("n", 2, 4), W,
                       "n,2,4 real"),
    "leading, batches": (lambda x, w: scaled(x, w), {"x": "leading"}, ("leading",), real(2, "n", 4), W,
                         "2,n,4 real"),
    "another dim": (lambda x: turned(x), {"x": 1}, (0,), real(4, "n"), "n,4 real"),
    "scales": (lambda x: quantised(x), {"x": "leading"}, ("leading", "all", None), X3,
               "1,n,4 real -128..127; 1,n real"),
    "all results": (lambda x: quantised(x, True), {"x": 0}, (0, 0, None), real(5, 4),
                    "5,4 -128..127; 5; 4"),
    "flat scales": (*FLAT, X3, real("n"), "1,n,4 real"),
    "flat scales of batches": (*FLAT, real(2, "n", 4), real("n*2"), None),
    "blocks of scales": (lambda x, s: dequantised(x, torch.cat([s, s])), *FLAT[1:], real(2, "n", 4),
                         real("n"), "2,n,4 real"),
    "scales that are not real": (*FLAT, X3, anything("n"), "1,n,4"),
    "a row for all": (*JOINED, X3, real(1, 1, 4), "1,n,4 real"),
    "one operand for all": (*JOINED, X, real(), "n,4 real"),
    "other rows": (lambda x, y: shifted(x, y), {"x": 0, "y": 0}, (0,), X, real(5, 4), None),
    "rows of another layout": (lambda x, y: joined(torch.cat([x, x]), y), *JOINED[1:], X, real("n*2", 4),
                               None),
    "an operand that was not said": (lambda x, y: scaled(x, y), {"x": 0}, (0,), X, X, None),
    "a dim that was not said": (lambda x, w: scaled(x, w), {"x": 0}, (0,), X3, W, None),
    "no such dim": (lambda x, w: scaled(x, w), {"x": 3}, (0,), X, W, None),
    "a result of another dim": (lambda x: turned(x), {"x": 0}, (0,), X, None),
    "a list": (lambda x: parts(x), {"x": 0}, (0, 0), X, "n,4 real; n real"),
    "a list of others": (lambda x: parts(x), {"x": 0}, (0,), X, None),
    "no tokens": (lambda x, w: x + unpacked(w)[0], {}, (None,), X, BYTES, "n,4 real"),
    "tokens where none were": (lambda x: unpacked(x), {}, (None,), real("n", dtype=U8), None),
    "weights": (lambda x, w: x @ scaled(w, w[0]), {"x": 0}, (0,), X, real(4, 4), "n,4 real"),
}  # fmt: skip


@pytest.mark.parametrize("name", JUDGED)
def test_I3_what_a_declaration_claims_holds_whatever_padded_rows_hold(name):
    function, token_args, token_results, *inputs, claim = JUDGED[name]
    for op in ("scaled", "joined", "shifted", "quantised", "dequantised", "turned", "parts", "unpacked"):
        if op in function.__code__.co_names:
            declare_rows(f"row_toys::{op}", token_args=token_args, token_results=token_results)
    found = judge(function, tuple(inputs))
    if claim is None:
        assert found.judged.mixes is not None
        return
    assert found.judged.mixes is None, found.judged.mixes.detail
    assert found.text() == claim
    assert check_claims(function, tuple(inputs), found, where=name) >= 3


def test_an_op_that_nobody_declared_runs_eagerly_and_says_how_to_declare_it():
    mixes = judge(lambda x, w: scaled(x, w), (X, W)).judged.mixes
    assert mixes.code == "unknown_op" and 'declare_rows("row_toys::scaled", ...)' in mixes.detail
    # Even without tokens: it may read values back, or keep state.
    assert judge(lambda x, w: x @ scaled(w, w[0]), (X, real(4, 4))).judged.mixes.code == "unknown_op"


def test_a_declaration_holds_for_the_values_that_were_said():
    declare_rows("row_toys::scaled", token_args={"x": 0}, only={"power": 1})
    assert judge(lambda x, w: scaled(x, w), (X, W)).judged.mixes is None
    mixes = judge(lambda x, w: scaled(x, w, 2.0), (X, W)).judged.mixes
    assert mixes.code == "unknown_op" and "power=1" in mixes.detail


def test_padded_rows_that_hold_anything_are_not_real():
    declare_rows("row_toys::scaled", token_args={"x": 0}, padded="anything")
    assert judge(lambda x, w: scaled(x, w), (X, W)).text() == "n,4"


def test_a_declaration_of_another_schema_is_ignored():
    for said in (rows.RowsDeclaration({"input": 0}), rows.RowsDeclaration({"x": 0}, only={"mode": 1})):
        rows._declared["row_toys::scaled"] = said
        assert rows.declared_rows(find_overload("row_toys::scaled")) is None
        assert judge(lambda x, w: scaled(x, w), (X, W)).judged.mixes.code == "unknown_op"
    rows._declared["row_toys::written"] = rows.RowsDeclaration({"x": 0})
    assert rows.declared_rows(find_overload("row_toys::written")) is None


# What is shipped.

MODULES = {
    "ao": "torchao.kernel.blockwise_quantization",
    "bitsandbytes": "bitsandbytes",
    "fbgemm": "fbgemm_gpu",
    "mslk": "mslk.gemm",
    "quanto": "optimum.quanto.library",
    "quantized_decomposed": "torch.ao.quantization.fx._decomposed",
    "torchao": "torchao.quantization.quant_primitives",
    "triton": "mslk.quantize.triton.fp8_quantize",
}
# As read in libraries whose ops are there with a GPU alone.
_INT4 = "Tensor XQ, Tensor WQ, Tensor x_scale, Tensor w_scale"
READ = [
    "ao::blockwise_fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s, SymInt block_size=128) -> Tensor",
    "fbgemm::bf16i4bf16_rowwise(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor",
    "fbgemm::f8f8bf16(Tensor XQ, Tensor WQ, Tensor scale, bool use_fast_accum=True) -> Tensor",
    f"fbgemm::f8f8bf16_rowwise({_INT4}, Tensor? bias=None, bool use_fast_accum=True) -> Tensor",
    "fbgemm::f8f8bf16_tensorwise(Tensor XQ, Tensor WQ, float scale, bool use_fast_accum=True) -> Tensor",
    f"fbgemm::f8i4bf16_rowwise({_INT4}, Tensor w_zp) -> Tensor",
    f"fbgemm::f8i4bf16_shuffled({_INT4}, Tensor w_scale_group) -> Tensor",
    "fbgemm::i8i8bf16(Tensor XQ, Tensor WQ, float scale, int split_k=1) -> Tensor",
    "fbgemm::quantize_fp8_per_row(Tensor input, Tensor? bs=None, Tensor? scale_ub=None, "
    "ScalarType? output_dtype=None, bool stochastic_rounding=False) -> Tensor[]",
    "mslk::bf16i4bf16_rowwise(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor",
    "mslk::bf16i4bf16_shuffled(Tensor X, Tensor W, Tensor w_scale_group, Tensor w_zero_group) -> Tensor",
    f"mslk::f8f8bf16_rowwise({_INT4}, Tensor? bias=None, bool use_fast_accum=True) -> Tensor",
    f"mslk::f8i4bf16_rowwise({_INT4}, Tensor w_zp) -> Tensor",
    f"mslk::f8i4bf16_shuffled({_INT4}, Tensor w_scale_group) -> Tensor",
    "triton::quantize_fp8_row(Tensor a, Tensor? scale_ub=None, Tensor? zero_start_index_M=None, "
    "bool use_triton=True, Device? output_device=None, SymInt? align_rows_to=None) -> (Tensor, Tensor)",
]


def load(name):
    """Imports the library of a shipped op, or skips the test."""
    module = MODULES[name.partition("::")[0]]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except (ImportError, OSError) as error:
        pytest.skip(f"{module} cannot be imported: {str(error).strip().splitlines()[0]}")
    if name not in op_names():
        pytest.skip(f"{module} makes {name} on other machines")


def declare_anew(name):
    """Declares a shipped op as a user would."""
    token_args, token_results, *more = LIBRARY_ROWS[name]
    settings = dict(zip(("padded", "only"), more, strict=False))
    return declare_rows(name, token_args=token_args, token_results=token_results, **settings)


@pytest.mark.parametrize("name", LIBRARY_ROWS)
def test_what_is_shipped_fits_the_op_of_an_installed_library(name):
    load(name)
    shipped = rows.declared_rows(find_overload(name))
    assert shipped is not None and declare_anew(name) == shipped


@pytest.mark.parametrize("schema", READ)
def test_what_is_shipped_fits_the_schema_that_was_read(schema):
    name = schema.partition("(")[0]
    with contextlib.suppress(pytest.skip.Exception):
        load(name)
    if name not in op_names():
        library = torch.library.Library(name.partition("::")[0], "FRAGMENT")
        library.define(schema.partition("::")[2])
    assert rows.declared_rows(find_overload(name)) is not None
    declare_anew(name)


def test_no_library_is_imported_for_what_is_shipped():
    """They are data, of ops that return what they make."""
    assert {name.partition("::")[0] for name in LIBRARY_ROWS} == MODULES.keys()
    assert list(LIBRARY_ROWS) == list(dict.fromkeys(LIBRARY_ROWS))


def integers(*shape, dtype=I8, low=-127, high=127):
    return torch.randint(low, high + 1, shape, dtype=dtype)


def four_bit(rows, columns, quant_type="nf4"):
    packed, absmax = torch.ops.bitsandbytes.quantize_4bit(floats(rows, columns), 64, quant_type, U8)
    return packed, [rows, columns], absmax, 64, quant_type


ON_CPU = {
    "bitsandbytes::dequantize_4bit": lambda: [*(four_bit(8, 64)[at] for at in (0, 2, 3, 4)), [8, 64], F32],
    "bitsandbytes::dequantize_blockwise": lambda: [
        integers(4, 64, dtype=U8, low=0), floats(4), torch.linspace(-1, 1, 256), 64, F32],
    "bitsandbytes::gemm_4bit": lambda: [floats(2, 3, 64), *four_bit(8, 64), floats(8)],
    "bitsandbytes::int8_linear_matmul": lambda: [integers(2, 3, 64), integers(8, 64)],
    "bitsandbytes::int8_mm_dequant": lambda: [
        integers(6, 8, dtype=torch.int32, low=-9999, high=9999), floats(6), floats(8)],
    "bitsandbytes::int8_scaled_mm": lambda: [
        integers(6, 64), integers(8, 64), floats(6), floats(8), floats(8), F32],
    "bitsandbytes::int8_vectorwise_dequant": lambda: [integers(6, 64), floats(6)],
    "bitsandbytes::int8_vectorwise_quant": lambda: [floats(6, 64, dtype=F16)],
    "fbgemm::FloatOrHalfToFused8BitRowwiseQuantized": lambda: [floats(2, 3, 64)],
    "fbgemm::Fused8BitRowwiseQuantizedToFloatOrHalf": lambda: [
        torch.ops.fbgemm.FloatOrHalfToFused8BitRowwiseQuantized(floats(2, 3, 64))],
    "quanto::qbytes_mm": lambda: [floats(2, 3, 64), integers(8, 64), floats(8, 1)],
    "quanto::quantize_affine": lambda: [floats(8, 64), 4, 0, 32, floats(16, 1), floats(16, 1)],
    "quanto::quantize_symmetric": lambda: [floats(2, 3, 64), I8, None, torch.tensor(0.1)],
    "quanto::unpack": lambda: [integers(8, 64, dtype=U8, low=0), 4],
    "quantized_decomposed::choose_qparams_per_token": lambda: [floats(2, 3, 64), I8],
    "quantized_decomposed::choose_qparams_per_token_asymmetric": lambda: [floats(2, 3, 64), I8],
    "quantized_decomposed::dequantize_per_channel": lambda: [
        integers(8, 64), floats(8), integers(8, dtype=torch.int64), 0, -128, 127, I8],
    "quantized_decomposed::dequantize_per_channel_group": lambda: [
        integers(8, 64), floats(8, 2), integers(8, 2), -128, 127, I8, 32, F32],
    "quantized_decomposed::dequantize_per_tensor": lambda: [integers(2, 3, 64), 0.1, 3, -128, 127, I8],
    "quantized_decomposed::dequantize_per_token": lambda: [
        integers(2, 3, 64), floats(2, 3, 1), integers(2, 3, 1), -128, 127, I8, F32],
    "quantized_decomposed::quantize_per_tensor": lambda: [floats(2, 3, 64), 0.1, 3, -128, 127, I8],
    "quantized_decomposed::quantize_per_token": lambda: [
        floats(2, 3, 64), floats(2, 3, 1).abs() + 0.1, integers(2, 3, 1), -128, 127, I8],
    "torchao::dequantize_affine_float8_non_decomposed": lambda: [floats(2, 3, 64, dtype=F8), floats(2, 3, 2)],
    "torchao::quantize_affine_float8_non_decomposed": lambda: [floats(2, 3, 64), floats(2, 3, 1).abs() + 0.1],
}  # fmt: skip


@pytest.mark.parametrize("name", ON_CPU)
def test_what_is_shipped_holds_on_real_tensors(name):
    load(name)
    check_rows(name, ON_CPU[name]())


def test_all_that_has_cpu_kernels_is_tested_on_them():
    on_gpus = {schema.partition("(")[0] for schema in READ}
    on_gpus.add("torchao::rowwise_scaled_linear_sparse_cutlass_f8f8")
    assert LIBRARY_ROWS.keys() - ON_CPU.keys() == on_gpus


def eight_bit(x, weight, scales):
    """As bitsandbytes' linear layer without outliers does it."""
    found, row_stats, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(x.reshape(-1, 64).half())
    made = torch.ops.bitsandbytes.int8_scaled_mm(found, weight, row_stats, scales, dtype=F32)
    return made.reshape(*x.shape[:-1], 8)


def mixed_eight_bit(x, weight, scales):
    found, row_stats, columns = torch.ops.bitsandbytes.int8_vectorwise_quant(x[0].half(), threshold=6.0)
    return torch.ops.bitsandbytes.int8_mixed_scaled_mm(x[0], found, weight, row_stats, scales, columns)[0]


def per_token(x, weight):
    """As torch exports a linear layer with dynamic activations."""
    ops = torch.ops.quantized_decomposed
    scales, zeros = ops.choose_qparams_per_token_asymmetric(x, I8)
    found = ops.quantize_per_token(x, scales, zeros, -128, 127, I8)
    return ops.dequantize_per_token(found, scales, zeros, -128, 127, I8, F32) @ weight.T


def per_group(x, scales):
    ops = torch.ops.torchao
    found = ops.quantize_affine_float8_non_decomposed(x, scales)
    return ops.dequantize_affine_float8_non_decomposed(found, scales)


def four_bits(x, packed, absmax):
    return torch.ops.bitsandbytes.gemm_4bit(x, packed, [8, 64], absmax, 64, "nf4")


def four_bits_in_two_steps(x, packed, absmax):
    return x @ torch.ops.bitsandbytes.dequantize_4bit(packed, absmax, 64, "nf4", [8, 64], F32).T


def flattened(x):
    return torch.ops.bitsandbytes.quantize_blockwise(x, torch.linspace(-1, 1, 256, device=x.device), 64)[0]


PACKED = real(256, 1, dtype=U8), real(8, dtype=F32)
W64 = real(8, 64, dtype=I8)
X64 = real(1, "n", 64, dtype=F32)
BY_LIBRARY = {
    "bitsandbytes 8 bits": ("bitsandbytes", eight_bit, X64, W64, real(8, dtype=F32), "1,n,8 real"),
    "bitsandbytes 8 bits, outliers": ("bitsandbytes", mixed_eight_bit, X64, W64, real(8, dtype=F32), None),
    "bitsandbytes 4 bits": ("bitsandbytes", four_bits, X64, *PACKED, "1,n,8 real"),
    "bitsandbytes 4 bits, dequantised": ("bitsandbytes", four_bits_in_two_steps, X64, *PACKED, "1,n,8 real"),
    "bitsandbytes, blocks": ("bitsandbytes", flattened, X64, None),
    "quanto": ("quanto", lambda x, w, s: torch.ops.quanto.qbytes_mm(x, w, s), X64, W64, real(8, 1, dtype=F32),
               "1,n,8 real"),
    "per token": ("quantized_decomposed", per_token, X64, real(8, 64, dtype=F32), "1,n,8 real"),
    "torchao, a scale per row": ("torchao", per_group, X64, real(1, "n", 1, dtype=F32), "1,n,64 real"),
    "torchao, scales per group": ("torchao", per_group, X64, real(1, "n", 2, dtype=F32), "1,n,64 real"),
    "torchao, one scale": ("torchao", per_group, X64, real(dtype=F32), "1,n,64 real"),
    "torchao, blocks of rows": ("torchao", per_group, X64, real(1, 2, 1, dtype=F32), None),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_I3_rows_are_followed_through_layers_of_libraries(name):
    namespace, function, *inputs, claim = BY_LIBRARY[name]
    load(next(shipped for shipped in LIBRARY_ROWS if shipped.startswith(f"{namespace}::")))
    found = judge(function, tuple(inputs))
    if claim is None:
        assert found.judged.mixes is not None
        return
    assert found.judged.mixes is None, found.judged.mixes.detail
    assert found.text() == claim
    assert check_claims(function, tuple(inputs), found, where=name) >= 3
