"""Kernels of a user whose offsets are 32 bits wide, and wrap."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_verify.emulate import EmulatedKernel
from mla_verify.inputs import slots_of
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput, WriteInputs

EMULATED = EmulatedKernel()


def row_at(slots: Tensor, stride: int, width: int) -> Tensor:
    """Where the elements of each slot's row lie, [slots, width], in int32 arithmetic."""
    return (slots.int() * stride)[:, None].long() + torch.arange(width, device=slots.device)


@mla_kernel(Contract(phases=("decode",), facts=EMULATED.facts))
def decode(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """The keys of each request, read at such offsets, into a cache of their own."""
    num_pages, page_size, r = inputs.ckv_cache.shape
    stride = inputs.ckv_cache.stride(1)
    pool = inputs.ckv_cache.as_strided((num_pages * page_size * stride,), (1,))
    kpe = inputs.kpe_cache.flatten(0, 1)
    kv_lens = inputs.kv_lens.tolist()
    slots = torch.cat([slots_of(inputs.page_table, b, page_size, n) for b, n in enumerate(kv_lens)])
    page_table = torch.zeros(len(kv_lens), max(kv_lens), dtype=torch.int32, device=inputs.device)
    for b, n in enumerate(kv_lens):
        page_table[b, :n] = torch.arange(n, device=inputs.device) + sum(kv_lens[:b])
    mine = replace(
        inputs,
        ckv_cache=pool[row_at(slots, stride, r)][:, None],
        kpe_cache=kpe[slots][:, None],
        page_table=page_table,
    )
    return MLAOutput(EMULATED.run(mine).out, None)


@mla_kernel(Contract(form="write"))
def write(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    width = out.out.shape[-1]
    out.out.view(-1)[row_at(inputs.slots, width, width)] = torch.cat([inputs.ckv, inputs.kpe], dim=-1)
    return out
