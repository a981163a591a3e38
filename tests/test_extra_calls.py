"""A check that could not be made leaves its case undecided, and memory that is freed hands no right answer on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_verify import observations
from mla_verify.calls import Job, execute_job
from mla_verify.cases import CaseSpec
from mla_verify.decision import EXIT_INCONCLUSIVE
from mla_verify.execute import Execution, execute
from mla_verify.inputs import make_inputs
from mla_verify.kernels.contract import Contract
from mla_verify.results import Verdict
from mla_verify.tensors import MLAInputs, MLAOutput
from tests.kernels_helper import Run, cases, register, verify
from tests.wrong_kernels import Honest

PASS, FAIL, NOT_RUN = Verdict.PASS, Verdict.FAIL, Verdict.NOT_RUN
FUSED = "decode-absorbed-h8-q1.kv65+q1.kv33-p16-fp16-mixed-fused-s0"
PLAIN = "decode-absorbed-h8-2xq1.kv64-p64-fp16-needle-s0"

Call = Callable[..., Execution]


def no_room(kernel: Any, job: Job, inputs: Any = None) -> Execution:
    return Execution(verdict=NOT_RUN, reason="out of memory in the kernel")


def never_ends(kernel: Any, job: Job, inputs: Any = None) -> Execution:
    return Execution(verdict=Verdict.TIMEOUT, reason="no result after 2 s")


def our_error(kernel: Any, job: Job, inputs: Any = None) -> Execution:
    raise ValueError("not the kernel's")


def changed(kernel: Any, job: Job, inputs: Any = None) -> Execution:
    done = execute_job(kernel, job, inputs)
    assert done.output is not None
    done.output.out[0, 0, 0] += 1
    return done


def changed_when_split_and_then(third: Call) -> Call:
    return lambda kernel, job, inputs=None: (changed if job.layout == "split" else third)(kernel, job, inputs)


def crashes(kernel: Any, job: Job, inputs: Any = None) -> Execution:
    return Execution(verdict=Verdict.CRASH, reason="killed by SIGSEGV")


def run_with(folder: Path, patch: pytest.MonkeyPatch, call: Call, case: str, **claims: bool) -> Run:
    patch.setattr(Honest, "contract", replace(Honest.contract, **claims))
    register(patch, [Honest])
    patch.setattr(observations, "execute_job", call)
    return verify(folder, *cases(case))


@pytest.mark.parametrize(
    ("call", "verdict", "reason"),
    [
        (no_room, NOT_RUN, "no result on the same tensors apart, not fused: out of memory in the kernel"),
        (never_ends, NOT_RUN, "no result on the same tensors apart, not fused: no result after 2 s"),
        (our_error, NOT_RUN, "error of the tool: ValueError: not the kernel's"),
        (crashes, FAIL, "on the same tensors apart, not fused: killed by SIGSEGV"),
        (changed_when_split_and_then(crashes), FAIL, "when the same call is made again: killed by SIGSEGV"),
        (changed_when_split_and_then(no_room), NOT_RUN, "no result when the same call is made again: out of memory"),
    ],
    ids=["no-room", "never-ends", "our-error", "crashes", "then-crashes", "then-no-room"],
)
def test_a_layout_case_without_its_check_is_no_pass(
    call: Call, verdict: Verdict, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, monkeypatch, call, FUSED)
    assert run.verdicts == [verdict] and reason in run.only.reason
    assert run.exit_code == (1 if verdict is FAIL else EXIT_INCONCLUSIVE)


@pytest.mark.parametrize(
    ("call", "claims", "verdict"),
    [
        (no_room, {}, PASS),
        (no_room, {"repeats": True}, NOT_RUN),
        (our_error, {"batch_invariant": True}, NOT_RUN),
        (never_ends, {}, NOT_RUN),
        (changed, {}, PASS),
        (changed, {"repeats": True}, FAIL),
    ],
)
def test_a_claim_about_bits_without_an_answer_is_no_pass(
    call: Call, claims: dict[str, bool], verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with(tmp_path, monkeypatch, call, PLAIN, **claims).verdicts == [verdict]


def test_a_claim_to_repeat_that_a_layout_case_sees_broken_is_a_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path, monkeypatch, changed, FUSED, repeats=True)
    assert run.verdicts == [FAIL] and "other bits when the same call is made again" in run.only.reason


@pytest.mark.parametrize(
    ("case", "holds"),
    [
        (PLAIN, lambda block: bool(block.isnan().all())),
        # Any bits may be right in a copy, but for these.
        (
            "keys-concat-h4-q3.kv3-ragged-bf16-rows-s0",
            lambda block: set(block.view(torch.uint8).unique().tolist()) == {0xA5},
        ),
    ],
)
def test_before_a_kernel_runs_free_memory_of_its_outputs_size_is_spoilt(
    case: str, holds: Callable[[Tensor], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or else it may hold the result of the kernel before, which one that writes nothing would return as its own."""
    inputs = make_inputs(CaseSpec.parse(case))
    blocks: list[Tensor] = []
    empty_like = torch.empty_like

    def recorded(like: Tensor, **options: Any) -> Tensor:
        blocks.append(empty_like(like, **options))
        return blocks[-1]

    class Kernel:
        contract = Contract(form=CaseSpec.parse(case).form, dtypes=("fp16", "bf16"))

        def run(self, inputs: MLAInputs, out: MLAOutput) -> MLAOutput:
            mine = [block for block in blocks if block.shape == out.out.shape and block.dtype == out.out.dtype]
            assert len(mine) == 8 and all(holds(block) for block in mine)
            return out

        def ran(self) -> str:
            return "nothing"

    monkeypatch.setattr(torch, "empty_like", recorded)
    done = execute(Kernel(), inputs, CaseSpec.parse(case).dtype)  # type: ignore[arg-type]
    assert done.verdict is not Verdict.ERROR, done.reason


@pytest.mark.parametrize(
    ("body", "verdict", "reason"),
    [
        ("os.kill(os.getpid(), 40)", Verdict.CRASH, "the kernel's process ended: killed by signal 40"),
        ("raise FallbackError()", FAIL, "its library ran another kernel than the one asked for"),
    ],
)
def test_what_has_no_name_or_no_words_is_told_all_the_same(
    body: str, verdict: Verdict, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(
        f"import os\nfrom mla_verify.errors import FallbackError\ndef odd(i, out):\n    {body}\n"
    )
    run = verify(tmp_path, "--kernel", f"{tmp_path / 'odd.py'}:odd", *cases(PLAIN))
    assert (run.verdicts, run.only.reason) == ([verdict], reason)


def test_a_summary_knows_a_named_case_that_no_kernel_was_planned_on(tmp_path: Path) -> None:
    other = "decode-mha-h8-q1.kv64-ragged-fp16-needle-s0"
    summary = tmp_path / "summary.json"
    run = verify(tmp_path, "--kernel", "torch-absorbed", *cases(PLAIN, other), "--summary", summary)
    found = json.loads(summary.read_text())
    assert run.exit_code == found["exit_code"] == EXIT_INCONCLUSIVE
    assert found["unpaired"] == [other]
