"""Outputs of one case -> what is found of each: one reference, then each comparison. Here or in other processes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeVar

from mla_verify.judge import Judgement, judge_attention, judge_copy
from mla_verify.watch import Watch
from mla_verify.workers import ask, close_workers

if TYPE_CHECKING:
    from mla_verify.calls import Job
    from mla_verify.cases import CaseSpec
    from mla_verify.expected import Expected
    from mla_verify.kernels.contract import RoundingFacts
    from mla_verify.results import Check
    from mla_verify.tensors import AttentionInputs, MLAInputs, MLAOutput
    from mla_verify.vacuity import FaultSizes

_T = TypeVar("_T")


@dataclass(frozen=True)
class Exhibit:
    """One kernel's result: its output, the roundings it declares, and checks that were made elsewhere."""

    output: MLAOutput
    facts: RoundingFacts
    checks: tuple[Check, ...]


@dataclass(frozen=True)
class Finding:
    """What is found of one exhibit, or why nothing is."""

    judgement: Judgement | None
    reason: str = ""
    traceback: str = ""  # of an error of the tool

    @classmethod
    def of_error(cls, error: BaseException) -> Finding:
        """Out of memory, or an error of ours. Called where the error is handled."""
        from mla_verify.execute import first_line, out_of_memory

        if out_of_memory(error):
            return cls(None, f"out of memory: {first_line(error)}")
        return cls(None, f"error of the tool: {type(error).__name__}: {error}", traceback.format_exc())


@dataclass(frozen=True)
class Judged:
    """One finding for each exhibit, in their order; seconds of the stages; of attention, the reference."""

    findings: tuple[Finding, ...]
    seconds: dict[str, float]
    expected: Expected | None = None


@dataclass
class Clock:
    """Seconds by stage."""

    laps: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        """What has passed since the last lap was for this stage."""
        now = time.perf_counter()
        self.laps[stage] = now - self.last
        self.last = now


class Room(Protocol):
    """How to do what takes memory."""

    def __call__(self, work: Callable[[], _T], /) -> _T: ...


def _at_once(work: Callable[[], _T], /) -> _T:
    return work()


def judge_case(
    spec: CaseSpec | None,
    inputs: MLAInputs,
    exhibits: Sequence[Exhibit],
    more_facts: Sequence[RoundingFacts] = (),
    room: Room = _at_once,
) -> Judged:
    """spec: None for an --inputs file. more_facts: whose noise is wanted, too.

    Raises what the reference raises; what a comparison raises is its exhibit's finding.
    """
    from mla_verify.expected import expect
    from mla_verify.tensors import CopyInputs

    clock = Clock()
    if isinstance(inputs, CopyInputs):
        findings = [_finding(partial(judge_copy, e.output, inputs, e.checks), room) for e in exhibits]
        clock.lap("compare")
        return Judged(tuple(findings), clock.laps)
    expected = room(partial(expect, inputs, [*(e.facts for e in exhibits), *more_facts]))
    clock.lap("reference")
    sizes = room(partial(_fault_sizes, spec, inputs, expected))
    clock.lap("vacuity")
    findings = [
        _finding(partial(judge_attention, e.output, inputs, expected, e.facts, sizes, e.checks), room) for e in exhibits
    ]
    clock.lap("compare")
    return Judged(tuple(findings), clock.laps, expected)


def _finding(judge: Callable[[], Judgement], room: Room) -> Finding:
    try:
        return Finding(room(judge))
    except Exception as error:
        return Finding.of_error(error)


def _fault_sizes(spec: CaseSpec | None, inputs: AttentionInputs, expected: Expected) -> FaultSizes:
    from mla_verify.regimes import REGIME_TABLE
    from mla_verify.vacuity import fault_sizes

    # Real activations claim nothing but that they are not all zero.
    return fault_sizes(inputs, expected, REGIME_TABLE[spec.regime].shows if spec else ("zeros",))


# One core each, and no GPU.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


class Judges:
    """Processes that judge cases, each from what its inputs are made of. A context manager: leaving it ends them."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count)
        self._futures: list[Future[Judged]] = []

    def submit(self, job: Job, exhibits: Sequence[Exhibit]) -> Future[Judged]:
        """job: on the CPU."""
        self._futures = [future for future in self._futures if not future.done()]
        self._futures.append(self._executor.submit(_ask, job, exhibits))
        return self._futures[-1]

    def __enter__(self) -> Judges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        while any(future.running() for future in self._futures):
            close_workers()
            time.sleep(0.05)


def _ask(job: Job, exhibits: Sequence[Exhibit]) -> Judged:
    return ask(_ENVIRONMENT, _judge_there, job, exhibits, watch=Watch("the judge"))


def _judge_there(job: Job, exhibits: Sequence[Exhibit]) -> Judged:
    clock = Clock()
    inputs = job.inputs()
    clock.lap("inputs")
    judged = judge_case(job.spec, inputs, exhibits)
    return Judged(judged.findings, clock.laps | judged.seconds)  # the reference stays here
