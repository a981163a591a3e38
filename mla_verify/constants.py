"""The numbers that decide a verdict, each with its reason. docs/error-model.md derives them and shows the evidence.

u is a format's unit round-off: rounding x to nearest errs by at most u |x|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
    # Keys too light to change an fp32 sum that is already there are lost, all in one direction: the key, or u of the
    # sum if that is less. How many come after the sum is there depends on where the heavy keys are: a share uniform
    # in [0, 1], of mean square 1 / 3.
    swamped: float = 1 / 3
    # Too light, in u: a step of 1.2 u of the sum still loses a tenth of what it adds, and a light key's value may be
    # several times smaller than the sum.
    light: float = 8.0
    # The square of the sum of P's rounding errors is as large as their variances together while they are random. Where
    # p's lie in one cell of the format, or become 0, they are not. Random sums come to 4.5 sigma once in 130,000; at
    # 5.1 sigma, and so a square of 26, the slope of a single head would be called wrong.
    together: float = 20.0
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
