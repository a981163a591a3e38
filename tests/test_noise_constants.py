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

from mla_verify.cases import CaseSpec
from mla_verify.compare import compare_output
from mla_verify.constants import CONSTANTS, Constants
from mla_verify.emulate import EmulatedKernel, tensor_core_dot
from mla_verify.expected import Expected, expect
from mla_verify.formats import FORMATS
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.key_noise import round_to, splitting, ulp, weighings
from mla_verify.noise import Noise, changed_rounding, noise_of, z_limit
from mla_verify.reference.attention import Attention, attend_absorbed, attend_mha
from mla_verify.reference.key_sums import KeyTerms, PartStates, slope_direction
from mla_verify.tensors import AbsorbedInputs, MLAOutput

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


def stored(c: Constants, out: Tensor, spread: Tensor) -> Tensor:
    """Variance of storing a partial output in bf16."""
    zero = torch.zeros_like(out)
    split = splitting(SPLIT, c)
    assert split
    return split.variance(PartStates(out, spread, zero, zero))


def known(c: Constants) -> float:
    x = torch.randn(100_000, generator=gen(0), dtype=torch.float64)
    return float(((round_to(x, BF16) - x).square() / stored(c, x, torch.zeros_like(x))).mean())


def unknown(c: Constants) -> float:
    """Probabilities rounded to bf16, and nothing else."""
    c = replace(c, together=math.inf)
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
    charged = stored(c, torch.zeros_like(spread), spread) / c.known
    return float(ulp((moved * spread).sqrt(), BF16).square().mean() / charged.mean())


def _tail(c: Constants, weight: float, count: int, value: float = 1.0) -> Tensor:
    """What the model charges as swamped: one heavy key of value 1, `count` keys of this weight and this value.

    Returns the charge to the LSE and to the output.
    """
    score = torch.full((count, 1, 1), math.log(weight), dtype=torch.float64)
    score[0] = 0.0
    q, v = torch.ones(1, 1, 1, dtype=torch.float64), torch.full((count, 1, 1), value, dtype=torch.float64)
    v[0] = 1.0

    def charged(c: Constants) -> Tensor:
        w = weighings(FP32, (1, 0), c)
        noise = noise_of(attend_mha(q, score, v, sm_scale=1.0, causal=False, weighings=w), FP32, c)
        return torch.stack([noise.lse.mean(), noise.inner.mean()])

    return charged(c) - charged(without(c, "swamped"))


def _chopped(c: Constants, name: str, a: Tensor, b: Tensor) -> Tensor:
    """Squared errors of a @ b.T on emulated tensor cores, over what the model charges under this name."""
    a, b = a.half().float(), b.half().float()
    score = a.double() @ b.double().T
    gram = a.double().square() @ b.double().square().T
    facts = replace(FP32, tensor_core_k=16)

    def variance(c: Constants) -> Tensor:
        one = torch.ones_like(score)
        t = KeyTerms(p=one, score=score, gram=gram, max_score=one, p_max=2 * one, num_keys=one)
        return weighings(facts, (a.shape[1], 0), c)[0](t)

    error = tensor_core_dot(a, b.T).double() - score
    return error.square() / (variance(c) - variance(without(c, name)))


def chop(c: Constants) -> float:
    a, b = torch.randn(100, 2048, generator=gen(25)), torch.randn(30, 2048, generator=gen(26))
    return float(_chopped(c, "chop", a, b).mean())


def chop_drift(c: Constants) -> float:
    """The largest, since it is a bound, of products with one sign."""
    a, b = torch.randn(40, 4096, generator=gen(27)), torch.randn(20, 4096, generator=gen(28))
    return float(_chopped(c, "chop_drift", a.abs(), b.abs()).max())


def swamped(c: Constants) -> float:
    """One heavy key somewhere among 6,000 light ones, summed in one fp32 chain.

    Keys of u / 4 are lost whole. Of keys of 2.9 u the sum takes 2 u each, and may lose no more than u.
    """
    count, heavy_at, ratios = 6000, torch.arange(100) * 60, []
    for weight in (2.0**-26, 2.9 * 2.0**-24):
        acc = torch.zeros(100)
        for j in range(count):
            acc = acc + torch.where(heavy_at == j, 1.0, weight)
        error = acc.double() - (1 + (count - 1) * weight)
        ratios.append(float(error.square().mean() / _tail(c, weight, count)[0]))
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))


def light(c: Constants) -> float:
    """Steps of exponential size on a sum, of keys whose value is an eighth of it.

    The largest weight that loses a tenth of what it adds, over the largest whose loss is charged.
    """
    size, value = torch.empty(20_000, dtype=torch.float64).exponential_(generator=gen(19)), 1 / 8

    def lost(weight: float) -> float:
        x = weight * value * size / 2  # in units in the last place of a sum just above 1, each 2 u
        return 2 * float((x - x.round()).mean())

    def is_charged(weight: float) -> bool:
        count = 400
        charge = float(_tail(c, weight * 2.0**-24, count, value)[1])
        return charge > c.swamped * (count * lost(weight) * 2.0**-24) ** 2

    weights = [1.05**k for k in range(-20, 120)]
    largest = max(weight for weight in weights if lost(weight) > 0.1 * weight * value)
    return largest / max(weight for weight in weights if is_charged(weight))


def tilt(c: Constants) -> float:
    """A number of the format but for a share x u, rounded: the largest change that all elements have in common."""
    whole = round_to(torch.randn(100_000, generator=gen(20), dtype=torch.float64), BF16)
    u, split = BF16.unit_roundoff, splitting(SPLIT, c)
    assert split
    changes = []
    for share in (0.75, 1.0, 1.25, 3.0, 5.0, 7.0):  # smaller ones are lost whole, whatever the constant is
        x = (1 - share * u) * whole
        change = abs(float((round_to(x, BF16) - x).mul(x).sum() / x.square().sum()))
        allowed = float(split.tilt(torch.tensor(share * u, dtype=torch.float64)))
        # Between the peaks the change is far smaller: it must nowhere be larger.
        changes.append(change / allowed)
    return max(changes)


def mean_size(c: Constants) -> float:
    """Roundings that change because of an error of 1/50 of a step."""
    x = torch.randn(200_000, generator=gen(21), dtype=torch.float64)
    step = ulp(x, BF16)
    error = step / 50 * torch.randn(200_000, generator=gen(22), dtype=torch.float64)
    changed = (round_to(x + error, BF16) - round_to(x, BF16)).square()
    return float(changed.mean() / changed_rounding(step, step / 50, c).mean())


MEASURED: dict[str, Callable[[Constants], float]] = {
    f.__name__: f
    for f in (
        known,
        unknown,
        random_walk,
        drift,
        chop,
        chop_drift,
        swamped,
        light,
        tilt,
        mean_size,
        argument,
        exp,
        lse,
        shared_scale,
        log,
        cut,
    )
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


def slope_accepts(c: Constants, out: Tensor, actual: Tensor, sigma: Tensor) -> bool:
    """The slope check on one bf16 row, for errors of this sigma that differ from dim to dim."""
    row = out[None, None]
    facts, zero = RoundingFacts(out_dtype="bf16"), torch.zeros(1, 1, dtype=torch.float64)
    inner = sigma.square()[None, None]
    attention = Attention(row, slope_direction(row), zero, zero, zero, zero, zero[0], (), ())
    reach = (attention.direction * row).sum(-1)
    slope = (attention.direction.square() * inner).sum(-1) / reach.square()
    noise = Noise(inner, inner + ulp(row, BF16).square(), slope, zero, zero, zero, zero, zero, zero, zero, zero + 1)
    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h1-q1.kv1-p1-bf16-normal-s0"))
    output = MLAOutput(actual[None, None].bfloat16(), None)
    (comparison,) = compare_output(output, Expected(attention, {facts: noise}), facts, inputs, c)
    return next(check.passed for check in comparison.checks if check.name == "slope")


def rare(c: Constants) -> bool:
    """Values on ties that all go down are accepted at sigma = step / 40; a scale 0.15 % off is not at step / 20."""
    grid = round_to(1 + torch.rand(512, generator=gen(23), dtype=torch.float64), BF16)
    step = ulp(grid, BF16)
    ties = slope_accepts(c, grid + step / 2, grid, step / 40)
    x = torch.randn(512, generator=gen(24), dtype=torch.float64)
    return ties and not slope_accepts(c, x, round_to(1.0015 * x, BF16), ulp(x, BF16) / 20)


def _accepts_an_lse(c: Constants, keys: int, times: float) -> bool:
    """Whether an LSE is accepted that is off by `times` the most that `keys` p's of one cell of bf16 err, added up."""
    facts = RoundingFacts(out_dtype="fp32", p_dtype="bf16", rowsum="rounded")
    p = 0.6 + 1e-6 * torch.arange(keys + 1, dtype=torch.float64)
    p[0] = 1.0
    # Rounded relative to a maximum that is still lower than the last.
    top = torch.linspace(1, 1 / 0.6, 1000, dtype=torch.float64)[:, None]
    largest = (round_to(p[1:] * top, BF16) / top - p[1:]).sum(-1).abs().max()
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    w = weighings(facts, (1, 0), c)
    ref = attend_mha(one, p.log()[:, None, None], one.expand(keys + 1, 1, 1), sm_scale=1.0, causal=False, weighings=w)
    z = times * torch.log1p(largest / p.sum()) / noise_of(ref, facts, c).lse.sqrt()
    return float(z) < z_limit(1, c.false_alarm / c.statistics)


def together(c: Constants) -> bool:
    """Ten p's that round alike are no fault; five do not hide one that is half as large again as their error."""
    return _accepts_an_lse(c, 10, 1.0) and not _accepts_an_lse(c, 5, 1.5)


def limits(c: Constants) -> bool:
    """A third of one in a million: two-sided normal quantile 5.1032 (mpmath); twice or half of it moves it by 0.13."""
    return abs(z_limit(1, c.false_alarm / c.statistics) - 5.1032) < 0.01


PINNED: dict[str, Callable[[Constants], bool]] = {
    "rare": rare,
    "together": together,
    "false_alarm": limits,
    "statistics": limits,
}


@pytest.mark.parametrize("name", PINNED)
def test_the_constant_separates_an_honest_row_from_a_wrong_one(name: str) -> None:
    assert PINNED[name](CONSTANTS)
    for factor in (0.5, 2.0):
        assert not PINNED[name](replace(CONSTANTS, **{name: factor * getattr(CONSTANTS, name)}))


def test_every_constant_has_its_test() -> None:
    assert {f.name for f in fields(Constants)} == {*MEASURED, *PINNED}


def test_torchs_own_exp_errs_less_than_the_model_allows() -> None:
    x = -8 * torch.rand(200_000, generator=gen(16))
    exact = x.double().exp()
    relative = (x.exp().double() - exact) / exact
    assert float(relative.square().mean()) < CONSTANTS.exp * 2.0**-48


@pytest.mark.parametrize("kv_len", [2, 20, 32])
def test_a_request_no_longer_than_the_least_part_is_charged_as_one_that_is_not_split(kv_len: int) -> None:
    least = replace(SPLIT, max_splits=16, least_part=32)
    inputs = make_inputs(CaseSpec.parse(f"decode-absorbed-h2-q1.kv{kv_len}-p64-bf16-normal-s0"))
    assert isinstance(inputs, AbsorbedInputs)
    noise = expect(inputs, [least, replace(least, max_splits=1), replace(least, least_part=1)]).noise
    unsplit, any_parts = noise[replace(least, max_splits=1)], noise[replace(least, least_part=1)]
    assert torch.equal(noise[least].out, unsplit.out) and torch.equal(noise[least].slope_bias, unsplit.slope_bias)
    assert float((any_parts.out / unsplit.out).max()) > 1.5


def test_a_longer_request_is_charged_for_as_many_parts_as_the_least_one_makes() -> None:
    least = replace(SPLIT, max_splits=16, least_part=32)
    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h2-q1.kv100-p64-bf16-normal-s0"))  # four parts
    noise = expect(inputs, [least, replace(SPLIT, max_splits=4), replace(SPLIT, max_splits=2)]).noise
    assert torch.equal(noise[least].out, noise[replace(SPLIT, max_splits=4)].out)
    assert not torch.equal(noise[least].out, noise[replace(SPLIT, max_splits=2)].out)


def test_parts_smaller_than_declared_are_an_unexplained_error() -> None:
    """An honest kernel that cuts 32 keys in two stores bf16 parts, which one with parts of 32 keys or more does not."""
    kernel = EmulatedKernel(splits=2, tile=16, rounds_partials=True)
    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h16-16xq1.kv32-p32-bf16-uniform-s0"))
    output = kernel.run(inputs)
    declared = {least: replace(kernel.facts("bf16"), least_part=least) for least in (1, 32)}
    expected = expect(inputs, list(declared.values()))
    passed = {
        n: all(c.passed for c in compare_output(output, expected, facts, inputs)) for n, facts in declared.items()
    }
    assert passed == {1: True, 32: False}
