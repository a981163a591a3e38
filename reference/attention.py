"""Attention in float64: absorbed over the latent cache, and non-absorbed over expanded keys and values.

Every product is a float64 matmul, so TF32 cannot occur, on a CPU or a GPU. Work is done in blocks of rows and keys, so
that memory stays bounded: 128 heads x 131,072 keys x 1 query take well under 4 GiB beyond the inputs.

An error model needs more than the output: sums over the keys, weighted by what it charges per key. Callers pass those
weights as functions (`weighings`); this file knows nothing of roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SCORE_BYTES = 128 << 20  # one [groups, rows, kv_len] float64 buffer; about six of them are alive at once
_KEY_BYTES = 48 << 20  # one float64 copy of a block of keys


@dataclass(frozen=True)
class KeyTerms:
    """What a weighing may look at, for every query row and key. Masked keys have p = 0 and score = 0."""

    p: Tensor  # softmax weights, [groups, rows, kv_len]
    score: Tensor  # sm_scale * q.k
    gram: Tensor  # sm_scale^2 * sum_i (q_i k_i)^2
    max_score: Tensor  # [groups, rows, 1], over the visible keys; 0 where there is none
    p_max: Tensor  # [groups, rows, 1], the largest p
    num_keys: Tensor  # [rows, 1], visible keys


Weighing = Callable[[KeyTerms], Tensor]  # -> [groups, rows, kv_len]


@dataclass(frozen=True)
class KeySums:
    """Sums over the keys j of one weighing's w_j, with a_j = direction.v_j. Shapes as `Attention`'s, float64."""

    one: Tensor  # sum w_j               [q_len, num_heads]
    square: Tensor  # sum w_j^2          [q_len, num_heads]
    v: Tensor  # sum w_j v_j             [q_len, num_heads, v_dim]
    v2: Tensor  # sum w_j v_j^2          [q_len, num_heads, v_dim]
    along: Tensor  # sum w_j a_j         [q_len, num_heads]
    along2: Tensor  # sum w_j a_j^2      [q_len, num_heads]


@dataclass(frozen=True)
class PartialStates:
    """Ask for the rounding of split-KV partial outputs: the keys cut into 1, 2, 4, ... equal parts, up to `max_splits`.

    variance: of storing one partial output, elementwise, from its value and the variance by which it would differ had
    other keys of the same kind been in the part.
    """

    max_splits: int
    variance: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PartialRounding:
    """What rounding the partial outputs does, of parts s with weights w_s."""

    variance: Tensor  # worst over the split counts of sum_s w_s^2 variance(out_s, spread_s)  [q_len, num_heads, v_dim]
    minor: Tensor  # 1 - the largest w_s, for split counts and cuts near the equal ones  [q_len, num_heads, cuts]


@dataclass(frozen=True)
class Attention:
    """out [q_len, num_heads, v_dim]; lse, max_score, mean_score (sum p s) [q_len, num_heads]; num_keys [q_len].

    All float64, lse in natural log. A query that sees no key has out 0, lse -inf, max_score and mean_score 0.
    """

    out: Tensor
    direction: Tensor  # `slope_direction(out)`
    lse: Tensor
    max_score: Tensor
    mean_score: Tensor
    num_keys: Tensor
    sums: tuple[KeySums, ...]  # one for each weighing
    partials: tuple[PartialRounding, ...]  # one for each of the `partials` asked for


def attend_absorbed(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    *,
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing] = (),
    partials: Sequence[PartialStates] = (),
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
    return _attend(
        [(q_nope.flatten(0, 1)[None], ckv[None]), (q_pe.flatten(0, 1)[None], kpe[None])],
        ckv[None],
        (q_len, num_heads, ckv.shape[1]),
        rows_of=lambda x: x[0].unflatten(0, (q_len, num_heads)),
        row_query=torch.arange(q_len, device=ckv.device).repeat_interleave(num_heads),
        sm_scale=sm_scale,
        causal=causal,
        weighings=weighings,
        partials=partials,
    )


def attend_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing] = (),
    partials: Sequence[PartialStates] = (),
) -> Attention:
    """Attention with keys and values of every head's own (`expand_kv`).

    q: [q_len, num_heads, qk_dim].  k: [kv_len, num_heads, qk_dim].  v: [kv_len, num_heads, v_dim].
    Causality and errors as in `attend_absorbed`.
    """
    q_len, num_heads, qk_dim = q.shape
    _check(k.shape[1:] == (num_heads, qk_dim) and k.shape[:2] == v.shape[:2], (q, k, v))
    return _attend(
        [(q.transpose(0, 1), k.transpose(0, 1))],
        v.transpose(0, 1),
        (q_len, num_heads, v.shape[2]),
        rows_of=lambda x: x.transpose(0, 1),
        row_query=torch.arange(q_len, device=q.device),
        sm_scale=sm_scale,
        causal=causal,
        weighings=weighings,
        partials=partials,
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
    pairs: list[tuple[Tensor, Tensor]],  # (q [groups, rows, d], k [groups, kv_len, d]); the scores are their sum
    v: Tensor,  # [groups, kv_len, v_dim]
    out_shape: tuple[int, int, int],
    *,
    rows_of: Callable[[Tensor], Tensor],  # [groups, rows, ...] -> [q_len, num_heads, ...]
    row_query: Tensor,  # [rows]
    sm_scale: float,
    causal: bool,
    weighings: Sequence[Weighing],
    partials: Sequence[PartialStates],
) -> Attention:
    q_len, kv_len = out_shape[0], v.shape[1]
    num_keys = torch.full((q_len,), kv_len, dtype=torch.float64, device=v.device)
    if causal:
        num_keys = (torch.arange(q_len, device=v.device) + (kv_len - q_len + 1)).clamp(0, kv_len).double()
    groups, rows = pairs[0][0].shape[:2]
    block = max(1, _SCORE_BYTES // max(1, 8 * groups * kv_len))
    for partial in partials:
        block = max(1, min(block, _SCORE_BYTES // (5 * 8 * groups * partial.max_splits * v.shape[2])))
    parts = [
        _attend_rows(
            [(q[:, start : start + block].double(), k) for q, k in pairs],
            v,
            num_keys[row_query[start : start + block]],
            sm_scale,
            weighings,
            partials,
        )
        for start in range(0, max(rows, 1), block)
    ]
    merged = [rows_of(torch.cat(column, dim=1)) for column in zip(*parts, strict=True)]
    head, rest = merged[:5], merged[5:]
    sums = tuple(KeySums(*rest[6 * i : 6 * i + 6]) for i in range(len(weighings)))
    rest = rest[6 * len(weighings) :]
    rounding = tuple(PartialRounding(*pair) for pair in zip(rest[::2], rest[1::2], strict=True))
    return Attention(*head, num_keys=num_keys, sums=sums, partials=rounding)


def _attend_rows(
    pairs: list[tuple[Tensor, Tensor]],
    v: Tensor,
    num_keys: Tensor,  # [rows]
    sm_scale: float,
    weighings: Sequence[Weighing],
    partials: Sequence[PartialStates],
) -> list[Tensor]:
    """out, direction, lse, max_score, mean_score, then the six sums of each weighing, then the partials': [groups, rows, ...]."""
    groups, kv_len, v_dim = v.shape
    rows = pairs[0][0].shape[1]
    score = v.new_zeros((groups, rows, kv_len), dtype=torch.float64)
    gram = torch.zeros_like(score) if weighings else score
    for q, k in pairs:
        for keys in _key_blocks(k):
            k64 = k[:, keys].double().transpose(1, 2)
            score[:, :, keys] += q @ k64
            if weighings:
                gram[:, :, keys] += q.square() @ k64.square()
    score *= sm_scale
    if weighings:
        gram *= sm_scale**2

    hidden = torch.arange(kv_len, device=v.device) >= num_keys[:, None]  # [rows, kv_len]
    empty = num_keys == 0
    score.masked_fill_(hidden, float("-inf"))
    max_score = score.amax(-1, keepdim=True) if kv_len else score.new_zeros(groups, rows, 1)
    max_score = max_score.masked_fill(empty[:, None], 0.0)
    p = torch.exp(score - max_score)  # 0 where hidden
    total = p.sum(-1, keepdim=True)
    lse = (max_score + total.log()).squeeze(-1)  # log 0 = -inf where empty
    p /= total.masked_fill(empty[:, None], 1.0)
    score.masked_fill_(hidden, 0.0)

    out = _weighted_values(p, v)
    direction = slope_direction(out)
    columns = [out, direction, lse, max_score.squeeze(-1), (p * score).sum(-1)]
    if weighings:
        p_max = p.amax(-1, keepdim=True) if kv_len else torch.zeros_like(max_score)
        terms = KeyTerms(p, score, gram, max_score, p_max, num_keys[:, None])
        along = torch.empty_like(p)
        for keys in _key_blocks(v):
            along[:, :, keys] = direction @ v[:, keys].double().transpose(1, 2)
        for weighing in weighings:
            w = weighing(terms)
            wv, wv2 = _weighted_values_and_squares(w, v)
            w_along = w * along
            columns += [w.sum(-1), w.square().sum(-1), wv, wv2, w_along.sum(-1), (w_along * along).sum(-1)]
    for partial in partials:
        columns += [_partial_variance(p, v, partial), _minor_mass(p, partial)]
    return columns


def slope_direction(out: Tensor) -> Tensor:
    """The direction in a row's v_dim along which a relative scale error of the row is measured, [.., v_dim].

    Proportional to out for most dims, and to 1 / out for those above the median, so that one channel a hundred times the
    others, and its rounding, does not decide alone.
    """
    square = out.square()
    middle = square.median(-1, keepdim=True).values
    return torch.where(square > 0, out / torch.maximum(square, middle).clamp_min(torch.finfo(out.dtype).tiny), 0.0)


def _key_blocks(k: Tensor) -> list[slice]:
    step = max(1, _KEY_BYTES // max(1, 8 * k.shape[0] * k.shape[2]))  # a part may have no dims
    return [slice(start, start + step) for start in range(0, k.shape[1], step)]


def _weighted_values(w: Tensor, v: Tensor) -> Tensor:
    total = w.new_zeros(*w.shape[:2], v.shape[2])
    for keys in _key_blocks(v):
        total += w[:, :, keys] @ v[:, keys].double()
    return total


def _weighted_values_and_squares(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first, second = (w.new_zeros(*w.shape[:2], v.shape[2]) for _ in range(2))
    for keys in _key_blocks(v):
        v64 = v[:, keys].double()
        first += w[:, :, keys] @ v64
        second += w[:, :, keys] @ v64.square()  # not in place: float64 input is not copied
    return first, second


def _partial_variance(p: Tensor, v: Tensor, partial: PartialStates) -> Tensor:
    """Worst over 1, 2, 4, ... equal parts of the keys of sum_s w_s^2 variance(out_s, spread_s)."""
    kv_len = v.shape[1]
    count = 1 << max(0, partial.max_splits.bit_length() - 1)
    step = max(1, -(-kv_len // count))
    slices = [slice(s * step, min((s + 1) * step, kv_len)) for s in range(count)]
    # Sums over each part, [groups, rows, count, v_dim or 1]; those of fewer, larger parts follow by addition.
    p2 = p.square()
    columns = [
        (p[:, :, s].sum(-1, keepdim=True), _weighted_values(p[:, :, s], v[:, s]))
        + (p2[:, :, s].sum(-1, keepdim=True), *_weighted_values_and_squares(p2[:, :, s], v[:, s]))
        for s in slices
    ]
    sums = [torch.stack(column, dim=2) for column in zip(*columns, strict=True)]
    worst = torch.zeros_like(sums[1][:, :, 0])
    while True:
        mass, value, square, square_v, square_v2 = sums
        safe = mass.clamp_min(torch.finfo(torch.float64).tiny)
        out = value / safe
        # Sampling variance of a weighted mean: sum_j (p_j / w_s)^2 (v_j - out_s)^2.
        spread = ((square_v2 - 2 * out * square_v + out.square() * square) / safe.square()).clamp_min(0.0)
        # Where w_s underflows its part weighs nothing.
        charged = torch.where(mass > 1e-30, mass.square() * partial.variance(out, spread), 0.0)
        worst = torch.maximum(worst, charged.sum(2))
        if mass.shape[2] == 1:
            return worst
        sums = [x.unflatten(2, (-1, 2)).sum(3) for x in sums]


_CUT_SHIFTS = (-64, -32, 0, 32, 64)  # keys: kernels cut at tiles


def _minor_mass(p: Tensor, partial: PartialStates) -> Tensor:
    """1 - the weight of the heaviest part, [groups, rows, cuts], for 2, 4, ... parts cut at and near equal lengths."""
    groups, rows, kv_len = p.shape
    before = torch.cat([p.new_zeros(groups, rows, 1), p.cumsum(-1)], dim=-1)
    minor = []
    for level in range(1, partial.max_splits.bit_length()):
        count = 1 << level
        equal = torch.arange(1, count, device=p.device) * -(-kv_len // count)
        for shift in _CUT_SHIFTS:
            bounds = torch.cat([equal.new_zeros(1), (equal + shift).clamp(0, kv_len), equal.new_full((1,), kv_len)])
            # The lighter parts' sum: 1 - w_s would cancel.
            mass = before[:, :, bounds].diff(dim=-1).sort(dim=-1).values
            minor.append(mass[:, :, :-1].sum(-1))
    return torch.stack(minor, dim=-1)
