"""The run: for each case, every kernel first and the reference second, then one verdict for every planned pair."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mla_verify.ahead import Ahead
from mla_verify.attempt import Attempt, check_contract, run_kernel
from mla_verify.calls import Job
from mla_verify.case_run import CaseRun, tool_errors
from mla_verify.config import repeat_command
from mla_verify.judging import Judges
from mla_verify.plan import PlanEntry
from mla_verify.results import CaseResult, Verdict
from mla_verify.watch import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from mla_verify.outputs import Outputs


@dataclass(frozen=True)
class RunOutcome:
    results: tuple[CaseResult, ...]  # one for each entry, in their order
    interrupted: bool


def run_plan(
    entries: Sequence[PlanEntry],
    *,
    device: str,
    fail_fast: bool,
    on_result: Callable[[CaseResult], None],
    inputs_file: Path | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    outputs: Outputs | None = None,
    jobs: int = 1,
) -> RunOutcome:
    """Run every entry on `device`. Kernels of one case that follow each other share its inputs and its reference.

    Never raises for what a kernel does. Ctrl-C, or a wrong result under `fail_fast`, leaves the rest NOT_RUN.
    timeout: seconds of one kernel call in a worker. outputs: is handed every output that was judged. jobs: processes
    that judge cases; with 1 this one does.
    """
    cases = [
        [Attempt(entry, _blank(entry, device, inputs_file, timeout)) for entry in group]
        for _, group in groupby(entries, key=lambda entry: entry.case_id)
    ]
    results: list[CaseResult] = []
    started: deque[CaseRun] = deque()  # whose results are not told yet
    stopped = ""
    interrupted = False
    for attempts in cases:
        for attempt in attempts:
            with tool_errors([attempt]):
                check_contract(attempt)

    def run_alone(attempt: Attempt) -> None:
        run_kernel(attempt, _job(attempt.entry, device, inputs_file, timeout))

    def tell(case: CaseRun) -> None:
        nonlocal stopped
        done = case.results()
        started.popleft()
        results.extend(done)
        for result in done:
            on_result(result)
            # The case's other kernels, and cases that have been started, have run as well: their verdicts are kept.
            if fail_fast and result.verdict.wrong and not stopped:
                stopped = f"stopped by --fail-fast after {result.kernel} on {result.case}"

    def run_all(ahead: Ahead, judges: Judges | None) -> None:
        for index, attempts in enumerate(cases):
            if stopped:
                break
            ahead.reach(index)
            job = _job(attempts[0].entry, device, inputs_file, timeout)
            started.append(CaseRun(attempts, job, ahead, outputs, judges))
            started[-1].start()
            while started and (started[0].is_done or len(started) > 2 * jobs):
                tell(started[0])
        while started:
            tell(started[0])

    try:
        with Ahead(cases, run_alone, device) as ahead, Judges(jobs) if jobs > 1 else nullcontext() as judges:
            try:
                run_all(ahead, judges)
            except KeyboardInterrupt:
                stopped, interrupted = "interrupted", True
                for case in started:  # now: what is under way ends with the judges
                    results.extend(case.results_so_far())
    except KeyboardInterrupt:  # once more
        stopped, interrupted = "interrupted", True
    for entry in entries[len(results) :]:
        results.append(replace(_blank(entry, device, inputs_file, timeout), reason=stopped))
    return RunOutcome(tuple(results), interrupted)


def _blank(entry: PlanEntry, device: str, inputs_file: Path | None, timeout: float) -> CaseResult:
    return CaseResult(
        case=entry.case_id,
        kernel=entry.kernel.name,
        verdict=Verdict.NOT_RUN,
        reason="",
        repeat=repeat_command(entry.kernel.name, entry.case_id, device, inputs_file, timeout),
        claim=entry.claim,
        phase=entry.phase,
        dtype=entry.dtype,
    )


def _job(entry: PlanEntry, device: str, inputs_file: Path | None, timeout: float) -> Job:
    return Job(entry.spec, inputs_file, entry.dtype, device, entry.spec.layout if entry.spec else "split", timeout)
