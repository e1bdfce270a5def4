"""Lists how token rows go through ops of libraries, as read in their schemas and kernels: data for `rows`.

"lib::op" → what `declare_rows` is told: token_args, token_results, padded, only. No library is imported.
Left out are ops that mix rows (scales over all tokens, blocks that do not end with a row, attention), write
into their arguments, know one row alone, or take the token count as an int. Liger's kernels, and flash-attn's
for rotary embeddings and norms, are no ops or write into their arguments.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

_Args: TypeAlias = dict[str, Any]
_Results: TypeAlias = tuple[Any, ...]
_Said: TypeAlias = tuple[_Args, _Results] | tuple[_Args, _Results, str] | tuple[_Args, _Results, str, _Args]

_LEADING = ("leading",)
_INPUT: _Said = ({"input": "leading"}, _LEADING)
_QPARAMS: _Said = ({"input": "leading"}, ("leading", "leading"))
_NO_TOKENS: _Said = ({}, (None,))
_PER_TOKEN = {"input": "leading", "scales": "leading", "zero_points": "leading"}
_FP8, _FP8_LEADING = {"XQ": 0, "x_scale": "all"}, {"XQ": "leading", "x_scale": "all"}
_NOT_RANDOM = {"bs": None, "stochastic_rounding": False}
_FLOAT8 = {"tensor": "leading", "scale": "leading"}
_SPARSE = {"input": "leading", "input_scale": "all"}

LIBRARY_ROWS: Mapping[str, _Said] = {
    # bitsandbytes 0.50.2
    "bitsandbytes::dequantize_4bit": _NO_TOKENS,
    "bitsandbytes::dequantize_blockwise": _NO_TOKENS,
    "bitsandbytes::gemm_4bit": ({"A": "leading"}, _LEADING),
    "bitsandbytes::int8_linear_matmul": ({"A": "leading"}, _LEADING),
    "bitsandbytes::int8_mm_dequant": ({"A": 0, "row_stats": "all"}, (0,)),
    "bitsandbytes::int8_scaled_mm": ({"A": 0, "row_stats": "all"}, (0,)),
    "bitsandbytes::int8_vectorwise_dequant": ({"A": 0, "stats": "all"}, (0,)),
    "bitsandbytes::int8_vectorwise_quant": ({"A": 0}, (0, 0, None), "real", {"threshold": 0.0}),
    # fbgemm-gpu-genai 1.9.0
    "fbgemm::bf16i4bf16_rowwise": ({"X": 0}, (0,)),
    "fbgemm::f8f8bf16": ({"XQ": 0}, (0,)),
    "fbgemm::f8f8bf16_rowwise": (_FP8_LEADING, _LEADING),
    "fbgemm::f8f8bf16_tensorwise": ({"XQ": "leading"}, _LEADING),
    "fbgemm::f8i4bf16_rowwise": (_FP8, (0,)),
    "fbgemm::f8i4bf16_shuffled": (_FP8, (0,)),
    "fbgemm::i8i8bf16": ({"XQ": 0}, (0,)),
    "fbgemm::quantize_fp8_per_row": ({"input": 0}, (0, 0), "real", _NOT_RANDOM),
    # fbgemm-gpu 1.8.0
    "fbgemm::FloatOrHalfToFused8BitRowwiseQuantized": ({"t": "leading"}, _LEADING),
    "fbgemm::Fused8BitRowwiseQuantizedToFloatOrHalf": _INPUT,
    # mslk-cuda 1.1.0, for torchao; its op "triton::quantize_fp8_row" is also fbgemm-gpu-genai's
    "mslk::bf16i4bf16_rowwise": ({"X": 0}, (0,)),
    "mslk::bf16i4bf16_shuffled": ({"X": 0}, (0,)),
    "mslk::f8f8bf16_rowwise": (_FP8_LEADING, _LEADING),
    "mslk::f8i4bf16_rowwise": (_FP8, (0,)),
    "mslk::f8i4bf16_shuffled": (_FP8, (0,)),
    "triton::quantize_fp8_row": ({"a": "leading"}, ("leading", "all"), "real", {"zero_start_index_M": None}),
    # optimum-quanto 0.2.7
    "quanto::qbytes_mm": ({"A": "leading"}, _LEADING),
    "quanto::quantize_affine": _NO_TOKENS,
    "quanto::quantize_symmetric": ({"base": "leading"}, _LEADING),
    "quanto::unpack": _NO_TOKENS,
    # torch 2.13, torch.ao.quantization
    "quantized_decomposed::choose_qparams_per_token": _QPARAMS,
    "quantized_decomposed::choose_qparams_per_token_asymmetric": _QPARAMS,
    "quantized_decomposed::dequantize_per_channel": _NO_TOKENS,
    "quantized_decomposed::dequantize_per_channel_group": _NO_TOKENS,
    "quantized_decomposed::dequantize_per_tensor": _INPUT,
    "quantized_decomposed::dequantize_per_token": (_PER_TOKEN, _LEADING),
    "quantized_decomposed::quantize_per_tensor": _INPUT,
    "quantized_decomposed::quantize_per_token": (_PER_TOKEN, _LEADING),
    # torchao 0.18.0
    "ao::blockwise_fp8_gemm": ({"a": "leading", "a_s": "leading"}, _LEADING),
    "torchao::dequantize_affine_float8_non_decomposed": (_FLOAT8, _LEADING),
    "torchao::quantize_affine_float8_non_decomposed": (_FLOAT8, _LEADING),
    "torchao::rowwise_scaled_linear_sparse_cutlass_f8f8": (_SPARSE, _LEADING),
}
