"""Attention in float64: absorbed over the latent cache, and non-absorbed over expanded keys and values.

Every product is a float64 matmul, so TF32 cannot occur, on a CPU or a GPU. Work is done in blocks of rows and keys, so
that memory stays bounded: 128 heads x 131,072 keys x 1 query take well under 4 GiB beyond the inputs.

An error model needs more than the output: sums over the keys, weighted by what it charges per key (key_sums.py).
Callers pass those weights as functions (`weighings`); the reference knows nothing of roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_verify.reference.chunk_rounding import Chunking, ChunkRounding, chunk_rounding
from mla_verify.reference.key_sums import (
    KeySums,
    KeyTerms,
    SplitRounding,
    Splitting,
    Weighing,
    key_copies,
    split_tilt,
    split_variance,
    weighted_sums,
)
from mla_verify.reference.keys import Keys

_SCORE_BYTES = 128 << 20  # see _score_bytes


@dataclass(frozen=True)
class Attention:
    """out [q_len, num_heads, v_dim]; lse, max_score, mean_score (sum p s), score_along [q_len, num_heads];
    num_keys [q_len].

    All float64, lse in natural log. A query that sees no key has out 0, lse -inf, max_score and mean_score 0.
    """

    out: Tensor
    direction: Tensor  # `slope_direction(out)`
    lse: Tensor
    max_score: Tensor
    mean_score: Tensor
    score_along: Tensor  # sum p s direction.v; 0 without weighings
    num_keys: Tensor
    sums: tuple[KeySums, ...]  # one for each weighing
    splits: tuple[SplitRounding, ...]  # one for each of the `splittings` asked for
    chunks: tuple[ChunkRounding, ...] = ()  # one for each of the `chunkings` asked for


def attend_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    *,
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing] = (),
    splittings: Sequence[Splitting] = (),
    chunkings: Sequence[Chunking] = (),
) -> Attention:
    """Attention over the latent cache: every head shares the keys, and ckv is both key and value.

    q_nope: [q_len, num_heads, kv_lora_rank], already multiplied by w_kc.  q_pe: [q_len, num_heads, qk_rope_head_dim].
    ckv: [kv_len, kv_lora_rank].  kpe: [kv_len, qk_rope_head_dim].  RoPE is applied to q_pe and kpe.
    causal is bottom-right aligned: query t of q_len sees the first kv_len - q_len + t + 1 keys.
    Raises ValueError for shapes that do not fit.
    """
    q_len, num_heads, _ = q_nope.shape
    _check(
        q_nope.shape[:2] == q_pe.shape[:2]
        and len(ckv) == len(kpe)
        and (q_nope.shape[2], q_pe.shape[2]) == (ckv.shape[1], kpe.shape[1]),
        (q_nope, q_pe, ckv, kpe),
    )
    # One group whose rows are (query, head): the keys are shared, so that all heads make one matmul.
    latent = Keys(ckv[None])
    return _attend(
        [(q_nope.flatten(0, 1)[None], latent), (q_pe.flatten(0, 1)[None], Keys(kpe[None]))],
        latent,
        q_len,
        rows_of=lambda x: x[0].unflatten(0, (q_len, num_heads)),
        row_query=torch.arange(q_len, device=ckv.device).repeat_interleave(num_heads),
        sm_scale=sm_scale,
        causal=causal,
        weighings=weighings,
        splittings=splittings,
        chunkings=chunkings,
    )


def attend_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing] = (),
    splittings: Sequence[Splitting] = (),
    chunkings: Sequence[Chunking] = (),
) -> Attention:
    """Attention with keys and values of every head's own (`expand_kv`).

    q: [q_len, num_heads, qk_dim].  k: [kv_len, num_heads, qk_dim].  v: [kv_len, num_heads, v_dim].
    Causality and errors as in `attend_absorbed`.
    """
    q_len, num_heads, qk_dim = q.shape
    _check(k.shape[1:] == (num_heads, qk_dim) and k.shape[:2] == v.shape[:2], (q, k, v))
    return _attend(
        [(q.transpose(0, 1), Keys(k.transpose(0, 1)))],
        Keys(v.transpose(0, 1)),
        q_len,
        rows_of=lambda x: x.transpose(0, 1),
        row_query=torch.arange(q_len, device=q.device),
        sm_scale=sm_scale,
        causal=causal,
        weighings=weighings,
        splittings=splittings,
        chunkings=chunkings,
    )


def expand_kv(ckv: Tensor, kpe: Tensor, w_kc: Tensor, w_vc: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of every head from the latent, in float64.

    ckv: [kv_len, kv_lora_rank].  kpe: [kv_len, qk_rope_head_dim].  w_kc: [num_heads, qk_nope_head_dim, kv_lora_rank].
    w_vc: [num_heads, kv_lora_rank, v_head_dim].
    Returns k [kv_len, num_heads, qk_nope_head_dim + qk_rope_head_dim], nope then rope, and v [kv_len, num_heads,
    v_head_dim].
    """
    ckv, kpe = ckv.double(), kpe.double()
    k_nope = torch.einsum("tr,hnr->thn", ckv, w_kc.double())
    k = torch.cat([k_nope, kpe[:, None].expand(-1, len(w_kc), -1)], dim=-1)
    return k, torch.einsum("tr,hrv->thv", ckv, w_vc.double())


def _check(fits: bool, tensors: Sequence[Tensor]) -> None:
    if not fits:
        raise ValueError(f"shapes do not fit: {', '.join(str(list(t.shape)) for t in tensors)}")


def _attend(
    pairs: list[tuple[Tensor, Keys]],  # (q [groups, rows, d], k [groups, kv_len, d]); the scores are their sum
    v: Keys,  # [groups, kv_len, v_dim]
    q_len: int,
    *,
    rows_of: Callable[[Tensor], Tensor],  # [groups, rows, ...] -> [q_len, num_heads, ...]
    row_query: Tensor,  # [rows]
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing],
    splittings: Sequence[Splitting],
    chunkings: Sequence[Chunking],
) -> Attention:
    kv_len, device = v.length, v.x.device
    num_keys = torch.full((q_len,), kv_len, dtype=torch.float64, device=device)
    if causal:
        num_keys = (torch.arange(q_len, device=device) + (kv_len - q_len + 1)).clamp(0, kv_len).double()
    groups, rows = pairs[0][0].shape[:2]
    copies = key_copies([k.x for _, k in pairs]) if weighings and kv_len else None
    # What is asked for twice is computed once.
    weigh, split = list(dict.fromkeys(weighings)), list(dict.fromkeys(splittings))
    room = _score_bytes(device)
    block = max(1, room // max(1, 8 * groups * kv_len))
    for splitting in split:
        block = max(1, min(block, room // (5 * 8 * groups * splitting.max_splits * v.dim)))
    parts = [
        _attend_rows(
            [(q[:, start : start + block].double(), k) for q, k in pairs],
            v,
            num_keys[row_query[start : start + block]],
            copies,
            sm_scale,
            weigh,
            split,
            q_len,
            chunkings,
        )
        for start in range(0, max(rows, 1), block)
    ]
    merged = [rows_of(torch.cat(column, dim=1)) for column in zip(*parts, strict=True)]
    rows_wise, rest = merged[:6], merged[6:]
    sums = {weighing: KeySums(*rest[6 * i : 6 * i + 6]) for i, weighing in enumerate(weigh)}
    rest = rest[6 * len(weigh) :]
    splits = {splitting: SplitRounding(*rest[2 * i : 2 * i + 2]) for i, splitting in enumerate(split)}
    rest = rest[2 * len(split) :]
    chunks = tuple(ChunkRounding(*rest[4 * i : 4 * i + 4]) for i in range(len(chunkings)))
    out, direction, lse, max_score, mean_score, score_along = rows_wise
    return Attention(
        out,
        direction,
        lse,
        max_score,
        mean_score,
        score_along,
        num_keys,
        sums=tuple(sums[weighing] for weighing in weighings),
        splits=tuple(splits[splitting] for splitting in splittings),
        chunks=chunks,
    )


def _score_bytes(device: torch.device) -> int:
    """Of one [groups, rows, kv_len] float64 buffer, of which about six are alive at once."""
    if device.type != "cuda":
        return _SCORE_BYTES
    # Each block costs a few hundred launches, and a GPU has memory to spare; others use it, too.
    return max(_SCORE_BYTES, min(4 * _SCORE_BYTES, torch.cuda.mem_get_info(device)[0] // 32))


def _attend_rows(
    pairs: list[tuple[Tensor, Keys]],
    v: Keys,
    num_keys: Tensor,  # [rows]
    copies: Tensor | None,  # of the keys, as in KeyTerms
    sm_scale: float,
    weighings: Sequence[Weighing],
    splittings: Sequence[Splitting],
    q_len: int,
    chunkings: Sequence[Chunking],
) -> list[Tensor]:
    """[groups, rows, ...]: six row-wise fields of Attention, six sums a weighing, two a splitting, four a chunking."""
    kv_len = v.length
    score = pairs[0][0].new_zeros(v.groups, pairs[0][0].shape[1], kv_len)
    gram = torch.zeros_like(score) if weighings else score
    for q, k in pairs:
        if weighings:
            q2 = q.square()
            for keys, value, square in k.blocks_and_squares():
                score[:, :, keys] += q @ value.transpose(1, 2)
                gram[:, :, keys] += q2 @ square.transpose(1, 2)
        else:
            for keys, value in k.blocks():
                score[:, :, keys] += q @ value.transpose(1, 2)
    score *= sm_scale
    if weighings:
        gram *= sm_scale**2

    hidden = torch.arange(kv_len, device=score.device) >= num_keys[:, None]  # [rows, kv_len]
    empty = num_keys == 0
    score.masked_fill_(hidden, float("-inf"))
    max_score = score.amax(-1, keepdim=True) if kv_len else score.new_zeros(*score.shape[:2], 1)
    max_score = max_score.masked_fill(empty[:, None], 0.0)
    p = torch.exp(score - max_score)  # 0 where hidden
    total = p.sum(-1, keepdim=True)
    lse = (max_score + total.log()).squeeze(-1)  # log 0 = -inf where empty
    p /= total.masked_fill(empty[:, None], 1.0)
    score.masked_fill_(hidden, 0.0)

    weights = []
    if weighings:
        p_max = p.amax(-1, keepdim=True) if kv_len else torch.zeros_like(max_score)
        terms = KeyTerms(p, score, gram, max_score, p_max, num_keys[:, None], copies)
        weights = [weighing(terms) for weighing in weighings]
    out, direction, along, sums = weighted_sums(p, weights, v)
    ps = p * score
    columns = [out, direction, lse, max_score.squeeze(-1), ps.sum(-1), (ps * along).sum(-1), *sums]
    for splitting in splittings:
        columns += [split_variance(p, v, out, lse, splitting), split_tilt(p, splitting)]
    for chunking in chunkings:
        columns += chunk_rounding(p, v, out, direction, lse, q_len, chunking)
    return columns
