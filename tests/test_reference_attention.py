"""The reference's attention agrees with 40-digit arithmetic, with its other form, and with the merge of its parts."""

from itertools import pairwise

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.reference import attention as attention_module
from mla_verify.reference import keys as keys_module
from mla_verify.reference.attention import attend_absorbed, attend_mha, expand_kv
from mla_verify.reference.merge import merge_states

INF = float("inf")


def random(generator: torch.Generator, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * scale


def latent_problem(q_len, kv_len, heads, dims, seed, scale=1.0):
    """q_nope (not absorbed), q_pe, ckv, kpe, w_kc, w_vc; scores are about `scale` at sm_scale 1."""
    rank, nope, rope, v_dim = dims
    g = torch.Generator().manual_seed(seed)
    return (
        random(g, q_len, heads, nope, scale=scale / nope**0.5),
        random(g, q_len, heads, rope, scale=scale / rope**0.5),
        random(g, kv_len, rank),
        random(g, kv_len, rope),
        random(g, heads, nope, rank, scale=rank**-0.5),
        random(g, heads, rank, v_dim, scale=rank**-0.5),
    )


def both_forms(problem, *, sm_scale, causal):
    q_nope, q_pe, ckv, kpe, w_kc, w_vc = problem
    q_latent = torch.einsum("qhn,hnr->qhr", q_nope, w_kc)
    absorbed = attend_absorbed(q_latent, q_pe, ckv, kpe, sm_scale=sm_scale, causal=causal)
    mha = attend_mha(torch.cat([q_nope, q_pe], -1), *expand_kv(ckv, kpe, w_kc, w_vc), sm_scale=sm_scale, causal=causal)
    return (torch.einsum("qhr,hrv->qhv", absorbed.out, w_vc), absorbed.lse), (mha.out, mha.lse)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, scale: float = 0.0) -> None:
    """To `tolerance` of the largest expected value or of `scale`; infinities must be the same ones."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype == torch.float64
    finite = expected.isfinite()
    assert torch.equal(actual[~finite], expected[~finite])
    if finite.any():
        scale = max(scale, float(expected[finite].abs().max()))
        assert float((actual - expected)[finite].abs().max()) <= tolerance * scale


def assert_same(actual, expected, tolerance: float) -> None:
    """(out, lse) twice. An error of 1e-12 in the LSE is one of 1e-12 in every weight, however small the LSE is."""
    assert_near(actual[0], expected[0], tolerance)
    assert_near(actual[1], expected[1], tolerance, scale=1.0)


REAL_DIMS = (512, 128, 64, 128)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 257), (3, 65), (33, 33), (5, 130), (9, 4)])
def test_absorbed_equals_non_absorbed_at_the_models_dimensions(q_len, kv_len, causal):
    problem = latent_problem(q_len, kv_len, 4, REAL_DIMS, seed=kv_len)
    assert_same(*both_forms(problem, sm_scale=1.3, causal=causal), 1e-12)


@settings(max_examples=80, deadline=None)
@given(
    q_len=st.integers(1, 5),
    kv_len=st.integers(0, 40),
    heads=st.integers(1, 3),
    log_scale=st.floats(-3.0, 3.0),
    causal=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_absorbed_equals_non_absorbed_for_flat_and_for_saturated_softmax(q_len, kv_len, heads, log_scale, causal, seed):
    scale = 10.0**log_scale
    problem = latent_problem(q_len, kv_len, heads, (24, 8, 4, 6), seed, scale=scale)
    # A score s is rounded to about 1e-16 s, and that is the relative error of its weight: 1e-12 up to scores of 100.
    assert_same(*both_forms(problem, sm_scale=0.7, causal=causal), 1e-14 * max(100.0, 10 * scale))


def attend_in_40_digits(q, k, v, sm_scale, causal):
    """The definition, one query of one head at a time: q [q_len, H, D], k [kv_len, H, D], v [kv_len, H, V]."""
    q_len, heads, _ = q.shape
    out = torch.zeros(q_len, heads, v.shape[2], dtype=torch.float64)
    lse = torch.full((q_len, heads), -INF, dtype=torch.float64)
    with mpmath.workdps(40):
        for t in range(q_len):
            visible = len(k) - (q_len - 1 - t) if causal else len(k)
            for h in range(heads if visible > 0 else 0):
                scores = [sm_scale * mpmath.fdot(q[t, h].tolist(), k[j, h].tolist()) for j in range(visible)]
                weights = [mpmath.exp(s) for s in scores]
                total = mpmath.fsum(weights)
                lse[t, h] = float(mpmath.log(total))
                for i in range(v.shape[2]):
                    out[t, h, i] = float(mpmath.fdot(weights, v[:visible, h, i].tolist()) / total)
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "scale"),
    [(1, 1, 1.0), (2, 7, 1.0), (4, 4, 3.0), (5, 2, 1.0), (3, 0, 1.0), (2, 9, 1e-6), (2, 9, 500.0), (3, 6, 5e4)],
)
def test_both_forms_equal_the_definition_in_40_digits(q_len, kv_len, scale, causal):
    problem = latent_problem(q_len, kv_len, 2, (6, 5, 3, 4), seed=q_len + kv_len, scale=scale)
    q_nope, q_pe, ckv, kpe, w_kc, _ = problem
    tolerance = 1e-14 + 1e-15 * scale  # as above, with a tenth of the room: the sums are short

    mha_inputs = (torch.cat([q_nope, q_pe], -1), *expand_kv(*problem[2:]))
    mha = attend_mha(*mha_inputs, sm_scale=0.9, causal=causal)
    assert_same((mha.out, mha.lse), attend_in_40_digits(*mha_inputs, 0.9, causal), tolerance)

    q_latent = torch.einsum("qhn,hnr->qhr", q_nope, w_kc)
    absorbed = attend_absorbed(q_latent, q_pe, ckv, kpe, sm_scale=0.9, causal=causal)
    k = torch.cat([ckv, kpe], -1)[:, None].expand(-1, 2, -1)
    v = ckv[:, None].expand(-1, 2, -1)
    expected = attend_in_40_digits(torch.cat([q_latent, q_pe], -1), k, v, 0.9, causal)
    assert_same((absorbed.out, absorbed.lse), expected, tolerance)


def test_one_key_gives_its_value_and_its_score():
    q_nope, q_pe, ckv, kpe, _, _ = latent_problem(1, 1, 3, (8, 8, 4, 4), seed=0, scale=50.0)
    result = attend_absorbed(q_nope, q_pe, ckv, kpe, sm_scale=0.25, causal=True)
    assert torch.equal(result.out, ckv.expand(1, 3, -1))
    scores = 0.25 * ((q_nope * ckv).sum(-1) + (q_pe * kpe).sum(-1))
    assert_near(result.lse, scores, 1e-14)


def test_causal_is_bottom_right_and_a_query_that_sees_nothing_gets_zero_and_minus_infinity():
    # Equal scores and one-hot values: the output of a query is 1 / n in each of the n keys that it sees.
    q_nope, q_pe, kpe = torch.zeros(4, 1, 3), torch.zeros(4, 1, 2), torch.zeros(3, 2)
    result = attend_absorbed(q_nope, q_pe, torch.eye(3), kpe, sm_scale=1.0, causal=True)
    expected = torch.tensor([[0, 0, 0], [1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64)
    torch.testing.assert_close(result.out[:, 0], expected, rtol=1e-15, atol=0)
    assert result.lse[0, 0] == -INF
    torch.testing.assert_close(result.lse[1:, 0].exp(), torch.tensor([1.0, 2.0, 3.0]).double(), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_float64_from_the_start(dtype):
    low = [t.to(dtype) for t in latent_problem(2, 30, 2, (16, 16, 4, 4), seed=1)[:4]]
    result = attend_absorbed(*low, sm_scale=1.0, causal=True)
    wide = attend_absorbed(*(t.double() for t in low), sm_scale=1.0, causal=True)
    assert torch.equal(result.out, wide.out) and torch.equal(result.lse, wide.lse)


def test_inputs_are_left_as_they_were_also_when_the_error_model_asks_for_its_sums():
    # float64 inputs: .double() is no copy of those, so work in place would reach the caller's tensors.
    inputs = latent_problem(2, 9, 2, (8, 8, 4, 4), seed=2)[:4]
    before = [t.clone() for t in inputs]
    result = attend_absorbed(*inputs, sm_scale=1.0, causal=True, weighings=[lambda terms: terms.p])
    assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
    assert_near(result.sums[0].v, result.out, 1e-14)
    assert_near(result.sums[0].one, torch.ones(2, 2, dtype=torch.float64), 1e-14)


def test_cutting_the_work_into_blocks_changes_nothing(monkeypatch):
    problem = latent_problem(5, 37, 3, (24, 8, 4, 6), seed=3)
    whole = both_forms(problem, sm_scale=1.0, causal=True)
    # Blocks of one row or two, and of one key or two.
    monkeypatch.setattr(attention_module, "_SCORE_BYTES", 2 * 8 * 37)
    monkeypatch.setattr(keys_module, "_BLOCK_BYTES", 2 * 8 * 24)
    monkeypatch.setattr(keys_module, "_RESIDENT_BYTES", 0)
    for actual, expected in zip(both_forms(problem, sm_scale=1.0, causal=True), whole, strict=True):
        assert_same(actual, expected, 1e-13)


@settings(max_examples=80, deadline=None)
@given(
    q_len=st.integers(1, 5),
    kv_len=st.integers(0, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    log_scale=st.floats(-3.0, 2.0),
    causal=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_attention_over_any_split_of_the_keys_merges_to_attention_over_all(
    q_len, kv_len, cuts, log_scale, causal, seed
):
    q_nope, q_pe, ckv, kpe, _, _ = latent_problem(q_len, kv_len, 2, (8, 8, 4, 4), seed, scale=10.0**log_scale)
    whole = attend_absorbed(q_nope, q_pe, ckv, kpe, sm_scale=1.0, causal=causal)
    for t in range(q_len):
        # One query at a time, without a mask: the parts hold what the query sees, which checks the mask as well.
        visible = max(0, kv_len - (q_len - 1 - t)) if causal else kv_len
        ends = [0, *sorted(min(c, visible) for c in cuts), visible]  # equal neighbours make empty parts
        query = (q_nope[t : t + 1], q_pe[t : t + 1])
        parts = [attend_absorbed(*query, ckv[a:b], kpe[a:b], sm_scale=1.0, causal=False) for a, b in pairwise(ends)]
        out, lse = merge_states(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
        tolerance = 1e-14 * max(100.0, 10 * 10.0**log_scale)
        assert_same((out, lse), (whole.out[t : t + 1], whole.lse[t : t + 1]), tolerance)


def test_a_part_without_keys_has_no_weight_even_if_its_out_was_never_written():
    outs = torch.tensor([[[1.0, 2.0]], [[float("nan"), INF]]])
    out, lse = merge_states(outs, torch.tensor([[0.5], [-INF]]))
    assert out.tolist() == [[1.0, 2.0]] and lse.tolist() == [0.5]
    nothing, empty = merge_states(torch.full((2, 1, 2), float("nan")), torch.full((2, 1), -INF))
    assert nothing.tolist() == [[0.0, 0.0]] and empty.tolist() == [-INF]


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_a_state_that_no_attention_can_give_does_not_merge(bad):
    with pytest.raises(ValueError, match="NaN or"):
        merge_states(torch.zeros(2, 1, 3), torch.tensor([[0.0], [bad]]))


def test_shapes_that_do_not_fit_are_an_error():
    q_nope, q_pe, ckv, kpe, w_kc, w_vc = latent_problem(2, 3, 2, (8, 8, 4, 4), seed=0)
    with pytest.raises(ValueError, match="shapes do not fit"):
        attend_absorbed(q_nope, q_pe, ckv, kpe[:2], sm_scale=1.0, causal=True)
    with pytest.raises(ValueError, match="shapes do not fit"):
        attend_absorbed(q_nope, q_pe[:, :1], ckv, kpe, sm_scale=1.0, causal=True)
    k, v = expand_kv(ckv, kpe, w_kc, w_vc)
    with pytest.raises(ValueError, match="shapes do not fit"):
        attend_mha(torch.cat([q_nope, q_pe], -1), k, v[:2], sm_scale=1.0, causal=True)
    with pytest.raises(ValueError, match="must agree"):
        merge_states(torch.zeros(2, 1, 3), torch.zeros(2, 3))
