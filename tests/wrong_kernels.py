"""Kernels that return something: an honest one, with its LSE, and wrong ones that are built on it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.emulate import EmulatedKernel
from mla_verify.formats import DTYPES
from mla_verify.kernels.contract import Contract, KernelBase
from mla_verify.tensors import AbsorbedInputs, MLAOutput

EMULATED = EmulatedKernel(splits=2, tile=32)


class Honest(KernelBase):
    """The emulated kernel, with two splits."""

    name = "honest"
    contract = Contract("absorbed", DTYPES, facts=EMULATED.facts, returns_lse=True)

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


class OtherRounding(Honest):
    """Honest, too, with another noise: one part, probabilities that stay fp32."""

    name = "other-rounding"
    emulated = EmulatedKernel(tile=64, rounds_p=False)
    contract = replace(Honest.contract, facts=emulated.facts)

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        return self.emulated.run(inputs)


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


class ScaledMHA(Scaled):
    name = "scaled-mha"
    contract = HonestMHA.contract


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
    """Wrong in row 3, head 5, dim 77, and nowhere else."""

    name = "one-element"

    def wrong_out(self, out: Tensor) -> Tensor:
        out[3:4, 5, 77] = 3.5  # a request alone is shorter
        return out


class Base2LSE(Honest):
    name = "base2-lse"

    def spoil(self, result: MLAOutput, out: MLAOutput) -> object:
        assert result.lse is not None
        return MLAOutput(result.out, result.lse * math.log2(math.e))


class LeavesRowUnwritten(Honest):
    """Forgets the last row of out."""

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


class SqueezesLengths(Honest):
    """Turns the lengths of a batch of one into a scalar."""

    name = "squeezes-lengths"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        result = EMULATED.run(inputs)
        inputs.kv_lens.squeeze_()
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


class RaisesApart(Honest):
    """Right on views of fused tensors, and on nothing else."""

    name = "raises-apart"

    def run(self, inputs: AbsorbedInputs, out: MLAOutput) -> object:
        if inputs.q_nope.is_contiguous():
            raise NotImplementedError("fused tensors only")
        return EMULATED.run(inputs)
