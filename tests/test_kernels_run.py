"""`mla-verify kernels` when not all of a run goes through: refused, out of memory, interrupted, or at fault itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mla_verify.expected
from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import KERNELS
from mla_verify.results import Verdict
from mla_verify.suites import suite_cases
from mla_verify.tensors import MLAInputs
from tests import failing_kernels as failing
from tests import wrong_kernels as wrong
from tests.kernels_helper import DECODE, MHA, RAGGED, SINGLE, cases, register, verify
from tests.wrong_kernels import Honest

PASS, FAIL, NOT_RUN, UNSUPPORTED = Verdict.PASS, Verdict.FAIL, Verdict.NOT_RUN, Verdict.UNSUPPORTED


def test_the_smoke_suite_decides_every_planned_case_and_exits_0(tmp_path: Path) -> None:
    run = verify(tmp_path)
    assert run.exit_code == 0, run.done.stdout
    every = {case.spec.id for case in suite_cases("smoke")}
    assert {entry.case for entry in run.report.plan} == every
    assert set(run.verdicts) == {PASS, UNSUPPORTED}
    # Nothing is left to a kernel that could not take it.
    assert {result.case for result in run.report.results if result.verdict is PASS} == every
    assert all(r.verdict is PASS for r in run.report.results if r.kernel in ("torch-absorbed", "torch-mha"))
    passed = Counter(result.kernel for result in run.report.results if result.verdict is PASS)
    for kernel, least in (("triton-decode", 20), ("triton-write-decode", 20), ("triton-prefill", 9)):
        assert passed[kernel] >= least
    assert passed["triton-cache-write"] == len([case for case in suite_cases("smoke") if case.spec.form == "write"])
    assert set(run.report.environment["unavailable_kernels"]) <= {
        n for n in KERNELS if n.startswith(("sgl-", "sglang-", "flashinfer-"))
    }


def test_a_run_in_which_every_case_is_unsupported_exits_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, [failing.TakesNothing])
    run = verify(tmp_path, *cases(DECODE, SINGLE))
    assert (run.exit_code, run.verdicts) == (3, [UNSUPPORTED] * 2)
    assert {result.reason for result in run.report.results} == {"8 heads are not a multiple of 7"}
    assert "No case was decided." in run.report.reasons
    assert "UNSUPPORTED  takes-nothing: 2 x 8 heads are not a multiple of 7\n" in run.done.stdout


def test_a_case_outside_the_contract_is_unsupported_with_the_part_that_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [failing.Picky])
    run = verify(tmp_path, *cases(DECODE, DECODE.replace("bf16", "fp16"), RAGGED, DECODE.replace("p64", "p32")))
    assert (run.exit_code, run.verdicts) == (3, [PASS] + [UNSUPPORTED] * 3)
    assert len(run.report.reasons) == 3 and all(r.startswith("No kernel decided ") for r in run.report.reasons)
    assert [result.reason for result in run.report.results[1:]] == [
        "dtype fp16 is not among bf16",
        "phase mixed is not among decode",
        "page size 32 is not among 64",
    ]


@pytest.mark.parametrize("kernel", [failing.OutOfMemory, failing.CPUAllocatorFails])
def test_a_kernel_that_runs_out_of_memory_is_inconclusive_and_not_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[failing.Raises]
) -> None:
    register(monkeypatch, [kernel, Honest])
    run = verify(tmp_path, *cases(DECODE))
    assert (run.exit_code, run.verdicts) == (3, [NOT_RUN, PASS])
    assert run.report.results[0].reason == f"out of memory in the kernel: {kernel.error}"
    assert not run.report.results[0].tool_error


def test_ctrl_c_inside_a_kernel_exits_130_and_leaves_the_rest_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.Scaled, failing.Interrupted])
    run = verify(tmp_path, *cases(SINGLE, DECODE, RAGGED))
    assert (run.exit_code, run.verdicts) == (130, [FAIL, PASS] + [NOT_RUN] * 4)
    assert {result.reason for result in run.report.results[2:]} == {"interrupted"}
    assert "INTERRUPTED: 2 of 6 planned cases decided, 1 wrong (exit 130)\n" in run.done.stdout


def test_ctrl_c_keeps_what_other_kernels_got_on_the_same_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Honest ran, and the reference did not: what is known of the one that raised and the one that refused stays."""
    register(monkeypatch, [failing.TakesNothing, Honest, failing.Raises, failing.Interrupted])
    run = verify(tmp_path, *cases(DECODE, SINGLE))
    assert run.exit_code == 130
    assert run.verdicts == [UNSUPPORTED, NOT_RUN, Verdict.ERROR, NOT_RUN] + [NOT_RUN] * 4
    assert {result.reason for result in run.report.results if result.verdict is NOT_RUN} == {"interrupted"}


def test_fail_fast_keeps_the_verdicts_of_the_wrong_case_and_leaves_the_rest_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [wrong.OtherRow, Honest])
    # One row of a batch of one is no other row.
    arguments = cases(SINGLE, DECODE, RAGGED)
    assert verify(tmp_path, *arguments).verdicts == [PASS, PASS, FAIL, PASS, FAIL, PASS]
    run = verify(tmp_path, *arguments, "--fail-fast")
    assert (run.exit_code, run.verdicts) == (1, [PASS, PASS, FAIL, PASS, NOT_RUN, NOT_RUN])
    assert {result.reason for result in run.report.results[4:]} == {
        f"stopped by --fail-fast after other-row on {DECODE}"
    }


# The reference


class Spy:
    """Stands before the reference and the emulated kernel: notes who was called, and breaks the reference on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.calls: list[str] = []
        run, expect = EmulatedKernel.run, mla_verify.expected.expect

        def spied_run(kernel: EmulatedKernel, inputs: MLAInputs) -> object:
            self.calls.append("kernel")
            return run(kernel, inputs)

        def spied_expect(inputs: MLAInputs, facts: Sequence[Any]) -> object:
            self.calls.append("reference")
            if error is not None and inputs.num_requests == 2:
                raise error
            return expect(inputs, facts)

        monkeypatch.setattr(EmulatedKernel, "run", spied_run)
        monkeypatch.setattr("mla_verify.expected.expect", spied_expect)


def test_kernels_of_one_case_run_before_the_reference_and_share_one_pass_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [Honest, wrong.OtherRounding, wrong.HonestMHA])
    spy = Spy(monkeypatch)
    run = verify(tmp_path, *cases(DECODE, SINGLE, MHA))
    assert (run.exit_code, run.verdicts) == (0, [PASS] * 5)
    # Each kernel is called for its verdict, once more, and on two requests alone where there are two.
    batch, single = 4 * ["kernel"], 2 * ["kernel"]
    assert spy.calls == [*2 * batch, "reference", *2 * single, "reference", *batch, "reference"]


def test_an_error_of_the_tool_is_no_verdict_and_the_other_cases_still_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [Honest])
    Spy(monkeypatch, ZeroDivisionError("in the reference"))
    run = verify(tmp_path, *cases(SINGLE, DECODE, RAGGED))
    assert (run.exit_code, run.verdicts) == (3, [PASS, NOT_RUN, PASS])
    result = run.report.results[1]
    assert result.reason == "error of the tool: ZeroDivisionError: in the reference"
    assert result.tool_error
    assert "in spied_expect" in result.traceback
    assert f"mla-verify itself failed on {DECODE}:\n" in run.done.stdout
    assert "in spied_expect" in run.done.stdout


def test_a_reference_without_memory_is_inconclusive_and_no_error_of_the_tool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [Honest])
    Spy(monkeypatch, MemoryError("no 4 TiB here"))
    run = verify(tmp_path, *cases(SINGLE, DECODE))
    assert (run.exit_code, run.verdicts) == (3, [PASS, NOT_RUN])
    assert run.report.results[1].reason == "out of memory: no 4 TiB here"
    assert not run.report.results[1].tool_error


def test_what_was_wrong_before_the_tool_failed_stays_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    register(monkeypatch, [wrong.ScalesQuery, wrong.ReturnsTuple, failing.Raises, Honest])
    Spy(monkeypatch, ZeroDivisionError("in the reference"))
    run = verify(tmp_path, *cases(DECODE))
    assert (run.exit_code, run.verdicts) == (1, [FAIL, Verdict.WRONG_SHAPE, Verdict.ERROR, NOT_RUN])


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (failing.SupportCheckRaises, "asking whether it takes the case raised KeyError: 'sm_75'"),
        (failing.WithoutFacts, "error of the tool: LookupError: no rounding facts for bf16"),
    ],
)
def test_a_broken_contract_costs_its_own_kernel_the_verdict_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], reason: str
) -> None:
    register(monkeypatch, [kernel, Honest])
    run = verify(tmp_path, *cases(DECODE))
    assert (run.exit_code, run.verdicts) == (3, [NOT_RUN, PASS])
    assert run.report.results[0].reason == reason
