"""The error model: how much error the arithmetic that a kernel declares must make, element by element.

Every number that decides a verdict is here, with its reason; docs/error-model.md derives them and shows the evidence.
u is a format's unit round-off, s_j a scaled score, p_j its softmax weight, v_j the value, o the output, n the number
of keys seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from mla_verify.formats import FORMATS, FloatFormat
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.reference.attention import Attention
from mla_verify.reference.key_sums import KeyTerms, PartStates, Splitting, Weighing


@dataclass(frozen=True)
class Constants:
    """The constants of the error model. tests/test_noise_constants.py pins each one from both sides."""

    # Rounding a known number x to nearest errs uniformly within half a unit in its last place: variance ulp(x)^2 / 12.
    known: float = 1 / 12
    # Where only the size of x is known, the mean of ulp(x)^2 / 12 over mantissas that are uniform in their logarithm,
    # in units of (u x)^2: 4/3 of the integral of 1 / (m^3 ln 2) over [1, 2], times 1/4, = 1 / (8 ln 2).
    unknown: float = 1 / (8 * math.log(2))
    # A chain of L additions of numbers without a common sign: the partial sums grow like a random walk, their squares
    # add up to L / 2 times the square of the whole spread.
    random_walk: float = 1 / 2
    # ... and with a common sign: partial sums i / L of the total, whose squares add up to L / 3.
    drift: float = 1 / 3
    # A tensor-core instruction cuts its sum off, on the grid of its largest addend: about 0.6 u of the sum on average,
    # always toward 0. Partial sums without a common sign add up to n^2 / 3 times the square of the whole's spread.
    chop: float = 0.6**2
    # ... and products with a common sign are cut in common, each on that grid: up to 3.4 u of the sum an instruction,
    # by how large they are beside it. Of n growing sums, n / 2 times the whole; a bias, and so charged in full.
    chop_drift: float = 3.4**2
    # Keys too light to change an fp32 sum that is already there are lost, all in one direction. How many come after the
    # sum is there depends on where the heavy keys are: a share uniform in [0, 1], of mean square 1 / 3.
    swamped: float = 1 / 3
    # Too light, in u: a step of 1.2 u of the sum still loses a tenth of what it adds, and a light key's value may be
    # several times smaller than the sum.
    light: float = 8.0
    # Roundings of the exponent's argument at the size of the score: the product with sm_scale, the product with log2 e.
    argument: float = 2.0
    # Error of exp in u^2: uniform within 1 ulp (2 u), the bound of the CPU's vector expf.
    exp: float = 4 / 3
    # Roundings of the LSE at its own size: the sum of maximum and logarithm, the product with ln 2.
    lse: float = 2.0
    # Error that all scores of a row share, since sm_scale * log2 e is one fp32 number: the product's rounding, and
    # log2 e itself, which fp32 holds to 0.22 u (0.22^2 / unknown = 1/4). It moves the LSE by its size times sum p s.
    shared_scale: float = 5 / 4
    # Where a kernel cuts the keys is known to a tile only, so a partial output is known to a part of its sampling
    # variance; one that happens to be near 0 for our cut must not count as exact.
    cut: float = 1 / 2
    # A sum that is one number of the format but for a share x u moves by less than half a step when it is rounded, and
    # in all dims alike: by x u while that is lost whole, by no more than u / 2, and falling as 1 / x.
    tilt: float = 1 / 2
    # Mean size of a normal number of variance 1: an error e changes a rounding with probability |e| / step.
    mean_size: float = math.sqrt(2 / math.pi)
    # Changed roundings are rare events, and no matter of variance, where sigma is under this share of a step: fewer
    # than 1 element in 40 then changes.
    rare: float = 1 / 32
    # Statistics that share false_alarm: max_z, rms_z, slope.
    statistics: float = 3.0
    # Absolute error of log: PTX gives lg2.approx 2^-22 for arguments near 1; uniform within it.
    log: float = (2.0**-22) ** 2 / 3
    # Probability of calling an honest kernel wrong, per case and tensor; shared out among the statistics.
    false_alarm: float = 1e-6


CONSTANTS = Constants()
_U32 = FORMATS["fp32"].unit_roundoff
# A row whose P.V is summed in one chain has tile = n.
_UNBOUNDED = 1 << 62


@dataclass(frozen=True)
class Noise:
    """Variances, float64. out-shaped [T, H, D], row-shaped [T, H]."""

    inner: Tensor  # of an output element before it is rounded to out_dtype
    out: Tensor  # of an output element as it is returned
    slope: Tensor  # row-shaped; of a row's relative scale error, along Attention.direction, before that rounding
    slope_common: Tensor  # row-shaped; a standard deviation, of what moves the slopes of all rows together
    slope_bias: Tensor  # row-shaped; no variance but a bound: how far rounding partial outputs can tilt that slope
    lse: Tensor  # of the LSE
    shared: Tensor  # row-shaped: share of `out` that comes from keys, and so is common to the dims
    num_sources: Tensor  # row-shaped: how many keys, in effect, that share comes from


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
) -> tuple[Weighing, Weighing, Weighing]:
    """What the reference sums up over the keys. qk_dims: nope, rope.

    Two are variances per key, of (v_j - o)^2 and of v_j^2; the third is the p_j of keys that a running sum swallows.
    """
    rounds_p = facts.p_dtype != "fp32"

    def centred(t: KeyTerms) -> Tensor:
        w = t.p.square() * _score_variance(t, facts, qk_dims, constants)
        return w + _p_variance(t, facts, constants) if rounds_p and facts.rowsum == "rounded" else w

    def plain(t: KeyTerms) -> Tensor:
        random = _chain(t.num_keys, facts.tile, constants)[0] * constants.unknown
        random = random + _chopped(t.num_keys, facts, constants)[0]
        w = t.p.square() * (random * _U32**2)
        return w + _p_variance(t, facts, constants) if rounds_p and facts.rowsum == "unrounded" else w

    def swamped(t: KeyTerms) -> Tensor | None:
        # A tile's keys are summed before the running sum takes them.
        light = t.p * float(facts.tile or 1) < constants.light * _U32
        lost = t.p.masked_fill(~light, 0.0)
        # Less than one rounding of the whole is not worth three products.
        return lost if bool((lost.sum(-1) > _U32).any()) else None

    return centred, plain, swamped


def splitting(facts: RoundingFacts, constants: Constants = CONSTANTS) -> Splitting | None:
    """What the reference must compute about split-KV partial states, or None for a kernel that never splits."""
    if facts.max_splits == 1:
        return None
    c, fmt = constants, FORMATS[facts.partial_dtype]

    def variance(part: PartStates) -> Tensor:
        size = (part.out.square() + c.cut * part.spread).sqrt()
        # The parts' weights come from their LSEs: stored, subtracted from the largest, and put through exp.
        weight = _U32**2 * (c.unknown * c.lse * part.lse.square() + c.exp) + c.log
        return c.known * ulp(size, fmt).square() + weight * part.away

    def tilt(share: Tensor) -> Tensor:
        # fp32 parts are rounded too finely to tilt anything.
        u = fmt.unit_roundoff if facts.partial_dtype != "fp32" else 0.0
        return torch.minimum(share, c.tilt * u * (u / share.clamp_min(1e-300)).clamp_max(1.0))

    return Splitting(facts.max_splits, variance, tilt)


def _score_variance(t: KeyTerms, facts: RoundingFacts, qk_dims: tuple[int, int], c: Constants) -> Tensor:
    """Variance of the relative error of exp(s_j - max), from the fp32 dot product to exp."""
    nope, rope = qk_dims
    # The score may come from the nope part alone; the rope part's additions then round the whole score each.
    dot = (c.random_walk * nope + rope) * t.gram + (c.drift * nope + rope) * t.score.square()
    random, drift = _chopped(torch.tensor(float(nope + rope)), facts, c)
    chopped = random * t.gram + drift * t.score.square()
    return _U32**2 * (c.unknown * (dot + c.argument * t.score.square()) + chopped + c.exp)


def _p_variance(t: KeyTerms, facts: RoundingFacts, c: Constants) -> Tensor:
    """Variance of storing p_j in p_dtype, relative to the row's (running) maximum."""
    fmt = FORMATS[facts.p_dtype]
    w = c.unknown * fmt.unit_roundoff**2 * t.p.square()
    # Below the normal range the step is fixed; a p under half of it becomes 0, and errs by itself.
    floor = c.known * (fmt.min_subnormal * t.p_max).square()
    w = torch.minimum(t.p.square(), torch.maximum(w, floor))
    # The largest p is exp(0) = 1 when it is rounded, and so exact.
    return w.masked_fill(t.p >= t.p_max, 0.0)


def _chain(num_keys: Tensor, tile: int | None, c: Constants) -> tuple[Tensor, Tensor]:
    """Rounding variance of summing num_keys numbers, tile by tile, in units of `unknown` u^2.

    Returns the factors of the sum of squares (random signs) and of the square of the sum (drift).
    """
    n = num_keys.clamp_min(1.0)
    inner = n.clamp_max(float(tile or _UNBOUNDED))
    outer = n / inner  # additions of a tile to the accumulator
    return c.random_walk * (inner + outer), c.drift * (inner / outer + outer)


def _chopped(count: Tensor, facts: RoundingFacts, c: Constants) -> tuple[Tensor, Tensor]:
    """What cutting off does to a sum of `count` products, in units of u^2; 0 without tensor cores.

    Returns the factors of the sum of squares (random signs) and of the square of the sum (one sign).
    """
    if facts.tensor_core_k is None:
        return torch.zeros_like(count), torch.zeros_like(count)
    steps = (count / facts.tensor_core_k).ceil()
    return c.chop / 3 * steps.square(), c.chop_drift / 4 * steps.square()


def noise_of(
    ref: Attention, facts: RoundingFacts, constants: Constants = CONSTANTS, qk_dims: tuple[int, int] = (0, 0)
) -> Noise:
    """The noise of a kernel with these facts. `ref` was computed with their `weighings` and `splitting` alone.

    qk_dims: nope, rope; they matter to what tensor cores do to all scores of a row alike.
    """
    c, fmt, o = constants, FORMATS[facts.out_dtype], ref.out
    centred, plain, swamped = ref.sums
    split = ref.splits[0] if ref.splits else None
    num_keys = ref.num_keys[:, None]
    _, drift = _chain(num_keys, facts.tile, c)
    drift = drift * _U32**2 * c.unknown  # [T, 1]

    # sum_j w_j (v_j - o)^2, expanded; cancellation can leave it a hair below 0.
    spread = (centred.v2 - 2 * o * centred.v + o.square() * centred.one[..., None]).clamp_min(0.0)
    chopped = _chopped(num_keys, facts, c)[1] * _U32**2  # [T, 1]; of P.V, in common to the whole row
    keyed = spread + plain.v2 + chopped[..., None] * o.square()
    # Two sums drift, that of P.V and the denominator.
    inner = keyed + 2 * drift[..., None] * o.square() + c.swamped * swamped.v.square()
    if split is not None:
        inner = inner + split.variance
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
    slope = slope + c.swamped * swamped.along.square() / safe
    if split is not None:
        slope = slope + (d.square() * split.variance).sum(-1) / safe

    lse_drift = _chain(num_keys, facts.tile, c)[1] * _U32**2 * c.unknown
    lse = centred.one + lse_drift + c.swamped * swamped.one.square() + c.log
    lse = lse + _U32**2 * c.unknown * c.lse * ref.lse.square()
    shared_scale = _shared_scale(facts, qk_dims, c)
    lse = lse + (shared_scale * ref.mean_score).square()
    one = centred.one + plain.one
    square = centred.square + plain.square
    return Noise(
        inner=inner,
        out=out,
        slope=slope,
        slope_common=((shared_scale * (ref.score_along - ref.mean_score * reach)).square() / safe + chopped).sqrt(),
        slope_bias=split.tilt if split else torch.zeros_like(reach),
        lse=lse,
        shared=(keyed / out).mean(-1),
        # sum(w)^2 / sum(w^2) counts equal weights; the two weighings share their keys, hence the 2.
        num_sources=one.square() / (2 * square).clamp_min(torch.finfo(torch.float64).tiny),
    )


def _shared_scale(facts: RoundingFacts, qk_dims: tuple[int, int], c: Constants) -> float:
    """Standard deviation of the relative error that all scores share."""
    # A root is rounded once and enters twice, with the same error: four times the variance of one rounding.
    roundings = c.shared_scale if facts.scale == "product" else 4.0
    chopped = float(_chopped(torch.tensor(float(sum(qk_dims))), facts, c)[1])
    return float(_U32 * math.sqrt(c.unknown * roundings + chopped))


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
