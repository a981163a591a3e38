"""How SGLang's Triton kernels are called: on pools of token slots with page size 1, as its own backend does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mla_verify.kernels.gpu import capability
from mla_verify.kernels.sglang_api import DECODE, EXTEND, NUM_KV_SPLITS

if TYPE_CHECKING:
    from torch import Tensor

    from mla_verify.tensors import AbsorbedInputs, AttentionInputs, MLAOutput

MORE_QUERIES = "a request has more queries than keys, and in SGLang's extend each query brings a key"


def side_by_side(first: Tensor, second: Tensor) -> tuple[Tensor, str]:
    """[.., a] and [.., b] as one [.., a + b], and how: a view where both are views of one already, else a copy."""
    import torch

    end = first.storage_offset() + first.shape[-1]
    if (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and (first.stride(), end) == (second.stride(), second.storage_offset())
        and first.stride(-1) == 1
    ):
        return first.as_strided((*first.shape[:-1], first.shape[-1] + second.shape[-1]), first.stride()), "a view"
    return torch.cat([first, second], dim=-1), "copied side by side"


def as_pool(ckv_cache: Tensor, kpe_cache: Tensor) -> tuple[Tensor, str]:
    """Pages as a pool of slots, [num_pages * page_size, 1, R + P], and how it came to be."""
    cache, how = side_by_side(ckv_cache, kpe_cache)
    return cache.flatten(0, 1)[:, None], how


def live_requests(inputs: AttentionInputs) -> list[int]:
    """Those that have queries. Their queries are all there are, in order."""
    starts = inputs.qo_indptr.tolist()
    return [b for b in range(inputs.num_requests) if starts[b] < starts[b + 1]]


def slots_by_request(inputs: AbsorbedInputs, requests: Sequence[int]) -> list[Tensor]:
    """The slot of each key, [kv_len] int64, for each of the requests."""
    from mla_verify.inputs import slots_of

    page_size, kv_lens = inputs.ckv_cache.shape[1], inputs.kv_lens.tolist()
    return [slots_of(inputs.page_table, b, page_size, kv_lens[b]) for b in requests]


def _starts(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    from mla_verify.inputs import indptr

    return indptr([len(part) for part in parts]).to(like.device)


def decode(q: Tensor, pool: Tensor, slots: Sequence[Tensor], out: Tensor, sm_scale: float) -> str:
    """One query a request: q [B, H, R + P], pool [S, 1, R + P], out [B, H, R], and each request's slots in order.

    Returns how it was called.
    """
    import torch

    batch, num_heads, rank = out.shape
    parts = (batch, num_heads, NUM_KV_SPLITS)
    nan = float("nan")  # a part that is merged without having been written must show
    # As SGLang's backend has it (triton_backend.py:221, 1805 of 0.5.16): from SM 9.0 on, the merge starts early.
    use_pdl = q.device.type == "cuda" and capability()[0] >= 9
    DECODE.load()(
        q=q,
        k_buffer=pool,
        v_buffer=pool[..., :rank],
        o=out,
        kv_indptr=_starts(slots, q),
        kv_indices=torch.cat(list(slots)),
        attn_logits=torch.full((*parts, rank), nan, dtype=torch.float32, device=q.device),
        attn_lse=torch.full(parts, nan, dtype=torch.float32, device=q.device),
        num_kv_splits=torch.full((batch,), NUM_KV_SPLITS, dtype=torch.int32, device=q.device),
        max_kv_splits=NUM_KV_SPLITS,
        sm_scale=sm_scale,
        k_scale=1.0,
        v_scale=1.0,
        has_mla=True,
        use_pdl=use_pdl,
    )
    return f"{NUM_KV_SPLITS} splits{', merged by dependent launch' if use_pdl else ''}"


def extend(
    inputs: AttentionInputs, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, slots: Sequence[Tensor], out: MLAOutput
) -> None:
    """The last q_len keys of each request are given as new ones, those before them by their slots in the buffers.

    q [T, H, D].  k_buffer [S, Hk, D], v_buffer [S, Hk, V].  slots: of each live request's keys, in order.
    Writes out [T, H, V] and lse [T, H], natural log.
    """
    import torch

    q_lens = [q_len for q_len in inputs.qo_indptr.diff().tolist() if q_len]
    cuts = [len(s) - q_len for s, q_len in zip(slots, q_lens, strict=True)]
    if min(cuts) < 0:
        raise ValueError(MORE_QUERIES)
    prefixes = [s[:cut] for s, cut in zip(slots, cuts, strict=True)]
    new = [s[cut:] for s, cut in zip(slots, cuts, strict=True)]
    at = torch.cat(new)
    EXTEND.load()(
        q_extend=q,
        k_extend=k_buffer[at],
        v_extend=v_buffer[at],
        o_extend=out.out,
        k_buffer=k_buffer,
        v_buffer=v_buffer,
        qo_indptr=_starts(new, q).long(),  # as SGLang has it: offsets into q pass 2^31 at 30,000 tokens of 128 heads
        kv_indptr=_starts(prefixes, q),
        kv_indices=torch.cat(prefixes),
        custom_mask=None,
        is_causal=inputs.causal,
        mask_indptr=None,
        max_len_extend=max(q_lens),
        k_scale=1.0,
        v_scale=1.0,
        sm_scale=inputs.sm_scale,
        lse_extend=out.lse,
    )
