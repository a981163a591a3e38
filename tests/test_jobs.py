"""--jobs: cases judged in other processes have the verdicts and the numbers that they have in the tool's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mla_verify import judging
from mla_verify.config import make_config
from mla_verify.plan import build_plan
from mla_verify.results import CaseResult, Verdict
from mla_verify.run import run_plan
from mla_verify.workers import WorkerDiedError
from tests import wrong_kernels as wrong
from tests.cli_helper import invoke
from tests.kernels_helper import DECODE, RAGGED, SINGLE, cases, register, verify
from tests.wrong_kernels import Honest

PASS, FAIL, NOT_RUN = Verdict.PASS, Verdict.FAIL, Verdict.NOT_RUN
WRITE = "append-write-h1-q5.kv9-p4-bf16-rows-s0"
LAYER = "prefix-layer-h8-q9.kv129-p16-bf16-normal-s0"
NAMES = ("torch-absorbed", "torch-mha", "torch-layer-absorbed", "triton-cache-write")
MHA = "prefix-mha-h8-q9.kv65-ragged-bf16-normal-s0"
IDS = (DECODE, RAGGED, SINGLE, WRITE, LAYER, MHA, *(DECODE.replace("-s7", f"-s{seed}") for seed in range(3)))


def numbers(results: tuple[CaseResult, ...]) -> list[Any]:
    return [(r.case, r.kernel, r.verdict, r.reason, r.comparisons) for r in results]


def test_cases_that_judges_judge_have_the_verdicts_and_numbers_of_those_judged_here(tmp_path: Path) -> None:
    kernels = [f"--kernel={name}" for name in NAMES]
    here, there = (verify(tmp_path, *kernels, *cases(*IDS), "--jobs", n) for n in ("1", "3"))
    assert numbers(here.report.results) == numbers(there.report.results)
    assert (here.exit_code, there.exit_code) == (0, 0)
    stages = [set(r.seconds) for r in there.report.results if r.case == DECODE]
    assert all({"kernel", "inputs", "reference", "vacuity", "compare"} <= found for found in stages)


def test_a_wrong_kernel_is_found_wrong_by_a_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, [wrong.Scaled, Honest])
    run = verify(tmp_path, *cases(DECODE, SINGLE), "--jobs", "2")
    assert run.verdicts == [FAIL, PASS, FAIL, PASS]
    assert "output times 1.00" in run.done.stdout


def test_fail_fast_keeps_what_has_been_started_and_says_why_the_rest_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, [wrong.Scaled])
    ids = [DECODE.replace("-s7", f"-s{seed}") for seed in range(20)]
    run = verify(tmp_path, *cases(*ids), "--jobs", "2", "--fail-fast")
    verdicts = run.verdicts
    assert verdicts[0] is FAIL and verdicts[-1] is NOT_RUN
    assert verdicts == sorted(verdicts, key=lambda v: v is NOT_RUN)  # in order, none lost between
    assert {r.reason for r in run.report.results if r.verdict is NOT_RUN} == {
        f"stopped by --fail-fast after scaled on {run.report.results[0].case}"
    }


def test_a_judge_that_dies_costs_its_case_the_verdict_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, [Honest])
    ask = judging._ask

    def dies(job: Any, exhibits: Any) -> judging.Judged:
        if job.spec.id == SINGLE:
            raise WorkerDiedError("killed by SIGKILL", "")
        return ask(job, exhibits)

    monkeypatch.setattr(judging, "_ask", dies)
    run = verify(tmp_path, *cases(DECODE, SINGLE, DECODE.replace("-s7", "-s8")), "--jobs", "2")
    assert (run.exit_code, run.verdicts) == (3, [PASS, NOT_RUN, PASS])
    assert "WorkerDiedError: killed by SIGKILL" in run.report.results[1].reason


def test_ctrl_c_keeps_the_results_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, [Honest])
    ids = [DECODE.replace("-s7", f"-s{seed}") for seed in range(12)]
    plan = build_plan(make_config(cases=ids, device="cpu"))
    told: list[CaseResult] = []

    def interrupted_at_the_third(result: CaseResult) -> None:
        told.append(result)
        if len(told) == 3:
            raise KeyboardInterrupt

    outcome = run_plan(plan.entries, device="cpu", fail_fast=False, on_result=interrupted_at_the_third, jobs=2)
    assert outcome.interrupted
    assert [r.case for r in outcome.results] == [e.case_id for e in plan.entries]
    verdicts = [r.verdict for r in outcome.results]
    assert verdicts[:3] == [PASS] * 3 and verdicts[-1] is NOT_RUN
    assert {r.reason for r in outcome.results if r.verdict is NOT_RUN} == {"interrupted"}


@pytest.mark.parametrize("value", ["0", "257", "two"])
def test_a_number_of_jobs_that_cannot_be_is_a_usage_error(value: str) -> None:
    done = invoke("kernels", "--jobs", value)
    assert done.exit_code == 2 and "--jobs" in done.stderr
