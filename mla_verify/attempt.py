"""One kernel on one case, on its way to a verdict: does it take the case, what does it return, is that right?"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_verify.calls import Job, execute_job
from mla_verify.judge import Judgement
from mla_verify.kernels.contract import facts_on
from mla_verify.observations import compare_layouts, observe
from mla_verify.plan import PlanEntry, why_outside
from mla_verify.results import CaseResult, Check, Verdict

if TYPE_CHECKING:
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.tensors import MLAInputs, MLAOutput


@dataclass
class Attempt:
    """One kernel on one case, on its way to a verdict."""

    entry: PlanEntry
    result: CaseResult
    output: MLAOutput | None = None
    facts: RoundingFacts | None = None
    checks: tuple[Check, ...] = ()  # of its output against others of the same kernel
    open: str = ""  # why one of those could not be made

    @property
    def is_open(self) -> bool:
        """Whether neither a verdict nor a reason for having none is there."""
        return self.result.verdict is Verdict.NOT_RUN and not self.result.reason


def settle(attempt: Attempt, verdict: Verdict, reason: str) -> None:
    """Give the attempt its verdict."""
    attempt.result = replace(attempt.result, verdict=verdict, reason=reason)


def check_contract(attempt: Attempt) -> None:
    """UNSUPPORTED with the reason when the case is outside the kernel's contract."""
    why = why_outside(attempt.entry)
    if why is not None:
        settle(attempt, Verdict.UNSUPPORTED, why)


def run_kernel(attempt: Attempt, job: Job, inputs: MLAInputs | None = None) -> None:
    """Run it. Sets the output, or the verdict or reason why there is none. inputs: the job's, if they are there."""
    kernel = attempt.entry.kernel
    facts = facts_on(kernel.contract, attempt.entry.dtype, job.device)
    done = execute_job(kernel, job, inputs)
    seconds = {"kernel": done.seconds} | ({"compile": done.compile_seconds} if done.compile_seconds else {})
    attempt.result = replace(attempt.result, ran=done.ran, traceback=done.traceback, seconds=seconds)
    if done.verdict is not None:
        settle(attempt, done.verdict, done.reason)
    if done.output is None:
        return
    attempt.output, attempt.facts = _kept(done.output, job.judged_on), facts
    if job.layout != "split":
        layouts = compare_layouts(kernel, job, inputs, attempt.output)
        attempt.checks, attempt.open = layouts.checks, layouts.open
    elif done.verdict is None and attempt.entry.observed:
        started = time.perf_counter()
        found = observe(kernel, job, inputs, attempt.output)
        attempt.checks, attempt.open = found.checks, found.open
        if found.observed:
            seconds["again"] = time.perf_counter() - started
            attempt.result = replace(attempt.result, observed=found.observed, seconds=seconds)


def _kept(output: MLAOutput, device: str) -> MLAOutput:
    """A copy on the device: a worker's comes back on the CPU, and a kernel may return the same memory the next time."""
    lse = None if output.lse is None else output.lse.to(device, copy=True)
    return replace(output, out=output.out.to(device, copy=True), lse=lse)


def judge(attempt: Attempt, judgement: Judgement) -> None:
    """Its verdict, unless it broke a rule: then its numbers do not matter."""
    if attempt.is_open:  # an error after the call has left it a reason, and no verdict
        attempt.result = replace(attempt.result, comparisons=judgement.comparisons)
        undecided = judgement.verdict is Verdict.PASS and attempt.open
        settle(attempt, *((Verdict.NOT_RUN, attempt.open) if undecided else (judgement.verdict, judgement.reason)))
