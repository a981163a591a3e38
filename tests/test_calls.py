"""What is asked of a kernel in its own process: whose inputs, when the process is done with, what memory it keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mla_verify import calls, memory
from mla_verify.calls import Job
from mla_verify.cases import CaseSpec
from mla_verify.kernels import KERNELS, load_kernel
from mla_verify.kernels.contract import KernelBase
from mla_verify.kernels.torch_sdpa import TorchAbsorbed
from mla_verify.results import Verdict
from mla_verify.tensors import MLAInputs
from mla_verify.workers import close_workers
from tests import failing_kernels as failing
from tests.kernels_helper import DECODE, SINGLE, cases, verify
from tests.wrong_kernels import Honest


def job(case: str = SINGLE, device: str = "cpu") -> Job:
    spec = CaseSpec.parse(case)
    return Job(spec, None, spec.dtype, device, spec.layout)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_that_comes_with_the_tool_has_a_process_of_its_own_on_a_gpu(name: str) -> None:
    assert load_kernel(name, "cuda").own_process("cuda") is not None


def test_torch_kernels_run_in_the_tools_own_process_on_a_cpu_and_give_the_same_in_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert TorchAbsorbed().own_process("cpu") is None
    monkeypatch.setattr(KernelBase, "own_process", lambda kernel, device: {})
    # Only here: the worker has the kernel as it is.
    monkeypatch.setattr(TorchAbsorbed, "run", lambda *args: pytest.fail("it ran in the tool's own process"))
    try:
        run = verify(tmp_path, "--kernel", "torch-absorbed", *cases(SINGLE, DECODE))
    finally:
        close_workers()
    assert run.verdicts == [Verdict.PASS] * 2


def test_inputs_are_made_once_for_all_layouts_and_let_go_before_the_next_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    make = Job.inputs

    def spied(self: Job) -> MLAInputs:
        assert not calls._made
        assert self.spec is not None
        made.append(self.spec.id)
        return make(self)

    monkeypatch.setattr(calls, "_made", {})
    monkeypatch.setattr(Job, "inputs", spied)
    for one in (job(SINGLE), replace(job(SINGLE), layout="fused"), job(DECODE), job(DECODE), job(SINGLE)):
        calls._inputs(one)
    assert made == [SINGLE, DECODE, SINGLE]


@pytest.mark.parametrize(
    ("kernel", "device", "retires"),
    [
        (Honest, "cuda", False),
        (failing.Raises, "cuda", True),
        (failing.Raises, "cpu", False),
        (failing.Exits, "cuda", True),
        (failing.OutOfMemory, "cuda", True),
        (failing.OutOfMemory, "cpu", True),
        (failing.TakesNothing, "cuda", False),
        (failing.CannotSayWhatRan, "cuda", True),
    ],
)
def test_a_process_is_done_with_after_an_error_on_a_gpu_and_after_running_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, kernel: type[Honest], device: str, retires: bool
) -> None:
    retired: list[bool] = []
    monkeypatch.setattr(calls, "retire", lambda: retired.append(True))
    inputs = job(SINGLE).inputs()
    calls._execute(kernel(), job(SINGLE, device), inputs)  # type: ignore[arg-type]
    assert bool(retired) is retires


def test_a_process_is_done_with_when_our_own_code_failed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    retired: list[bool] = []
    monkeypatch.setattr(calls, "retire", lambda: retired.append(True))
    with pytest.raises(LookupError):
        calls._execute(failing.WithoutFacts(), job(SINGLE), job(SINGLE).inputs())  # type: ignore[arg-type]
    assert retired


@pytest.mark.parametrize(("reserved", "allocated", "given"), [(9, 1, True), (9, 8.5, False), (0.5, 0, False)])
def test_memory_of_a_gpu_is_given_back_where_much_is_kept_and_not_used(
    monkeypatch: pytest.MonkeyPatch, reserved: float, allocated: float, given: bool
) -> None:
    done: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * memory.GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated * memory.GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append(True))
    memory.give_back_gpu_memory()
    assert bool(done) is given
    memory.give_back_gpu_memory(keep=0)
    assert done
