"""Kernels of a user whose conventions are their own, declared or not."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from mla_verify.conventions import visible_keys
from mla_verify.emulate import EmulatedKernel
from mla_verify.kernels import Contract, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput

EMULATED = EmulatedKernel()
LSE = Contract(facts=EMULATED.facts, returns_lse=True)
NO_LSE = Contract(facts=EMULATED.facts)


def attend(inputs: AbsorbedInputs) -> tuple[Tensor, Tensor]:
    """out and lse [T, H], natural."""
    result = EMULATED.run(inputs)
    assert result.lse is not None
    return result.out, result.lse


# LSE


@mla_kernel(replace(LSE, lse_base="2", lse_layout="HT"))
def base2_heads_first(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    o, lse = attend(inputs)
    return MLAOutput(o, (lse / math.log(2)).T.contiguous())


@mla_kernel(replace(LSE, lse_base="2"))
def heads_first_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return base2_heads_first(inputs, out)


# Queries that see no key


@mla_kernel(replace(LSE, empty_lse="+inf"))
def plus_inf(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    o, lse = attend(inputs)
    return MLAOutput(o, lse.masked_fill(lse.isneginf(), math.inf))


@mla_kernel(LSE)
def plus_inf_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return plus_inf(inputs, out)


@mla_kernel(replace(LSE, empty_lse="+inf"))
def minus_inf_where_plus_is_declared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return MLAOutput(*attend(inputs))


@mla_kernel(replace(NO_LSE, empty_out="any"))
def garbage_rows(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Divides 0 by 0 in one row without keys, and leaves what was there in the others."""
    o, _ = attend(inputs)
    empty = visible_keys(inputs) == 0
    o[empty] = 7.0
    o[empty.nonzero()[:1].flatten()] = math.nan
    return MLAOutput(o, None)


@mla_kernel(NO_LSE)
def garbage_rows_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return garbage_rows(inputs, out)


# Slots after the last key


@mla_kernel(Contract(phases=("decode",), finite_tail=True))
def whole_pages(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Reads whole pages, and gives what lies behind the last key the weight 0: 0 times NaN is NaN."""
    page_size = inputs.ckv_cache.shape[1]
    for request, kv_len in enumerate(inputs.kv_lens.tolist()):
        pages = inputs.page_table[request, : -(-kv_len // page_size)].long()
        ckv = inputs.ckv_cache[pages].flatten(0, 1).float()
        kpe = inputs.kpe_cache[pages].flatten(0, 1).float()
        scores = (inputs.q_nope[request].float() @ ckv.T + inputs.q_pe[request].float() @ kpe.T) * inputs.sm_scale
        scores[:, kv_len:] = -math.inf
        out.out[request] = (scores.softmax(-1) @ ckv).to(out.out.dtype)
    return MLAOutput(out.out, None)


@mla_kernel(Contract(phases=("decode",)))
def whole_pages_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return whole_pages(inputs, out)


# Strides


@mla_kernel(replace(NO_LSE, strides="contiguous"))
def takes_contiguous(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return takes_contiguous_undeclared(inputs, out)


@mla_kernel(NO_LSE)
def takes_contiguous_undeclared(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Computes where row and head of q_pe lie from its shape, as a kernel that is passed no strides does."""
    tokens, heads, width = inputs.q_pe.shape
    q_pe = inputs.q_pe.as_strided((tokens, heads, width), (heads * width, width, 1))
    return MLAOutput(attend(replace(inputs, q_pe=q_pe))[0], None)


@mla_kernel(replace(NO_LSE, facts=EmulatedKernel(splits=4).facts))
def splits_by_layout(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Right in both layouts, by another way in each: a fallback that nobody was told of."""
    splits = 1 if inputs.q_pe.is_contiguous() else 4
    return MLAOutput(EmulatedKernel(splits=splits).run(inputs).out, None)


# Limits


@mla_kernel(replace(NO_LSE, phases=("decode",), dtypes=("bf16",), num_heads=(8, 128), page_sizes=(32, 64)))
def limited(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    heads, page_size = inputs.q_nope.shape[1], inputs.ckv_cache.shape[1]
    assert heads in (8, 128) and page_size in (32, 64)
    return MLAOutput(attend(inputs)[0], None)


@mla_kernel(replace(LSE, lse_base="2"))
def base2_declared_and_natural(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    return MLAOutput(*attend(inputs))
