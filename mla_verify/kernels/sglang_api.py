"""SGLang's functions: where they are, what is passed to them, and which roundings they make.

Checked against SGLang 0.5.16 and 0.5.23. Nothing here imports it until a function is asked for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mla_verify.kernels.contract import RoundingFacts
from mla_verify.kernels.entry import Entry

NOT_INSTALLED = "sglang is not installed: requirements/gpu.txt has it, and requirements/sglang-cpu.txt for a CPU"
NUM_KV_SPLITS = 8  # SGLang's default, --triton-attention-num-kv-splits


@dataclass(frozen=True)
class MovedEntry(Entry):
    """A function that a later release of SGLang has in another module."""

    later: str

    def home(self) -> ModuleType:
        """The module, wherever this release has it. Raises what importing it raises."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Something that it needs may be missing instead.
            if error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            return importlib.import_module(self.later)

    def load(self) -> Any:
        return getattr(self.home(), self.name)


_ATTENTION = "k_buffer", "v_buffer", "kv_indptr", "kv_indices", "sm_scale", "k_scale", "v_scale"
DECODE = Entry(
    "sglang",
    "sglang.kernels.ops.attention.decode_attention",
    "decode_attention_fwd",
    ("q", "o", "attn_logits", "attn_lse", "num_kv_splits", "max_kv_splits", "has_mla", "use_pdl", *_ATTENTION),
)
EXTEND = Entry(
    "sglang",
    "sglang.kernels.ops.attention.extend_attention",
    "extend_attention_fwd",
    (
        *("q_extend", "k_extend", "v_extend", "o_extend", "qo_indptr", "custom_mask", "is_causal", "mask_indptr"),
        *("max_len_extend", "lse_extend", *_ATTENTION),
    ),
)
_WRITE = "kv_buffer", "loc", "cache_k_nope", "cache_k_rope"
# The cache write under the name that SGLang's own code calls, and its JIT CUDA kernel, to which that one may go.
WRITE = Entry("sglang", "sglang.kernels.ops.kvcache.mla_buffer", "set_mla_kv_buffer_triton", _WRITE)
JIT_WRITE = MovedEntry(
    *("sglang", "sglang.jit_kernel.set_mla_kv_buffer", "set_mla_kv_buffer", _WRITE),
    later="sglang.kernels.ops.kvcache.set_mla_kv_buffer",
)
_CONCAT = "sglang.jit_kernel.concat_mla"
_CONCAT_LATER = "sglang.kernels.ops.attention.concat_mla"
CONCAT_K = MovedEntry("sglang", _CONCAT, "concat_mla_k", ("k", "k_nope", "k_rope"), later=_CONCAT_LATER)
CONCAT_ABSORB_Q = MovedEntry("sglang", _CONCAT, "concat_mla_absorb_q", ("a", "b"), later=_CONCAT_LATER)


# Files of the installed package, with lines of 0.5.16 / 0.5.23.
_DECODE_FILE = "sglang/kernels/ops/attention/decode_attention.py"
_EXTEND_FILE = "sglang/kernels/ops/attention/extend_attention.py"


def decode_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        partial_dtype="fp32",
        max_splits=NUM_KV_SPLITS,
        scale="product",
        # Of the row sum. P.V adds 16 keys at a time on a GPU, where Triton makes `acc += dot(..)` one chain of
        # instructions; what those additions lose is charged with tensor_core_k.
        tile=32,
        tensor_core_k=16,  # mma and wgmma of 16-bit operands; fp32, which would be TF32 there, runs on a CPU alone
        sources=(
            f"{_DECODE_FILE}:577 / 762: p is cast to the cache's dtype before P.V",
            f"{_DECODE_FILE}:579 / 764: the row sum adds p before that cast",
            f"{_DECODE_FILE}:531 / 708, 1034 / 1305: scores times one factor, sm_scale * k_scale, and k_scale is 1",
            f"{_DECODE_FILE}:575 / 752: exp of the scores, natural",
            f"{_DECODE_FILE}:630 / 818: BLOCK = 32 keys, on every NVIDIA GPU",
            f"{_DECODE_FILE}:589-605 / 774-790, 803 / 1016: parts and their LSE are stored as they are, in float32 "
            "buffers, and merged in float32; out is rounded once",
        ),
    )


def extend_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        scale="product",
        # Of the row sum, as in decode_facts. The interpreter has 32, and runs fp32 alone and fp16; up to its 512 keys
        # the two sizes give about the same variance.
        tile=32 if dtype == "fp32" else 64,
        tensor_core_k=16,  # mma and wgmma of 16-bit operands; fp32, which would be TF32 there, runs on a CPU alone
        sources=(
            f"{_EXTEND_FILE}:503, 624 / 712, 868: p is cast to the values' dtype before P.V",
            f"{_EXTEND_FILE}:483, 614 / 682, 848: the row sum adds p before that cast",
            f"{_EXTEND_FILE}:451, 582 / 646, 812: scores times one factor, sm_scale",
            f"{_EXTEND_FILE}:482, 613 / 681, 847: exp of the scores, natural; exp2 in 0.5.23 on gfx95 alone (- / 1045)",
            f"{_EXTEND_FILE}:98-102 / 114-118: 64 keys a tile on Hopper; 122 / 138: 32 without a GPU",
            f"{_EXTEND_FILE}:637 / 891: the LSE, natural, over prefix and new keys",
            f"{_EXTEND_FILE}:655 / 911: out is rounded once, after the division",
        ),
    )
