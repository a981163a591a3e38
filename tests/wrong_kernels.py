"""Kernels for tests/test_kernels_command.py: an honest one that returns its LSE, and wrong ones that are built on it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mla_verify.cases import PHASES, CaseSpec
from mla_verify.emulate import EmulatedKernel
from mla_verify.formats import DTYPES
from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.tensors import AbsorbedInputs, MLAInputs, MLAOutput

EMULATED = EmulatedKernel(splits=2, tile=32)


class Honest:
    """The emulated kernel, with two splits."""

    name = "honest"
    contract = Contract("absorbed", DTYPES, PHASES, facts=EMULATED.facts, returns_lse=True)

    def why_unavailable(self, device: str) -> str | None:
        return None

    def why_not(self, spec: CaseSpec) -> str | None:
        return None

    def version(self) -> str:
        return "emulated"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return self.spoil(EMULATED.run(inputs), out)

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return MLAOutput(self.wrong_out(result.out), result.lse)

    def wrong_out(self, out: Tensor) -> Tensor:
        return out

    def ran(self) -> str:
        return "2 splits"


class HonestMHA(Honest):
    name = "honest-mha"
    contract = replace(Honest.contract, form="mha")


class NoLSE(Honest):
    name = "no-lse"
    contract = replace(Honest.contract, returns_lse=False)

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return MLAOutput(self.wrong_out(result.out), None)


# Wrong numbers


class Scaled(Honest):
    name = "scaled"

    def wrong_out(self, out: Tensor) -> Tensor:
        return (out.double() * 1.005).to(out.dtype)


class Zeroed(Honest):
    name = "zeroed"

    def wrong_out(self, out: Tensor) -> Tensor:
        return torch.zeros_like(out)


class OtherRow(Honest):
    name = "other-row"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out.roll(1, dims=0)


class OtherHead(Honest):
    name = "other-head"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out.roll(1, dims=1)


class OneElement(Honest):
    """Wrong in row 2, head 5, dim 77, and nowhere else."""

    name = "one-element"

    def wrong_out(self, out: Tensor) -> Tensor:
        out[2, 5, 77] = 3.5
        return out


class Base2LSE(Honest):
    name = "base2-lse"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        assert result.lse is not None
        return MLAOutput(result.out, result.lse * math.log2(math.e))


class LeavesRowUnwritten(Honest):
    name = "leaves-row"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        assert result.lse is not None and out.lse is not None
        out.out[:-1], out.lse[:] = result.out[:-1], result.lse
        return out


class ReadsPageTail(Honest):
    """Masks the tail of the last page in the scores, and lets 0 times its values into the sum."""

    name = "reads-page-tail"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        result = EMULATED.run(inputs)
        for b in range(inputs.num_requests):
            used = -(-int(inputs.kv_lens[b]) // inputs.ckv_cache.shape[1])
            pages = inputs.ckv_cache[inputs.page_table[b, :used].long()].flatten(0, 1)
            start, end = inputs.q_range(b)
            result.out[start:end] += 0 * pages[int(inputs.kv_lens[b]) :].sum(0)
        return result


class ReadsTableTail(Honest):
    """Gathers every page that the table has an entry for, and cuts off what is too much."""

    name = "reads-table-tail"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        _ = inputs.ckv_cache[inputs.page_table.long()]
        return EMULATED.run(inputs)


# Damage to the inputs


class ScalesQuery(Honest):
    name = "scales-query"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        result = EMULATED.run(inputs)
        inputs.q_nope.mul_(inputs.sm_scale)
        return result


class CleansCache(Honest):
    """Takes the NaN out of the cache's tails: the output is right, and the user's cache is another."""

    name = "cleans-cache"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        inputs.ckv_cache.nan_to_num_()
        return EMULATED.run(inputs)


class TransposesQuery(Honest):
    name = "transposes-query"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        result = EMULATED.run(inputs)
        inputs.q_pe.transpose_(0, 1)
        return result


# Results of another kind


class FlattensHeads(Honest):
    name = "flattens-heads"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out.flatten(1)


class OneHeadForAll(Honest):
    """Would be broadcast by a careless comparison."""

    name = "one-head"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out[:, :1]


class ReturnsFp32(Honest):
    name = "returns-fp32"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out.float()


class OnAnotherDevice(Honest):
    name = "another-device"

    def wrong_out(self, out: Tensor) -> Tensor:
        return out.to("meta")


class ReturnsNumpy(Honest):
    name = "returns-numpy"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return MLAOutput(result.out.float().numpy(), result.lse)  # type: ignore[arg-type]


class ReturnsTuple(Honest):
    name = "returns-tuple"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return result.out, result.lse


class ReturnsNothing(Honest):
    name = "returns-nothing"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return None


class ForgetsLSE(Honest):
    name = "forgets-lse"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return MLAOutput(result.out, None)


class UndeclaredLSE(NoLSE):
    name = "undeclared-lse"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        return result


# No result


class Raises(Honest):
    name = "raises"
    error: BaseException = RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_")

    def run(self, inputs: MLAInputs, out: MLAOutput) -> object:
        raise self.error


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
    """The user presses Ctrl-C while the kernel runs its first batch of two."""

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

    def why_not(self, spec: CaseSpec) -> str | None:
        return f"{spec.num_heads} heads are not a multiple of 7"


class SupportCheckRaises(Honest):
    name = "support-check-raises"

    def why_not(self, spec: CaseSpec) -> str | None:
        raise KeyError("sm_75")


def _no_facts(dtype: str) -> RoundingFacts:
    raise LookupError(f"no rounding facts for {dtype}")


class WithoutFacts(Honest):
    name = "without-facts"
    contract = replace(Honest.contract, facts=_no_facts)


def register(monkeypatch: pytest.MonkeyPatch, *kernels: type[Honest]) -> None:
    """Make these the only kernels there are."""
    table = {kernel.name: f"tests.wrong_kernels:{kernel.__name__}" for kernel in kernels}
    monkeypatch.setattr("mla_verify.kernels.KERNELS", table)
