"""The run: for each case, every kernel first and the reference second, then one verdict for every planned pair."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mla_verify.ahead import Ahead
from mla_verify.attempt import Attempt, check_contract, judge, run_kernel
from mla_verify.calls import Job
from mla_verify.config import repeat_command
from mla_verify.judge import judge_attention, judge_copy
from mla_verify.memory import give_back_gpu_memory
from mla_verify.plan import PlanEntry
from mla_verify.results import CaseResult, Verdict
from mla_verify.watch import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from mla_verify.expected import Expected
    from mla_verify.outputs import Outputs
    from mla_verify.tensors import AttentionInputs, MLAInputs
    from mla_verify.vacuity import FaultSizes


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
) -> RunOutcome:
    """Run every entry on `device`. Kernels of one case that follow each other share its inputs and its reference.

    Never raises for what a kernel does. Ctrl-C, or a wrong result under `fail_fast`, leaves the rest NOT_RUN.
    timeout: seconds of one kernel call in a worker. outputs: is handed every output that was judged.
    """
    cases = [
        [Attempt(entry, _blank(entry, device, inputs_file, timeout)) for entry in group]
        for _, group in groupby(entries, key=lambda entry: entry.case_id)
    ]
    results: list[CaseResult] = []
    stopped = ""
    interrupted = False
    for attempts in cases:
        for attempt in attempts:
            with _tool_errors([attempt]):
                check_contract(attempt)

    def run_alone(attempt: Attempt) -> None:
        run_kernel(attempt, _job(attempt.entry, device, inputs_file, timeout))

    try:
        with Ahead(cases, run_alone, device) as ahead:
            for index, attempts in enumerate(cases):
                if stopped:
                    break
                ahead.reach(index)
                job = _job(attempts[0].entry, device, inputs_file, timeout)
                for result in _run_case(attempts, ahead, job, outputs):
                    results.append(result)
                    on_result(result)
                    # The case's other kernels have run as well: their verdicts are kept.
                    if fail_fast and result.verdict.wrong and not stopped:
                        stopped = f"stopped by --fail-fast after {result.kernel} on {result.case}"
    except KeyboardInterrupt:
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


def _run_case(attempts: list[Attempt], ahead: Ahead, job: Job, outputs: Outputs | None) -> Iterator[CaseResult]:
    """The results of one case's kernels, in order, once all of them are there; on Ctrl-C, what there is by then."""
    try:
        open_attempts = [attempt for attempt in attempts if attempt.is_open]
        if open_attempts:
            with _tool_errors(open_attempts):
                _run_and_judge(open_attempts, ahead, job, outputs)
    except KeyboardInterrupt:
        # What a kernel got before, ERROR say, is a result so far.
        yield from (replace(a.result, reason="interrupted") if a.is_open else a.result for a in attempts)
        raise
    for attempt in attempts:
        attempt.output = None  # or else the device fills up with the outputs of all cases
    if job.device == "cuda":
        give_back_gpu_memory()
    yield from (attempt.result for attempt in attempts)


def _job(entry: PlanEntry, device: str, inputs_file: Path | None, timeout: float) -> Job:
    return Job(entry.spec, inputs_file, entry.dtype, device, entry.spec.layout if entry.spec else "split", timeout)


@contextmanager
def _tool_errors(attempts: list[Attempt]) -> Iterator[None]:
    """Out of memory and errors of the tool cost these attempts a verdict that they lack so far, and nothing else."""
    from mla_verify.execute import first_line, out_of_memory

    try:
        yield
    except (Exception, SystemExit) as error:  # no kernel's contract and no library may end the run either
        reason, is_tool = f"{type(error).__name__}: {error}", True
        if out_of_memory(error):
            reason, is_tool = f"out of memory: {first_line(error)}", False
        for attempt in attempts:
            if attempt.is_open:
                attempt.result = replace(
                    attempt.result,
                    verdict=Verdict.NOT_RUN,
                    reason=f"error of the tool: {reason}" if is_tool else reason,
                    traceback=traceback.format_exc() if is_tool else "",
                    tool_error=is_tool,
                )


def _run_and_judge(attempts: list[Attempt], ahead: Ahead, job: Job, outputs: Outputs | None) -> None:
    from mla_verify.tensors import CopyInputs

    clock = _Clock()
    inputs = ahead.with_room(replace(job, device=job.judged_on).inputs)
    clock.lap("inputs")
    # Every kernel runs before the reference allocates: a fresh buffer could otherwise hold the right answer already.
    for attempt in attempts:
        with _tool_errors([attempt]):
            if not ahead.finish(attempt):
                run_kernel(attempt, job, inputs)
    judged = [attempt for attempt in attempts if attempt.output is not None]
    clock.lap("kernels")
    if isinstance(inputs, CopyInputs):
        for attempt in judged:
            with _tool_errors([attempt]):
                assert attempt.output is not None
                judge(attempt, judge_copy(attempt.output, inputs, attempt.checks))
                _hand_on(outputs, attempt, inputs, None)
    elif judged:
        _judge_attention(judged, inputs, clock, ahead, outputs)
    clock.lap("compare")
    for attempt in judged:
        shared = {stage: seconds / len(judged) for stage, seconds in clock.laps.items() if stage != "kernels"}
        attempt.result = replace(attempt.result, seconds={**attempt.result.seconds, **shared})


def _judge_attention(
    judged: list[Attempt], inputs: AttentionInputs, clock: _Clock, ahead: Ahead, outputs: Outputs | None
) -> None:
    from mla_verify.expected import expect

    others = outputs.other_facts(attempt.entry for attempt in judged) if outputs else []
    expected = ahead.with_room(lambda: expect(inputs, [*(a.facts for a in judged if a.facts), *others]))
    clock.lap("reference")
    sizes = ahead.with_room(lambda: _fault_sizes(judged[0].entry, inputs, expected))
    clock.lap("vacuity")
    for attempt in judged:
        with _tool_errors([attempt]):
            assert attempt.output is not None and attempt.facts is not None
            compare = partial(judge_attention, attempt.output, inputs, expected, attempt.facts, sizes, attempt.checks)
            judge(attempt, ahead.with_room(compare))
            _hand_on(outputs, attempt, inputs, expected)


def _hand_on(outputs: Outputs | None, attempt: Attempt, inputs: MLAInputs, expected: Expected | None) -> None:
    """A judged output to whoever writes it or holds it against another build's."""
    if outputs is not None:
        from mla_verify.outputs import Obtained

        assert attempt.output is not None and attempt.facts is not None
        obtained = Obtained(attempt.entry, inputs, attempt.output, attempt.facts, expected)
        attempt.result = outputs.take(obtained, attempt.result)


def _fault_sizes(entry: PlanEntry, inputs: AttentionInputs, expected: Expected) -> FaultSizes:
    from mla_verify.regimes import REGIME_TABLE
    from mla_verify.vacuity import fault_sizes

    # Real activations claim nothing but that they are not all zero.
    faults = REGIME_TABLE[entry.spec.regime].shows if entry.spec else ("zeros",)
    return fault_sizes(inputs, expected, faults)


@dataclass
class _Clock:
    laps: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = now - self.last
        self.last = now
