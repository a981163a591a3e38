"""FlashInfer's functions: where they are, what is passed to them, and which roundings they make.

Nothing here imports FlashInfer until a function is asked for.
"""

from __future__ import annotations

from mla_verify.kernels.contract import RoundingFacts
from mla_verify.kernels.entry import Entry

LIBRARY = "flashinfer-python"  # the distribution; the module is flashinfer

_MLA, _RAGGED = "BatchMLAPagedAttentionWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
MLA_INIT = Entry(LIBRARY, "flashinfer.mla", f"{_MLA}.__init__", ("float_workspace_buffer", "backend"))
MLA_PLAN = Entry(
    LIBRARY,
    "flashinfer.mla",
    f"{_MLA}.plan",
    (
        *("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe"),
        *("page_size", "causal", "sm_scale", "q_data_type", "kv_data_type"),
    ),
)
MLA_RUN = Entry(
    LIBRARY,
    "flashinfer.mla",
    f"{_MLA}.run",
    ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse"),
)
RAGGED_INIT = Entry(
    LIBRARY, "flashinfer.prefill", f"{_RAGGED}.__init__", ("float_workspace_buffer", "kv_layout", "backend")
)
RAGGED_PLAN = Entry(
    LIBRARY,
    "flashinfer.prefill",
    f"{_RAGGED}.plan",
    (
        *("qo_indptr", "kv_indptr", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"),
        *("causal", "sm_scale", "q_data_type", "kv_data_type"),
    ),
)
RAGGED_RUN = Entry(LIBRARY, "flashinfer.prefill", f"{_RAGGED}.run", ("q", "k", "v", "out", "lse", "return_lse"))
APPEND = Entry(
    LIBRARY,
    "flashinfer.page",
    "append_paged_mla_kv_cache",
    (
        *("append_ckv", "append_kpe", "batch_indices", "positions", "ckv_cache", "kpe_cache"),
        *("kv_indices", "kv_indptr", "kv_last_page_len"),
    ),
)
CONCAT = Entry(LIBRARY, "flashinfer.concat_ops", "concat_mla_k", ("k", "k_nope", "k_rope"))

# Names of the CUDA kernels behind each backend, as a trace of the GPU shows them.
MLA_KERNELS = {"fa2": "BatchMLAPagedAttentionKernel", "fa3": "BatchMLAPageAttentionHopperKernel"}
RAGGED_KERNELS = {"fa2": "BatchPrefillWithRaggedKVCacheKernel", "fa3": "PrefillWithKVCacheKernel"}

# Files of the installed package, with lines of 0.6.14.
_IN = "flashinfer/data/include/flashinfer"
_MLA_FILE = f"{_IN}/attention/mla.cuh"
_HOPPER_FILE = f"{_IN}/attention/mla_hopper.cuh"
_PREFILL_FILE = f"{_IN}/attention/prefill.cuh"
_UPDATER_FILE = f"{_IN}/attention/hopper/attention_updater.cuh"
_MAINLOOP_FILE = f"{_IN}/attention/hopper/mainloop_mma.cuh"
_MERGE_FILE = f"{_IN}/attention/cascade.cuh"
_STATE_FILE = f"{_IN}/attention/state.cuh"
_PLAN_FILE = f"{_IN}/attention/scheduler.cuh"

# The planners may cut further: MLA into one part for each cluster of thread blocks, 132 on an H200, ragged fa2 into
# 264 / heads. More than 16 add 2 % to the noise that is charged, and take the reference eight times as long.
MAX_SPLITS = 16


def mla_fa2_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="rounded",
        partial_dtype=dtype,
        max_splits=MAX_SPLITS,
        least_part=32,
        scale="product",
        tile=16,
        tensor_core_k=16,
        sources=(
            f"{_MLA_FILE}:516, 571: p is cast to the cache's dtype before P.V",
            f"{_MLA_FILE}:517, 572: the row sum adds p after that cast, on tensor cores, 16 at a time",
            f"{_MLA_FILE}:755, 672-678: a part's output is stored in the output's dtype, merged in fp32, rounded",
            f"{_MLA_FILE}:781, {_STATE_FILE}:57-60: parts are weighed by their LSE, in base 2, in fp32",
            f"{_PLAN_FILE}:1477, 1508: parts of 32 keys or more, no more of them than clusters of thread blocks",
            f"{_MLA_FILE}:45, 429: scores times one factor, sm_scale * log2 e, less the largest, through ex2.approx",
            f"{_MLA_FILE}:558: 16 keys a tensor-core instruction, added to the accumulator of the whole row",
            f"{_MLA_FILE}:615, {_STATE_FILE}:76: rcp.approx of the row sum; merged parts go through __fdividef",
            f"{_MLA_FILE}:819: the LSE in base 2, lg2.approx of the row sum plus the largest score",
        ),
    )


def mla_fa3_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        partial_dtype=dtype,
        max_splits=MAX_SPLITS,
        least_part=32,
        scale="product",
        tile=64,
        tensor_core_k=16,
        sources=(
            f"{_HOPPER_FILE}:751: p is cast to the queries' dtype before P.V",
            f"{_HOPPER_FILE}:588-590: the row sum adds p before that cast, in fp32: a tile's first, in 4 threads",
            f"{_HOPPER_FILE}:650, 664: a part's output is stored in the output's dtype",
            f"{_MLA_FILE}:672-680: parts are merged in fp32, weighed by their LSE, and rounded again",
            f"{_PLAN_FILE}:1477, 1508: parts of 32 keys or more, no more of them than clusters of thread blocks",
            f"{_MLA_FILE}:45, {_HOPPER_FILE}:584: scores times one factor, sm_scale * log2 e, through ex2.approx",
            f"{_HOPPER_FILE}:1257: 64 keys a tile",
            f"{_HOPPER_FILE}:619: rcp.approx of the row sum",
            f"{_HOPPER_FILE}:725: the LSE in base 2, lg2.approx of the row sum plus the largest score",
        ),
    )


def ragged_fa2_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="rounded",
        partial_dtype=dtype,
        max_splits=MAX_SPLITS,
        least_part=128,
        scale="product",
        tile=16,
        tensor_core_k=16,
        sources=(
            f"{_PREFILL_FILE}:1298: p is cast to the queries' dtype before P.V",
            f"{_PREFILL_FILE}:1310: the row sum adds p after that cast, on tensor cores, 16 at a time",
            f"{_PREFILL_FILE}:3578: a part's output is stored in the output's dtype",
            f"{_MERGE_FILE}:440, 459: parts are merged in fp32 and rounded again",
            f"{_MERGE_FILE}:124, 456: of more than 8 parts, eight merged shares are rounded once more on the way",
            f"{_PLAN_FILE}:527, 720: parts of 128 keys or more, two blocks a multiprocessor shared among the heads",
            f"{_IN}/attention/variants.cuh:54: scores times one factor, sm_scale * log2 e",
            f"{_IN}/attention/variant_helper.cuh:86: rcp.approx of the row sum",
            f"{_PREFILL_FILE}:2592: the LSE in base 2, lg2.approx of the row sum plus the largest score",
        ),
    )


def ragged_fa3_facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,
        rowsum="unrounded",
        max_splits=1,
        scale="product",
        tile=4,
        tensor_core_k=16,
        sources=(
            f"{_MAINLOOP_FILE}:175, 225, 271: p is cast to the values' dtype before P.V",
            f"{_UPDATER_FILE}:67, 216: the row sum adds p before that cast, in fp32: one chain in each of 4 threads",
            f"{_PLAN_FILE}:928-945: a block sees all keys of its rows: nothing is split",
            f"{_IN}/attention/hopper/variants.cuh:91: scores times one factor, sm_scale * log2 e",
            f"{_UPDATER_FILE}:137: less the largest, through exp2f, which the build's fast math makes ex2.approx",
            f"{_UPDATER_FILE}:231: a division by the row sum, approximate by the build's fast math",
            f"{_UPDATER_FILE}:234: the LSE in base 2, lg2.approx of the row sum plus the largest score",
        ),
    )
