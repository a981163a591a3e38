"""Kernels that return nothing on some case: they raise, they refuse it, or the user stops them."""

from __future__ import annotations

from dataclasses import replace

from mla_verify.cases import CaseSpec
from mla_verify.kernels.contract import RoundingFacts
from mla_verify.tensors import AbsorbedInputs, MLAOutput
from tests.wrong_kernels import EMULATED, Honest


class Raises(Honest):
    name = "raises"
    error: BaseException = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_")

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        raise type(self.error)(*self.error.args)  # an exception that is raised again piles up tracebacks


class Exits(Raises):
    name = "exits"
    error = SystemExit(0)


class OutOfMemory(Raises):
    name = "out-of-memory"
    error = MemoryError("no 4 TiB here")


class CPUAllocatorFails(Raises):
    name = "allocator-fails"
    error = RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried")


class Interrupted(Raises):
    """The user presses Ctrl-C while the kernel runs its first batch of two or more."""

    name = "interrupted"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        if inputs.num_requests > 1:
            raise KeyboardInterrupt
        return EMULATED.run(inputs)


class CannotSayWhatRan(Honest):
    name = "cannot-say"

    def ran(self) -> str:
        raise AttributeError("no attribute '_last_backend'")


class TakesNothing(Honest):
    name = "takes-nothing"

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        return f"{spec.num_heads} heads are not a multiple of 7"


class SupportCheckRaises(Honest):
    name = "support-check-raises"

    def why_not(self, spec: CaseSpec, device: str) -> str | None:
        raise KeyError("sm_75")


def _no_facts(dtype: str) -> RoundingFacts:
    raise LookupError(f"no rounding facts for {dtype}")


class WithoutFacts(Honest):
    name = "without-facts"
    contract = replace(Honest.contract, facts=_no_facts)


class Picky(Honest):
    """Takes bf16 decode with 64-token pages alone."""

    name = "picky"
    contract = replace(Honest.contract, dtypes=("bf16",), phases=("decode",), page_sizes=(64,))
