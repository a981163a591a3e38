"""One case of a run: every kernel first, the reference second, then one verdict for each kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from mla_verify.ahead import Ahead
from mla_verify.attempt import Attempt, judge, run_kernel
from mla_verify.calls import Job
from mla_verify.judging import Clock, Exhibit, Finding, Judged, Judges, judge_case
from mla_verify.memory import give_back_gpu_memory
from mla_verify.results import CaseResult, Verdict

if TYPE_CHECKING:
    from mla_verify.outputs import Outputs
    from mla_verify.tensors import MLAInputs


class CaseRun:
    """`start` runs the kernels and has the rest done, here or by a judge; `results` waits for it."""

    def __init__(
        self, attempts: Sequence[Attempt], job: Job, ahead: Ahead, outputs: Outputs | None, judges: Judges | None
    ) -> None:
        self._attempts, self._job, self._ahead, self._outputs = attempts, job, ahead, outputs
        # Outputs are written and compared with another build's in this process.
        self._judges = judges if outputs is None and job.judged_on == "cpu" else None
        self._judged: list[Attempt] = []
        self._future: Future[Judged] | None = None

    def start(self) -> None:
        """Never raises, but for Ctrl-C."""
        open_attempts = [attempt for attempt in self._attempts if attempt.is_open]
        if open_attempts:
            with tool_errors(open_attempts):
                self._start(open_attempts)

    def _start(self, attempts: list[Attempt]) -> None:
        job, clock = self._job, Clock()
        inputs: MLAInputs | None = None
        if self._judges is None or any(a.entry.kernel.own_process(job.device) is None for a in attempts):
            inputs = self._ahead.with_room(replace(job, device=job.judged_on).inputs)
        clock.lap("inputs")
        # Every kernel before the reference allocates: a fresh buffer could otherwise hold the right answer already.
        for attempt in attempts:
            with tool_errors([attempt]):
                if not self._ahead.finish(attempt):
                    run_kernel(attempt, job, inputs)
        self._judged = [attempt for attempt in attempts if attempt.output is not None]
        if not self._judged:
            return
        exhibits = [_exhibit(attempt) for attempt in self._judged]
        if self._judges is not None:
            self._future = self._judges.submit(replace(job, device="cpu", layout="split"), exhibits)
            return
        assert inputs is not None
        entries = [attempt.entry for attempt in self._judged]
        more = self._outputs.other_facts(entries) if self._outputs else ()
        found = judge_case(job.spec, inputs, exhibits, more, self._ahead.with_room)
        self._settle(replace(found, seconds=clock.laps | found.seconds))
        if self._outputs is not None:
            self._hand_on(self._outputs, inputs, found)

    def _settle(self, judged: Judged) -> None:
        shared = {stage: seconds / len(self._judged) for stage, seconds in judged.seconds.items()}
        for attempt, finding in zip(self._judged, judged.findings, strict=True):
            if finding.judgement is not None:
                judge(attempt, finding.judgement)
            else:
                lose(attempt, finding)
            attempt.result = replace(attempt.result, seconds={**attempt.result.seconds, **shared})

    def _hand_on(self, outputs: Outputs, inputs: MLAInputs, judged: Judged) -> None:
        """Judged outputs to whoever writes them or holds them against another build's."""
        from mla_verify.outputs import Obtained

        for attempt, finding in zip(self._judged, judged.findings, strict=True):
            with tool_errors([attempt]):
                if finding.judgement is not None:
                    assert attempt.output is not None and attempt.facts is not None
                    obtained = Obtained(attempt.entry, inputs, attempt.output, attempt.facts, judged.expected)
                    attempt.result = outputs.take(obtained, attempt.result)

    @property
    def is_done(self) -> bool:
        """Whether `results` need not wait."""
        return self._future is None or self._future.done()

    def results(self) -> list[CaseResult]:
        """One for each attempt, in order."""
        if self._future is not None:
            with tool_errors(self._judged):
                self._settle(self._future.result())
        for attempt in self._attempts:
            attempt.output = None  # or else the device fills up with the outputs of all cases
        if self._job.device == "cuda":
            give_back_gpu_memory()
        return [attempt.result for attempt in self._attempts]

    def results_so_far(self) -> list[CaseResult]:
        """After Ctrl-C: what a kernel got before, ERROR say, is a result."""
        if self.is_done and self._future is not None:
            return self.results()
        return [replace(a.result, reason="interrupted") if a.is_open else a.result for a in self._attempts]


def _exhibit(attempt: Attempt) -> Exhibit:
    assert attempt.output is not None and attempt.facts is not None
    return Exhibit(attempt.output, attempt.facts, attempt.checks)


def lose(attempt: Attempt, finding: Finding) -> None:
    """Out of memory or an error of the tool costs the attempt a verdict that it lacks so far, and nothing else."""
    if attempt.is_open:
        attempt.result = replace(
            attempt.result,
            verdict=Verdict.NOT_RUN,
            reason=finding.reason,
            traceback=finding.traceback,
            tool_error=bool(finding.traceback),
        )


@contextmanager
def tool_errors(attempts: Sequence[Attempt]) -> Iterator[None]:
    """What is raised inside, but for Ctrl-C, is lost to these attempts, and ends nothing."""
    try:
        yield
    except (Exception, SystemExit) as error:  # no kernel's contract and no library may end the run either
        finding = Finding.of_error(error)
        for attempt in attempts:
            lose(attempt, finding)
