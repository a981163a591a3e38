"""Running ahead of the tool on a GPU: in order, a few cases, large ones alone; and who has the memory. Needs no GPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from mla_verify.ahead import Ahead
from mla_verify.attempt import Attempt
from mla_verify.cases import CaseSpec
from mla_verify.plan import PlanEntry
from mla_verify.results import CaseResult, Verdict
from tests.fakes import Absorbed


class InWorker(Absorbed):
    def own_process(self, device: str) -> dict[str, str]:  # type: ignore[override]
        return {}


SMALL = "decode-absorbed-h16-q1.kv64-p64-bf16-normal-s7"
LARGE = "decode-absorbed-h128-q1.kv262144-p64-bf16-normal-s7"
FAR = SMALL.replace("-s7", "-far31-s7")


def attempts(*cases: str) -> list[list[Attempt]]:
    """For each case, two kernels on it. Every case has an id of its own: that is its seed."""
    found = []
    for number, case in enumerate(cases):
        spec = CaseSpec.parse(case).with_seed(number)
        entries = [
            PlanEntry(spec, spec.id, kernel, "", spec.form, spec.dtype, spec.phase)
            for kernel in (InWorker(), InWorker())
        ]
        found.append([Attempt(entry, CaseResult(spec.id, entry.kernel.name, Verdict.NOT_RUN, "")) for entry in entries])
    return found


def begun(cases: Sequence[Sequence[Attempt]], reached: Sequence[int]) -> list[list[int]]:
    """After each of `reached`, the numbers of the cases that have run so far, by kernel call."""
    ran: list[int] = []
    after = []
    with Ahead(cases, lambda attempt: ran.append(attempt.entry.spec.seed), "cuda") as ahead:  # type: ignore[union-attr]
        for index in reached:
            ahead.reach(index)
            ahead._executor.submit(lambda: None).result()  # one thread: what came before it is done
            after.append(list(ran))
    return after


def test_kernels_on_a_gpu_run_two_cases_ahead_in_order() -> None:
    assert begun(attempts(*[SMALL] * 5), [0, 1, 4]) == [
        [0, 0, 1, 1, 2, 2],
        [0, 0, 1, 1, 2, 2, 3, 3],
        [0, 0, 1, 1, 2, 2, 3, 3, 4, 4],
    ]


@pytest.mark.parametrize("large", [LARGE, FAR])
def test_no_case_runs_while_a_large_one_is_judged_nor_a_large_one_ahead(large: str) -> None:
    assert begun(attempts(SMALL, large, SMALL, SMALL), [0, 1, 2]) == [
        [0, 0],
        [0, 0, 1, 1],
        [0, 0, 1, 1, 2, 2, 3, 3],
    ]


def test_an_attempt_that_has_its_verdict_is_not_run() -> None:
    (first, second), *others = attempts(SMALL, SMALL)
    first.result = replace(first.result, verdict=Verdict.UNSUPPORTED, reason="pages")
    assert begun([[first, second], *others], [0]) == [[0, 1, 1]]


# Memory


def test_the_tool_tries_again_when_the_kernel_that_ran_ahead_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, tried = threading.Event(), threading.Event()
    given_back: list[int] = []
    monkeypatch.setattr("mla_verify.ahead.give_back_gpu_memory", lambda keep: given_back.append(keep))

    def run(attempt: Attempt) -> None:
        taken.set()
        assert tried.wait(30)  # holds all there is, until the tool has run out of it
        taken.clear()

    def make() -> str:
        if taken.is_set():
            tried.set()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return "made"

    cases = attempts(SMALL)
    with Ahead([[cases[0][0]]], run, "cuda") as ahead:
        ahead.reach(0)
        assert taken.wait(30)
        assert ahead.with_room(make) == "made"
    assert given_back == [0]


def test_the_tool_tries_twice_and_no_more_and_for_no_other_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_verify.ahead.give_back_gpu_memory", lambda keep: None)
    calls: list[type[Exception]] = []

    def fail(error: type[Exception]) -> None:
        calls.append(error)
        raise error("no 4 TiB here")

    with Ahead([], lambda attempt: None, "cuda") as ahead:
        for error in (MemoryError, ZeroDivisionError):
            with pytest.raises(error):
                ahead.with_room(lambda error=error: fail(error))  # type: ignore[misc]
    assert calls == [MemoryError, MemoryError, ZeroDivisionError]
