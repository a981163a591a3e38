"""`mla-verify kernels` judges each kernel by its result: an honest one passes, a wrong one exits 1 and says where."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from mla_verify.cases import CaseSpec
from mla_verify.expected import expect
from mla_verify.inputs import make_inputs
from mla_verify.results import CaseResult, Verdict
from tests import failing_kernels as failing
from tests import wrong_kernels as wrong
from tests.kernels_helper import DECODE, MHA, RAGGED, SINGLE, Run, cases, register, verify
from tests.wrong_kernels import Honest


def run_one(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kernel: type[Honest], case: str = DECODE, *args: str
) -> tuple[Run, CaseResult]:
    register(monkeypatch, [kernel])
    run = verify(folder, *cases(case), *args)
    return run, run.only


def names(kernel: type[Honest]) -> str:
    return kernel.name


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("kernel", "case"),
    [(wrong.Honest, DECODE), (wrong.Honest, RAGGED), (wrong.NoLSE, DECODE), (wrong.HonestMHA, MHA)],
)
def test_an_honest_kernel_passes_on_a_case_of_no_suite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], case: str, dtype: str
) -> None:
    run, result = run_one(monkeypatch, tmp_path, kernel, case.replace("bf16", dtype))
    assert (run.exit_code, result.verdict) == (0, Verdict.PASS)
    assert result.claim == "named on the command line, in no suite"
    assert result.ran == "2 splits"
    tensors = ["out", "lse"] if kernel.contract.returns_lse else ["out"]
    assert [comparison.tensor for comparison in result.comparisons] == tensors
    assert run.repeats() == []


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    ("kernel", "case"),
    [
        (wrong.Scaled, DECODE),
        (wrong.Zeroed, DECODE),
        (wrong.OtherRow, DECODE),
        (wrong.OtherHead, SINGLE),
        (wrong.OneElement, RAGGED),
        (wrong.LeavesRowUnwritten, DECODE),
        (wrong.ReadsPageTail, DECODE),
        (wrong.Base2LSE, DECODE),
        (wrong.ScaledMHA, MHA),
    ],
)
def test_a_kernel_with_wrong_numbers_exits_1_and_names_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], case: str, dtype: str
) -> None:
    run, result = run_one(monkeypatch, tmp_path, kernel, case.replace("bf16", dtype))
    assert (run.exit_code, result.verdict) == (1, Verdict.FAIL)
    failed = [comparison for comparison in result.comparisons if not comparison.passed]
    assert [comparison.tensor for comparison in failed] == (["lse"] if kernel is wrong.Base2LSE else ["out"])
    worst = failed[0].worst
    assert worst is not None
    where = f"request {worst.request}, token {worst.token}, head {worst.head}"
    where += "" if kernel is wrong.Base2LSE else f", dim {worst.dim}"
    values = f"actual {worst.actual:.9g}, expected {worst.expected:.9g}, z {worst.z:.3g}"
    assert f"  {failed[0].tensor}: worst at {where}: {values}\n" in run.done.stdout
    assert run.repeats() == [f"mla-verify kernels --kernel {kernel.name} --case {result.case} --device cpu"]


def test_the_element_that_is_named_is_the_one_that_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A request without queries comes before it: a count that skips it would name request 1."""
    _, result = run_one(monkeypatch, tmp_path, wrong.OneElement, RAGGED)
    worst = result.comparisons[0].worst
    assert worst is not None
    assert (worst.request, worst.token, worst.head, worst.dim, worst.actual) == (2, 1, 5, 77, 3.5)
    spec = CaseSpec.parse(RAGGED)
    reference = expect(make_inputs(spec), [Honest.contract.facts(spec.dtype)]).attention
    assert worst.expected == float(reference.out[3, 5, 77])
    assert worst.z > 20


@pytest.mark.parametrize("kernel", [wrong.LeavesRowUnwritten, wrong.ReadsPageTail], ids=names)
def test_nan_that_shows_is_counted_as_nan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest]
) -> None:
    run, result = run_one(monkeypatch, tmp_path, kernel)
    rows = 1 if kernel is wrong.LeavesRowUnwritten else 2
    assert f"out: nonfinite {8 * 512 * rows}, limit 0 ({8 * 512 * rows} of 8192 elements" in run.done.stdout
    assert ": actual nan, expected " in result.reason


@pytest.mark.parametrize(
    ("kernel", "damaged"),
    [
        (wrong.ScalesQuery, "q_nope"),
        (wrong.CleansCache, "ckv_cache"),
        (wrong.TransposesQuery, "q_pe"),
        (wrong.SqueezesLengths, "kv_lens"),
    ],
)
def test_a_kernel_that_changes_its_input_fails_and_the_next_one_gets_it_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], damaged: str
) -> None:
    """Its own result is right. ReadsPageTail is right, too, on a cache whose tails are clean."""
    register(monkeypatch, [kernel, Honest, wrong.ReadsPageTail])
    run = verify(tmp_path, *cases(SINGLE))
    assert (run.exit_code, run.verdicts) == (1, [Verdict.FAIL, Verdict.PASS, Verdict.FAIL])
    reason = f"the kernel changed its input {damaged} in place"
    assert run.report.results[0].reason == reason
    assert f"  reason  {reason}\n" in run.done.stdout
    assert run.repeats()[0] == f"mla-verify kernels --kernel {kernel.name} --case {SINGLE} --device cpu"


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (wrong.FlattensHeads, "out has shape [2, 4096], it must be [2, 8, 512]"),
        (wrong.OneHeadForAll, "out has shape [2, 1, 512], it must be [2, 8, 512]"),
        (wrong.ReturnsFp32, "out has dtype torch.float32, it must be torch.bfloat16"),
        (wrong.OnAnotherDevice, "out has device meta, it must be cpu"),
        (wrong.ReturnsNumpy, "out is ndarray, it must be a tensor [2, 8, 512]"),
        (wrong.ReturnsTuple, "run returned tuple, it must return MLAOutput(out, lse)"),
        (wrong.ReturnsNothing, "run returned NoneType, it must return MLAOutput(out, lse)"),
        (wrong.ForgetsLSE, "lse is NoneType, it must be a tensor [2, 8]"),
        (wrong.UndeclaredLSE, "lse was returned, but the contract says that there is none"),
    ],
)
def test_a_result_of_another_kind_than_declared_exits_1_and_nothing_is_converted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], reason: str
) -> None:
    run, result = run_one(monkeypatch, tmp_path, kernel)
    assert (run.exit_code, result.verdict, result.reason) == (1, Verdict.WRONG_SHAPE, reason)
    assert f"WRONG_SHAPE  {kernel.name}  {DECODE}\n" in run.done.stdout
    assert f"  reason  {reason}\n" in run.done.stdout
    assert run.repeats() == [f"mla-verify kernels --kernel {kernel.name} --case {DECODE} --device cpu"]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (failing.Raises, "the kernel raised RuntimeError: CUDA error: an illegal memory access was encountered"),
        (failing.Exits, "the kernel raised SystemExit: 0"),
        (failing.CannotSayWhatRan, "the kernel raised AttributeError: no attribute '_last_backend'"),
        (wrong.ReadsTableTail, "the kernel raised IndexError: index 2147480000 is out of bounds"),
    ],
)
def test_a_kernel_that_raises_exits_1_with_its_traceback_and_the_next_case_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest], reason: str
) -> None:
    register(monkeypatch, [kernel, Honest])
    run = verify(tmp_path, *cases(DECODE, SINGLE))
    assert (run.exit_code, run.verdicts) == (1, [Verdict.ERROR, Verdict.PASS] * 2)
    for result in run.report.results[::2]:
        assert result.reason.startswith(reason)
        assert not result.tool_error
        assert "_kernels.py" in result.traceback
        assert result.repeat in run.repeats()
    assert f"  reason  {reason}" in run.done.stdout


@pytest.mark.parametrize("kernel", [wrong.OtherHead, wrong.ScalesQuery, failing.Raises], ids=names)
def test_the_repeat_command_reproduces_the_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: type[Honest]
) -> None:
    """With --seed, by which the run changed the case: the command must name the case that ran."""
    register(monkeypatch, [Honest, kernel])
    run = verify(tmp_path, *cases(DECODE, RAGGED), "--seed", "5")
    assert run.report.results[3].case == RAGGED.replace("-s7", "-s5")
    program, command, *arguments = shlex.split(run.repeats()[1])
    assert (program, command) == ("mla-verify", "kernels")
    again = verify(tmp_path, *arguments)
    assert again.exit_code == 1
    assert without_times(again.only) == without_times(run.report.results[3])


def test_real_activations_are_judged_like_a_case_and_repeated_from_their_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = make_inputs(CaseSpec.parse(DECODE))
    path = tmp_path / "real activations.safetensors"
    save_file(inputs.named_tensors(), path, {"sm_scale": str(inputs.sm_scale), "causal": "true"})
    register(monkeypatch, [Honest, wrong.Scaled, wrong.ReadsPageTail])
    run = verify(tmp_path, "--inputs", path)
    assert (run.exit_code, run.verdicts) == (1, [Verdict.PASS, Verdict.FAIL, Verdict.FAIL])
    again = verify(tmp_path, *shlex.split(run.repeats()[0])[2:])
    assert without_times(again.only) == without_times(run.report.results[1])


def without_times(result: CaseResult) -> CaseResult:
    # An exception that is raised twice collects the frames of both.
    return replace(result, seconds={}, traceback="")


def test_a_kernel_that_fails_on_the_same_tensors_apart_fails_the_fused_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    register(monkeypatch, [Honest, wrong.RaisesApart])
    run = verify(tmp_path, *cases(DECODE.replace("-s7", "-fused-s7")))
    assert run.verdicts == [Verdict.PASS, Verdict.FAIL]
    assert "apart, not fused: the kernel raised NotImplementedError: fused tensors only" in run.done.stdout
