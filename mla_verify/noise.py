"""The error model: how much error the arithmetic that a kernel declares must make, element by element.

Every number that decides a verdict is in constants.py, with its reason; what each key adds is in key_noise.py.
docs/error-model.md derives it all and shows the evidence.
u is a format's unit round-off, s_j a scaled score, p_j its softmax weight, v_j the value, o the output, n the number
of keys seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from mla_verify.constants import CONSTANTS as CONSTANTS
from mla_verify.constants import Constants as Constants
from mla_verify.formats import FORMATS
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.key_noise import U32, chain, chopped
from mla_verify.key_noise import round_to as round_to
from mla_verify.key_noise import splitting as splitting
from mla_verify.key_noise import ulp as ulp
from mla_verify.key_noise import weighings as weighings
from mla_verify.reference.attention import Attention
from mla_verify.reference.chunk_rounding import ChunkRounding
from mla_verify.reference.key_sums import KeySums, SplitRounding


@dataclass(frozen=True)
class Noise:
    """Variances, float64. out-shaped [T, H, D], row-shaped [T, H]."""

    inner: Tensor  # of an output element before it is rounded to out_dtype
    out: Tensor  # of an output element as it is returned
    slope: Tensor  # row-shaped; of a row's relative scale error, along Attention.direction, before that rounding
    slope_common: Tensor  # row-shaped; a standard deviation, of what moves the slopes of all rows together
    slope_bias: Tensor  # row-shaped; no variance but a bound: how far roundings that are not random can tilt that slope
    slope_known: Tensor  # row-shaped; no variance: what that slope is, with its sign, where nothing else is rounded
    lse: Tensor  # of the LSE
    shared: Tensor  # row-shaped: share of `out` that comes from keys, and so is common to the dims
    num_sources: Tensor  # row-shaped: how many independent numbers, in effect, that share comes from
    lost: Tensor  # row-shaped: share of `out` for light keys that are lost; one value and no spread, up to 3 times that
    copies: Tensor  # row-shaped: how many rows of its head make the errors that this one makes, itself included


@dataclass(frozen=True)
class Beside:
    """What errs beside the attention itself, as variances. out-shaped [T, H, D], row-shaped [T, H]."""

    variance: Tensor  # of an output element
    slope: Tensor  # row-shaped; of a row's relative scale error
    common: Tensor  # row-shaped; what moves the slopes of all rows together
    bias: Tensor  # row-shaped; no variance: Noise.slope_bias
    lse: Tensor
    # row-shaped: how many independent numbers the variance of a row's elements comes from; m times fewer, and so
    # perhaps less than one, where m rows have them in common.
    num_sources: Tensor


def noise_of(
    ref: Attention,
    facts: RoundingFacts,
    constants: Constants = CONSTANTS,
    qk_dims: tuple[int, int] = (0, 0),
    beside: Beside | None = None,
) -> Noise:
    """The noise of a kernel with these facts. `ref` was computed with their `weighings` and `splitting` alone.

    qk_dims: nope, rope; they matter to what tensor cores do to all scores of a row alike.
    """
    c, fmt, o = constants, FORMATS[facts.out_dtype], ref.out
    centred, plain, swamped, together = ref.sums
    parts: tuple[SplitRounding | ChunkRounding, ...] = (*ref.splits, *ref.chunks)
    num_keys = ref.num_keys[:, None]
    drift = chain(num_keys, facts.tile, c)[1] * U32**2 * c.unknown  # [T, 1]

    # sum_j w_j (v_j - o)^2, expanded; cancellation can leave it a hair below 0.
    spread = (centred.v2 - 2 * o * centred.v + o.square() * centred.one[..., None]).clamp_min(0.0)
    cut = chopped(num_keys, facts, c)[1] * U32**2  # [T, 1]; of P.V, in common to the whole row
    keyed = spread + plain.v2 + cut[..., None] * o.square()
    # Both sums lose their light keys, that of P.V and the denominator.
    lost = c.swamped * (swamped.v.square() + (o * swamped.one[..., None]).square())
    # Rounded P moves both sums where the denominator adds rounded P, and so leaves o where it is for equal values.
    centre = 1.0 if facts.rowsum == "rounded" else 0.0
    pulled = together.v - centre * o * together.one[..., None]
    # Two sums drift as well.
    inner = keyed + 2 * drift[..., None] * o.square() + lost + pulled.square()
    for part in parts:
        inner = inner + part.variance
    if beside is not None:
        inner = inner + beside.variance
    step = ulp(o, fmt)
    # The rounding of a known number is known: never charge less than what rounding the expected value itself shows,
    # which matters where values sit on the format's ties (an average of two).
    rounding = torch.maximum(c.known * step.square(), (round_to(o, fmt) - o).square().nan_to_num(posinf=0.0))
    out = inner + rounding

    d = ref.direction
    reach = (d * o).sum(-1)  # the slope is d.error / d.o
    along = (centred.along2 - 2 * reach * centred.along + reach.square() * centred.one).clamp_min(0.0) + plain.along2
    safe = reach.square().masked_fill(reach == 0, 1.0)
    # The denominator's drift is one factor for the whole row; P.V's differs from dim to dim.
    slope = along / safe + drift + drift * (d * o).square().sum(-1) / safe
    for part in parts:
        slope = slope + (d.square() * part.variance).sum(-1) / safe
    for chunks in ref.chunks:
        slope = slope + chunks.shared
    scale = _shared_scale(facts, qk_dims, c)
    scaled = (scale * (ref.score_along - ref.mean_score * reach)).square() / safe
    # All rows lose in one direction.
    common = scaled + cut + c.swamped * (swamped.one.square() + swamped.along.square() / safe)
    flatness = _flatness(ref)
    flat = flatness < (FORMATS[facts.p_dtype].unit_roundoff if facts.p_dtype != "fp32" else 0.0)
    # P's that all become 1 push all rows alike, also where each row on its own would not show it.
    risen = torch.where(flat, (1.0 - centre) * flatness, 0.0)
    bias = torch.maximum((together.along - centre * reach * together.one).abs() / safe.sqrt(), risen)
    for split in ref.splits:
        bias = bias + split.tilt
    known = torch.zeros_like(bias)
    for chunks in ref.chunks:
        known = known + chunks.along / safe.sqrt()

    lse = centred.one + drift + c.swamped * swamped.one.square() + centre * together.one.square() + c.log
    lse = lse + U32**2 * c.unknown * c.lse * ref.lse.square() + (scale * ref.mean_score).square()
    for chunks in ref.chunks:
        lse = lse + chunks.lse
    shared = (keyed / out).mean(-1)
    num_sources = _num_sources(o, centred, plain, keyed, cut, out).clamp(1.0, float(o.shape[-1]))
    if beside is not None:
        slope, common, bias, lse = slope + beside.slope, common + beside.common, bias + beside.bias, lse + beside.lse
        # Of two parts the norms of their correlations add up at most: share / sqrt(sources) of each.
        share = (beside.variance / out).mean(-1)
        norm = shared / num_sources.sqrt() + share / beside.num_sources.sqrt()
        shared = shared + share
        num_sources = (shared / norm.clamp_min(torch.finfo(torch.float64).tiny)).square()
    return Noise(
        inner=inner,
        out=out,
        slope=slope,
        slope_common=common.sqrt(),
        slope_bias=bias,
        slope_known=known,
        lse=lse,
        shared=shared,
        num_sources=num_sources,
        lost=(lost / out).mean(-1),
        copies=_copies(ref, flat),
    )


def _flatness(ref: Attention) -> Tensor:
    """Mean of 1 - P, where P is p over the largest p; 1 in an empty row."""
    keys = ref.num_keys[:, None].clamp_min(1.0)
    return -torch.expm1(ref.lse - ref.max_score - keys.log()).clamp_max(0.0)


def _copies(ref: Attention, flat: Tensor) -> Tensor:
    """Noise.copies: rows that are equal, as in batches padded with one request and prompts that begin alike.

    So do rows in which all p become 1 and o is the mean of the same values.
    """
    num_heads = ref.lse.shape[1]
    copies = torch.ones_like(ref.lse)
    seen = ref.num_keys > 0
    if int(seen.sum()) < 2:
        return copies
    # float32 takes what equal rows of different matrix products may differ by.
    size = ref.out[seen].square().sum(-1).log2()
    # The size alone, to 1 %, tells the values of flat rows apart.
    exact = torch.stack([ref.lse[seen], ref.max_score[seen], ref.out[seen].sum(-1), size], -1).float()
    rough = torch.zeros_like(exact)
    rough[..., 0] = (size * 32).round().float()
    marks = torch.where(flat[seen][..., None], rough, exact)
    keys = ref.num_keys[seen].float()[:, None].expand(-1, num_heads)
    heads = torch.arange(num_heads, device=keys.device).float().expand_as(keys)
    marks = torch.cat([heads[..., None], keys[..., None], marks], -1).flatten(0, 1)
    _, which, count = marks.unique(dim=0, return_inverse=True, return_counts=True)
    copies[seen] = count[which].double().unflatten(0, (-1, num_heads))
    return copies


def _num_sources(o: Tensor, centred: KeySums, plain: KeySums, keyed: Tensor, cut: Tensor, out: Tensor) -> Tensor:
    """How many independent numbers the errors that come from keys are, in effect: no more than keys, fewer where the
    values have a vector in common, along which all keys push.
    """
    tiny = torch.finfo(torch.float64).tiny
    # sum(w)^2 / sum(w^2) counts equal weights; the two weighings share their keys, hence the 2.
    keys = (centred.one + plain.one).square() / (2 * (centred.square + plain.square)).clamp_min(tiny)
    # The part of the variance along the mean value of each weighing is one number.
    of_centred = (centred.v - o * centred.one[..., None]).square() / centred.one.clamp_min(tiny)[..., None]
    of_plain = plain.v.square() / plain.one.clamp_min(tiny)[..., None]
    single = of_centred + of_plain + cut[..., None] * o.square()
    share = (single / out).sum(-1) / (keyed / out).sum(-1).clamp_min(tiny)
    return 1 / (1 / keys.clamp_min(tiny) + share.square())


def _shared_scale(facts: RoundingFacts, qk_dims: tuple[int, int], c: Constants) -> float:
    """Standard deviation of the relative error that all scores share."""
    # A root is rounded once and enters twice, with the same error: four times the variance of one rounding.
    roundings = c.shared_scale if facts.scale == "product" else 4.0
    cut = float(chopped(torch.tensor(float(sum(qk_dims))), facts, c)[1])
    return float(U32 * math.sqrt(c.unknown * roundings + cut))


def changed_rounding(step: Tensor, sigma: Tensor, constants: Constants = CONSTANTS) -> Tensor:
    """Mean square of round(o + e) - round(o) for an error e of variance sigma^2, beyond e itself.

    A full step now and then while e is small; two independent roundings when it is large.
    """
    return torch.minimum(2 * constants.known * step.square(), constants.mean_size * step * sigma)


def z_limit(count: int, probability: float) -> float:
    """|z| that the largest of `count` normal numbers exceeds with at most this probability."""
    return -NormalDist().inv_cdf(probability / (2 * max(count, 1)))


def rms_limit(dof: float, probability: float) -> float:
    """What the root mean square of z exceeds with this probability, when its square has `dof` degrees of freedom.

    Wilson and Hilferty's cube-root approximation of the chi-square quantile (PNAS 17, 1931).
    """
    if dof <= 0:
        return math.inf
    h = 2 / (9 * dof)
    return float((1 - h - NormalDist().inv_cdf(probability) * math.sqrt(h)) ** 1.5)
