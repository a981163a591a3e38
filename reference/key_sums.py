"""What an error model needs beside the attention output: sums over the keys, and the rounding of split-KV partials.

Everything here works on blocks: p, score, ... are [groups, rows, kv_len], values v are [groups, kv_len, v_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_verify.reference.keys import Keys


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


def weighted_sums(p: Tensor, weights: list[Tensor], v: Keys) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The output sum_j p_j v_j, its direction, and each weight's fields of KeySums, one after the other."""
    rows = p.shape[1]
    # One product for p and all weights: the values are read once, which is what a few rows wait for.
    stacked = torch.cat([p, *weights], dim=1)
    first = p.new_zeros(p.shape[0], stacked.shape[1], v.dim)
    second = torch.zeros_like(first[:, rows:])
    if weights:
        for keys, value, square in v.blocks_and_squares():
            first += stacked[:, :, keys] @ value
            second += stacked[:, rows:, keys] @ square
    else:
        for keys, value in v.blocks():
            first += stacked[:, :, keys] @ value
    out = first[:, :rows]
    direction = slope_direction(out)
    if not weights:
        return out, direction, []
    along = torch.empty_like(p)
    for keys, value in v.blocks():
        along[:, :, keys] = direction @ value.transpose(1, 2)
    columns = []
    for i, w in enumerate(weights):
        mine = slice(i * rows, (i + 1) * rows)
        w_along = w * along
        columns += [w.sum(-1), w.square().sum(-1), first[:, rows:][:, mine], second[:, mine]]
        columns += [w_along.sum(-1), (w_along * along).sum(-1)]
    return out, direction, columns


def slope_direction(out: Tensor) -> Tensor:
    """The direction in a row's v_dim along which a relative scale error of the row is measured, [.., v_dim].

    Proportional to out for most dims, and to 1 / out for those above the median, so that one channel a hundred times
    the others, and its rounding, does not decide alone.
    """
    square = out.square()
    middle = square.median(-1, keepdim=True).values
    return torch.where(square > 0, out / torch.maximum(square, middle).clamp_min(torch.finfo(out.dtype).tiny), 0.0)


def partial_variance(p: Tensor, v: Keys, partial: PartialStates) -> Tensor:
    """Worst over 1, 2, 4, ... equal parts of the keys of sum_s w_s^2 variance(out_s, spread_s)."""
    kv_len = v.length
    count = 1 << max(0, partial.max_splits.bit_length() - 1)
    step = max(1, -(-kv_len // count))
    slices = [slice(s * step, min((s + 1) * step, kv_len)) for s in range(count)]
    # Sums over each part, [groups, rows, count, v_dim or 1]; those of fewer, larger parts follow by addition.
    p2 = p.square()
    columns = []
    for s in slices:
        value, _, (square, _, square_v, square_v2, _, _) = weighted_sums(p[:, :, s], [p2[:, :, s]], v.part(s))
        columns.append((p[:, :, s].sum(-1, keepdim=True), value, square[..., None], square_v, square_v2))
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


def minor_mass(p: Tensor, partial: PartialStates) -> Tensor:
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
