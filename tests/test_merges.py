"""The merge relation: attention over all keys is that over its parts, merged; a merge in the wrong base is named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mla_verify.cases import CaseSpec
from mla_verify.compare import compare_output
from mla_verify.emulate import EmulatedKernel
from mla_verify.errors import UsageError
from mla_verify.expected import dense_request, expect
from mla_verify.inputs import make_inputs
from mla_verify.kernels import load_kernel
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.kernels.merge_parts import CHUNK, MERGED_PHASES, empty_state, parts_of
from mla_verify.merge_bases import _fits as fits_wrong_merge
from mla_verify.reference.merge import merge_states
from mla_verify.results import Verdict
from mla_verify.suites import suite_cases
from mla_verify.tensors import MHAInputs, output_buffers
from tests.kernels_helper import Run, cases, register, verify
from tests.merged_kernels import (
    Base2AsNatural,
    DropsAChunk,
    EmptyPartIsNaN,
    Merged,
    NaturalAsBase2,
    NoLSE,
    ReturnsBase2,
    Scaled,
    merged_facts,
)

AS_NATURAL = "the output fits its parts merged with base-2 LSEs taken as natural ones (each LSE times 1.4427); out: "
AS_BASE_2 = "the output fits its parts merged with natural LSEs taken as base-2 ones (each LSE times 0.6931); out: "
# Of 3 and 1 chunks, the last ones partial; of 10, 0 and 2 beside a request without queries.
PREFIX = "prefix-mha-h8-q17.kv300+q31.kv95-ragged-{}-mixed-s0"
RAGGED = "mixed-mha-h8-q1.kv900+q33.kv33+q0.kv64+q5.kv102-ragged-{}-unequal-s0"
NAMES = ("sgl-merge", "sglang-merge", "flashinfer-merge", "sglang-flashinfer-merge")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, kernel: type[Merged], *ids: str) -> Run:
    register(monkeypatch, [kernel])
    return verify(folder, *cases(*ids))


def mha_inputs(case: str) -> MHAInputs:
    inputs = make_inputs(CaseSpec.parse(case))
    assert isinstance(inputs, MHAInputs)
    return inputs


# The relation


def test_attention_over_all_keys_is_that_over_the_parts_merged() -> None:
    inputs = mha_inputs(RAGGED.format("fp32"))
    parts = parts_of(inputs, CHUNK)
    assert [part.kv_lens.tolist() for part in parts[:3]] == [[1, 33, 0, 5], [96, 0, 0, 96], [96, 0, 0, 1]]
    assert len(parts) == 11
    for b in (0, 1, 3):
        states = [dense_request(part, b).attend() for part in parts]
        out, lse = merge_states(torch.stack([s.out for s in states]), torch.stack([s.lse for s in states]))
        whole = dense_request(inputs, b).attend()
        assert float((out - whole.out).abs().max()) < 1e-12
        assert float((lse - whole.lse).abs().max()) < 1e-12


def test_a_request_with_more_queries_than_keys_has_no_parts() -> None:
    with pytest.raises(ValueError, match="more queries than keys"):
        parts_of(mha_inputs("mixed-mha-h8-q3.kv2+q1.kv9-ragged-fp32-normal-s0"), CHUNK)


def test_a_prefix_in_chunks_merged_right_passes_in_every_dtype_and_phase(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    specs = {case.spec for suite in ("smoke", "standard") for case in suite_cases(suite)}
    small = [s for s in specs if s.form == "mha" and s.num_heads <= 16 and s.num_q_tokens < 110 and s.causal]
    small = [s for s in small if s.phase in MERGED_PHASES and all(r.q_len <= r.kv_len for r in s.requests)]
    done = run(monkeypatch, tmp_path, Merged, *sorted(s.id for s in small))
    assert {s.phase for s in small} == set(MERGED_PHASES)
    assert {s.dtype for s in small} == {"fp32", "fp16", "bf16"}
    assert len(done.verdicts) > 20
    assert set(done.verdicts) == {Verdict.PASS}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("kernel", "cause"), [(Base2AsNatural, AS_NATURAL), (NaturalAsBase2, AS_BASE_2)])
def test_lses_of_the_wrong_base_fail_and_are_named(
    kernel: type[Merged], cause: str, dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = run(monkeypatch, tmp_path, kernel, PREFIX.format(dtype), RAGGED.format(dtype))
    assert done.verdicts == [Verdict.FAIL, Verdict.FAIL]
    assert all(result.reason.startswith(cause) for result in done.report.results)
    assert cause.split("; ")[0] in done.done.stdout


@pytest.mark.parametrize("kernel", [Scaled, DropsAChunk, EmptyPartIsNaN])
def test_another_fault_of_a_merge_fails_and_is_not_taken_for_a_base(
    kernel: type[Merged], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = run(monkeypatch, tmp_path, kernel, PREFIX.format("bf16"), RAGGED.format("fp16"))
    assert done.verdicts == [Verdict.FAIL, Verdict.FAIL]
    assert all("base" not in result.reason for result in done.report.results)
    nonfinite = [result.reason.startswith("out: NaN or infinity") for result in done.report.results]
    assert nonfinite == [kernel is EmptyPartIsNaN] * 2


def test_a_fault_where_the_base_makes_no_difference_is_not_taken_for_a_base(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # One key of each row has all the weight, and its part has it in every base.
    case = PREFIX.format("fp32").replace("mixed-s0", "peaked-s2")
    assert run(monkeypatch, tmp_path, Base2AsNatural, case).verdicts == [Verdict.PASS]
    result = run(monkeypatch, tmp_path, Scaled, case).only
    assert result.verdict is Verdict.FAIL
    assert "base" not in result.reason


@pytest.mark.parametrize(
    ("distance", "gone", "noisy", "fits"),
    [(3.0, 1.0, 1.0, True), (3.0, 0.0, 1.0, False), (3.0, 0.6, 1.0, False), (0.1, 1.0, 0.0, False)],
)
def test_an_output_fits_a_wrong_merge_only_where_it_can_be_told_and_has_gone_all_the_way(
    distance: float, gone: float, noisy: float, fits: bool
) -> None:
    # No element is beyond the limit of max_z of either: 3 sigma apart, or a tenth of one.
    generator = torch.Generator().manual_seed(0)
    noise = noisy * torch.randn(2, 4, 128, generator=generator, dtype=torch.float64)
    right = torch.zeros_like(noise)
    wrong = right + distance * torch.sign(torch.randn(2, 4, 128, generator=generator, dtype=torch.float64))
    assert fits_wrong_merge(gone * wrong + noise, right, wrong, torch.ones_like(noise)) == fits


def test_a_wrong_base_beside_another_fault_is_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Both(Base2AsNatural):
        name = "both"

        def spoil(self, out: torch.Tensor) -> torch.Tensor:
            out[3, 5, 77] += 1.0
            return out

    monkeypatch.setattr("tests.merged_kernels.Both", Both, raising=False)
    monkeypatch.setattr("mla_verify.kernels.KERNELS", {"both": "tests.merged_kernels:Both"})
    result = verify(tmp_path, *cases(PREFIX.format("bf16"))).only
    assert result.verdict is Verdict.FAIL
    assert "base" not in result.reason


def test_a_kernel_that_takes_all_keys_at_once_is_never_said_to_merge(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Whole(Base2AsNatural):
        name = "whole"
        contract = replace(NoLSE.contract, facts=lambda dtype: replace(NoLSE.contract.facts(dtype), chunk=None))

    monkeypatch.setattr("tests.merged_kernels.Whole", Whole, raising=False)
    monkeypatch.setattr("mla_verify.kernels.KERNELS", {"whole": "tests.merged_kernels:Whole"})
    result = verify(tmp_path, *cases(PREFIX.format("bf16"))).only
    assert result.verdict is Verdict.FAIL
    assert "base" not in result.reason


def test_a_right_output_whose_lse_alone_is_in_another_base_is_named_as_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = run(monkeypatch, tmp_path, ReturnsBase2, PREFIX.format("bf16")).only
    assert result.verdict is Verdict.FAIL
    assert result.reason.startswith("lse: |z| ")
    assert "all of it is 1.4427 times the expected: base 2 where base e is declared" in result.reason


# The facts


@pytest.mark.parametrize(
    ("case", "chunk", "why"),
    [
        (
            "h8-q1.kv602+q65.kv185+q3.kv3-ragged-bf16-uniform-s81",
            64,
            "all queries see the same chunks alike: slope 6.4",
        ),
        (
            "h4-q65.kv633+q1.kv134+q17.kv234+q3.kv3-ragged-bf16-needle-s275",
            64,
            "chunks beside a heavy one, lost when the result is stored: slope 6.1",
        ),
        (
            "h8-q65.kv165+q1.kv1+q3.kv3-ragged-bf16-unequal-s311",
            5,
            "20 light chunks, lost one by one: rms z 1.06 of 1.04",
        ),
    ],
)
def test_honest_merges_that_once_raised_an_alarm_are_accepted(case: str, chunk: int, why: str) -> None:
    inputs = mha_inputs(f"mixed-mha-{case}")
    kernel = Merged()
    kernel.parts, kernel.chunk = EmulatedKernel(tile=32, rounds_p=False), chunk
    facts = merged_facts("bf16", kernel.parts, chunk)
    output = kernel.run(inputs, output_buffers(inputs, torch.bfloat16).output)
    checks = compare_output(output, expect(inputs, [facts]), facts, inputs)[0].checks
    assert all(check.value <= 0.9 * check.limit for check in checks), (why, checks)


def test_the_lse_of_many_merges_is_allowed_the_rounding_of_each() -> None:
    # 190 merges in fp32: one rounding at the size of the LSE would allow a fraction of this.
    inputs = mha_inputs("decode-mha-h16-8xq1.kv951-ragged-fp32-normal-s0")
    kernel = Merged()
    kernel.chunk = 5
    facts = merged_facts("fp32", chunk=5)
    output = kernel.run(inputs, output_buffers(inputs, torch.float32).output)
    at_once = replace(facts, chunk=None)
    expected = expect(inputs, [facts, at_once])
    many, one = (compare_output(output, expected, f, inputs)[1] for f in (facts, at_once))
    assert many.passed
    assert 0.25 < many.rms_z < 1.1
    assert one.rms_z > 1.5


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_without_the_fact_that_parts_are_stored_an_honest_merge_has_an_unexplained_error(
    dtype: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # Nine chunks of about one weight: what is stored on the way is half of the error.
    case = f"prefix-mha-h8-q65.kv900-ragged-{dtype}-normal-s0"
    assert run(monkeypatch, tmp_path, Merged, case).verdicts == [Verdict.PASS]
    undeclared = replace(Merged.contract, facts=lambda d: replace(merged_facts(d), chunk=None))
    monkeypatch.setattr(Merged, "contract", undeclared)
    (out, _lse) = run(monkeypatch, tmp_path, Merged, case).only.comparisons
    assert not next(check for check in out.checks if check.name == "rms_z").passed


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "96"])
def test_a_chunk_that_is_no_number_of_keys_is_refused(chunk: object) -> None:
    with pytest.raises(UsageError, match="chunk is"):
        RoundingFacts(out_dtype="bf16", chunk=chunk)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_a_merged_kernel_declares_its_parts_and_its_phases(name: str) -> None:
    contract = load_kernel(name).contract
    assert contract.form == "mha"
    assert "prefill" not in contract.phases  # nothing is merged there
    for dtype in ("fp16", "bf16"):
        facts = contract.facts(dtype)
        assert facts.chunk == CHUNK
        assert any("output" in source for source in facts.sources)
    assert (contract.returns_lse, contract.lse_base) == {
        "flashinfer-merge": (True, "2"),
        "sglang-flashinfer-merge": (False, "e"),
    }.get(name, (True, "e"))


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("sgl-merge", "mixed-mha-h16-q3.kv2+q1.kv9-ragged-bf16-normal-s0", "more queries than keys"),
        ("flashinfer-merge", "mixed-mha-h16-q3.kv2+q1.kv9-ragged-bf16-normal-s0", "more queries than keys"),
        ("flashinfer-merge", "prefix-mha-h64-q3.kv20-ragged-bf16-normal-s0", None),
        ("flashinfer-merge", "prefix-mha-h65-q3.kv20-ragged-bf16-normal-s0", "needs 1040 threads, of 1024"),
        ("flashinfer-merge", "prefix-mha-h8-q3.kv20-ragged-bf16-normal-dims512.64.64.128-s0", "built for"),
        ("sglang-flashinfer-merge", "prefix-mha-h65-q3.kv20-ragged-bf16-normal-s0", None),
        ("sglang-flashinfer-merge", "prefix-mha-h16-q3.kv20-ragged-bf16-normal-full-s0", "causally"),
        ("sglang-flashinfer-merge", "mixed-mha-h16-q3.kv3+q0.kv9-ragged-bf16-normal-s0", "no request has cached keys"),
        ("sglang-flashinfer-merge", "mixed-mha-h16-q3.kv2+q1.kv9-ragged-bf16-normal-s0", "more queries than keys"),
    ],
)
def test_cases_that_a_merged_kernel_has_no_call_for_are_declined(name: str, case: str, reason: str | None) -> None:
    why_not = load_kernel(name).why_not(CaseSpec.parse(case), "cuda")
    assert why_not is None if reason is None else reason in str(why_not)


# The suites


@pytest.mark.parametrize("name", NAMES)
def test_the_standard_suite_has_fifty_cases_of_16_bits_for_each_merged_kernel(name: str) -> None:
    kernel = load_kernel(name)
    taken = [
        s
        for s in (case.spec for case in suite_cases("standard"))
        if (s.form, s.phase in kernel.contract.phases) == ("mha", True)
        and s.dtype in ("fp16", "bf16")
        and kernel.contract.why_not(s) is None
        and kernel.why_not(s, "cuda") is None
    ]
    assert len(taken) >= 50
    sizes = [s.num_q_tokens * s.num_heads for s in taken]
    assert max(sizes) < 0.1 * sum(sizes)  # under 1 % of ten seeds
    assert {s.phase for s in taken} == set(kernel.contract.phases)


def chunks(spec: CaseSpec) -> list[int]:
    """Keys of the last chunk of the longest cached prefix, of every request with queries."""
    cached = [r.kv_len - r.q_len for r in spec.requests if r.q_len]
    last = (max(cached) - 1) // CHUNK * CHUNK
    return [min(max(n - last, 0), CHUNK) for n in cached]


@pytest.mark.parametrize("suite", ["smoke", "standard"])
def test_the_suites_have_chunks_that_are_empty_full_and_partial_and_parts_of_unequal_mass(suite: str) -> None:
    phases = set(MERGED_PHASES) - ({"spec"} if suite == "smoke" else set())
    specs = [c.spec for c in suite_cases(suite) if c.spec.form == "mha" and c.spec.phase in phases]
    for phase in phases:
        of_phase = [chunks(s) for s in specs if s.phase == phase]
        assert any(0 in lens and max(lens) > 0 for lens in of_phase), phase
    found = {n for s in specs for n in chunks(s)}
    assert {0, CHUNK} <= found or suite == "smoke"
    unequal = next(s for s in specs if s.regime == "unequal" and s.dtype == "fp16" and 0 in chunks(s))
    parts = parts_of(mha_inputs(unequal.id), CHUNK)
    longest = max(range(len(unequal.requests)), key=lambda b: unequal.requests[b].kv_len)
    lses = torch.stack([dense_request(part, longest).attend().lse.mean() for part in parts])
    assert float(lses.max() - lses[lses.isfinite()].min()) > math.log(10)


# With SGLang, interpreted


@pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")
def test_sglangs_triton_merge_passes_in_the_interpreter(tmp_path: Path) -> None:
    ids: Sequence[str] = (
        "prefix-mha-h4-q9.kv200+q7.kv40-ragged-fp16-mixed-s0",
        "mixed-mha-h4-q1.kv200+q5.kv5+q0.kv64+q8.kv11-ragged-fp32-unequal-s0",
        "decode-mha-h4-q1.kv98+q1.kv1-ragged-fp16-needle-s0",
    )
    done = verify(tmp_path, "--kernel", "sglang-merge", *cases(*ids))
    assert done.verdicts == [Verdict.PASS] * 3
    assert {result.ran for result in done.report.results} == {
        "Triton, interpreted; extend_attention_fwd; parts merged by merge_state_triton"
    }


def test_an_empty_state_has_no_weight() -> None:
    out, lse = empty_state(mha_inputs(PREFIX.format("bf16")))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    merged, _ = merge_states(torch.stack([out, out + 3]), torch.stack([lse, torch.ones_like(lse)]))
    assert float(merged.min()) == float(merged.max()) == 3.0
