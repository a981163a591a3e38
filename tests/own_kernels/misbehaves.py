"""Kernels of a user that return something of another kind, or nothing at all. Most are right on a batch of one."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from dataclasses import replace

import torch

from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput

EMULATED = EmulatedKernel()
DECODE = Contract(phases=("decode",), facts=EMULATED.facts)


def attend(inputs: AbsorbedInputs) -> MLAOutput:
    return MLAOutput(EMULATED.run(inputs).out, None)


@mla_kernel(DECODE)
def flattens_heads(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    result = attend(inputs)
    return replace(result, out=result.out.flatten(1)) if inputs.num_requests > 1 else result


@mla_kernel(DECODE)
def returns_fp32(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    result = attend(inputs)
    return replace(result, out=result.out.float()) if inputs.num_requests > 1 else result


@mla_kernel(DECODE)
def returns_none(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput | None:
    """Writes into `out`, rightly, and forgets to return it."""
    out.out.copy_(attend(inputs).out)
    return None if inputs.num_requests > 1 else MLAOutput(out.out, None)


@mla_kernel(DECODE)
def raises(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if inputs.num_requests > 1:
        raise NotImplementedError("no batches yet [WIP]\nsee the issue")  # the line that the report has to show
    return attend(inputs)


@mla_kernel(DECODE)
def scales_the_query_in_place(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    result = attend(inputs)
    if inputs.num_requests > 1:
        inputs.q_pe.mul_(inputs.sm_scale)
    return result


@mla_kernel(DECODE)
def writes_past_its_output(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """One row too many, as a grid that is rounded up to whole blocks writes without a mask."""
    if inputs.num_requests > 1:
        tokens, heads, width = out.out.shape
        out.out.as_strided((tokens + 1, heads, width), out.out.stride())[-1] = 0.0
    return attend(inputs)


@mla_kernel(DECODE)
def segfaults(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if inputs.num_requests > 1:
        print("what stands in a buffer")
        for step in range(20):
            print("step", step, file=sys.stderr)
        ctypes.string_at(0)
    return attend(inputs)


@mla_kernel(DECODE)
def exits_at_once(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if inputs.num_requests > 1:
        print("assertion failed in kernel.cu:17", flush=True)
        os._exit(3)
    return attend(inputs)


@mla_kernel(DECODE)
def exits_politely(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if inputs.num_requests > 1:
        sys.exit(0)
    return attend(inputs)


@mla_kernel(DECODE)
def prints(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    print("autotuned: 2 warps")
    print("deprecated: sm_70", file=sys.stderr)
    return attend(inputs)


@mla_kernel(replace(DECODE, phases=("decode", "prefill")))
def claims_prefill(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    if int(inputs.qo_indptr.diff().max()) > 1:
        raise ValueError("this kernel takes one query token a request")
    return attend(inputs)


@mla_kernel(replace(DECODE, returns_lse=True))
def claims_lse(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return attend(inputs)


@mla_kernel(DECODE)
def leaves_nan(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Skips its last row: `out` was full of NaN."""
    out.out[:-1] = attend(inputs).out[:-1]
    return MLAOutput(out.out, None) if inputs.num_requests > 1 else attend(inputs)


@mla_kernel(DECODE)
def changes_torchs_default_dtype(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Right, and leaves a setting behind that concerns everything else in its process."""
    torch.set_default_dtype(torch.float64)
    return attend(inputs)


# Functions as Python has them, besides `def`


def _attend_in(tile: int, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return MLAOutput(EmulatedKernel(tile=tile).run(inputs).out, None)


partial = mla_kernel(DECODE)(functools.partial(_attend_in, 64))


class Attention:
    contract = DECODE

    def __call__(self, inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
        return attend(inputs)


called_object = Attention()
