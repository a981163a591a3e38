"""The suites hold what their summaries promise: every value of every dimension, each case once, each with its claim."""

from __future__ import annotations

import re
from itertools import product

import pytest

from mla_verify.cases import (
    ATTENTION_PHASES,
    CONCAT_PHASES,
    FORM_LAYOUTS,
    FORM_PHASES,
    FORMS,
    REGIMES,
    WRITE_REGIMES,
    CaseSpec,
)
from mla_verify.dims import ODD_HEADS, PRESETS
from mla_verify.formats import DTYPES
from mla_verify.kernels.interpreter import too_large
from mla_verify.suites import PAGE_SIZES, RANK_HEADS, SUITES, suite_cases

ATTENTION_FORMS = ("absorbed", "mha")
HEADS = (8, 12, 16, 20, 32, 64, 96, 128)


def specs(suite: str, form: str | None = None) -> list[CaseSpec]:
    return [case.spec for case in suite_cases(suite) if form in (None, case.spec.form)]


def ids(suite: str) -> list[str]:
    return [spec.id for spec in specs(suite)]


@pytest.mark.parametrize("suite", SUITES)
def test_no_case_is_there_twice_and_each_reads_from_its_id(suite: str) -> None:
    assert len(set(ids(suite))) == len(set(specs(suite))) == len(specs(suite))
    assert [CaseSpec.parse(case_id) for case_id in ids(suite)] == specs(suite)


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_says_its_claim_in_one_sentence(suite: str) -> None:
    for case in suite_cases(suite):
        assert re.fullmatch(r"[^.{}\n]{20,119}", case.claim), case.claim  # no full stop, no field left unfilled
        assert case.claim == case.claim.strip()


def test_a_claim_names_the_heads_drafts_and_pages_of_its_own_case() -> None:
    for case in suite_cases("full"):
        for pattern, own in (
            (r"(\d+) heads of one rank", case.spec.num_heads),
            (r"pages of (\d+)", case.spec.page_size),
            (r"each of (\d+) draft tokens", case.spec.requests[0].q_len),
            (r"context of ([\d,]+) tokens", None),
        ):
            claimed = re.search(pattern, case.claim)
            if claimed and own is not None:
                assert int(claimed[1]) == own, case


def test_the_larger_suites_start_with_all_of_the_smaller_ones() -> None:
    smoke, standard, full = (ids(name) for name in ("smoke", "standard", "full"))
    assert standard[: len(smoke)] == smoke and len(standard) > 2.5 * len(smoke)
    assert full[: len(standard)] == standard and len(full) > len(standard)


def test_smoke_stays_small_enough_for_two_cpu_cores() -> None:
    assert 80 <= len(specs("smoke")) <= 150
    assert max(spec.num_kv_tokens for spec in specs("smoke")) <= 4096
    assert max(spec.num_q_tokens for form in ATTENTION_FORMS for spec in specs("smoke", form)) <= 200


def test_smoke_holds_every_phase_dtype_regime_page_size_and_head_count_of_the_absorbed_form() -> None:
    absorbed = specs("smoke", "absorbed")
    assert {spec.phase for spec in absorbed} == set(ATTENTION_PHASES)
    assert {spec.dtype for spec in absorbed} == set(DTYPES)
    assert {spec.regime for spec in absorbed} == set(REGIMES)
    assert {spec.page_size for spec in absorbed} == {1, 16, 32, 64, 128} == set(PAGE_SIZES)
    assert {spec.num_heads for spec in absorbed} == set(HEADS)
    assert {spec.causal for spec in absorbed} == {True, False}


def test_smoke_holds_every_phase_dtype_and_layout_of_every_form() -> None:
    assert {(spec.form, spec.phase) for spec in specs("smoke")} == {(f, p) for f in FORMS for p in FORM_PHASES[f]}
    # A layer in fp32 rounds nothing on the way that the other forms do not.
    assert {(spec.form, spec.dtype) for spec in specs("smoke")} == set(product(FORMS, DTYPES)) - {("layer", "fp32")}
    # A cache past 2^31 elements is for no CPU.
    layouts = {(form, layout) for form in FORMS for layout in FORM_LAYOUTS[form] if not layout.startswith("far")}
    assert {(spec.form, spec.layout) for spec in specs("smoke")} == layouts


def test_smoke_writes_few_and_many_tokens_repeated_slots_and_slots_outside() -> None:
    writes = specs("smoke", "write")
    assert {spec.regime for spec in writes} == set(WRITE_REGIMES)
    assert {1, 767, 768, 769, 1201} <= {spec.num_q_tokens for spec in writes}


def compared(spec: CaseSpec) -> int:
    """Elements that a case of a write or a concatenation puts in place."""
    dims = {"append": 576, "queries": 576, "keys": 192}[spec.phase]
    return spec.num_q_tokens * spec.num_heads * dims


# What the kernels take that there are: some cast none but bf16, write no slot outside, or begin at 768 tokens.
@pytest.mark.parametrize(
    ("phase", "num_heads", "fewest"), [("queries", 128, 1), ("keys", 128, 1), ("append", 1, 1), ("append", 1, 768)]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_standard_has_fifty_copies_of_each_kind_and_none_holds_a_tenth_of_their_elements(
    phase: str, num_heads: int, fewest: int, dtype: str
) -> None:
    """Ten seeds are then 500 ids, of which none decides more than 1 % of the elements."""
    kind = [
        spec
        for spec in specs("standard")
        if (spec.phase, spec.num_heads, spec.dtype) == (phase, num_heads, dtype) and spec.num_q_tokens >= fewest
        if spec.regime != "outside"
    ]
    assert len(kind) >= (50 if fewest == 1 else 25)
    assert {spec.layout for spec in kind} == set(FORM_LAYOUTS[kind[0].form]) - {"far31", "far32"}
    assert max(map(compared, kind)) <= sum(map(compared, kind)) / 10


def test_standard_writes_on_and_beside_768_tokens_in_every_page_size_dtype_and_regime() -> None:
    writes = specs("standard", "write")
    counts = {(spec.page_size, spec.num_q_tokens) for spec in writes if spec.regime == "rows"}
    assert counts >= set(product((1, 16, 32, 64), (1, 767, 768, 769, 1024, 4096)))
    assert {(spec.regime, spec.dtype) for spec in writes} == set(product(WRITE_REGIMES, DTYPES))


@pytest.mark.parametrize("phase", CONCAT_PHASES)
def test_full_has_concatenations_whose_output_and_parts_pass_32_bit_offsets(phase: str) -> None:
    nope = {"queries": 512, "keys": 128}[phase]
    rows = [s.num_q_tokens * s.num_heads for s in specs("full", "concat") if (s.phase, s.dtype) == (phase, "bf16")]
    standard = [s.num_q_tokens * s.num_heads for s in specs("standard", "concat") if s.phase == phase]
    for bits in (31, 32):
        assert any(n * nope > 2**bits for n in rows)
    assert any(n * nope < 2**31 < n * (nope + 64) for n in rows)
    assert max(standard) * (nope + 64) * 4 < 2**27  # bytes; what a CPU or a small GPU holds many of


def test_smoke_has_every_regime_and_attention_phase_in_the_size_that_an_interpreter_runs() -> None:
    small = [spec for spec in specs("smoke", "absorbed") if too_large(spec) is None and spec.dtype != "bf16"]
    assert {spec.phase for spec in small} == set(ATTENTION_PHASES)
    assert {spec.regime for spec in small} >= set(REGIMES) - {"uniform"}  # which wants many keys
    assert {spec.dtype for spec in small} == {"fp32", "fp16"}
    assert {spec.page_size for spec in small} == set(PAGE_SIZES)


@pytest.mark.parametrize("suite", SUITES)
def test_speculative_cases_have_two_three_and_four_drafts(suite: str) -> None:
    spec_cases = [spec for spec in specs(suite, "absorbed") if spec.phase == "spec"]
    assert {request.q_len for spec in spec_cases for request in spec.requests} - {0} == {2, 3, 4}


def test_smoke_lengths_stand_on_and_beside_every_edge() -> None:
    """A kernel that loses the key after a full tile or page, or reads one too many before it, meets that length."""
    lengths = {r.kv_len for spec in specs("smoke", "absorbed") if spec.phase == "decode" for r in spec.requests}
    assert {1, 2, 4096} <= lengths
    for tile in (32, 64):
        assert {tile - 1, tile, tile + 1} <= lengths
    for page_size in PAGE_SIZES:
        own = [r.kv_len for s in specs("smoke", "absorbed") if s.page_size == page_size for r in s.requests]
        assert any(n > page_size and n % page_size == 1 % page_size for n in own), f"one token on a page of {page_size}"
        assert any(n > page_size and n % page_size == 0 for n in own), f"a last page of {page_size} that is full"


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_standard_has_lengths_one_short_of_a_page_for_every_page_size_and_dtype(page_size: int) -> None:
    short = [s for s in specs("standard", "absorbed") if s.page_size == page_size]
    found = {s.dtype for s in short for r in s.requests if r.kv_len > page_size and (r.kv_len + 1) % page_size == 0}
    assert found == set(DTYPES)


@pytest.mark.parametrize("form", ATTENTION_FORMS)
def test_smoke_has_an_empty_request_between_others_and_rows_without_keys(form: str) -> None:
    mixed = [spec.requests for spec in specs("smoke", form) if spec.phase == "mixed"]
    assert any(
        before.kv_len and not empty.kv_len and empty.q_len and after.kv_len
        for requests in mixed
        for before, empty, after in zip(requests, requests[1:], requests[2:], strict=False)
    )
    assert any(r.q_len == 0 and r.kv_len for requests in mixed for r in requests)  # keys that nobody asks for
    assert any(r.q_len > r.kv_len > 0 for requests in mixed for r in requests)  # its first queries see no key


def test_standard_crosses_every_regime_with_every_dtype_in_both_forms() -> None:
    crossed = {(s.form, s.regime, s.dtype) for form in ATTENTION_FORMS for s in specs("standard", form)}
    assert crossed == set(product(ATTENTION_FORMS, REGIMES, DTYPES))
    assert {(spec.num_heads, spec.dtype) for spec in specs("standard", "mha")} >= set(product(HEADS, DTYPES))


def test_full_crosses_every_head_count_with_every_page_size_and_dtype_and_has_long_contexts() -> None:
    crossed = {(spec.num_heads, spec.page_size, spec.dtype) for spec in specs("full", "absorbed")}
    assert crossed >= set(product(HEADS, PAGE_SIZES, DTYPES))
    assert {spec.dtype for spec in specs("full") if spec.num_kv_tokens == 131_072} == set(DTYPES)


def test_head_counts_are_those_of_real_models_at_every_tensor_parallel_size_and_the_odd_ones() -> None:
    ranks = {name: [preset.heads_at(tp) for tp in preset.tensor_parallel_sizes()] for name, preset in PRESETS.items()}
    assert ranks == {
        "deepseek-v2-lite": [16, 8],
        "deepseek-v2": [128, 64, 32, 16, 8],
        "deepseek-v3": [128, 64, 32, 16, 8],
        "kimi-k2": [64, 32, 16, 8],
    }
    assert ODD_HEADS == (12, 20, 96)
    assert RANK_HEADS == HEADS


@pytest.mark.parametrize("tp", [0, -1, 3, 32])
def test_heads_that_do_not_divide_over_the_ranks_are_refused(tp: int) -> None:
    with pytest.raises(ValueError, match=f"do not divide over tp={tp}"):
        PRESETS["deepseek-v2-lite"].heads_at(tp)
