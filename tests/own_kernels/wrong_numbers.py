"""Kernels of a user with one mistake each: an emulated kernel with wrong inputs, or with a spoiled result."""

from __future__ import annotations

from dataclasses import replace

import torch

from examples.my_kernel import CONTRACT, my_decode
from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput

EMULATED = EmulatedKernel(splits=2, tile=32)
DECODE = Contract(phases=("decode",), facts=EMULATED.facts, returns_lse=True)


@mla_kernel(DECODE)
def honest(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return EMULATED.run(inputs)


@mla_kernel(DECODE)
def drops_last_key(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return EMULATED.run(replace(inputs, kv_lens=inputs.kv_lens - 1))


@mla_kernel(DECODE)
def scales_output(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    result = EMULATED.run(inputs)
    return replace(result, out=(result.out.double() * 1.005).to(result.out.dtype))


@mla_kernel(DECODE)
def swaps_rope_halves(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """As when a kernel takes the two halves of RoPE's pairs in the other order."""
    return EMULATED.run(replace(inputs, q_pe=torch.cat(inputs.q_pe.chunk(2, dim=-1)[::-1], dim=-1)))


@mla_kernel(DECODE)
def ignores_page_table(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Reads pages one after the other; the first is left out, since engines use it for padding."""
    first = 1
    page_table = inputs.page_table.clone()
    for request, kv_len in enumerate(inputs.kv_lens.tolist()):
        count = -(-kv_len // inputs.ckv_cache.shape[1])
        page_table[request, :count] = torch.arange(first, first + count)
        first += count
    return EMULATED.run(replace(inputs, page_table=page_table))


@mla_kernel(replace(CONTRACT, lse_base="e"))
def base2_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return my_decode(inputs, out)


@mla_kernel(DECODE)
def one_nan(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    result = EMULATED.run(inputs)
    result.out[-1, 3, 77] = float("nan")
    return result
