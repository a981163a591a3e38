"""PyTorch's scaled_dot_product_attention, on any device: the kernels that run everywhere.

`torch-absorbed` gathers the pages and concatenates (512 + 64); `torch-mha` is the non-absorbed 192/128 form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_verify.formats import DTYPES
from mla_verify.kernels.contract import Contract, KernelBase, RoundingFacts

if TYPE_CHECKING:
    import torch

    from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAOutput


def _facts(dtype: str) -> RoundingFacts:
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype="fp32",
        rowsum="unrounded",
        scale="root",
        # With one query a head, P.V is a matrix-vector product, which the CPU's BLAS sums in one chain over the keys
        # (measured: docs/error-model.md). Larger products are blocked and err less.
        tile=None,
        sources=(
            "aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math: fp16 and bf16 "
            "inputs are computed in fp32 and the result is rounded once, unless "
            "allowFP16BF16ReductionMathSDP is set; q and k are each multiplied by the square root of the scale",
        ),
    )


class _TorchSDPA(KernelBase):
    name: str
    contract: Contract

    def version(self) -> str:
        import torch

        return f"torch {torch.__version__}"

    def ran(self) -> str:
        # The fused CPU and CUDA kernels refuse value dims that differ from key dims; pinned, so that the rounding
        # facts above are those of what runs.
        return "scaled_dot_product_attention, math backend"


class TorchAbsorbed(_TorchSDPA):
    name = "torch-absorbed"
    contract = Contract(form="absorbed", dtypes=DTYPES, facts=_facts)

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        import torch

        page_size = inputs.ckv_cache.shape[1]
        for request in range(inputs.num_requests):
            start, end = inputs.q_range(request)
            kv_len = int(inputs.kv_lens[request])
            pages = inputs.page_table[request, : -(-kv_len // page_size)].long()
            ckv = inputs.ckv_cache[pages].flatten(0, 1)[:kv_len]
            kpe = inputs.kpe_cache[pages].flatten(0, 1)[:kv_len]
            q = torch.cat([inputs.q_nope[start:end], inputs.q_pe[start:end]], dim=-1)
            k = torch.cat([ckv, kpe], dim=-1)
            heads = q.shape[1]
            _sdpa(
                out.out[start:end],
                q.transpose(0, 1),
                k.expand(heads, -1, -1),
                ckv.expand(heads, -1, -1),
                inputs.sm_scale,
                inputs.causal,
            )
        return _without_lse(out)


class TorchMHA(_TorchSDPA):
    name = "torch-mha"
    contract = Contract(form="mha", dtypes=DTYPES, facts=_facts)

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        for request in range(inputs.num_requests):
            start, end = inputs.q_range(request)
            kv = slice(int(inputs.kv_indptr[request]), int(inputs.kv_indptr[request + 1]))
            _sdpa(
                out.out[start:end],
                inputs.q[start:end].transpose(0, 1),
                inputs.k[kv].transpose(0, 1),
                inputs.v[kv].transpose(0, 1),
                inputs.sm_scale,
                inputs.causal,
            )
        return _without_lse(out)


def _sdpa(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float, causal: bool) -> None:
    """out [q_len, heads, v_dim] of q [heads, q_len, d], k [heads, kv_len, d], v [heads, kv_len, v_dim]."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q_len, kv_len = q.shape[1], k.shape[1]
    mask: Any = None
    first = 0  # the first query that sees a key: SDPA gives NaN for a row that is masked out whole
    if causal:
        first = min(q_len, max(0, q_len - kv_len))
        if q_len > 1:
            mask = torch.ones(q_len - first, kv_len, dtype=torch.bool, device=q.device).tril(kv_len - (q_len - first))
    if kv_len == 0:
        first = q_len
    out[:first] = 0.0
    if first < q_len:
        with sdpa_kernel(SDPBackend.MATH):
            result = torch.nn.functional.scaled_dot_product_attention(
                q[None, :, first:], k[None], v[None], attn_mask=mask, scale=sm_scale
            )
        out[first:] = result[0].transpose(0, 1)


def _without_lse(out: MLAOutput) -> MLAOutput:
    from mla_verify.tensors import MLAOutput

    return MLAOutput(out.out, None)
