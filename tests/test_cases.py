"""A case and its id are one and the same; what is no case is refused with the part that is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_verify.cases import (
    FORM_LAYOUTS,
    FORM_PHASES,
    FORM_REGIMES,
    FORMS,
    MAX_TOKENS,
    RAGGED_FORMS,
    SM_SCALE,
    CaseSpec,
    Request,
)
from mla_verify.dims import MLADims
from mla_verify.errors import UsageError
from mla_verify.formats import DTYPES

DECODE = "decode-absorbed-h16-4xq1.kv4096-p64-bf16-normal-s0"
SPEC = CaseSpec("decode", "absorbed", 16, (Request(1, 64),), 64, "bf16", "normal")

small = st.integers(0, 300)
# What a request of each phase looks like; every phase may hold empty ones.
LENGTHS = {
    "decode": st.tuples(st.just(1), small),
    "spec": st.tuples(st.integers(2, 4), small),
    "prefill": small.map(lambda n: (n, n)),
    "prefix": st.tuples(st.integers(1, 300), st.integers(301, 9000)),
    "chunked": st.tuples(small, small),
    "mixed": st.tuples(small, small),
    "append": st.tuples(small, small).map(lambda n: (min(n), max(n))),
    "queries": small.map(lambda n: (n, n)),
    "keys": small.map(lambda n: (n, n)),
}


@st.composite
def specs(draw: st.DrawFn) -> CaseSpec:
    form = draw(st.sampled_from(FORMS))
    phase, write, copy = draw(st.sampled_from(FORM_PHASES[form])), form == "write", form in ("write", "concat")
    lengths = LENGTHS[phase] if form == "concat" else LENGTHS[phase] | st.tuples(st.just(0), small)
    runs = draw(st.lists(st.tuples(st.integers(1, 12), lengths), min_size=2, max_size=5))
    return CaseSpec(
        phase=phase,
        form=form,
        # 60 requests of up to 9,000 tokens and 2,100 dims a head: 12 heads stay under MAX_ELEMENTS, whatever is drawn.
        num_heads=1 if write else draw(st.integers(1, 12)),
        requests=tuple(Request(*one) for count, one in runs for _ in range(count)),
        page_size=0 if form in RAGGED_FORMS else draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(DTYPES)),
        regime=draw(st.sampled_from(FORM_REGIMES[form])),
        seed=draw(st.integers(0, 10**18 - 1)),
        causal=copy or draw(st.booleans()),
        sm_scale=draw(
            st.just(SM_SCALE) if copy else st.just(SM_SCALE) | st.floats(0, exclude_min=True, allow_infinity=False)
        ),
        layout=draw(st.sampled_from(FORM_LAYOUTS[form])),
        dims=draw(st.just(MLADims()) | st.builds(MLADims, *[st.integers(1, 700)] * 4)),
    )


@settings(deadline=None)
@given(specs())
def test_an_id_gives_back_the_very_case_it_came_from(spec: CaseSpec) -> None:
    assert CaseSpec.parse(spec.id) == spec
    assert CaseSpec.parse(f"  {spec.id}\n") == spec  # as pasted from a report


@pytest.mark.parametrize(
    ("case_id", "spec"),
    [
        (DECODE, replace(SPEC, requests=(Request(1, 4096),) * 4)),
        (DECODE.replace("4x", "1xq1.kv4096+3x"), replace(SPEC, requests=(Request(1, 4096),) * 4)),
        (
            "mixed-absorbed-h7-q1.kv33+2xq1.kv0+q5.kv100-p3-fp16-needle-full-scale1e-05-dims256.32.64.96-s42",
            CaseSpec(
                "mixed",
                "absorbed",
                7,
                (Request(1, 33), Request(1, 0), Request(1, 0), Request(5, 100)),
                3,
                "fp16",
                "needle",
                seed=42,
                causal=False,
                sm_scale=1e-5,
                dims=MLADims(kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=96),
            ),
        ),
        (
            "prefill-mha-h1-q257.kv257-ragged-fp32-channel-scale2-s9",
            CaseSpec("prefill", "mha", 1, (Request(257, 257),), 0, "fp32", "channel", seed=9, sm_scale=2.0),
        ),
    ],
)
def test_a_well_formed_id_that_is_in_no_suite_reads(case_id: str, spec: CaseSpec) -> None:
    assert CaseSpec.parse(case_id) == spec


def refusal(case_id: str) -> str:
    with pytest.raises(UsageError) as refused:
        CaseSpec.parse(case_id)
    assert refused.value.hint
    return str(refused.value)


@pytest.mark.parametrize(
    ("part", "wrong", "told"),
    [
        ("decode", "Decode", "'Decode' stands where the phase"),
        ("decode", "decod", "did you mean decode"),
        ("absorbed", "4", "'4' stands where the form"),
        ("absorbed", "absorb", "did you mean absorbed"),
        ("h16", "16", "'16' stands where the heads"),
        ("h16", "h0", "'h0' stands where the heads"),
        ("4xq1.kv4096", "4xkv4096", "'4xkv4096' stands where the requests"),
        ("4xq1.kv4096", "0xq1.kv4096", "'0xq1.kv4096' stands where the requests"),
        ("4xq1.kv4096", "q1.kv1++q1.kv2", "'q1.kv1++q1.kv2' stands where the requests"),
        ("p64", "p0", "'p0' stands where the page"),
        ("p64", "64", "'64' stands where the page"),
        ("bf16", "bf-16", "'16' stands where the regime"),
        ("bf16", "bf17", "unknown dtype 'bf17'"),
        ("normal", "n0rmal", "'n0rmal' stands where the regime"),
        ("normal", "norma", "did you mean normal"),
        ("-s0", "", "the seed is missing"),
        ("-s0", "-0", "'0' is none of full, fused, transposed, far31, far32, scale0.25"),
        ("-s0", "-fused-transposed-s0", "full, layout, scale, dims and seed in this order"),
        ("-s0", "-scale-s0", "'scale' is none of"),
        ("-s0", "-scale-1-s0", "'scale' is none of"),
        ("-s0", "-scale1e-05-0", "'0' is none of"),
        ("-s0", "-dims512.64-s0", "'dims512.64' is none of"),
        ("-s0", "-dims512.64.0.128-s0", "'dims512.64.0.128' is none of"),
        ("-s0", "-s0-full", "the seed is missing"),
        ("-s0", "-scale2-full-s0", "in this order"),
        ("-normal-s0", "", "the regime and what follows it is missing"),
    ],
)
def test_a_bad_id_is_refused_by_the_part_that_is_wrong(part: str, wrong: str, told: str) -> None:
    assert told in refusal(DECODE.replace(part, wrong))


@pytest.mark.parametrize(
    ("case_id", "told"),
    [
        ("decode-absorbed-h16-q1.kv64+q2.kv64-p64-bf16-normal-s0", "phase decode means that every request has q_len 1"),
        ("spec-absorbed-h16-q3.kv64+q5.kv64-p64-bf16-normal-s0", "phase spec means that every request has q_len 2 to"),
        ("spec-absorbed-h16-q1.kv64-p64-bf16-normal-s0", "phase spec means that every request has q_len 2 to 4"),
        ("prefill-absorbed-h16-q64.kv65-p64-bf16-normal-s0", "as many queries as keys"),
        ("prefix-absorbed-h16-q64.kv64-p64-bf16-normal-s0", "more keys than queries"),
        ("chunked-absorbed-h16-q64.kv64-p64-bf16-normal-s0", "at least two requests"),
        ("mixed-absorbed-h16-q64.kv64-p64-bf16-normal-s0", "at least two requests"),
        ("decode-mha-h16-q1.kv64-p64-bf16-normal-s0", "form mha with page size 64"),
        ("decode-absorbed-h16-q1.kv64-ragged-bf16-normal-s0", "form absorbed with page size 0"),
        ("append-absorbed-h16-q1.kv64-p64-bf16-normal-s0", "phase append of form absorbed"),
        ("decode-write-h1-q1.kv64-p64-bf16-rows-s0", "phase decode of form write"),
        ("append-write-h2-q1.kv64-p64-bf16-rows-s0", "phase append means that one head is written"),
        ("append-write-h1-q65.kv64-p64-bf16-rows-s0", "every new token is one of the keys"),
        ("append-write-h1-q1.kv64-p64-bf16-rows-full-s0", "neither full nor a scale is named"),
        ("append-write-h1-q1.kv64-p64-bf16-rows-scale2-s0", "neither full nor a scale is named"),
        ("append-write-h1-q1.kv64-p64-bf16-normal-s0", "unknown regime 'normal'"),
        ("append-write-h1-q1.kv64-ragged-bf16-rows-s0", "form write with page size 0"),
        (
            "append-write-h1-q1.kv64-p64-bf16-rows-transposed-s0",
            "layout transposed of form write\nhint: it has split, ",
        ),
        ("prefill-mha-h16-q64.kv64-ragged-bf16-normal-far31-s0", "layout far31 of form mha\nhint: it has split, fused"),
        ("keys-concat-h128-q64.kv64-p64-bf16-rows-s0", "form concat with page size 64\nhint: concat needs ragged"),
        ("keys-concat-h128-q64.kv64-ragged-bf16-normal-s0", "unknown regime 'normal'\nhint: known: rows"),
        ("keys-concat-h128-q64.kv64-ragged-bf16-rows-far31-s0", "layout far31 of form concat"),
        ("keys-concat-h128-q1.kv64-ragged-bf16-rows-s0", "phase keys means that every request has as many queries as"),
        ("queries-concat-h128-q9.kv9-ragged-bf16-rows-full-s0", "neither full nor a scale is named"),
        ("queries-concat-h128-q9.kv9-ragged-bf16-rows-scale2-s0", "neither full nor a scale is named"),
        ("prefill-concat-h128-q9.kv9-ragged-bf16-rows-s0", "phase prefill of form concat\nhint: it has queries, keys"),
        ("keys-mha-h128-q9.kv9-ragged-bf16-normal-s0", "phase keys of form mha"),
        ("decode-absorbed-h16-q1.kv64-p64-bf16-normal-scale0-s0", "sm_scale is 0.0"),
        ("decode-absorbed-h16-q1.kv64-p64-bf16-normal-scale1e999-s0", "sm_scale is inf"),
    ],
)
def test_an_id_that_contradicts_itself_is_refused(case_id: str, told: str) -> None:
    assert told in refusal(case_id)


@pytest.mark.parametrize("phase", ["decode", "spec", "prefill", "prefix"])
def test_empty_requests_contradict_no_phase(phase: str) -> None:
    live = {"decode": "q1.kv9", "spec": "q2.kv9", "prefill": "q9.kv9", "prefix": "q2.kv9"}[phase]
    assert CaseSpec.parse(f"{phase}-absorbed-h16-q7.kv0+{live}+q0.kv7-p64-bf16-normal-s0").phase == phase


@pytest.mark.parametrize(
    "case_id",
    [
        f"decode-absorbed-h1-q1.kv{MAX_TOKENS + 1}-p1-bf16-normal-s0",
        f"mixed-absorbed-h1-q{MAX_TOKENS}.kv1+q1.kv1-p1-bf16-normal-s0",
        "decode-absorbed-h1-9999999xq1.kv0-p1-bf16-normal-s0",
        "decode-absorbed-h1-9000000xq0.kv0-p1-bf16-normal-s0",
        "decode-absorbed-h1-8000000xq0.kv0+8000000xq0.kv0-p1-bf16-normal-s0",
        "decode-absorbed-h1-1000xq1.kv1-p999999-bf16-normal-s0",  # 1000 pages, each with one key
        "prefill-absorbed-h128-q4000000.kv4000000-p64-bf16-normal-s0",
        "decode-mha-h128-q1.kv4000000-ragged-bf16-normal-s0",
        "queries-concat-h128-q233017.kv233017-ragged-bf16-rows-s0",  # 233,016 x 128 x 576 is just under 2^34
        "keys-concat-h128-q524289.kv524289-ragged-bf16-rows-s0",
        "decode-absorbed-h99999-1000xq1.kv1-p64-bf16-normal-s0",
        "decode-absorbed-h128-q1.kv1000000-p64-bf16-normal-dims99999.1.1.1-s0",
        f"decode-absorbed-h1-q1.kv64-p64-bf16-normal-dims{'9' * 5000}.64.128.128-s0",
        f"decode-absorbed-h1-q1.kv64-p64-bf16-normal-s{'9' * 5000}",
        f"decode-absorbed-h{'9' * 5000}-q1.kv64-p64-bf16-normal-s0",
    ],
    ids=lambda case_id: case_id[:60],
)
def test_a_case_that_no_machine_could_hold_is_refused_before_anything_is_allocated(case_id: str) -> None:
    refusal(case_id)


def test_the_sizes_at_which_32_bit_offsets_wrap_are_allowed() -> None:
    keys = CaseSpec.parse("decode-absorbed-h8-q1.kv7456541-p64-bf16-normal-s0").num_kv_tokens
    queries = CaseSpec.parse("prefix-absorbed-h128-q58256.kv58257-p64-bf16-normal-s0").num_q_tokens
    assert keys * 576 > 2**32 and queries * 128 * 576 > 2**32
    copied = CaseSpec.parse("queries-concat-h128-q233016.kv233016-ragged-bf16-rows-s0").num_q_tokens
    assert copied * 128 * 512 > 2**33


@pytest.mark.parametrize(
    "fields",
    [
        {"seed": -1},
        {"seed": 10**18},
        {"num_heads": 100_000},
        {"page_size": -64},
        {"requests": (Request(1, -5),)},
        {"requests": (Request(-1, 5), Request(2, 5))},
        {"requests": ()},
        {"num_heads": 0},
        {"dims": MLADims(kv_lora_rank=0)},
        {"sm_scale": float("nan")},
        {"sm_scale": -0.1},
        {"dtype": "fp64"},
        {"regime": "random"},
        {"phase": "encode"},
        {"form": "gqa"},
        {"layout": "strided"},
    ],
)
def test_a_spec_that_no_id_could_name_cannot_be_made(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(SPEC, **fields)  # type: ignore[arg-type]


@settings(deadline=None)
@given(specs(), st.data())
def test_an_id_with_a_typing_error_reads_as_a_case_or_is_refused(spec: CaseSpec, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(spec.id) - 1))
    typed = data.draw(st.sampled_from(["", "-", ".", "+", "x", "0", "99", "s", " "]) | st.characters())
    case_id = spec.id[:at] + typed + spec.id[at + data.draw(st.integers(0, 2)) :]
    try:
        read = CaseSpec.parse(case_id)
    except UsageError:
        return
    assert CaseSpec.parse(read.id) == read
