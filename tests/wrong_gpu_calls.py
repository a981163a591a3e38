"""The GPU kernels of the table, called as they must not be: each function here is wrong in one way, under the kernel's
own contract. `right_*` takes the same way through and changes nothing.

`mla-verify kernels --kernel tests/wrong_gpu_calls.py:scale_flashinfer_mla_fa2 --case ...`. KERNELS has the names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mla_verify.kernels import load_kernel, mla_kernel
from mla_verify.tensors import AbsorbedInputs, MHAInputs, MLAOutput

Inputs = AbsorbedInputs | MHAInputs
PAGED = ("flashinfer-mla-fa2", "flashinfer-mla-fa3", "sglang-decode")
RAGGED = ("flashinfer-ragged-fa2", "flashinfer-ragged-fa3")


def _right(inputs: Any) -> Inputs:
    return inputs  # type: ignore[no-any-return]


def _scale(inputs: Inputs) -> Inputs:
    return replace(inputs, sm_scale=inputs.sm_scale * 1.01)


def _one_key_less(inputs: Inputs) -> Inputs:
    if isinstance(inputs, AbsorbedInputs):
        return replace(inputs, kv_lens=(inputs.kv_lens - 1).clamp_min(0))
    # Ragged keys follow each other, so the last key of each request has to be taken out.
    import torch

    from mla_verify.inputs import indptr

    ends = inputs.kv_indptr.tolist()
    keep = [t for start, end in pairwise(ends) for t in range(start, end - 1)]
    at = torch.tensor(keep, device=inputs.device)
    lens = (inputs.kv_lens - 1).clamp_min(0)
    starts = indptr(lens.tolist()).to(inputs.device)
    return replace(inputs, kv_lens=lens, kv_indptr=starts, k=inputs.k[at], v=inputs.v[at])


def _swapped_pages(inputs: AbsorbedInputs) -> Inputs:
    """The first pages of the first two requests, each the other's: in one request the order of pages is no matter."""
    table = inputs.page_table.clone()
    if len(table) > 1:  # not when a request runs alone
        table[[0, 1], 0] = table[[1, 0], 0]
    return replace(inputs, page_table=table)


def _swapped_halves(inputs: Inputs) -> Inputs:
    if isinstance(inputs, AbsorbedInputs):
        half = inputs.q_pe.shape[-1] // 2
        return replace(inputs, q_pe=inputs.q_pe.roll(half, -1))
    rope = inputs.qk_rope_head_dim
    q = inputs.q.clone()
    q[..., -rope:] = q[..., -rope:].roll(rope // 2, -1)
    return replace(inputs, q=q)


def _other_mask(inputs: Inputs) -> Inputs:
    return replace(inputs, causal=not inputs.causal)


def _other_base(output: MLAOutput) -> MLAOutput:
    assert output.lse is not None
    return replace(output, lse=output.lse * math.log(2))  # natural where base 2 is declared


# What is done to the inputs, and of which kernels it can be a fault. Decode has neither a mask nor an LSE.
_INPUTS: dict[str, tuple[Callable[[Any], Inputs], tuple[str, ...]]] = {
    "right": (_right, PAGED + RAGGED),
    "scale": (_scale, PAGED + RAGGED),
    "one_key_less": (_one_key_less, PAGED + RAGGED),
    "swapped_pages": (_swapped_pages, PAGED),
    "swapped_halves": (_swapped_halves, PAGED + RAGGED),
    "other_mask": (_other_mask, ("flashinfer-mla-fa2", "flashinfer-mla-fa3", *RAGGED)),
}
_OUTPUTS = {"other_base": (_other_base, ("flashinfer-mla-fa2", "flashinfer-mla-fa3", *RAGGED))}


def _called(name: str, before: Callable[[Any], Inputs], after: Callable[[MLAOutput], MLAOutput]) -> Any:
    kernel = load_kernel(name, "cuda")

    @mla_kernel(kernel.contract)
    def call(inputs: Any, out: MLAOutput) -> MLAOutput:
        return after(kernel.run(before(inputs), out))  # type: ignore[arg-type]

    return call


KERNELS: dict[str, str] = {}  # the function's name -> the kernel that it calls
for _what, (_before, _names) in _INPUTS.items():
    for _name in _names:
        KERNELS[f"{_what}_{_name.replace('-', '_')}"] = _name
        globals()[f"{_what}_{_name.replace('-', '_')}"] = _called(_name, _before, lambda output: output)
for _what, (_after, _names) in _OUTPUTS.items():
    for _name in _names:
        KERNELS[f"{_what}_{_name.replace('-', '_')}"] = _name
        globals()[f"{_what}_{_name.replace('-', '_')}"] = _called(_name, _right, _after)
