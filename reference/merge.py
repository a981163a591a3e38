"""Merging attention over parts of the keys into attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint key sets, from (out, lse) over each, in float64.

    outs: [parts, ..., v_dim].  lses: [parts, ...], natural log.  Returns out [..., v_dim] and lse [...].
    A part without keys (lse -inf) has no weight, whatever its out; where all parts are empty, out is 0 and lse -inf.
    Raises ValueError when the shapes do not fit or an lse is NaN or +inf.
    """
    outs, lses = outs.double(), lses.double()
    if outs.shape[:-1] != lses.shape or not len(lses):
        raise ValueError(f"outs {list(outs.shape)} and lses {list(lses.shape)} must agree but for the last dimension")
    if bool((lses.isnan() | lses.isposinf()).any()):
        raise ValueError("an lse is NaN or +inf; a part without keys has lse -inf")
    lse = torch.logsumexp(lses, dim=0)
    # Where everything is empty, -inf - -inf would be NaN.
    weight = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    # 0 * NaN is NaN: the out of a part without keys may hold anything.
    outs = torch.where(weight[..., None] > 0, outs, 0.0)
    return (weight[..., None] * outs).sum(0), lse
