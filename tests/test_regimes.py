"""Each input regime is what it says, on the rounded inputs that kernels get: a fault has something to show on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_verify.cases import REGIMES, CaseSpec
from mla_verify.emulate import EmulatedKernel
from mla_verify.expected import dense_request, expect
from mla_verify.inputs import make_inputs
from mla_verify.regimes import REGIME_TABLE, edge_keys
from mla_verify.vacuity import FAULTS

ABSORBED = "prefix-absorbed-h16-q3.kv300+q2.kv1000-p16-{dtype}-{regime}-s0"
MHA = "prefix-mha-h16-q3.kv300+q2.kv1000-ragged-{dtype}-{regime}-s0"
BOTH_FORMS = pytest.mark.parametrize("template", [ABSORBED, MHA], ids=["absorbed", "mha"])


@dataclass(frozen=True)
class Row:
    """One query: float64 [num_heads, num_keys], keys it sees alone."""

    nope: Tensor  # scaled scores of the nope part
    rope: Tensor

    @property
    def scores(self) -> Tensor:
        return self.nope + self.rope

    @property
    def mass(self) -> Tensor:
        return self.scores.softmax(-1)

    @property
    def num_keys(self) -> int:
        return self.nope.shape[1]


def rows(case: str) -> Iterator[Row]:
    """Every query of a case that sees a key."""
    spec = CaseSpec.parse(case)
    inputs = make_inputs(spec)
    for b, request in enumerate(spec.requests):
        r = dense_request(inputs, b)
        split = r.qk_dims[0]
        q = torch.cat(r.q, dim=-1).double()
        k = torch.cat(r.k, dim=-1).double()[:, None] if len(r.q) == 2 else r.k[0].double()
        k = k.expand(-1, spec.num_heads, -1)
        parts = [
            spec.sm_scale * torch.einsum("qhd,thd->qht", q[..., part], k[..., part])
            for part in (slice(0, split), slice(split, None))
        ]
        for t in range(request.q_len):
            seen = request.kv_len - request.q_len + t + 1
            if seen > 0:
                yield Row(*(part[t, :, :seen] for part in parts))


def spread(scores: Tensor) -> float:
    """Variance over the keys, which is what a softmax sees; the mean of all heads."""
    return float(scores.var(-1).mean())


def test_every_regime_is_in_the_table_with_the_faults_that_it_shows() -> None:
    assert tuple(REGIME_TABLE) == REGIMES
    for regime in REGIME_TABLE.values():
        assert regime.summary and "zeros" in regime.shows and set(regime.shows) <= set(FAULTS)
    # Each fault is what some regime is for.
    assert {fault for regime in REGIME_TABLE.values() for fault in regime.shows} == set(FAULTS)


@BOTH_FORMS
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("regime", REGIMES)
def test_no_regime_leaves_the_range_of_any_dtype(regime: str, dtype: str, template: str) -> None:
    assert all(row.scores.isfinite().all() for row in rows(template.format(dtype=dtype, regime=regime)))


@BOTH_FORMS
def test_uniform_queries_are_zero_so_that_every_key_weighs_the_same(template: str) -> None:
    for row in rows(template.format(dtype="bf16", regime="uniform")):
        assert not row.nope.any() and not row.rope.any()


@BOTH_FORMS
def test_normal_scores_spread_by_a_few_units_in_both_parts(template: str) -> None:
    for row in rows(template.format(dtype="bf16", regime="normal")):
        assert 1.2 < spread(row.scores) ** 0.5 < 3.0
        assert spread(row.rope) > 0.05 * spread(row.scores) < spread(row.nope)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(("absorbed-h{h}-q3.kv{n}-p16", "mha-h{h}-q3.kv{n}-ragged")),
    st.sampled_from((1, 4, 16)),
    st.integers(4, 600),
    st.sampled_from(("fp32", "fp16", "bf16")),
    st.integers(0, 10**6),
)
def test_peaked_rows_have_one_key_that_leads_by_more_than_30(form: str, h: int, n: int, dtype: str, seed: int) -> None:
    """exp(-30) is below every format's half unit: the winner's value must come back as it is."""
    winners = set()
    for row in rows(f"prefix-{form.format(h=h, n=n)}-{dtype}-peaked-s{seed}"):
        best = row.scores.topk(2, dim=-1).values
        assert float((best[:, 0] - best[:, 1]).min()) > 30
        winners |= set(row.scores.argmax(-1).tolist())
    assert len(winners) > 1 or h == 1  # not the same key for all


@BOTH_FORMS
def test_mixed_heads_run_from_flat_to_one_hot_with_a_strong_rope_part_and_values_off_centre(template: str) -> None:
    case = template.format(dtype="bf16", regime="mixed")
    for row in rows(case):
        by_head = row.scores.std(-1)
        assert by_head[0] < 0.8 and by_head[-1] > 15
        assert (by_head[::5].diff() > 0).all()  # a temperature that rises from head to head
        assert spread(row.rope) > 0.3 * spread(row.scores)
    r = dense_request(make_inputs(CaseSpec.parse(case)), 1)
    values = (r.k[0][:, None] if len(r.q) == 2 else r.k[1]).double()
    assert float(values.mean(0).abs().mean()) > 0.2  # iid values of 1,000 keys would give 0.025
    tiles = torch.stack([tile.std() for tile in values.split(64)[:-1]])
    assert float(tiles.max() / tiles.min()) > 1.5


# Both sides of each edge of 32, 64 and 128 keys, of a page, and of 2, 3, 4 and 8 splits.
EDGES = {
    "decode-absorbed-h16-q1.kv4096-p64-bf16-needle-s0": "0 31 32 63 64 127 128 511 512 1023 1024 1365 1366 2047 2048",
    "decode-absorbed-h8-q1.kv4095-p16-bf16-needle-s0": "0 15 16 31 32 127 128 2047 2048 4031 4032 4063 4064 4079 4080",
    "decode-absorbed-h16-q1.kv257-p1-bf16-needle-s0": "0 1 31 32 63 64 127 128 255 256",
    "decode-mha-h16-q1.kv1000-ragged-bf16-needle-s0": "31 32 63 64 124 125 127 128 249 250 333 334 499 500 959 960 999",
    "decode-mha-h8-q1.kv65-ragged-bf16-needle-s0": "0 31 32 63 64",
}


@pytest.mark.parametrize("case", EDGES)
def test_every_edge_of_a_tile_page_or_split_has_a_needle(case: str) -> None:
    """A kernel that loses the key at any one edge changes the output of some head far beyond bf16's rounding."""
    inputs = make_inputs(CaseSpec.parse(case))
    (row,) = rows(case)
    r, facts = dense_request(inputs, 0), EmulatedKernel().facts("bf16")
    expected = expect(inputs, [facts])
    values = (r.k[0][:, None] if len(r.q) == 2 else r.k[1]).double()
    seen = {}
    for edge in map(int, EDGES[case].split()):
        p = row.mass[:, edge, None]
        without = (expected.attention.out[0] - p * values[edge]) / (1 - p)
        z = (without - expected.attention.out[0]) / expected.noise[facts].out[0].sqrt()
        seen[edge] = float(z.abs().max())
    assert all(z > 20 for z in seen.values()), seen


def _page_size(case: str) -> int:
    return CaseSpec.parse(case).page_size


@BOTH_FORMS
def test_every_row_has_needles_at_its_own_edges_and_head_0_looks_at_the_last_key_it_sees(template: str) -> None:
    case = template.format(dtype="fp16", regime="needle")
    for row in rows(case):
        assert 0.3 < float(row.mass[0, -1]) < 0.999
        heaviest = row.mass.max(-1)
        assert set(heaviest.indices.tolist()) <= set(edge_keys(row.num_keys, _page_size(case)))
        # Not all of it: the other keys must still count.
        assert float(heaviest.values.min()) > 0.15 and float(heaviest.values.max()) < 0.999
        assert (row.mass.max(0).values[edge_keys(row.num_keys, _page_size(case))] > 0.15).all()


@settings(deadline=None)
@given(st.integers(0, 5000), st.sampled_from((0, 1, 16, 64, 128)))
def test_edge_keys_are_keys_each_once_and_the_last_comes_first(num_keys: int, page_size: int) -> None:
    keys = edge_keys(num_keys, page_size)
    assert len(set(keys)) == len(keys) and all(0 <= key < num_keys for key in keys)
    assert keys[:1] == [num_keys - 1] * (num_keys > 0)
    full_page = num_keys // page_size * page_size if page_size else 0  # where the last, partial page starts
    assert full_page in {*keys, num_keys} and (full_page == 0 or full_page - 1 in keys)


@BOTH_FORMS
def test_the_parts_of_unequal_rows_have_unequal_mass(template: str) -> None:
    """Two parts of equal mass have one LSE, and then a merge in the wrong base, or without weights, is right."""
    for row in rows(template.format(dtype="bf16", regime="unequal")):
        for parts in (2, 4):  # split into halves and into quarters
            mass = torch.stack([part.sum(-1) for part in row.mass.tensor_split(parts, dim=-1)])
            assert float((mass[-1] / mass[0]).min()) > 4
        assert float(row.mass[:, : row.num_keys * 3 // 4].sum(-1).min()) > 0.01  # the light part counts, too


def test_the_values_of_unequal_parts_differ_so_that_their_weights_show() -> None:
    for template in (ABSORBED, MHA):
        r = dense_request(make_inputs(CaseSpec.parse(template.format(dtype="bf16", regime="unequal"))), 1)
        values = (r.k[0][:, None] if len(r.q) == 2 else r.k[1]).double()
        apart = values[750:].mean(0) - values[:750].mean(0)  # [heads, dims]
        # By chance, means of 250 and 750 keys differ by 0.07 in each dim.
        assert float(apart.norm(dim=-1).min()) > 3 * 0.07 * values.shape[-1] ** 0.5


@BOTH_FORMS
@pytest.mark.parametrize(("regime", "strong", "weak"), [("rope", "rope", "nope"), ("nope", "nope", "rope")])
def test_one_part_of_the_scores_dominates_the_rope_and_the_nope_regime(
    regime: str, strong: str, weak: str, template: str
) -> None:
    for row in rows(template.format(dtype="bf16", regime=regime)):
        assert spread(getattr(row, strong)) > 100 * spread(getattr(row, weak)) > 0
        assert 1.3 < spread(row.scores) ** 0.5 < 8


@BOTH_FORMS
def test_one_channel_is_a_hundred_times_the_others_and_still_does_not_decide_the_softmax(template: str) -> None:
    case = template.format(dtype="fp16", regime="channel")
    inputs = make_inputs(CaseSpec.parse(case))
    channels = []
    for b in range(2):
        r = dense_request(inputs, b)
        for tensor in r.k if len(r.q) == 1 else r.k[:1]:
            size = tensor.double().abs().mean(tuple(range(tensor.dim() - 1)))
            first, second = size.topk(2).values
            assert 80 < first / second < 200 and 0.5 < second < 1.5
            channels.append(int(size.argmax()))
    assert len(set(channels)) > 1  # another one for each request
    assert all(1.1 < row.scores.std(-1).mean() < 3 and math.isfinite(row.mass.sum()) for row in rows(case))
