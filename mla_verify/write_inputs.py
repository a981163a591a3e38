"""Cache writes: their inputs, and what the cache must hold afterwards, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_verify.cases import CaseSpec
from mla_verify.formats import FORMATS
from mla_verify.inputs import indptr, permuted_pages, slots_of
from mla_verify.tensors import WriteInputs

# The first slots before the cache and past its end, and far ones that no 32-bit index holds.
_OUTSIDE = (-1, -2, 0, 1, -(1 << 40), 1 << 40)


def make_write_inputs(spec: CaseSpec, generator: torch.Generator, poison: float) -> WriteInputs:
    """The last q_len tokens of each request are new; the cache holds those before them, and poison elsewhere.

    repeated: every fourth new token has the slot of the one before it, as padding tokens of a batch share one.
    outside: every fourth new token has no slot in the cache.
    """
    fmt, d = FORMATS[spec.dtype], spec.dims
    num_pages, page_table = permuted_pages(spec, generator)
    num_slots = num_pages * spec.page_size
    cache = torch.full((num_slots, d.kv_lora_rank + d.qk_rope_head_dim), poison, dtype=fmt.torch_dtype)
    new = []
    for b, request in enumerate(spec.requests):
        slots = slots_of(page_table, b, spec.page_size, request.kv_len)
        old = request.kv_len - request.q_len
        cache[slots[:old]] = torch.randn(old, cache.shape[1], generator=generator).to(fmt.torch_dtype)
        new.append(slots[old:])
    slots = torch.cat(new)
    odd = torch.arange(len(slots)) % 4 == 3
    if spec.regime == "repeated":
        slots = torch.where(odd, slots.roll(1), slots)
    elif spec.regime == "outside":
        outside = torch.tensor([s if s < 0 else num_slots + s for s in _OUTSIDE])
        slots = torch.where(odd, outside[torch.arange(len(slots)) // 4 % len(outside)], slots)
    rows = torch.randn(len(slots), cache.shape[1], generator=generator).to(fmt.torch_dtype)
    rows = torch.where(torch.rand(rows.shape, generator=generator) < 1 / 8, _special(rows, generator), rows)
    return WriteInputs(
        qo_indptr=indptr([r.q_len for r in spec.requests]),
        kv_lens=torch.tensor([r.kv_len for r in spec.requests], dtype=torch.int32),
        ckv=rows[:, : d.kv_lora_rank].clone(),
        kpe=rows[:, d.kv_lora_rank :].clone(),
        slots=slots,
        kv_cache=cache.view(num_pages, spec.page_size, -1),
        page_table=page_table,
    )


def _special(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers that arithmetic would change and a copy does not: -0, subnormal, largest, infinite."""
    info = torch.finfo(like.dtype)
    values = torch.tensor([-0.0, info.smallest_normal / 2, -info.max, float("inf")], dtype=like.dtype)
    return values[torch.randint(len(values), like.shape, generator=generator)]


def rows_of(cache: Tensor) -> Tensor:
    """[num_pages, page_size, D] or [num_slots, D] -> the rows' bits, [num_slots, D] in an integer dtype."""
    bits = {2: torch.int16, 4: torch.int32}[cache.element_size()]
    return cache.reshape(-1, cache.shape[-1]).contiguous().view(bits)
