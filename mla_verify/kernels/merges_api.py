"""Merges of two attention states: the libraries' functions, and the roundings of a prefix that is merged with them.

Nothing here imports a library until a function is asked for.
"""

from __future__ import annotations

from dataclasses import replace

from mla_verify.kernels.contract import RoundingFacts
from mla_verify.kernels.entry import Entry
from mla_verify.kernels.flashinfer_api import LIBRARY as FLASHINFER
from mla_verify.kernels.flashinfer_api import ragged_fa3_facts
from mla_verify.kernels.merge_parts import CHUNK
from mla_verify.kernels.sglang_api import extend_facts

# Natural LSEs both: exp and log in the Triton kernel (merge_state.py:33-36), expf and logf in the compiled one.
MERGE_TRITON = Entry(
    "sglang",
    "sglang.kernels.ops.attention.merge_state",
    "merge_state_triton",
    ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse", "output", "output_lse"),
)
MERGE_V2 = Entry("sglang-kernel", "sgl_kernel", "merge_state_v2", ("v_a", "s_a", "v_b", "s_b", "v_merged", "s_merged"))
# LSEs in base 2 (cascade.cuh:42).
MERGE_FLASHINFER = Entry(FLASHINFER, "flashinfer.cascade", "merge_state", ("v_a", "s_a", "v_b", "s_b"))

# SGLang's own path for a cached prefix in chunks, with its FlashInfer MLA backend.
CHUNKED_FORWARD = Entry(
    "sglang",
    "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha",
    "DeepseekMHAForwardMixin.forward_normal_chunked_kv_core",
    ("q", "k", "v", "forward_batch"),
)
BACKEND_EXTEND = Entry(
    "sglang",
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    "FlashInferMLAAttnBackend.forward_extend",
    ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
)
CHUNK_RUNNER = Entry(
    "sglang",
    "sglang.srt.layers.attention.flashinfer_mla_backend",
    "FlashInferMhaChunkKVRunner.__init__",
    ("model_runner", "attn_backend"),
)
CHUNK_LENGTHS = Entry(
    "sglang",
    "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin",
    "ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info",
    ("device",),
)

# Lines of the installed packages: FlashInfer 0.6.14, SGLang 0.5.16.
_STORED = "a part's output has the dtype of its queries, and so has each merged one"
_TRITON_FILE = "sglang/kernels/ops/attention/merge_state.py"
_CASCADE_FILE = "flashinfer/data/include/flashinfer/attention/cascade.cuh"
_FORWARD_FILE = "sglang/srt/models/deepseek_common/attention_forward_methods/forward_mha.py"


def _chunked(parts: RoundingFacts, *sources: str) -> RoundingFacts:
    return replace(parts, chunk=CHUNK, sources=(*sources, *parts.sources))


def triton_facts(dtype: str) -> RoundingFacts:
    return _chunked(
        extend_facts(dtype),
        f"{_TRITON_FILE}:76, 56-63: {_STORED}; both are scaled and added in fp32",
        f"{_TRITON_FILE}:30-36: weights and LSE in fp32, natural",
    )


def v2_facts(dtype: str) -> RoundingFacts:
    return _chunked(
        extend_facts(dtype),
        f"sgl_kernel/attention.py:22: {_STORED}; the kernel is compiled, and scales and adds in fp32",
        f"sgl_kernel/attention.py:14, 24: LSEs in fp32; {_FORWARD_FILE}:513 gives it natural ones of other backends",
    )


def flashinfer_facts(dtype: str) -> RoundingFacts:
    return _chunked(
        ragged_fa3_facts(dtype),
        f"flashinfer/cascade.py:92, {_CASCADE_FILE}:65, 67: {_STORED}; both are scaled and added in fp32",
        f"{_CASCADE_FILE}:55-59, 69: weights by ex2.approx, LSE by lg2.approx, in base 2",
    )


def sglang_flashinfer_facts(dtype: str) -> RoundingFacts:
    return _chunked(
        ragged_fa3_facts(dtype),
        f"{_FORWARD_FILE}:511-514: {_STORED}: the new keys' first, then chunk by chunk",
        "sgl_kernel/attention.py:14, 24: merged in fp32",
    )
