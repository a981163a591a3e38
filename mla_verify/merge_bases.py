"""A merged kernel that is wrong: does its output fit its own parts, merged with LSEs in the wrong base?

Attention over parts of the keys is merged with weights exp(lse). A merge that takes base-2 LSEs for natural ones has
weights exp(1.4427 lse) instead, one that takes natural ones for base 2 has exp(0.6931 lse). Both are computed here in
float64, with the roundings that the parts and the merges make then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_verify.constants import CONSTANTS
from mla_verify.expected import DenseRequest, Expected, dense_request
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.key_noise import chunking
from mla_verify.noise import noise_of, z_limit
from mla_verify.reference.chunk_rounding import parts_in_order
from mla_verify.reference.merge import merge_states
from mla_verify.tensors import AttentionInputs, MLAOutput

# What each LSE is multiplied by, and what a merge that does so takes for what.
WRONG_BASES = (
    (1 / math.log(2), "base-2 LSEs taken as natural ones (each LSE times 1.4427)"),
    (math.log(2), "natural LSEs taken as base-2 ones (each LSE times 0.6931)"),
)
# The wrong merge has to be told from the right one before an output can be nearer to it: 10 sigma of their distance,
# so that how far an output has gone from the one to the other is known to a tenth. It must have gone all the way.
TOLD_APART = 10.0
ALL_THE_WAY = 0.1


@dataclass(frozen=True)
class _Part:
    """Attention over one part of a request's keys, and the variance of each element as the part is stored."""

    out: Tensor  # [q_len, num_heads, v_dim]
    variance: Tensor
    lse: Tensor  # [q_len, num_heads], natural log
    lse_variance: Tensor


def wrong_base(output: MLAOutput, inputs: AttentionInputs, expected: Expected, facts: RoundingFacts) -> str | None:
    """In one sentence, that a wrong `output` is that of a merge with LSEs of another base; None where it is not.

    Its LSE is not looked at: compare.py tells when that one alone is in another base.
    """
    if facts.chunk is None:
        return None
    actual, right = output.out.double(), expected.attention.out
    parts = [_parts(dense_request(inputs, b), facts) for b in range(inputs.num_requests)]
    for factor, told in WRONG_BASES:
        merged = [_merged(p, factor, facts) for p in parts]
        wrong, sigma = torch.cat([m[0] for m in merged]), torch.cat([m[1] for m in merged]).sqrt()
        if _fits(actual, right, wrong, sigma):
            return f"the output fits its parts merged with {told}"
    return None


def _fits(actual: Tensor, right: Tensor, wrong: Tensor, sigma: Tensor) -> bool:
    z, distance = (actual - wrong) / sigma, (wrong - right) / sigma  # NaN fits nothing
    reach = float(distance.square().sum())
    if reach < TOLD_APART**2:
        return False
    # How far the output went from the right one (0) to the wrong one (1).
    gone = 1 + float((z * distance).sum()) / reach
    limit = z_limit(z.numel(), CONSTANTS.false_alarm / CONSTANTS.statistics)
    return abs(gone - 1) <= ALL_THE_WAY and float(z.abs().max()) <= limit


def _parts(request: DenseRequest, facts: RoundingFacts) -> list[_Part]:
    assert facts.chunk is not None
    alone = replace(facts, chunk=None)
    found = []
    for number, keys in enumerate(parts_in_order(len(request.k[0]), len(request.q[0]), facts.chunk)):
        # Only the new keys, which come first, are hidden from some of the queries.
        causal = request.causal and number == 0
        part = replace(request, k=tuple(k[keys] for k in request.k), causal=causal).attend([alone])
        noise = noise_of(part, alone, qk_dims=request.qk_dims)
        found.append(_Part(part.out, noise.out, part.lse, noise.lse))
    return found


def _merged(parts: Sequence[_Part], factor: float, facts: RoundingFacts) -> tuple[Tensor, Tensor]:
    """The parts merged with every LSE times `factor`, and the variance of each element of that."""
    merging = chunking(facts)
    assert merging is not None
    outs, lses = torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]) * factor
    out, lse = merge_states(outs, lses)
    seen = lse.masked_fill(lse.isneginf(), 0.0)

    def share(of: Tensor) -> Tensor:
        """The weight of a part, or of the running result, by its LSE."""
        return (of - seen).exp()[..., None]

    def weight(of: Tensor, more: Tensor | float = 0.0) -> Tensor:
        """Variance of the relative error of that weight."""
        return (merging.weight(of.masked_fill(of.isneginf(), 0.0)) + more)[..., None]

    variance = torch.zeros_like(out)
    for number, part in enumerate(parts):
        off = weight(lses[number], factor**2 * part.lse_variance.nan_to_num())
        variance += share(lses[number]).square() * (part.variance + off * (part.out - out).square())
        if number:  # a merge, after which the running result is stored
            so_far, so_far_lse = merge_states(outs[: number + 1], lses[: number + 1])
            moved = weight(so_far_lse) * (so_far - out).square() + 4 * merging.arithmetic * so_far.square()
            variance += share(so_far_lse).square() * (merging.stored(so_far) + moved)
    return out, variance
