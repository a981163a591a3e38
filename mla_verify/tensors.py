"""What a kernel is given and what it gives back: plain tensors in one convention.

A kernel's own layouts and conventions are mapped in that kernel's file, nowhere else.
T query tokens of all requests in order, H heads, R kv_lora_rank, P qk_rope_head_dim, B requests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class _Inputs:
    qo_indptr: torch.Tensor  # [B + 1] int32: request b's queries are rows qo_indptr[b]:qo_indptr[b + 1]
    kv_lens: torch.Tensor  # [B] int32
    sm_scale: float
    causal: bool  # bottom-right aligned: the last query sees every key

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), torch.Tensor)}

    @property
    def device(self) -> torch.device:
        return self.qo_indptr.device

    def q_range(self, request: int) -> tuple[int, int]:
        return int(self.qo_indptr[request]), int(self.qo_indptr[request + 1])

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens)


@dataclass(frozen=True)
class AbsorbedInputs(_Inputs):
    """Absorbed form: the query was multiplied by w_kc, keys and values both come from the latent cache."""

    q_nope: torch.Tensor  # [T, H, R]
    q_pe: torch.Tensor  # [T, H, P], RoPE applied
    ckv_cache: torch.Tensor  # [num_pages, page_size, R]
    kpe_cache: torch.Tensor  # [num_pages, page_size, P], RoPE applied
    page_table: torch.Tensor  # [B, max_pages] int32; entries past a request's last page are garbage

    @property
    def queries(self) -> torch.Tensor:
        return self.q_nope

    @property
    def qk_dims(self) -> tuple[int, int]:
        """Dims of the two parts of the scores, nope and rope."""
        return self.q_nope.shape[-1], self.q_pe.shape[-1]

    @property
    def v_dim(self) -> int:
        return self.ckv_cache.shape[-1]


@dataclass(frozen=True)
class MHAInputs(_Inputs):
    """Non-absorbed form: every head has keys and values of its own, expanded from the latent by w_kc and w_vc."""

    q: torch.Tensor  # [T, H, qk_nope_head_dim + P]: nope, then rope
    k: torch.Tensor  # [S, H, qk_nope_head_dim + P], S keys of all requests in order
    v: torch.Tensor  # [S, H, v_head_dim]
    kv_indptr: torch.Tensor  # [B + 1] int32
    qk_rope_head_dim: int  # P, the last dims of q and k

    @property
    def queries(self) -> torch.Tensor:
        return self.q

    @property
    def qk_dims(self) -> tuple[int, int]:
        return self.q.shape[-1] - self.qk_rope_head_dim, self.qk_rope_head_dim

    @property
    def v_dim(self) -> int:
        return self.v.shape[-1]


MLAInputs = AbsorbedInputs | MHAInputs


@dataclass(frozen=True)
class MLAOutput:
    """out [T, H, R] (absorbed) or [T, H, v_head_dim] (mha); lse [T, H] float32, natural log, or None if not returned.

    A query that sees no key has out 0 and lse -inf.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


def output_buffers(inputs: MLAInputs, dtype: torch.dtype) -> MLAOutput:
    """Buffers for a kernel to write, full of NaN: a row that it leaves unwritten must not look right by chance."""
    num_tokens, num_heads = inputs.queries.shape[:2]
    out = torch.full((num_tokens, num_heads, inputs.v_dim), float("nan"), dtype=dtype, device=inputs.device)
    lse = torch.full((num_tokens, num_heads), float("nan"), dtype=torch.float32, device=inputs.device)
    return MLAOutput(out, lse)
