"""One kernel on one case, on its way to a verdict: does it take the case, what does it return, is that right?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mla_verify.calls import Job, execute_job
from mla_verify.judge import Judgement
from mla_verify.kernels.contract import facts_on
from mla_verify.plan import PlanEntry, why_outside
from mla_verify.results import CaseResult, Check, Verdict

if TYPE_CHECKING:
    from mla_verify.execute import Execution
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.tensors import MLAInputs, MLAOutput


@dataclass
class Attempt:
    """One kernel on one case, on its way to a verdict."""

    entry: PlanEntry
    result: CaseResult
    output: MLAOutput | None = None
    facts: RoundingFacts | None = None
    checks: tuple[Check, ...] = ()  # of a fused case: its output against that of the split one

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
    attempt.result = replace(attempt.result, ran=done.ran, traceback=done.traceback, seconds={"kernel": done.seconds})
    if done.verdict is not None:
        settle(attempt, done.verdict, done.reason)
    if done.output is None:
        return
    attempt.output, attempt.facts = _on(done.output, job.device), facts
    if job.layout == "fused":
        attempt.checks = _cat_free(attempt, job, inputs, done)


def _on(output: MLAOutput, device: str) -> MLAOutput:
    """A worker's output comes back on the CPU."""
    return replace(output, out=output.out.to(device), lse=None if output.lse is None else output.lse.to(device))


def _cat_free(attempt: Attempt, job: Job, inputs: MLAInputs | None, fused: Execution) -> tuple[Check, ...]:
    """The same numbers as views of fused tensors and apart give the same bits: no place in memory may matter.

    Nothing where there is nothing to compare: the kernel takes no split form, or does not even repeat itself.
    """
    kernel = attempt.entry.kernel
    apart = execute_job(kernel, replace(job, layout="split"), inputs)
    if apart.verdict is not None and apart.verdict.wrong:
        return (Check("cat_free", 1.0, 0.0, f"on the same tensors apart, not fused: {apart.reason}"),)
    split = apart.output
    if split is None or fused.output is None:
        return ()
    changed = _differing(fused.output, split)
    if changed:
        again = execute_job(kernel, job, inputs).output
        if again is None or _differing(fused.output, again):
            return ()
    detail = "elements differ from those of the same tensors apart, not fused" if changed else "the same bits as apart"
    return (Check("cat_free", float(changed), 0.0, detail),)


def _differing(a: MLAOutput, b: MLAOutput) -> int:
    import torch

    pairs = [(a.out, b.out)] if a.lse is None or b.lse is None else [(a.out, b.out), (a.lse, b.lse)]
    return sum(int((~torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)).sum()) for x, y in pairs)


def judge(attempt: Attempt, judgement: Judgement) -> None:
    """Its verdict, unless it broke a rule: then its numbers do not matter."""
    if attempt.result.verdict is Verdict.NOT_RUN:
        attempt.result = replace(attempt.result, comparisons=judgement.comparisons)
        settle(attempt, judgement.verdict, judgement.reason)
