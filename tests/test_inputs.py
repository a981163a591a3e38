"""Made inputs: a function of the case's id alone, paged through a permuted table, poison wherever nobody may read."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.cases import SM_SCALE, CaseSpec, Request
from mla_verify.formats import FORMATS
from mla_verify.inputs import GARBAGE_PAGE, make_inputs, poison_unreferenced
from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAInputs

ABSORBED = "mixed-absorbed-h4-q1.kv33+q1.kv0+q5.kv100+q0.kv7-p16-bf16-normal-s0"
MHA = "mixed-mha-h4-q1.kv33+q1.kv0+q5.kv100+q0.kv7-ragged-bf16-normal-s0"

lengths = st.tuples(st.integers(0, 3), st.integers(0, 90))
paged_specs = st.builds(
    lambda requests, page_size, dtype, seed: CaseSpec(
        "mixed", "absorbed", 2, tuple(Request(*r) for r in requests), page_size, dtype, "normal", seed
    ),
    st.lists(lengths, min_size=2, max_size=6).filter(lambda rs: any(q for q, _ in rs)),
    st.sampled_from((1, 2, 16, 64)),
    st.sampled_from(tuple(FORMATS)),
    st.integers(0, 9),
)


def made(case: CaseSpec | str) -> AbsorbedInputs:
    inputs = make_inputs(CaseSpec.parse(case) if isinstance(case, str) else case)
    assert isinstance(inputs, AbsorbedInputs)
    return inputs


def slots_of(inputs: AbsorbedInputs, request: int) -> list[tuple[int, int]]:
    """(page, offset) of each token of a request, read off the table one by one."""
    page_size = inputs.ckv_cache.shape[1]
    return [
        (int(inputs.page_table[request, token // page_size]), token % page_size)
        for token in range(int(inputs.kv_lens[request]))
    ]


def referenced(inputs: AbsorbedInputs) -> torch.Tensor:
    used = torch.zeros(inputs.ckv_cache.shape[:2], dtype=torch.bool)
    for request in range(inputs.num_requests):
        for slot in slots_of(inputs, request):
            assert not used[slot], "two tokens in one slot"
            used[slot] = True
    return used


def same_bits(a: MLAInputs, b: MLAInputs) -> bool:
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip(a.named_tensors().values(), b.named_tensors().values(), strict=True)
    )


# A function of the id


@pytest.mark.parametrize("case", [ABSORBED, MHA])
def test_the_same_id_gives_the_same_bits_whatever_was_drawn_before(case: str) -> None:
    first = make_inputs(CaseSpec.parse(case))
    torch.manual_seed(1)
    torch.randn(3)
    assert same_bits(first, make_inputs(CaseSpec.parse(case)))


def test_another_process_and_another_machine_make_the_same_numbers() -> None:
    """A failure that was reported elsewhere is repeated from its id."""
    first = made(ABSORBED.replace("bf16", "fp32")).q_nope[0, 0, :4].tolist()
    assert first == pytest.approx([0.13613759, -1.15588057, 0.01443918, 1.08487451], abs=1e-6)


@pytest.mark.parametrize("case", [ABSORBED, MHA])
def test_cases_that_differ_in_anything_share_no_numbers(case: str) -> None:
    """With shared numbers, one unlucky draw would blind every regime and dtype at once."""
    spec = CaseSpec.parse(case)
    others = [
        spec,
        replace(spec, seed=1),
        replace(spec, dtype="fp32"),
        replace(spec, regime="nope"),
        replace(spec, causal=False),
        replace(spec, sm_scale=0.5),
        replace(spec, phase="chunked"),
    ]
    queries = [make_inputs(other).queries.double().flatten() for other in others]
    for a, b in combinations(queries, 2):
        assert abs(float(torch.nn.functional.cosine_similarity(a, b, dim=0))) < 0.15


def test_inputs_have_the_shapes_dtype_and_lengths_of_their_case() -> None:
    a, m = made(ABSORBED), make_inputs(CaseSpec.parse(MHA))
    assert isinstance(m, MHAInputs)
    assert a.qo_indptr.tolist() == m.qo_indptr.tolist() == [0, 1, 2, 7, 7]
    assert a.kv_lens.tolist() == m.kv_lens.tolist() == m.kv_indptr.diff().tolist() == [33, 0, 100, 7]
    assert (a.q_nope.shape, a.q_pe.shape, a.ckv_cache.shape[1:]) == ((7, 4, 512), (7, 4, 64), (16, 512))
    assert (m.q.shape, m.k.shape, m.v.shape) == ((7, 4, 192), (140, 4, 192), (140, 4, 128))
    for inputs in (a, m):
        floating = [t.dtype for t in inputs.named_tensors().values() if t.is_floating_point()]
        assert set(floating) == {torch.bfloat16}
        assert (inputs.sm_scale, inputs.causal, inputs.qk_dims[1]) == (SM_SCALE, True, 64)
    full = make_inputs(CaseSpec.parse(ABSORBED.replace("-s0", "-full-scale0.5-s0")))
    assert (full.sm_scale, full.causal) == (0.5, False)


def test_every_head_of_the_non_absorbed_form_has_one_and_the_same_rope_part() -> None:
    inputs = make_inputs(CaseSpec.parse(MHA))
    assert isinstance(inputs, MHAInputs)
    rope = inputs.k[..., 128:]
    assert torch.equal(rope, rope[:, :1].expand_as(rope))
    assert not torch.equal(inputs.k[:, 0, :128], inputs.k[:, 1, :128])


# Pages and poison


@settings(deadline=None, max_examples=60)
@given(paged_specs)
def test_what_a_request_references_is_finite_and_everything_else_is_nan(spec: CaseSpec) -> None:
    """A kernel that reads the tail of a last page, or a page of nobody, shows NaN."""
    inputs = made(spec)
    used = referenced(inputs)
    assert not used[0].any(), "page 0 belongs to a request"
    assert int((~used.any(1)).sum()) >= 2, "page 0 is the only page of nobody"
    for cache in (inputs.ckv_cache, inputs.kpe_cache):
        assert cache[used].isfinite().all()
        assert cache[~used].isnan().all()


@settings(deadline=None, max_examples=60)
@given(paged_specs)
def test_table_entries_past_the_last_page_are_far_outside_any_cache(spec: CaseSpec) -> None:
    inputs = made(spec)
    num_pages, page_size = inputs.ckv_cache.shape[:2]
    for row, kv_len in zip(inputs.page_table.tolist(), inputs.kv_lens.tolist(), strict=True):
        tail = row[math.ceil(kv_len / page_size) :]
        assert tail and all(page > 1000 * num_pages and page > 2**30 for page in tail)


@pytest.mark.parametrize("seed", range(4))
def test_page_tables_are_permuted(seed: int) -> None:
    """A kernel that takes pages to lie in order, or from page 0 on, reads another token nearly everywhere."""
    inputs = made(f"decode-absorbed-h2-2xq1.kv1000-p16-bf16-normal-s{seed}")
    pages = inputs.page_table[:, :63]
    assert int((pages.diff() == 1).sum()) < 10
    assert int((pages[0] == torch.arange(63)).sum()) < 10
    mine, others = set(pages[0].tolist()), set(pages[1].tolist())
    assert min(mine) < max(others) and min(others) < max(mine), "the requests' pages are not mixed"


@settings(deadline=None, max_examples=60)
@given(paged_specs, st.sampled_from((math.nan, math.inf, -1e4)))
def test_poisoning_changes_unreferenced_slots_and_nothing_else(spec: CaseSpec, poison: float) -> None:
    made_inputs = made(spec)
    used = referenced(made_inputs)
    # As in a file of real activations: old data where nobody reads, and any page number in the table's tail.
    clean = replace(
        made_inputs,
        ckv_cache=made_inputs.ckv_cache.nan_to_num(7.0),
        kpe_cache=made_inputs.kpe_cache.nan_to_num(7.0),
        page_table=made_inputs.page_table.masked_fill(made_inputs.page_table == GARBAGE_PAGE, 0),
    )
    before = replace(clean, **{name: tensor.clone() for name, tensor in clean.named_tensors().items()})
    poisoned = poison_unreferenced(clean, poison)
    assert same_bits(clean, before), "the original was changed"
    for cache, original in ((poisoned.ckv_cache, clean.ckv_cache), (poisoned.kpe_cache, clean.kpe_cache)):
        assert torch.equal(cache[used], original[used])
        expected = torch.full_like(cache[~used], poison)
        assert torch.equal(cache[~used].nan_to_num(3e4), expected.nan_to_num(3e4))
    assert torch.equal(poisoned.page_table, made_inputs.page_table)
    rest = {f.name for f in fields(clean)} - {"ckv_cache", "kpe_cache", "page_table"}
    assert all(getattr(poisoned, name) is getattr(clean, name) for name in rest)


def test_another_poison_moves_no_referenced_number() -> None:
    nan, huge = made(ABSORBED), make_inputs(CaseSpec.parse(ABSORBED), poison=3e38)
    assert same_bits(nan, poison_unreferenced(huge))  # type: ignore[arg-type]
    assert not same_bits(nan, huge)


# The softmax scale


@pytest.mark.parametrize(
    ("default", "what"),
    [
        (192**-0.5, "of the non-absorbed query, 128 + 64 dims"),
        (576**-0.5, "of the absorbed query, 512 + 64 dims"),
        (512**-0.5, "of the latent alone"),
        (128**-0.5, "of the nope part, and of an ordinary head"),
        (64**-0.5, "of the rope part"),
        (256**-0.5, "of the 256 dims some kernels pad 192 to"),
        (1.0, "none at all"),
        (192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2, "DeepSeek-V2 and V2-Lite, YaRN factor 40, mscale 0.707"),
        (192**-0.5 * (0.1 * math.log(40) + 1) ** 2, "DeepSeek-V3 and R1, YaRN factor 40, mscale 1"),
        (192**-0.5 * (0.1 * math.log(32) + 1) ** 2, "Kimi-K2, YaRN factor 32, mscale 1"),
    ],
)
def test_the_softmax_scale_is_more_than_a_tenth_from_every_default(default: float, what: str) -> None:
    """A kernel that ignores its sm_scale and uses one of these must be wrong, visibly."""
    assert abs(SM_SCALE / default - 1) > 0.1 and abs(default / SM_SCALE - 1) > 0.1, what


def test_the_softmax_scale_is_exact_in_fp32() -> None:
    assert float(torch.tensor(SM_SCALE, dtype=torch.float32)) == SM_SCALE
