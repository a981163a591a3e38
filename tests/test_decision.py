from __future__ import annotations

from typing import Any

import pytest

from mla_verify.cases import CaseSpec
from mla_verify.decision import decide
from mla_verify.kernels.contract import Kernel
from mla_verify.plan import Plan, PlanEntry
from mla_verify.results import CaseResult, Verdict
from tests.fakes import DECODE, PREFILL, Absorbed, Gone, Other, result

CLAIMS = (("phase", "decode"), ("phase", "prefill"), ("dtype", "fp32"), ("dtype", "bf16"))


def plan_of(results: list[CaseResult], *more: Kernel, **fields: object) -> Plan:
    """The plan of `absorbed`, and of `more` kernels, that these results come from."""
    kernels: dict[str, Kernel] = {kernel.name: kernel for kernel in (Absorbed(), *more)}
    entries = tuple(
        PlanEntry(CaseSpec.parse(r.case), r.case, kernels[r.kernel], r.claim, "absorbed", r.dtype, r.phase)
        for r in results
    )
    known: dict[str, object] = {"claims": {"absorbed": CLAIMS}}
    return Plan(entries, tuple(kernels.values()), **known | fields)  # type: ignore[arg-type]


def both(first: Verdict, second: Verdict = Verdict.PASS, **fields: Any) -> list[CaseResult]:
    """The two cases that together cover CLAIMS; the verdict of the first is in question."""
    return [result(first, DECODE, **fields), result(second, PREFILL)]


def test_a_run_with_every_claim_decided_and_nothing_wrong_passes() -> None:
    results = both(Verdict.PASS)
    assert decide(plan_of(results), results, interrupted=False) == ("pass", 0, ())


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.FAIL, 1),
        (Verdict.WRONG_SHAPE, 1),
        (Verdict.ERROR, 1),
        (Verdict.CRASH, 1),
        (Verdict.TIMEOUT, 3),
        (Verdict.NOT_RUN, 3),
        (Verdict.UNSUPPORTED, 3),
    ],
)
def test_each_other_verdict_of_one_case_decides_the_exit_code(verdict: Verdict, code: int) -> None:
    results = both(verdict)
    decision, exit_code, reasons = decide(plan_of(results), results, interrupted=False)
    assert (decision, exit_code) == ({1: "wrong", 3: "inconclusive"}[code], code)
    assert "absorbed" in " ".join(reasons)


@pytest.mark.parametrize("open_verdict", [Verdict.TIMEOUT, Verdict.NOT_RUN])
def test_wrong_outranks_inconclusive_and_both_are_reported(open_verdict: Verdict) -> None:
    results = both(Verdict.FAIL, open_verdict)
    decision = decide(plan_of(results), results, interrupted=False)
    assert decision.exit_code == 1
    assert decision.reasons[0] == "absorbed is wrong in 1 of 2 cases: 1 FAIL."
    assert f"absorbed: 1 case {open_verdict.value} (a reason for {open_verdict.value})." in decision.reasons


def test_an_undecided_case_is_inconclusive_even_when_every_claim_is_decided_elsewhere() -> None:
    results = [*both(Verdict.PASS), result(Verdict.NOT_RUN, DECODE.replace("-s7", "-s8"), reason="out of memory")]
    decision = decide(plan_of(results), results, interrupted=False)
    assert decision[1:] == (3, ("absorbed: 1 case NOT_RUN (out of memory).",))


def test_an_unsupported_case_alone_leaves_a_run_green_whose_claims_are_decided_elsewhere() -> None:
    results = [*both(Verdict.PASS), result(Verdict.UNSUPPORTED, DECODE.replace("-p64-", "-p1-"))]
    assert decide(plan_of(results), results, interrupted=False).exit_code == 0


def test_a_run_of_only_unsupported_cases_is_inconclusive_whatever_the_kernel_claims() -> None:
    results = both(Verdict.UNSUPPORTED, Verdict.UNSUPPORTED)
    decision = decide(plan_of(results, claims={}), results, interrupted=False)
    assert decision[1:] == (3, ("No case was decided.",))


def test_an_error_of_the_tool_is_inconclusive_even_beside_a_verdict() -> None:
    results = both(Verdict.PASS, tool_error=True, reason="the report broke")
    decision = decide(plan_of(results), results, interrupted=False)
    assert decision[1:] == (3, ("absorbed: 1 case PASS (the report broke).",))


def test_a_claimed_phase_or_dtype_without_a_decided_case_is_inconclusive_and_named() -> None:
    results = [result(Verdict.PASS, DECODE)]
    decision = decide(plan_of(results), results, interrupted=False)
    assert decision[1:] == (
        3,
        (
            "absorbed claims phase prefill, of which no case was decided.",
            "absorbed claims dtype bf16, of which no case was decided.",
        ),
    )


def test_one_kernels_verdicts_do_not_decide_anothers_claims() -> None:
    results = [*both(Verdict.PASS), result(Verdict.UNSUPPORTED, DECODE, "other")]
    plan = plan_of(results, Other(), claims={"absorbed": CLAIMS, "other": (("phase", "decode"),)})
    decision = decide(plan, results, interrupted=False)
    assert decision[1:] == (3, ("other claims phase decode, of which no case was decided.",))


def test_a_required_kernel_that_is_unavailable_is_inconclusive_with_its_reason_once() -> None:
    results = [*both(Verdict.PASS), result(Verdict.UNSUPPORTED, DECODE, "gone")]
    plan = plan_of(
        results,
        Gone(),
        named=("gone",),
        required=("gone",),
        unavailable={"gone": "gonelib is not installed"},
        claims={"absorbed": CLAIMS, "gone": CLAIMS},
    )
    decision = decide(plan, results, interrupted=False)
    assert decision[1:] == (
        3,
        ("gone was required, and none of its cases was decided: gonelib is not installed.",),
    )


def test_a_named_kernel_without_any_case_of_its_form_is_inconclusive() -> None:
    results = both(Verdict.PASS)
    decision = decide(plan_of(results, Other(), named=("other",)), results, interrupted=False)
    assert decision[1:] == (3, ("other was selected, and no selected case is of its form.",))


def test_a_required_kernel_that_decides_a_case_is_satisfied() -> None:
    results = both(Verdict.PASS)
    plan = plan_of(results, named=("absorbed",), required=("absorbed",))
    assert decide(plan, results, interrupted=False).exit_code == 0


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_an_interrupted_run_says_so_whatever_was_found_before(verdict: Verdict) -> None:
    results = both(verdict, Verdict.NOT_RUN)
    decision = decide(plan_of(results), results, interrupted=True)
    assert decision[:2] == ("interrupted", 130)
    assert ("absorbed is wrong in 1 of 2 cases: 1 FAIL." in decision.reasons) is (verdict is Verdict.FAIL)
