"""The rounding of attention in parts that are merged one after the other, as engines attend over a cached prefix.

The last q_len keys of a request come first, the cached ones before them follow in chunks; each part's output is stored,
and so is the running result after each merge. Unlike the cuts of a split-KV kernel these are known. Blocks as in
key_sums.py: p [groups, rows, kv_len], v [groups, kv_len, v_dim].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_verify.reference.keys import Keys


@dataclass(frozen=True)
class Chunking:
    """Ask for the rounding of a kernel that attends over `chunk` cached keys at a time.

    stored: variance of storing a part's output or a merged one, elementwise.
    store: a result as it is stored.
    weight: variance of the relative error of a part's weight, from its LSE.
    arithmetic: variance of the relative error of one operation of a merge.
    """

    chunk: int
    stored: Callable[[Tensor], Tensor]
    store: Callable[[Tensor], Tensor]
    weight: Callable[[Tensor], Tensor]
    arithmetic: float


@dataclass(frozen=True)
class ChunkRounding:
    """What it does to the result: variances, but for `along`. All 0 without cached keys.

    Storing exact parts and merging them shows an error of its own, which is what happens where the parts' other errors
    are small beside a step. It is no random number: rows whose queries are alike share it, and a chunk too light to
    change the stored result is lost, as is the next one.
    """

    variance: Tensor  # of an output element, no less than the square of that error  [q_len, num_heads, v_dim]
    along: Tensor  # direction.(result - out) when both are stored  [q_len, num_heads]
    shared: Tensor  # of the relative error that the dims of a row share  [q_len, num_heads]
    lse: Tensor  # of the LSE  [q_len, num_heads]


def parts_in_order(kv_len: int, q_len: int, chunk: int) -> list[slice]:
    """Which keys each part holds, in the order of merging: the last q_len first, then the cached ones by chunk."""
    num_cached = max(0, kv_len - q_len)
    chunks = [slice(first, min(first + chunk, num_cached)) for first in range(0, num_cached, chunk)]
    return [slice(num_cached, kv_len), *chunks]


def chunk_rounding(
    p: Tensor, v: Keys, out: Tensor, direction: Tensor, lse: Tensor, q_len: int, chunking: Chunking
) -> list[Tensor]:
    """The fields of ChunkRounding for a block of rows. out, direction: [groups, rows, v_dim].  lse: [groups, rows]."""
    parts = parts_in_order(v.length, q_len, chunking.chunk)
    variance = torch.zeros_like(out)
    shared, lse_variance = torch.zeros_like(lse), torch.zeros_like(lse)
    if len(parts) == 1:
        return [variance, shared, shared, lse_variance]

    def charge(mass: Tensor, value: Tensor) -> Tensor:
        """For storing a state of this weight, whose out is value / mass, and its LSE. Returns the state."""
        safe = mass.clamp_min(torch.finfo(torch.float64).tiny)
        state = value / safe
        weight = chunking.weight(lse[..., None] + safe.log())
        # One whose weight underflows adds nothing.
        square, counts = mass.square(), mass > 1e-30
        charged = square * (chunking.stored(state) + weight * (state - out).square())
        variance.add_(torch.where(counts, charged, 0.0))
        lse_variance.add_(torch.where(counts, square * weight, 0.0).squeeze(-1))
        return state

    so_far = torch.zeros_like(lse)[..., None]  # the weight of the running result
    total = torch.zeros_like(out)
    stored = torch.zeros_like(out)  # the running result as exact parts, stored, give it
    for number, keys in enumerate(parts):
        mine = p[:, :, keys]
        mass, value = mine.sum(-1, keepdim=True), torch.zeros_like(out)
        for some, x in v.part(keys).blocks():
            value += mine[:, :, some] @ x
        part = chunking.store(charge(mass, value))
        if not number:
            so_far, total, stored = mass, value, part
            continue
        # Two quotients of weights, two products, their sum, and the sum of the weights.
        terms = 2 * (total.square() + value.square()) + 2 * (total + value).square()
        variance += chunking.arithmetic * terms
        merged = so_far + mass
        share = mass / merged.clamp_min(torch.finfo(merged.dtype).tiny)
        stored = (1 - share) * stored + share * part
        so_far, total = merged, total + value
        shared += 2 * chunking.arithmetic * so_far.square().squeeze(-1)
        if number < len(parts) - 1:  # storing the last one is the rounding of the result
            charge(so_far, total)
            stored = chunking.store(stored)
    stored = torch.where(so_far > 0, stored, out)
    along = (direction * (chunking.store(stored) - chunking.store(out)).nan_to_num(0.0)).sum(-1)
    return [torch.maximum(variance, (stored - out).square()), along, shared, lse_variance]
