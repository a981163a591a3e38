"""What an error model needs beside the attention output: sums over the keys, and the rounding of split-KV partials.

Everything here works on blocks: p, score, ... are [groups, rows, kv_len], values v are [groups, kv_len, v_dim].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    copies: Tensor | None = None  # [groups, 1, kv_len]: keys equal to each key, itself included; None: all differ


# -> [groups, rows, kv_len], or None for a weighing that is 0 throughout, whose sums cost nothing.
Weighing = Callable[[KeyTerms], "Tensor | None"]


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
class PartStates:
    """Attention over each part of a split of the keys: the partial states that a split-KV kernel merges."""

    out: Tensor  # [groups, rows, parts, v_dim]
    spread: Tensor  # like out: the variance by which it would differ had other keys of the same kind been in the part
    away: Tensor  # like out: (out of the part - out of the whole)^2
    lse: Tensor  # [groups, rows, parts, 1]; of a part without weight, that of the smallest number


@dataclass(frozen=True)
class Splitting:
    """Ask for the rounding of a split-KV kernel: the keys cut into 1, 2, 4, ... equal parts, up to `max_splits`.

    Nothing is cut that has no more than `least_part` keys, and nothing into more parts than that makes.
    variance: what part s adds to the variance of the result, over w_s^2, elementwise.
    tilt: relative change, in all dims alike, of a rounded sum in which all but this share comes from one term.
    """

    max_splits: int
    least_part: int
    variance: Callable[[PartStates], Tensor]
    tilt: Callable[[Tensor], Tensor]

    def most(self, kv_len: int) -> int:
        """How many parts so many keys are cut into at most. 1: they are not cut, and no part is stored."""
        return max(1, min(self.max_splits, -(-kv_len // self.least_part)))


@dataclass(frozen=True)
class SplitRounding:
    """What splitting does to the result, with w_s the weight of part s."""

    variance: Tensor  # worst over the split counts of sum_s w_s^2 variance  [q_len, num_heads, v_dim]
    tilt: Tensor  # worst over cuts of: tilt of the merge + sum_s w_s tilt of part s  [q_len, num_heads]


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def key_copies(parts: Sequence[Tensor]) -> Tensor | None:
    """KeyTerms.copies of keys [groups, kv_len, dim] that are given in parts of their dims."""
    # A few dims tell almost all keys apart.
    if not _has_equal(_marks([x[..., :4] for x in parts])):
        return None
    marks = _marks(parts)
    if not _has_equal(marks):
        return None
    copies = []
    for row in marks:
        _, which, count = row.unique(return_inverse=True, return_counts=True)
        copies.append(count[which])
    return torch.stack(copies)[:, None].double()


def _marks(parts: Sequence[Tensor]) -> Tensor:
    """[groups, kv_len]: a number for each key, equal for equal bits, since integers add up alike in any order."""
    generator = torch.Generator().manual_seed(0)
    marks = torch.zeros(parts[0].shape[:2], dtype=torch.int64, device=parts[0].device)
    for x in parts:
        factors = torch.randint(-(1 << 62), 1 << 62, x.shape[2:], generator=generator).to(x.device)
        for some, sums in zip(x.split(8192, dim=1), marks.split(8192, dim=1), strict=True):
            sums += (some.contiguous().view(_BITS[x.element_size()]).long() * factors).sum(-1)
    return marks


def _has_equal(marks: Tensor) -> bool:
    ordered = marks.sort(-1).values
    return bool((ordered[:, 1:] == ordered[:, :-1]).any())


def weighted_sums(
    p: Tensor, all_weights: Sequence[Tensor | None], v: Keys
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """out = sum_j p_j v_j, its direction, direction.v_j, and each weight's fields of KeySums, one after the other.

    Without weights direction.v_j [groups, rows, kv_len] is not computed, and 0.
    """
    rows = p.shape[1]
    weights = [w for w in all_weights if w is not None]
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
    along = torch.zeros_like(p)
    if weights:
        for keys, value in v.blocks():
            along[:, :, keys] = direction @ value.transpose(1, 2)
    columns: list[Tensor] = []
    start = 0
    for w in all_weights:
        if w is None:
            scalar, vector = out.new_zeros(out.shape[:2]), torch.zeros_like(out)
            columns += [scalar, scalar, vector, vector, scalar, scalar]
            continue
        mine = slice(start, start + rows)
        start += rows
        w_along = w * along
        columns += [w.sum(-1), w.square().sum(-1), first[:, rows:][:, mine], second[:, mine]]
        columns += [w_along.sum(-1), (w_along * along).sum(-1)]
    return out, direction, along, columns


def slope_direction(out: Tensor) -> Tensor:
    """The direction in a row's v_dim along which a relative scale error of the row is measured, [.., v_dim].

    Proportional to out for most dims, and to 1 / out for those above the median, so that one channel a hundred times
    the others, and its rounding, does not decide alone.
    """
    square = out.square()
    middle = square.median(-1, keepdim=True).values
    return torch.where(square > 0, out / torch.maximum(square, middle).clamp_min(torch.finfo(out.dtype).tiny), 0.0)


def split_variance(p: Tensor, v: Keys, out: Tensor, lse: Tensor, splitting: Splitting) -> Tensor:
    """SplitRounding.variance for a block of rows. out: [groups, rows, v_dim].  lse: [groups, rows]."""
    kv_len = v.length
    most = splitting.most(kv_len)
    if most == 1:
        return torch.zeros_like(out)
    count = 1 << (most.bit_length() - 1)
    step = max(1, -(-kv_len // count))
    sums = _sums_by_part(p, v, count, step)
    whole, whole_lse = out[:, :, None], lse[:, :, None, None]
    worst = torch.zeros_like(out)
    while True:
        mass, value, square, square_v, square_v2 = sums
        safe = mass.clamp_min(torch.finfo(torch.float64).tiny)
        part = value / safe
        # Sampling variance of a weighted mean: sum_j (p_j / w_s)^2 (v_j - out_s)^2.
        spread = ((square_v2 - 2 * part * square_v + part.square() * square) / safe.square()).clamp_min(0.0)
        states = PartStates(part, spread, (part - whole).square(), whole_lse + safe.log())
        # A part whose weight underflows adds nothing.
        charged = torch.where(mass > 1e-30, mass.square() * splitting.variance(states), 0.0)
        worst = torch.maximum(worst, charged.sum(2))
        if mass.shape[2] == 1:
            return worst
        sums = [x.unflatten(2, (-1, 2)).sum(3) for x in sums]


def _sums_by_part(p: Tensor, v: Keys, count: int, step: int) -> list[Tensor]:
    """Sums over parts of `step` keys: of p, p v, p^2, p^2 v and p^2 v^2. [groups, rows, count, v_dim or 1] each.

    Those of fewer, larger parts follow from them by addition.
    """
    columns: list[list[Tensor]] = [[], [], []]
    # A few parts at a time: each costs a dozen small operations, and all at once the memory of the values.
    at_once = max(1, _PARTS_BYTES // max(1, 8 * step * v.groups * v.dim))
    for first in range(0, count, at_once):
        parts = min(at_once, count - first)
        keys = slice(first * step, min((first + parts) * step, v.length))
        short = parts * step - len(range(*keys.indices(v.length)))
        x = torch.nn.functional.pad(v.x[:, keys].double(), (0, 0, 0, short)).unflatten(1, (parts, step))
        mine = torch.nn.functional.pad(p[:, :, keys], (0, short)).unflatten(2, (parts, step))
        both = torch.stack([mine, mine.square()], dim=2)  # [groups, rows, 2, parts, step]
        by_part = both.permute(0, 3, 2, 1, 4).flatten(2, 3)  # [groups, parts, 2 rows, step]
        columns[0].append(both.sum(-1))
        columns[1].append((by_part @ x).unflatten(2, (2, -1)))  # [groups, parts, 2, rows, v_dim]
        columns[2].append(by_part[:, :, len(p[0]) :] @ x.square())  # [groups, parts, rows, v_dim]
    mass, square = torch.cat(columns[0], dim=3)[..., None].unbind(2)
    value, square_v = torch.cat(columns[1], dim=1).permute(2, 0, 3, 1, 4)
    return [mass, value, square, square_v, torch.cat(columns[2], dim=1).transpose(1, 2)]


_PARTS_BYTES = 32 << 20  # of the values of some parts, in float64

_CUT_STEPS = (1, 16, 32, 64, 128)  # keys: a part is a whole number of tiles or pages


def split_tilt(p: Tensor, splitting: Splitting) -> Tensor:
    """SplitRounding.tilt for a block of rows, [groups, rows]."""
    groups, rows, kv_len = p.shape
    worst = p.new_zeros(groups, rows)
    levels = range(1, splitting.most(kv_len).bit_length())
    steps = [max(unit, -(-kv_len // (unit << level)) * unit) for level in levels for unit in _CUT_STEPS]
    for step in dict.fromkeys(steps):
        parts = torch.nn.functional.pad(p, (0, -kv_len % step)).unflatten(2, (-1, step))
        mass, largest = parts.sum(-1), parts.amax(-1)  # [groups, rows, count]
        # What is beside the largest, added up from small numbers: 1 - largest would cancel.
        rest = parts.masked_fill(parts >= largest[..., None], 0.0).sum(-1)
        tilt = (mass * splitting.tilt(rest / mass.clamp_min(torch.finfo(mass.dtype).tiny))).sum(-1)
        others = mass.masked_fill(mass >= mass.amax(-1, keepdim=True), 0.0).sum(-1)
        worst = torch.maximum(worst, tilt + splitting.tilt(others))
    return worst
