"""What a kernel is given and what it gives back: plain tensors in one convention.

A kernel's own layouts and conventions are mapped in that kernel's file, nowhere else.
T query tokens of all requests in order, H heads, R kv_lora_rank, P qk_rope_head_dim, B requests. The last dim of every
tensor is contiguous; the others need not be (layouts.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class _Inputs:
    qo_indptr: torch.Tensor  # [B + 1] int32: request b's tokens are rows qo_indptr[b]:qo_indptr[b + 1]
    kv_lens: torch.Tensor  # [B] int32

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
class _AttentionInputs(_Inputs):
    sm_scale: float
    causal: bool  # bottom-right aligned: the last query sees every key


@dataclass(frozen=True)
class AbsorbedInputs(_AttentionInputs):
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
class MHAInputs(_AttentionInputs):
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


@dataclass(frozen=True)
class LayerInputs(_AttentionInputs):
    """Attention between its weights, which a kernel absorbs into query and output or expands the latent by."""

    q_nope: torch.Tensor  # [T, H, qk_nope_head_dim], before absorption
    q_pe: torch.Tensor  # [T, H, P], RoPE applied
    w_kc: torch.Tensor  # [H, qk_nope_head_dim, R]; with w_vc the two halves of kv_b_proj
    w_vc: torch.Tensor  # [H, R, v_head_dim]
    ckv_cache: torch.Tensor  # [num_pages, page_size, R]
    kpe_cache: torch.Tensor  # [num_pages, page_size, P], RoPE applied
    page_table: torch.Tensor  # [B, max_pages] int32; entries past a request's last page are garbage

    @property
    def queries(self) -> torch.Tensor:
        return self.q_nope

    @property
    def qk_dims(self) -> tuple[int, int]:
        return self.q_nope.shape[-1], self.q_pe.shape[-1]

    @property
    def v_dim(self) -> int:
        return self.w_vc.shape[-1]


@dataclass(frozen=True)
class WriteInputs(_Inputs):
    """A cache write: row t of ckv and kpe goes to slot slots[t] of the cache, side by side; no other slot changes.

    Slot s is row s of the cache's pages in order: page s // page_size, offset s % page_size.
    """

    ckv: torch.Tensor  # [T, R], the latent of the new tokens, the last ones of each request
    kpe: torch.Tensor  # [T, P], RoPE applied
    slots: torch.Tensor  # [T] int64
    # [num_pages, page_size, R + P], as it was before. The kernel writes into a copy, `out.out`; in a far layout it is
    # that, too.
    kv_cache: torch.Tensor
    page_table: torch.Tensor  # [B, max_pages] int32, from which slots were made; entries past the last page are garbage


@dataclass(frozen=True)
class ConcatInputs(_Inputs):
    """A concatenation: every token's and head's nope and rope part, side by side in `out`, all bits as they are."""

    nope: torch.Tensor  # [T, H, D]: D is kv_lora_rank for queries, qk_nope_head_dim for keys
    rope: torch.Tensor  # [T, H, P] for queries, [T, 1, P] for keys, whose heads share it

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[T, H, D + P]"""
        num_tokens, num_heads, nope_dim = self.nope.shape
        return num_tokens, num_heads, nope_dim + self.rope.shape[-1]


AttentionInputs = AbsorbedInputs | MHAInputs | LayerInputs
CopyInputs = WriteInputs | ConcatInputs  # bits are moved, and no softmax is taken
MLAInputs = AttentionInputs | CopyInputs


@dataclass(frozen=True)
class MLAOutput:
    """out [T, H, R] (absorbed) or [T, H, v_head_dim] (mha, layer); lse [T, H] float32, natural log, or None.

    A query that sees no key has out 0 and lse -inf. Of a cache write, out is the cache [num_pages, page_size, R + P],
    of a concatenation [T, H, D + P].
    """

    out: torch.Tensor
    lse: torch.Tensor | None


@dataclass(frozen=True)
class Buffers:
    """What a kernel may write into, and the guard zones around it, which nobody may touch."""

    output: MLAOutput
    guarded: tuple[torch.Tensor, ...]  # flat uint8: a zone, the tensor's bytes, a zone

    def overwritten(self) -> str | None:
        """Which zone of `out` or `lse` changed, in words, or None."""
        for name, whole in zip(("out", "lse"), self.guarded, strict=False):
            for where, zone in (("before", whole[:GUARD_BYTES]), ("after", whole[-GUARD_BYTES:])):
                changed = int((zone != _GUARD_BYTE).sum())
                if changed:
                    return f"{changed} bytes right {where} its {name} buffer"
        return None


# A row of the largest dims is a few KiB: an index that is off by one row, or by a small page, lands in the zone.
GUARD_BYTES = 1 << 16
_GUARD_BYTE = 0xA5
UNWRITTEN = _GUARD_BYTE


def output_buffers(inputs: MLAInputs, dtype: torch.dtype) -> Buffers:
    """Buffers for a kernel to write, full of NaN: a row that it leaves unwritten must not look right by chance.

    `out` of a cache write is a copy of the cache, `out` of a concatenation holds UNWRITTEN in every byte.
    """
    if isinstance(inputs, ConcatInputs):
        # NaN is among what a concatenation copies; the zones' own byte is not (concat_inputs).
        out, whole = _guarded(inputs.out_shape, inputs.nope.dtype, inputs.device)
        return Buffers(MLAOutput(out, None), (whole,))
    if isinstance(inputs, WriteInputs):
        out, whole = _guarded(inputs.kv_cache.shape, inputs.kv_cache.dtype, inputs.device)
        return Buffers(MLAOutput(out.copy_(inputs.kv_cache), None), (whole,))
    num_tokens, num_heads = inputs.queries.shape[:2]
    out, whole = _guarded((num_tokens, num_heads, inputs.v_dim), dtype, inputs.device)
    lse, whole_lse = _guarded((num_tokens, num_heads), torch.float32, inputs.device)
    return Buffers(MLAOutput(out.fill_(float("nan")), lse.fill_(float("nan"))), (whole, whole_lse))


def _guarded(
    shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    size = math.prod(shape) * dtype.itemsize
    whole = torch.full((size + 2 * GUARD_BYTES,), _GUARD_BYTE, dtype=torch.uint8, device=device)
    return whole[GUARD_BYTES : GUARD_BYTES + size].view(dtype).view(shape), whole
