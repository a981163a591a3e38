"""Each constant of the error model against the one rounding that it stands for, made on purpose and nothing else.

`MEASURED[name]` gives what was measured over what the model charges for it. The true constant lies within sqrt(2) of it
on either side, so that doubling or halving any constant turns its test red; a test below does just that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from mla_verify.formats import FORMATS
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.noise import CONSTANTS, Constants, noise_of, partial_states, round_to, ulp, weighings, z_limit
from mla_verify.reference.attention import Attention, attend_absorbed
from mla_verify.reference.key_sums import KeyTerms

BF16 = FORMATS["bf16"]
FP32 = RoundingFacts(out_dtype="fp32")
SPLIT = RoundingFacts(out_dtype="bf16", partial_dtype="bf16", max_splits=2)
LOG2E = math.log2(math.e)


def fl32(x: Tensor) -> Tensor:
    return x.float().double()


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def attend(q: Tensor, v: Tensor, facts: RoundingFacts, c: Constants) -> Attention:
    """One query row a head over keys that are the values themselves."""
    none = torch.zeros(len(v), 0)
    rows = torch.zeros(1, q.shape[0], 0)
    w = weighings(facts, (v.shape[1], 0), c)
    return attend_absorbed(q[None], rows, v, none, sm_scale=1.0, causal=False, weighings=w)


def terms(score: Tensor, gram: float = 0.0) -> KeyTerms:
    one = torch.ones_like(score)
    return KeyTerms(p=one, score=score, gram=gram * one, max_score=one, p_max=2 * one, num_keys=one)


def score_variance(c: Constants, score: Tensor) -> Tensor:
    return weighings(FP32, (0, 0), c)[0](terms(score))


def without(c: Constants, name: str) -> Constants:
    return replace(c, **{name: 0.0})


def log_uniform(low: float, high: float, count: int, seed: int) -> Tensor:
    return low * (high / low) ** torch.rand(count, generator=gen(seed), dtype=torch.float64)


def known(c: Constants) -> float:
    x = torch.randn(100_000, generator=gen(0), dtype=torch.float64)
    states = partial_states(SPLIT, c)
    assert states
    return float(((round_to(x, BF16) - x).square() / states.variance(x, torch.zeros_like(x))).mean())


def unknown(c: Constants) -> float:
    """Probabilities rounded to bf16, and nothing else."""
    facts = RoundingFacts(out_dtype="fp32", p_dtype="bf16")
    v = torch.randn(300, 64, generator=gen(1), dtype=torch.float64)
    q = 0.2 * torch.randn(64, 64, generator=gen(2), dtype=torch.float64)
    ref = attend(q, v, facts, c)
    p = torch.exp(q @ v.T - ref.max_score[0, :, None])
    error = ((round_to(p, BF16) - p) @ v) / p.sum(-1, keepdim=True)
    rest = without(c, "unknown")
    charged = noise_of(ref, facts, c).inner - noise_of(attend(q, v, facts, rest), facts, rest).inner
    return float((error.square() / charged[0]).mean())


def _summed_in_fp32(p: Tensor, v: Tensor) -> Tensor:
    """P.V over keys and the row sum, each in one chain of fp32 additions, exact otherwise."""
    acc = torch.zeros(p.shape[0], v.shape[1], dtype=torch.float64)
    total = torch.zeros(p.shape[0], 1, dtype=torch.float64)
    for j in range(len(v)):
        acc = fl32(acc + p[:, j, None] * v[j])
        total = fl32(total + p[:, j, None])
    return acc / total


def _chain(c: Constants, name: str, v: Tensor, *, flat: bool) -> float:
    heads = 1 if flat else 32
    q = (0.0 if flat else 0.02) * torch.randn(heads, v.shape[1], generator=gen(4), dtype=torch.float64)
    ref = attend(q, v, FP32, c)
    p = torch.exp(q @ v.T - ref.max_score[0, :, None])
    # A factor that all of a row share, as after a maximum that came late, so that sums of every size occur. Where all
    # p are 1, their sum is exact.
    p = p if flat else p * 2 ** torch.rand(heads, 1, generator=gen(18), dtype=torch.float64)
    error = _summed_in_fp32(p, v) - ref.out[0]
    rest = without(c, name)
    charged = noise_of(ref, FP32, c).inner - noise_of(attend(q, v, FP32, rest), FP32, rest).inner
    return float(error.square().mean() / charged.mean())


def random_walk(c: Constants) -> float:
    # Long, with values without a common sign: the drift is nothing beside it.
    return _chain(c, "random_walk", torch.randn(1000, 2000, generator=gen(3), dtype=torch.float64), flat=True)


def drift(c: Constants) -> float:
    v = 1.5 + 0.3 * torch.rand(1500, 64, generator=gen(5), dtype=torch.float64)
    # Values of every size from 1 to 2, so that no binade is preferred.
    v = v * 2 ** torch.rand(64, generator=gen(6), dtype=torch.float64)
    return _chain(c, "drift", v, flat=False)


def argument(c: Constants) -> float:
    """A score times sm_scale, then times log2 e, each rounded to fp32."""
    raw, scale = log_uniform(1, 1000, 50_000, 7), log_uniform(0.01, 1, 50_000, 8)
    raw, scale = fl32(raw), fl32(scale)
    log2e = fl32(torch.tensor(LOG2E, dtype=torch.float64))
    score = raw * scale
    error = fl32(fl32(score) * log2e) / log2e - score
    return float((error.square() / (score_variance(c, score) - score_variance(without(c, "argument"), score))).mean())


def exp(c: Constants) -> float:
    """An exp whose error is uniform within one unit in the last place, relative to 1."""
    error = (2 * torch.rand(50_000, generator=gen(9), dtype=torch.float64) - 1) * 2.0**-23
    zero = torch.zeros(1, dtype=torch.float64)
    return float(error.square().mean() / (score_variance(c, zero) - score_variance(without(c, "exp"), zero)))


def _lse_noise(c: Constants, lse: Tensor, mean_score: Tensor) -> Tensor:
    ref = attend(torch.zeros(len(lse), 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64), FP32, c)
    return noise_of(replace(ref, lse=lse[None], mean_score=mean_score[None]), FP32, c).lse[0]


def lse(c: Constants) -> float:
    """(maximum + log2 of the sum) * ln 2 in fp32, from exact parts."""
    top, log = fl32(log_uniform(1, 100, 50_000, 10)), fl32(log_uniform(1, 12, 50_000, 11))
    exact = (top + log) * math.log(2)
    error = fl32(fl32(top + log) * fl32(torch.tensor(math.log(2), dtype=torch.float64))) - exact
    charged = _lse_noise(c, exact, 0 * exact) - _lse_noise(without(c, "lse"), exact, 0 * exact)
    return float((error.square() / charged).mean())


def shared_scale(c: Constants) -> float:
    """Scores times the fp32 number sm_scale * log2 e instead of the exact product."""
    scale, mean = fl32(log_uniform(0.01, 1, 50_000, 12)), log_uniform(1, 100, 50_000, 13)
    product = fl32(scale * fl32(torch.tensor(LOG2E, dtype=torch.float64)))
    error = mean * (product / (scale * LOG2E) - 1)
    charged = _lse_noise(c, 0 * mean, mean) - _lse_noise(without(c, "shared_scale"), 0 * mean, mean)
    return float((error.square() / charged).mean())


def log(c: Constants) -> float:
    error = (2 * torch.rand(50_000, generator=gen(14), dtype=torch.float64) - 1) * 2.0**-22
    zero = torch.zeros(1, dtype=torch.float64)
    charged = _lse_noise(c, zero, zero) - _lse_noise(without(c, "log"), zero, zero)
    return float(error.square().mean() / charged)


def cut(c: Constants) -> float:
    """A part of 128 keys that begins and ends one tile of 32 later than ours."""
    # Values of every size from 1 to 2: the step of a size then stands for the size.
    sizes = 2 ** torch.rand(20_000, generator=gen(17), dtype=torch.float64)
    v = sizes * torch.randn(160, 20_000, generator=gen(15), dtype=torch.float64)
    ours, theirs = v[:128].mean(0), v[32:].mean(0)
    spread = (v[:128] - ours).square().sum(0) / 128**2
    moved = float(((theirs - ours).square() / spread).mean())
    states = partial_states(SPLIT, c)
    assert states
    charged = states.variance(torch.zeros_like(spread), spread) / c.known
    return float(ulp((moved * spread).sqrt(), BF16).square().mean() / charged.mean())


MEASURED: dict[str, Callable[[Constants], float]] = {
    f.__name__: f for f in (known, unknown, random_walk, drift, argument, exp, lse, shared_scale, log, cut)
}


def fits(ratio: float) -> bool:
    return 2**-0.5 < ratio < 2**0.5


@pytest.mark.parametrize("name", MEASURED)
def test_the_constant_is_what_its_rounding_measures(name: str) -> None:
    assert fits(MEASURED[name](CONSTANTS))


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", MEASURED)
def test_doubling_or_halving_the_constant_is_noticed(name: str, factor: float) -> None:
    changed = replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)})
    assert not fits(MEASURED[name](changed))


def test_every_constant_has_a_measurement() -> None:
    assert {f.name for f in fields(Constants)} == {*MEASURED, "false_alarm"}


def test_false_alarm_is_one_in_a_million() -> None:
    # Two-sided quantile of the normal distribution at 1e-6, from mpmath; 2e-6 gives 4.753, 5e-7 gives 5.026.
    assert z_limit(1, CONSTANTS.false_alarm) == pytest.approx(4.8916, abs=1e-3)


def test_torchs_own_exp_errs_less_than_the_model_allows() -> None:
    x = -8 * torch.rand(200_000, generator=gen(16))
    exact = x.double().exp()
    relative = (x.exp().double() - exact) / exact
    assert float(relative.square().mean()) < CONSTANTS.exp * 2.0**-48
