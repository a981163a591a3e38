"""Merged kernels whose parts and merges are torch's: a right one, and wrong ones that are built on it."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels.contract import Contract, RoundingFacts
from mla_verify.kernels.merge_parts import CHUNK, MERGED_PHASES, MergedKernel
from mla_verify.tensors import MHAInputs, MLAOutput

PARTS = EmulatedKernel(tile=32)
State = tuple[Tensor, Tensor]


def merged_facts(dtype: str, parts: EmulatedKernel = PARTS, chunk: int = CHUNK) -> RoundingFacts:
    return replace(parts.facts(dtype), chunk=chunk)


class Merged(MergedKernel):
    """Emulated attention over each part; merged in fp32, each result stored in the case's dtype."""

    name = "merged"
    parts = PARTS
    factor = 1.0  # of the LSEs, as the merge takes them
    contract = Contract(form="mha", phases=MERGED_PHASES, facts=merged_facts, returns_lse=True)

    def attend(self, part: MHAInputs) -> State:
        done = self.parts.run(part)
        assert done.lse is not None
        return done.out, done.lse * self.factor

    def merge(self, part: State, merged: State) -> State:
        (out_a, a), (out_b, b) = part, merged
        top = torch.maximum(a, b)
        weight_a, weight_b = (a - top).exp(), (b - top).exp()
        total = weight_a + weight_b
        out = (weight_a / total)[..., None] * out_a.float() + (weight_b / total)[..., None] * out_b.float()
        return out.to(out_a.dtype), top + total.log()


class NoLSE(Merged):
    """Returns no LSE, which would show a wrong base by itself."""

    name = "merged-no-lse"
    contract = replace(Merged.contract, returns_lse=False)

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        return MLAOutput(self.spoil(super().run(inputs, out).out), None)

    def spoil(self, out: Tensor) -> Tensor:
        return out


class Base2AsNatural(NoLSE):
    name = "base2-as-natural"
    factor = math.log2(math.e)


class NaturalAsBase2(NoLSE):
    name = "natural-as-base2"
    factor = math.log(2)


class Scaled(NoLSE):
    name = "merged-scaled"

    def spoil(self, out: Tensor) -> Tensor:
        return (out.double() * 1.01).to(out.dtype)


class DropsAChunk(NoLSE):
    """Leaves out the second chunk of the cached keys."""

    name = "drops-a-chunk"

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        self.seen = 0
        return super().run(inputs, out)

    def merge(self, part: State, merged: State) -> State:
        self.seen += 1
        return merged if self.seen == 2 else super().merge(part, merged)


class EmptyPartIsNaN(NoLSE):
    """Takes the parts of one chunk together first: two empty ones give exp(-inf - -inf)."""

    name = "empty-part-is-nan"

    def merge(self, part: State, merged: State) -> State:
        nothing = torch.zeros_like(part[0]), torch.full_like(part[1], -math.inf)
        return super().merge(super().merge(nothing, part), merged)


class ReturnsBase2(Merged):
    """Right, and its LSE too, but for the base that it is returned in."""

    name = "returns-base2"

    def run(self, inputs: MHAInputs, out: MLAOutput) -> MLAOutput:
        done = super().run(inputs, out)
        assert done.lse is not None
        return MLAOutput(done.out, done.lse * math.log2(math.e))
