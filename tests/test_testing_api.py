"""`assert_mla` accepts what an honest kernel returns, in each convention that a contract can declare, and rejects the
rest in the terminal's words; `mla_cases` chooses what a contract takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_verify.cases import CaseSpec
from mla_verify.emulate import EmulatedKernel
from mla_verify.errors import UsageError
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.suites import suite_cases
from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAOutput, WriteInputs, output_buffers
from mla_verify.testing import InconclusiveError, MLACase, assert_mla, mla_cases
from tests import wrong_kernels as wrong
from tests.kernels_helper import DECODE, MHA, RAGGED, cases, register, verify
from tests.wrong_kernels import EMULATED, Honest, HonestMHA

NEEDLE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-needle-s7"
ROPE = "decode-absorbed-h8-q1.kv300+q1.kv201-p64-bf16-rope-s7"
# 6 tokens and 8 heads, so that [T, H] is not [H, T]; token 2 sees no key.
EMPTY = "mixed-absorbed-h8-q2.kv140+q1.kv0+q3.kv70-p64-bf16-normal-s7"
WRITE = "append-write-h1-q100.kv300-p64-bf16-rows-s0"


def a_case(case_id: str, contract: Contract = Honest.contract, claim: str = "") -> MLACase:
    return MLACase(CaseSpec.parse(case_id), contract, claim)


def absorbed(case_id: str = DECODE) -> AbsorbedInputs:
    inputs = a_case(case_id).inputs
    assert isinstance(inputs, AbsorbedInputs)
    return inputs


def write(inputs: WriteInputs) -> Tensor:
    """The cache after an honest write; tokens without a slot are left out."""
    cache = inputs.kv_cache.clone()
    rows = cache.view(-1, cache.shape[-1])
    inside = (inputs.slots >= 0) & (inputs.slots < len(rows))
    rows[inputs.slots[inside]] = torch.cat([inputs.ckv, inputs.kpe], dim=-1)[inside]
    return cache


def lines_of(error: pytest.ExceptionInfo[AssertionError]) -> list[str]:
    return str(error.value).splitlines()


# What is right is accepted


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("case_id", "contract"), [(RAGGED, Honest.contract), (MHA, HonestMHA.contract)])
def test_an_honest_result_is_accepted_for_a_case_and_for_its_bare_tensors(
    case_id: str, contract: Contract, dtype: str
) -> None:
    case = a_case(case_id.replace("bf16", dtype), contract)
    assert isinstance(case.inputs, MHAInputs if contract.form == "mha" else AbsorbedInputs)
    result = EMULATED.run(case.inputs)
    assert result.lse is not None
    assert_mla(result, case)
    assert_mla(result, case.inputs, contract)
    assert_mla((result.out, result.lse), case.inputs, contract)
    assert_mla(result.out, case.inputs, replace(contract, returns_lse=False))


@pytest.mark.parametrize("regime", ["rows", "repeated", "outside"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_an_honest_cache_write_is_accepted_for_a_case_and_for_its_bare_tensors(regime: str, dtype: str) -> None:
    contract = Contract(form="write", skips_out_of_range=True)
    case = a_case(WRITE.replace("bf16", dtype).replace("rows", regime), contract)
    assert isinstance(case.inputs, WriteInputs)
    assert_mla(write(case.inputs), case)
    assert_mla(write(case.inputs), case.inputs)


@pytest.mark.parametrize("case_id", [DECODE, MHA])
def test_without_a_contract_one_rounding_is_excused_in_either_form_and_rounded_probabilities_are_not(
    case_id: str,
) -> None:
    inputs = a_case(case_id).inputs
    assert not isinstance(inputs, WriteInputs)
    assert_mla(wrong.OtherRounding.emulated.run(inputs).out, inputs)
    with pytest.raises(AssertionError, match="out: rms_z"):
        assert_mla(EMULATED.run(inputs).out, inputs)
    with pytest.raises(AssertionError, match="lse was returned, but the contract says that there is none"):
        assert_mla(wrong.OtherRounding.emulated.run(inputs), inputs)


# Conventions


def _base_2(out: Tensor, lse: Tensor) -> MLAOutput:
    return MLAOutput(out, lse * math.log2(math.e))


def _heads_first(out: Tensor, lse: Tensor) -> MLAOutput:
    return MLAOutput(out, lse.T)


def _plus_infinity(out: Tensor, lse: Tensor) -> MLAOutput:
    return MLAOutput(out, torch.where(lse.isneginf(), math.inf, lse))


def _all_three(out: Tensor, lse: Tensor) -> MLAOutput:
    return MLAOutput(out, torch.where(lse.isneginf(), math.inf, lse * math.log2(math.e)).T)


def _unwritten(out: Tensor, lse: Tensor) -> MLAOutput:
    out, lse = out.clone(), lse.clone()
    out[2], lse[2] = math.nan, math.nan
    return MLAOutput(out, lse)


@pytest.mark.parametrize(
    ("declared", "convert", "undeclared"),
    [
        ({"lse_base": "2"}, _base_2, "lse: max_z"),
        ({"lse_layout": "HT"}, _heads_first, r"lse has shape \[8, 6\], it must be \[6, 8\]"),
        ({"empty_lse": "+inf"}, _plus_infinity, "lse: nonfinite 8, limit 0"),
        ({"lse_base": "2", "lse_layout": "HT", "empty_lse": "+inf"}, _all_three, r"lse has shape \[8, 6\]"),
        ({"empty_out": "any", "empty_lse": "any"}, _unwritten, "out: nonfinite 4096, limit 0"),
    ],
)
def test_a_convention_is_accepted_where_it_is_declared_and_nowhere_else(
    declared: dict[str, Any], convert: Callable[[Tensor, Tensor], MLAOutput], undeclared: str
) -> None:
    ours = Honest.contract
    theirs = replace(ours, **declared)
    case = a_case(EMPTY, theirs)
    honest = EMULATED.run(absorbed(EMPTY))
    assert honest.lse is not None
    result = convert(honest.out, honest.lse)
    assert_mla(result, case)
    assert_mla(result, case.inputs, theirs)
    with pytest.raises(AssertionError, match=undeclared):
        assert_mla(result, a_case(EMPTY, ours))
    with pytest.raises(AssertionError, match=undeclared):
        assert_mla(result, case, ours)  # an argument goes before the case's own
    if "any" not in declared.values():
        with pytest.raises(AssertionError, match="lse"):
            assert_mla(honest, case)


# What is wrong is rejected, in the terminal's words


class LosesLastKey(Honest):
    name = "loses-last-key"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return EMULATED.run(replace(inputs, kv_lens=inputs.kv_lens - 1))


class SwapsHalvesOfRope(Honest):
    name = "swaps-halves"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return EMULATED.run(replace(inputs, q_pe=inputs.q_pe.roll(32, dims=-1)))


class OneNaN(Honest):
    name = "one-nan"

    def wrong_out(self, out: Tensor) -> Tensor:
        out[1:2, 3, 5] = math.nan  # a request alone is shorter
        return out


@pytest.mark.parametrize(
    ("kernel", "case_id", "said"),
    [
        (wrong.Scaled, DECODE, ["out: slope ", "all 8 heads, head ", "output times 1.00", "out: worst at request "]),
        (LosesLastKey, NEEDLE, ["out: max_z ", "lse: max_z ", "out: worst at request ", "lse: worst at request "]),
        (SwapsHalvesOfRope, ROPE, ["out: max_z ", "lse: max_z ", "out: worst at request "]),
        (wrong.Base2LSE, DECODE, ["lse: max_z ", "lse: worst at request "]),
        (wrong.OneElement, RAGGED, ["out: max_z ", "out: worst at request 2, token 1, head 5, dim 77: actual 3.5, "]),
        (OneNaN, DECODE, ["out: nonfinite 1, limit 0", "out: worst at request 1, token 0, head 3, dim 5: actual nan"]),
        (wrong.FlattensHeads, DECODE, ["  reason  out has shape [2, 4096], it must be [2, 8, 512]"]),
        (wrong.ReturnsFp32, DECODE, ["  reason  out has dtype torch.float32, it must be torch.bfloat16"]),
        (wrong.OnAnotherDevice, DECODE, ["  reason  out has device meta, it must be cpu"]),
        (wrong.ForgetsLSE, DECODE, ["  reason  lse is NoneType, it must be a tensor [2, 8]"]),
        (wrong.ScalesQuery, DECODE, ["  reason  the kernel changed its input q_nope in place"]),
        (wrong.CleansCache, DECODE, ["  reason  the kernel changed its input ckv_cache in place"]),
    ],
    ids=lambda value: value.name if isinstance(value, type) else "",
)
def test_a_wrong_kernel_is_rejected_with_the_lines_that_the_terminal_shows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], case_id: str, said: list[str]
) -> None:
    case = a_case(case_id, kernel.contract, claim="named on the command line, in no suite")
    result: Any = kernel().run(case.inputs, case.output_buffers())  # type: ignore[arg-type]
    with pytest.raises(AssertionError) as error:
        assert_mla(result, case)
    header, claim, *lines = lines_of(error)
    assert not isinstance(error.value, InconclusiveError)
    assert claim == f"  claim   {case.claim}"
    assert all(any(part in line for line in lines) for part in said), lines

    register(monkeypatch, [kernel])
    shown = verify(tmp_path, *cases(case_id)).done.stdout.splitlines()
    verdict, _, name = header.partition("  ")
    start = shown.index(f"{verdict}  {kernel.name}  {name}")
    block = shown[start + 1 : shown.index("", start)]
    assert [claim, *lines] == [line for line in block if not line.startswith(("  ran ", "  repeat "))]


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda rows: rows[7].zero_(), "other_rows 1, limit 0 (1 of "),
        (lambda rows: rows[:, 512:].zero_(), "kv_cache: rope 100, limit 0 (100 of 100 written rows have a wrong rope"),
    ],
)
def test_a_wrong_cache_write_is_rejected(spoil: Callable[[Tensor], object], line: str) -> None:
    """Slot 7 lies in page 0, which no request has."""
    case = a_case(WRITE, Contract(form="write"))
    assert isinstance(case.inputs, WriteInputs)
    cache = write(case.inputs)
    spoil(cache.view(-1, cache.shape[-1]))
    with pytest.raises(AssertionError) as error:
        assert_mla(cache, case)
    assert any(line in shown for shown in lines_of(error)), lines_of(error)


@pytest.mark.parametrize("result", [None, [1, 2], (1, 2, 3)], ids=str)
def test_a_result_that_is_no_output_says_what_it_must_be(result: Any) -> None:
    with pytest.raises(AssertionError, match=r"the result is \w+, it must be out, \(out, lse\) or MLAOutput"):
        assert_mla(result, absorbed(), Honest.contract)


def test_without_a_case_the_message_has_no_claim_and_ends_with_the_worst_element() -> None:
    inputs = absorbed()
    result = EMULATED.run(inputs)
    with pytest.raises(AssertionError) as error:
        assert_mla((result.out * 1.005, result.lse), inputs, Honest.contract)
    header, *lines = lines_of(error)
    assert header == "FAIL"
    assert lines[-1].startswith("  out: worst at request ")
    assert not any("claim" in line for line in lines)


# What a case watches over


def test_a_kernel_that_writes_beside_its_buffers_is_rejected() -> None:
    case = a_case(DECODE)
    buffers = case.output_buffers()
    result = EMULATED.run(absorbed())
    buffers.out.copy_(result.out)
    flat = buffers.out.as_strided((buffers.out.numel() + 1,), (1,))
    flat[-1] = 0.0
    assert_mla(buffers.out, a_case(DECODE), replace(Honest.contract, returns_lse=False))
    with pytest.raises(AssertionError, match="the kernel wrote outside its output: 2 bytes right after its out buffer"):
        assert_mla(result, case)
    assert case.broken_rule() is None, "told twice"


def test_output_buffers_are_full_of_nan_in_the_dtype_of_the_facts_and_new_each_time() -> None:
    case = a_case(DECODE, replace(Honest.contract, facts=lambda dtype: RoundingFacts("fp32")))
    first, second = case.output_buffers(), case.output_buffers()
    assert (first.out.shape, first.out.dtype) == ((2, 8, 512), torch.float32)
    assert first.lse is not None
    assert first.out.isnan().all()
    assert first.lse.isnan().all()
    first.out.zero_()
    assert second.out.isnan().all()


def test_output_buffers_of_a_write_are_a_copy_of_the_cache() -> None:
    case = a_case(WRITE, Contract(form="write"))
    assert isinstance(case.inputs, WriteInputs)
    out = case.output_buffers().out
    assert torch.equal(out.view(torch.int16), case.inputs.kv_cache.view(torch.int16))
    rows = out.view(-1, out.shape[-1])
    rows[case.inputs.slots] = torch.cat([case.inputs.ckv, case.inputs.kpe], dim=-1)
    assert_mla(out, case)


def test_a_write_into_the_cache_that_it_is_compared_with_is_no_result() -> None:
    """Every other row would be compared with itself."""
    contract = Contract(form="write")
    inputs = a_case(WRITE, contract).inputs
    assert isinstance(inputs, WriteInputs)
    rows = inputs.kv_cache.view(-1, inputs.kv_cache.shape[-1])
    rows[inputs.slots] = torch.cat([inputs.ckv, inputs.kpe], dim=-1)
    rows[7] = 0.0
    with pytest.raises(UsageError, match=r"inputs\.kv_cache itself"):
        assert_mla(inputs.kv_cache, inputs, contract)


def test_a_kernel_that_needs_finite_tails_gets_them_as_in_a_run() -> None:
    """It multiplies what lies behind the last key by 0."""
    finite = replace(Honest.contract, finite_tail=True)
    for contract, is_right in ((finite, True), (Honest.contract, False)):
        case = a_case(DECODE, contract)
        assert isinstance(case.inputs, AbsorbedInputs)
        result: Any = wrong.ReadsPageTail().run(case.inputs, case.output_buffers())
        if is_right:
            assert_mla(result, case)
        else:
            with pytest.raises(AssertionError, match="nonfinite"):
                assert_mla(result, case)


# What shows nothing, and what does not fit


def test_inputs_that_cannot_tell_are_inconclusive() -> None:
    inputs = absorbed()
    nothing = replace(inputs, ckv_cache=torch.zeros_like(inputs.ckv_cache))
    result = EMULATED.run(nothing)
    with pytest.raises(InconclusiveError, match="would pass a kernel that returns zeros"):
        assert_mla(result, nothing, Honest.contract)
    with pytest.raises(AssertionError, match="out: nonfinite") as error:
        assert_mla((result.out + math.nan, result.lse), nothing, Honest.contract)
    assert not isinstance(error.value, InconclusiveError)


def test_a_case_must_show_what_its_regime_is_for_and_bare_tensors_only_that_they_are_not_zero() -> None:
    """With a scale of almost 0 every key weighs the same, whatever its RoPE part is."""
    case = a_case(ROPE.replace("-s7", "-scale1e-06-s7"))
    result = EMULATED.run(case.inputs)  # type: ignore[arg-type]
    with pytest.raises(InconclusiveError) as error:
        assert_mla(result, case)
    assert lines_of(error) == [
        f"INCONCLUSIVE  {case}",
        "  the case cannot tell: it would pass a kernel that drops the RoPE part of the scores",
    ]
    assert_mla(result, case.inputs, case.contract)


@pytest.mark.parametrize(
    ("inputs", "contract", "message"),
    [
        (absorbed, HonestMHA.contract, "inputs of form absorbed, a contract of form mha"),
        (lambda: a_case(MHA).inputs, Honest.contract, "inputs of form mha, a contract of form absorbed"),
        (lambda: a_case(DECODE), HonestMHA.contract, "inputs of form absorbed, a contract of form mha"),
        (absorbed, replace(Honest.contract, dtypes=("fp32", "fp16")), "inputs of dtype bf16"),
        (lambda: mixed("q_pe"), None, "q_nope torch.bfloat16, q_pe torch.float64, ckv_cache torch.bfloat16"),
        (lambda: mixed("q_nope", "q_pe", "ckv_cache", "kpe_cache"), None, "q_nope torch.float64, q_pe torch.float64"),
        (lambda: EMULATED.run(absorbed()), None, "inputs are MLAOutput"),
    ],
    ids=["absorbed, not mha", "mha, not absorbed", "a case", "dtype", "two dtypes", "float64", "swapped arguments"],
)
def test_inputs_that_the_contract_does_not_take_are_a_usage_error(
    inputs: Callable[[], Any], contract: Contract | None, message: str
) -> None:
    """Even when the result is no output at all."""
    with pytest.raises(UsageError, match=message):
        assert_mla(None, inputs(), contract)  # type: ignore[arg-type]


def mixed(*names: str) -> AbsorbedInputs:
    """Inputs of which these are float64."""
    inputs = absorbed()
    changed: dict[str, Any] = {name: inputs.named_tensors()[name].double() for name in names}
    return replace(inputs, **changed)


def test_judging_changes_neither_result_nor_inputs() -> None:
    case = a_case(EMPTY, replace(Honest.contract, empty_out="any", empty_lse="+inf", lse_base="2", lse_layout="HT"))
    honest = EMULATED.run(absorbed(EMPTY))
    assert honest.lse is not None
    result = _all_three(honest.out, honest.lse)
    assert result.lse is not None
    out, lse = result.out.clone(), result.lse.clone()
    assert_mla(result, case)
    assert torch.equal(result.out, out)
    assert torch.equal(result.lse, lse)
    assert case.broken_rule() is None


# mla_cases


def taken(contract: Contract, **choice: Any) -> list[str]:
    return [case.spec.id for case in mla_cases(contract, **choice)]


def test_a_contract_takes_the_cases_of_its_form_dtypes_phases_and_pages_from_smoke() -> None:
    contract = Contract(phases=("decode", "spec"), dtypes=("bf16",), page_sizes=(64,), num_heads=(16,))
    wanted = [
        case.spec.id
        for case in suite_cases("smoke")
        if case.spec.form == "absorbed"
        and case.spec.phase in ("decode", "spec")
        and (case.spec.dtype, case.spec.page_size, case.spec.num_heads) == ("bf16", 64, 16)
    ]
    assert len(wanted) > 3
    assert taken(contract) == wanted
    assert taken(contract, suite="smoke") == wanted
    assert set(wanted) < set(taken(contract, suite="standard"))


def test_fused_cases_and_slots_outside_are_left_out_where_the_contract_says_so() -> None:
    fused = set(taken(Contract())) - set(taken(Contract(strides="contiguous")))
    assert fused
    assert all("-fused-" in case or "-transposed-" in case for case in fused)
    outside = set(taken(Contract("write", skips_out_of_range=True))) - set(taken(Contract("write")))
    assert outside
    assert all("-outside-" in case for case in outside)


def test_phases_and_dtypes_narrow_the_suite_and_a_single_name_needs_no_tuple() -> None:
    everything = mla_cases(Contract())
    assert {case.spec.phase for case in everything} == set(Contract().phases)
    wanted = [c.spec.id for c in everything if c.spec.phase == "decode" and c.spec.dtype in ("fp32", "fp16")]
    assert wanted
    assert taken(Contract(), phases=["decode"], dtypes=("fp32", "fp16")) == wanted
    assert taken(Contract(), phases="decode", dtypes=("fp32", "fp16")) == wanted
    assert taken(Contract(), cases=[DECODE, RAGGED], phases="decode") == [DECODE]


def test_named_cases_are_taken_in_their_order_once_each_with_the_claim_of_their_suite() -> None:
    known = next(case for case in suite_cases("smoke") if case.spec.form == "absorbed")
    found = mla_cases(Contract(), cases=[RAGGED, known.spec.id, DECODE, RAGGED])
    assert [case.spec.id for case in found] == [RAGGED, known.spec.id, DECODE]
    assert [case.claim for case in found] == [unknown := "named by the test, in no suite", known.claim, unknown]
    assert taken(Contract(), cases=DECODE) == [DECODE]


@pytest.mark.parametrize(
    ("contract", "choice", "message"),
    [
        (Contract(), {"suite": "smok"}, "unknown suite 'smok'\nhint: did you mean smoke?"),
        (Contract(), {"phases": ["decod"]}, "unknown phase 'decod'\nhint: did you mean decode?"),
        (Contract(), {"dtypes": "fp8"}, "unknown dtype 'fp8'\nhint: did you mean fp"),
        (Contract(), {"dtypes": torch.bfloat16}, "dtypes is torch.bfloat16\nhint: a name, or a tuple of names"),
        (Contract(), {"cases": ["decode-absorbed"]}, "not a case id: 'decode-absorbed'\nhint: "),
        (Contract(), {"cases": [DECODE], "suite": "full"}, "suite and cases exclude each other\nhint: "),
        (Contract(), {"cases": [DECODE, MHA]}, f"case {MHA} is outside the contract: form mha is not among absorbed"),
        (Contract(dtypes=("fp16",)), {"cases": [DECODE]}, "outside the contract: dtype bf16 is not among fp16"),
        (Contract(page_sizes=(1,)), {"cases": [DECODE]}, "outside the contract: page size 64 is not among 1"),
        (Contract(phases=("spec",)), {"phases": "decode"}, " x phase decode is not among spec"),
        (Contract(), {"phases": "append"}, " x phase decode is not among append"),
        (Contract(), {"cases": [DECODE], "dtypes": "fp16"}, "no case of those named is left for this contract: 1 x "),
        (Honest, {}, "type is no contract\nhint: give its contract, my_kernel.contract"),
        ("smoke", {}, "str is no contract\nhint: give Contract(...)"),
    ],
)
def test_a_choice_that_is_wrong_or_empty_is_a_usage_error_with_the_next_step(
    contract: Any, choice: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as error:
        mla_cases(contract, **choice)
    assert message in str(error.value)
    assert error.value.hint


def test_when_nothing_of_a_suite_is_left_the_reasons_are_counted_over_the_cases_of_the_contracts_form() -> None:
    sizes = [case.spec.page_size for case in suite_cases("smoke") if case.spec.form == "absorbed"]
    with pytest.raises(UsageError) as error:
        mla_cases(Contract(page_sizes=(256,)))
    most = f"{sizes.count(64)} x page size 64 is not among 256; {sizes.count(16)} x page size 16 is not among 256"
    assert error.value.message.startswith(f"no case of suite smoke is left for this contract: {most}")
    assert "form" not in error.value.message


def test_a_case_made_by_hand_shows_its_id_and_buffers_that_nobody_asked_for_are_not_watched() -> None:
    case = a_case(DECODE)
    assert (str(case), repr(case)) == (DECODE, f"MLACase({DECODE})")
    assert case.broken_rule() is None
    assert case.inputs is case.inputs
    assert_mla(EMULATED.run(absorbed()), case)
    own = output_buffers(case.inputs, torch.bfloat16)
    own.output.out.zero_()
    assert case.broken_rule() is None


def test_what_tensor_cores_do_is_not_excused_on_a_cpu() -> None:
    """A contract for a GPU declares it; what runs here rounds its sums, and has to."""
    cut_off = EmulatedKernel(splits=2, tile=32, tensor_cores=True)
    inputs = make_inputs(CaseSpec.parse("decode-absorbed-h8-q1.kv500-p64-fp16-unequal-s0"))
    with pytest.raises(AssertionError, match="lse: max_z"):
        assert_mla(cut_off.run(inputs), inputs, Contract(facts=cut_off.facts, returns_lse=True))
