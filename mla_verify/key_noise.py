"""What each key, and each part of a split, adds to the noise: the weights that the reference sums over the keys.

Notation as in noise.py, which puts the sums together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from mla_verify.constants import CONSTANTS, Constants
from mla_verify.formats import FORMATS, FloatFormat
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.reference.chunk_rounding import Chunking
from mla_verify.reference.key_sums import KeyTerms, PartStates, Splitting, Weighing

U32 = FORMATS["fp32"].unit_roundoff
# A row whose P.V is summed in one chain has tile = n.
_UNBOUNDED = 1 << 62
# Maxima, an octave at most above the last one, at which the common error of P is looked for. Where all p lie in one
# cell of the format that error is a sawtooth in the maximum: 8 points find 7/8 of its peak.
_MAXIMA = 8


def ulp(x: Tensor, fmt: FloatFormat) -> Tensor:
    """Distance between neighbours of `fmt` at |x|, float64; that of the subnormal numbers near 0."""
    exponent = torch.frexp(x.double().abs()).exponent - 1  # |x| = m * 2^exponent with m in [1, 2)
    # frexp gives 0 the exponent of 1/2.
    exponent = exponent.clamp_min(fmt.min_exponent).masked_fill(x == 0, fmt.min_exponent)
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - fmt.mantissa_bits)


def round_to(x: Tensor, fmt: FloatFormat) -> Tensor:
    """float64 `x` rounded once to `fmt`, as float64. Overflow gives inf."""
    # torch converts float64 to a 16-bit format by way of float32, which rounds twice; a grid step does not.
    step = ulp(x, fmt)
    rounded = torch.round(x / step) * step  # half to even; exact, since step is a power of two
    largest = (2.0 - 2.0**-fmt.mantissa_bits) * 2.0 ** (1 - fmt.min_exponent)
    return torch.where(rounded.abs() > largest, torch.sign(x) * math.inf, rounded)


def weighings(
    facts: RoundingFacts, qk_dims: tuple[int, int], constants: Constants = CONSTANTS
) -> tuple[Weighing, Weighing, Weighing, Weighing]:
    """What the reference sums up over the keys. qk_dims: nope, rope.

    Two are variances per key, of (v_j - o)^2 and of v_j^2. Two are errors, which add up with their signs: what a
    running sum loses of a key that it swallows, and how far off p_j is stored, where a row's p_j err together.
    Kernels that have the facts of one in common share it: it is the same object, and its sums are made once.
    """
    rounding = _only(facts, "p_dtype", "rowsum", "tensor_core_k")
    return (
        _centred(rounding, qk_dims, constants),
        _plain(replace(rounding, tile=facts.tile), constants),
        _swamped(facts.tile, constants),
        _together(_only(facts, "p_dtype"), constants),
    )


def _only(facts: RoundingFacts, *names: str) -> RoundingFacts:
    """These facts, and of the others the default."""
    return RoundingFacts("fp32", **{name: getattr(facts, name) for name in names})


@lru_cache
def _centred(facts: RoundingFacts, qk_dims: tuple[int, int], constants: Constants) -> Weighing:
    def centred(t: KeyTerms) -> Tensor:
        w = t.p.square() * _score_variance(t, facts, qk_dims, constants)
        if facts.p_dtype != "fp32" and facts.rowsum == "rounded":
            w = w + _p_variance(t.p, t.p_max, facts, constants)
        # m equal keys have one error, m times as large: variance m^2, which is m for each.
        return w if t.copies is None else w * t.copies

    return centred


@lru_cache
def _plain(facts: RoundingFacts, constants: Constants) -> Weighing:
    def plain(t: KeyTerms) -> Tensor:
        random = chain(t.num_keys, facts.tile, constants)[0] * constants.unknown
        random = random + chopped(t.num_keys, facts, constants)[0]
        w = t.p.square() * (random * U32**2)
        if facts.p_dtype == "fp32" or facts.rowsum == "rounded":
            return w
        p = _p_variance(t.p, t.p_max, facts, constants)
        return w + (p if t.copies is None else p * t.copies)

    return plain


@lru_cache
def _swamped(tile: int | None, constants: Constants) -> Weighing:
    # A tile's keys are summed before the running sum takes them, and that addition loses u of the sum at most.
    most = U32 / float(tile or 1)

    def swamped(t: KeyTerms) -> Tensor | None:
        light = t.p < constants.light * most
        lost = t.p.clamp_max(most).masked_fill(~light, 0.0)
        # Less than one rounding of the whole is not worth three products.
        return lost if bool((lost.sum(-1) > U32).any()) else None

    return swamped


@lru_cache
def _together(facts: RoundingFacts, constants: Constants) -> Weighing:
    def together(t: KeyTerms) -> Tensor | None:
        if facts.p_dtype == "fp32" or not t.p.numel():
            return None
        return _common_errors_of_p(t, facts, constants)

    return together


def _common_errors_of_p(t: KeyTerms, facts: RoundingFacts, c: Constants) -> Tensor | None:
    """How far off each p_j is stored, signed, in the rows whose p_j err together; 0 in the others, None without any.

    p's that lie in one cell of the format, or below half its smallest number, all err in one direction. Where in its
    cell a p lies depends on the maximum at the time it is rounded, which is unknown: it is the one that shows most.
    """
    fmt = FORMATS[facts.p_dtype]
    # fp32 holds p to far less than it is rounded by, and torch rounds fp32 as a kernel does.
    p = (t.p / t.p_max.clamp_min(torch.finfo(torch.float64).tiny)).float()
    # A maximum is no further below the last one than the lightest key is.
    lowest = p.masked_fill(p == 0, 1.0).amin(-1, keepdim=True)
    p.masked_fill_(p >= 1, 0.0)  # exp(0), and exact
    total = p.sum(-1)
    sums = []
    for i in range(_MAXIMA):
        shift = lowest.clamp_min(0.5) ** (-i / _MAXIMA)
        sums.append((p * shift).to(fmt.torch_dtype).sum(-1, dtype=torch.float32) / shift.squeeze(-1) - total)
    largest, which = torch.stack(sums).abs().max(0)  # [groups, rows]
    # The variance of the sum were they independent; near the subnormal numbers it is larger.
    least = c.unknown * fmt.unit_roundoff**2 * torch.linalg.vector_norm(p, dim=-1).square()
    # Less than one fp32 rounding of the whole is not worth the products.
    matters = (largest.square() > c.together * least) & (largest.double() * t.p_max.squeeze(-1) > U32)
    if not bool(matters.any()):
        return None
    rows = matters.nonzero(as_tuple=True)
    p, p_max, largest = p[rows], t.p_max[rows], largest[rows]
    matters = largest.square() > c.together * _p_variance(p.double(), torch.ones_like(p_max), facts, c).sum(-1)
    shift = (lowest.clamp_min(0.5)[rows]) ** (-which[rows][:, None] / _MAXIMA)
    errors = (p * shift).to(fmt.torch_dtype).double() / shift.double() - p.double()
    result = torch.zeros_like(t.p)
    result[rows] = errors * p_max * matters[:, None]
    return result if bool(matters.any()) else None


def splitting(facts: RoundingFacts, constants: Constants = CONSTANTS) -> Splitting | None:
    """What the reference must compute about split-KV partial states, or None for a kernel that never splits."""
    if facts.max_splits == 1:
        return None
    return _splitting(facts.max_splits, facts.least_part, facts.partial_dtype, constants)


@lru_cache
def _splitting(max_splits: int, least_part: int, partial_dtype: str, c: Constants) -> Splitting:
    fmt = FORMATS[partial_dtype]

    def variance(part: PartStates) -> Tensor:
        size = (part.out.square() + c.cut * part.spread).sqrt()
        return c.known * ulp(size, fmt).square() + _part_weight(part.lse, c) * part.away

    def tilt(share: Tensor) -> Tensor:
        # fp32 parts are rounded too finely to tilt anything.
        u = fmt.unit_roundoff if partial_dtype != "fp32" else 0.0
        return torch.minimum(share, c.tilt * u * (u / share.clamp_min(1e-300)).clamp_max(1.0))

    return Splitting(max_splits, least_part, variance, tilt)


def chunking(facts: RoundingFacts, constants: Constants = CONSTANTS) -> Chunking | None:
    """What the reference must compute about a prefix in chunks, or None for a kernel that takes all keys at once."""
    if facts.chunk is None:
        return None
    c, fmt = constants, FORMATS[facts.out_dtype]

    def stored(out: Tensor) -> Tensor:
        # These parts are known, and so is how far off a value on a tie is stored.
        return torch.maximum(c.known * ulp(out, fmt).square(), (round_to(out, fmt) - out).square().nan_to_num(posinf=0))

    def store(out: Tensor) -> Tensor:
        return round_to(out, fmt)

    return Chunking(facts.chunk, stored, store, lambda lse: _part_weight(lse, c), U32**2 * c.unknown)


def _part_weight(lse: Tensor, c: Constants) -> Tensor:
    """Variance of the relative error of a part's weight: its LSE is stored, taken from another, and put through exp."""
    return U32**2 * (c.unknown * c.lse * lse.square() + c.exp) + c.log


def _score_variance(t: KeyTerms, facts: RoundingFacts, qk_dims: tuple[int, int], c: Constants) -> Tensor:
    """Variance of the relative error of exp(s_j - max), from the fp32 dot product to exp."""
    nope, rope = qk_dims
    # The score may come from the nope part alone; the rope part's additions then round the whole score each.
    dot = (c.random_walk * nope + rope) * t.gram + (c.drift * nope + rope) * t.score.square()
    random, drift = chopped(torch.tensor(float(nope + rope)), facts, c)
    cut = random * t.gram + drift * t.score.square()
    return U32**2 * (c.unknown * (dot + c.argument * t.score.square()) + cut + c.exp)


def _p_variance(p: Tensor, p_max: Tensor, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of storing p_j in p_dtype, relative to the row's (running) maximum."""
    fmt = FORMATS[facts.p_dtype]
    w = c.unknown * fmt.unit_roundoff**2 * p.square()
    # Below the normal range the step is fixed; a p under half of it becomes 0, and errs by itself.
    floor = c.known * (fmt.min_subnormal * p_max).square()
    w = torch.minimum(p.square(), torch.maximum(w, floor))
    # The largest p is exp(0) = 1 when it is rounded, and so exact.
    return w.masked_fill(p >= p_max, 0.0)


def chain(num_keys: Tensor, tile: int | None, c: Constants) -> tuple[Tensor, Tensor]:
    """Rounding variance of summing num_keys numbers, tile by tile, in units of `unknown` u^2.

    Returns the factors of the sum of squares (random signs) and of the square of the sum (drift).
    """
    n = num_keys.clamp_min(1.0)
    inner = n.clamp_max(float(tile or _UNBOUNDED))
    outer = n / inner  # additions of a tile to the accumulator
    return c.random_walk * (inner + outer), c.drift * (inner / outer + outer)


def chopped(count: Tensor, facts: RoundingFacts, c: Constants) -> tuple[Tensor, Tensor]:
    """What cutting off does to a sum of `count` products, in units of u^2; 0 without tensor cores.

    Returns the factors of the sum of squares (random signs) and of the square of the sum (one sign).
    """
    if facts.tensor_core_k is None:
        return torch.zeros_like(count), torch.zeros_like(count)
    steps = (count / facts.tensor_core_k).ceil()
    return c.chop / 3 * steps.square(), c.chop_drift / 4 * steps.square()
