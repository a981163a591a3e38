"""A kernel of your own under mla-verify: copy this file, put your kernel in, say what it claims.

mla-verify kernels --kernel examples/my_kernel.py:my_decode --kernel examples/my_kernel.py:my_cache_write
"""

from __future__ import annotations

import math

import torch

from mla_verify.kernels import Contract, RoundingFacts, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MLAOutput, WriteInputs


def rounding_facts(dtype: str) -> RoundingFacts:
    """What my_decode rounds, for cases of this dtype. Declare what the code does, no more: it excuses errors."""
    return RoundingFacts(
        out_dtype=dtype,
        p_dtype=dtype,  # P is cast to the cache's dtype before P.V
        rowsum="unrounded",  # the softmax denominator sums P before that cast
        tile=None,  # one product over all keys
        sources=("examples/my_kernel.py, my_decode",),
    )


# What is left out claims everything: all dtypes, any page size, head count and strides, NaN behind the last key, ...
CONTRACT = Contract(
    form="absorbed",
    phases=("decode",),
    facts=rounding_facts,
    returns_lse=True,
    lse_base="2",  # log2 of the sum of exponentials: converted before it is compared
)


@mla_kernel(CONTRACT)
def my_decode(inputs: AbsorbedInputs, out: MLAOutput) -> MLAOutput:
    """Decode without concatenation. `inputs` are described in mla_verify/tensors.py; `out` is full of NaN."""
    assert out.lse is not None
    page_size = inputs.ckv_cache.shape[1]
    for request, kv_len in enumerate(inputs.kv_lens.tolist()):
        rows = slice(int(inputs.qo_indptr[request]), int(inputs.qo_indptr[request + 1]))
        if kv_len == 0:  # nothing to attend to: 0, and log of nothing
            out.out[rows] = 0.0
            out.lse[rows] = float("-inf")
            continue
        # Only this request's pages, and only kv_len of their slots: what lies behind is NaN.
        pages = inputs.page_table[request, : -(-kv_len // page_size)].long()
        ckv = inputs.ckv_cache[pages].flatten(0, 1)[:kv_len]
        kpe = inputs.kpe_cache[pages].flatten(0, 1)[:kv_len]
        scores = inputs.q_nope[rows].float() @ ckv.float().T + inputs.q_pe[rows].float() @ kpe.float().T
        scores *= inputs.sm_scale
        top = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - top)
        total = p.sum(-1, keepdim=True)
        out.out[rows] = (p.to(ckv.dtype).float() @ ckv.float() / total).to(ckv.dtype)
        out.lse[rows] = ((top + total.log()) / math.log(2)).squeeze(-1)
    return out


WRITE_CONTRACT = Contract(form="write")


@mla_kernel(WRITE_CONTRACT)
def my_cache_write(inputs: WriteInputs, out: MLAOutput) -> MLAOutput:
    """Write latent and rope part straight into their slots of the cache, which is `out.out`."""
    cache = out.out.view(-1, out.out.shape[-1])  # pages in order: slot s is row s
    latent = inputs.ckv.shape[-1]
    cache[inputs.slots, :latent] = inputs.ckv
    cache[inputs.slots, latent:] = inputs.kpe
    return out
