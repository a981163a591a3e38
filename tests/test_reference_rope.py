"""RoPE turns what it should by what it should; YaRN's numbers are those of DeepSeek's models."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.reference.rope import RopeConfig, YarnConfig, amplitude, inv_freq, rotate, softmax_scale, yarn_mscale

V2_LITE = RopeConfig(yarn=YarnConfig(factor=40.0, mscale=0.707, mscale_all_dim=0.707))
V3 = RopeConfig(yarn=YarnConfig(factor=40.0, mscale=1.0, mscale_all_dim=1.0))
# Kimi K2's: theta 50000, and a ramp between equal betas, which lies within one index.
EQUAL_BETAS = RopeConfig(theta=50000.0, yarn=YarnConfig(factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale_all_dim=1.0))
# cos and sin grow by 1.26: the amplitude must show in both parts of a pair.
LOUD = RopeConfig(dim=8, yarn=YarnConfig(factor=40.0, mscale=0.707))
ALL = [RopeConfig(), RopeConfig(dim=8, theta=100.0, style="half"), V2_LITE, V3, EQUAL_BETAS, LOUD]
MAX_POSITION = 163840  # 40 * 4096

positions_st = st.integers(0, MAX_POSITION)


def at(position: int, tokens: int = 1) -> torch.Tensor:
    return torch.full((tokens,), position)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_first_pair_turns_counterclockwise_by_one_radian_a_position():
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    for position in (1, 2, 1000):
        cos, sin = math.cos(position), math.sin(position)
        assert rotate(x, at(position), RopeConfig(dim=4)).tolist() == [[cos, sin, 0, 0]]
        assert rotate(x, at(position), RopeConfig(dim=4, style="half")).tolist() == [[cos, 0, sin, 0]]


@settings(max_examples=40, deadline=None)
@given(rope=st.sampled_from(ALL), m=positions_st, n=positions_st, shift=positions_st, seed=st.integers(0, 1000))
def test_a_score_depends_on_the_distance_of_the_two_positions_only(rope, m, n, shift, seed):
    q, k = random(2, rope.dim, seed=seed).split(1)

    def score(shift: int) -> float:
        return float((rotate(q, at(m + shift), rope) * rotate(k, at(n + shift), rope)).sum())

    # An angle of up to 3e5 radians is rounded to 3e-11, and dim of them add up.
    assert score(shift) == pytest.approx(score(0), abs=1e-8)


@settings(max_examples=40, deadline=None)
@given(rope=st.sampled_from(ALL), position=positions_st, seed=st.integers(0, 1000))
def test_a_rotation_keeps_the_norm_of_every_vector_up_to_the_amplitude(rope, position, seed):
    x = random(3, 2, rope.dim, seed=seed)
    norms = rotate(x, at(position, 3), rope).norm(dim=-1)
    torch.testing.assert_close(norms, amplitude(rope) * x.norm(dim=-1), rtol=1e-13, atol=0)


@pytest.mark.parametrize("rope", [V2_LITE, LOUD], ids=["v2-lite", "loud"])
def test_half_split_is_interleaved_on_permuted_elements_and_nothing_else(rope):
    half = RopeConfig(rope.dim, rope.theta, rope.yarn, style="half")
    x, positions = random(5, 3, rope.dim), torch.tensor([0, 1, 77, 4096, 163839])

    def evens_then_odds(t: torch.Tensor) -> torch.Tensor:
        return torch.cat([t[..., 0::2], t[..., 1::2]], dim=-1)

    assert torch.equal(evens_then_odds(rotate(x, positions, rope)), rotate(evens_then_odds(x), positions, half))
    # ... and the difference is not academic: the same vector rotates differently.
    assert not torch.allclose(rotate(x, positions, rope), rotate(x, positions, half), atol=0.1)


def test_every_token_is_turned_by_its_own_position_whatever_stands_between():
    x, positions = random(4, 3, 2, 64), torch.tensor([5, 0, 4097, 5])
    whole = rotate(x, positions, V3)
    for token, position in enumerate(positions.tolist()):
        for head in range(3):
            assert torch.equal(whole[token, head], rotate(x[token, head], at(position, 2), V3))
    assert torch.equal(rotate(x[:, 0, 0], positions, V3), whole[:, 0, 0])  # [num_tokens, dim], as kpe is


def yarn_by_search(rope: RopeConfig) -> list[mpmath.mpf]:
    """YaRN's frequencies in 40 digits, the bounds of the ramp found by counting turns instead of by logarithms."""
    y = rope.yarn
    kept = [mpmath.mpf(rope.theta) ** (-mpmath.mpf(2 * i) / rope.dim) for i in range(rope.dim)]
    turns = [f * y.original_max_position_embeddings / (2 * mpmath.pi) for f in kept]
    first = max([i for i, t in enumerate(turns) if t >= y.beta_fast], default=0)
    last = min([i for i, t in enumerate(turns) if t <= y.beta_slow], default=rope.dim - 1)
    divided = [min(max(mpmath.mpf(i - first) / (last - first), 0), 1) for i in range(rope.dim // 2)]
    return [f * (1 - d) + f / y.factor * d for f, d in zip(kept, divided, strict=False)]


@pytest.mark.parametrize(
    "rope", [V2_LITE, V3, EQUAL_BETAS, LOUD, RopeConfig(dim=16, theta=500.0, yarn=YarnConfig(factor=3.0))]
)
def test_yarn_frequencies_are_those_of_an_independent_derivation(rope):
    with mpmath.workdps(40):
        expected = torch.tensor([float(f) for f in yarn_by_search(rope)], dtype=torch.float64)
    torch.testing.assert_close(inv_freq(rope), expected, rtol=1e-14, atol=0)


def test_deepseeks_ramp_runs_from_frequency_10_to_23():
    # 64 elements, theta 1e4, 4096 positions: 32 turns at index 10.5, 1 turn at index 22.5, rounded outwards.
    ratio = inv_freq(V3) / inv_freq(RopeConfig())
    assert torch.equal(ratio[:11], torch.ones(11, dtype=torch.float64))
    assert ((ratio[11:23] < 1) & (ratio[11:23] > 1 / 40)).all()
    torch.testing.assert_close(ratio[23:], torch.full((9,), 1 / 40, dtype=torch.float64), rtol=1e-15, atol=0)
    assert ratio[16].item() == pytest.approx(1 - 6 / 13 * (1 - 1 / 40), rel=1e-14)


@pytest.mark.parametrize("rope", ALL)
def test_a_far_rotation_is_exact_to_the_rounding_of_its_angle(rope):
    x = random(1, rope.dim)
    pairs = x[0].reshape(-1, 2) if rope.style == "interleaved" else x[0].reshape(2, -1).T
    with mpmath.workdps(40):
        turned = []
        for (a, b), f in zip(pairs.tolist(), inv_freq(rope).tolist(), strict=True):
            angle = MAX_POSITION * mpmath.mpf(f)
            turned.append([float(v * amplitude(rope)) for v in (
                a * mpmath.cos(angle) - b * mpmath.sin(angle), a * mpmath.sin(angle) + b * mpmath.cos(angle)
            )])  # fmt: skip
    expected = torch.tensor(turned, dtype=torch.float64)
    expected = expected.flatten() if rope.style == "interleaved" else expected.T.flatten()
    # Half a unit in the last place of 163840 is 1.5e-11.
    torch.testing.assert_close(rotate(x, at(MAX_POSITION), rope)[0], expected, rtol=0, atol=1e-10)


def test_v2_lite_keeps_the_amplitude_and_raises_the_softmax_scale_by_1_59():
    assert amplitude(V2_LITE) == 1.0
    assert softmax_scale(192, V2_LITE) / 192**-0.5 == pytest.approx((1 + 0.0707 * math.log(40)) ** 2)
    assert softmax_scale(192, V2_LITE) == pytest.approx(0.1147, abs=5e-5)
    assert softmax_scale(192, V2_LITE) * 192**0.5 == pytest.approx(1.59, abs=0.005)


def test_v3_raises_the_softmax_scale_by_1_87():
    assert amplitude(V3) == 1.0
    assert softmax_scale(192, V3) == pytest.approx(0.1352, abs=5e-5)
    assert softmax_scale(192, V3) * 192**0.5 == pytest.approx(1.87, abs=0.005)


def test_mscale_goes_to_the_amplitude_and_mscale_all_dim_to_the_softmax():
    only_mscale = RopeConfig(yarn=YarnConfig(factor=40.0, mscale=0.707))
    assert amplitude(only_mscale) == pytest.approx(1.261, abs=5e-4)
    assert softmax_scale(192, only_mscale) == 192**-0.5
    unequal = RopeConfig(yarn=YarnConfig(factor=40.0, mscale=0.5, mscale_all_dim=1.0))
    assert amplitude(unequal) == pytest.approx((1 + 0.05 * math.log(40)) / (1 + 0.1 * math.log(40)))
    assert softmax_scale(192, unequal) == softmax_scale(192, V3)


def test_without_yarn_or_extension_nothing_is_scaled():
    for rope in (RopeConfig(), RopeConfig(yarn=YarnConfig(factor=1.0, mscale=0.707, mscale_all_dim=0.3))):
        assert amplitude(rope) == 1.0
        assert softmax_scale(192, rope) == 192**-0.5
        torch.testing.assert_close(inv_freq(rope), inv_freq(RopeConfig()), rtol=1e-15, atol=0)
    assert yarn_mscale(0.5, 1.0) == 1.0


def test_low_precision_input_is_rotated_in_float64():
    x = random(3, 64)
    rotated = rotate(x.bfloat16(), at(9, 3), V3)
    assert rotated.dtype == torch.float64
    assert torch.equal(rotated, rotate(x.bfloat16().double(), at(9, 3), V3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RopeConfig(dim=7), "dim is 7"),
        (lambda: RopeConfig(theta=1.0), "theta > 1"),
        (lambda: RopeConfig(style="neox"), "unknown RoPE style 'neox'"),
        (lambda: YarnConfig(factor=0.5), "factor >= 1"),
        (lambda: YarnConfig(factor=2.0, beta_fast=1.0, beta_slow=2.0), "not 1.0 and 2.0"),
        (lambda: inv_freq(RopeConfig(yarn=YarnConfig(2.0, original_max_position_embeddings=4))), "ramp would run"),
        (lambda: rotate(random(2, 32), at(0, 2), V3), "32 elements, RoPE is configured for 64"),
        (lambda: rotate(random(2, 64), at(0, 3), V3), r"\[3\], they must be int64 \[2\]"),
        (lambda: rotate(random(2, 64), at(0, 2).int(), V3), "positions are torch.int32"),
    ],
)
def test_what_cannot_be_meant_is_an_error_with_the_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()
